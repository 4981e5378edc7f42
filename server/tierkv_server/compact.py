"""Gives disk space back to the filesystem, a namespace after the other, a step at a time."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tierkv.errors import BusyError, NotFoundError, RefusedError
from tierkv.layout import Namespace
from tierkv.selection import Select
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_compact import Compaction, Slack

#: One compaction runs at a time; when nobody has gone on with it for so long, it is given up.
IDLE_S = 60.0


class Compactor:
    """Compacts namespaces on the disk, one after the other; each step of it is a command.

    Args:
        disk: the tier.
        chosen: the namespaces that a selection means.
        wait: called before each step; returns when nobody waits for a load, soon in any case.
        idle_s: a work that nobody goes on with is given up after this time.
    """

    def __init__(
        self,
        disk: DiskTier,
        chosen: Callable[[Select], dict[bytes, Namespace]],
        wait: Callable[[], None] = lambda: None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._disk = disk
        self._chosen = chosen
        self._wait = wait
        self._idle_s = idle_s
        self._work: _Work | None = None
        self._lock = threading.Lock()

    def step(self, select: Select) -> dict[str, Any]:
        """Do the next step of what is meant, or with ``select.dry_run`` say what it would come to.

        In the reply ``namespaces`` has a row for each namespace that this step has come to an end with, ``nbytes`` were
        written, ``cursor`` is empty after the last step.

        Raises:
            BusyError: another compaction is under way.
            NotFoundError: the cursor is not known any more.
        """
        if select.dry_run:
            rows = [_row(*item, state="planned" if item[2].worth else "left") for item in self._found(select)]
            return _reply("", 0, sum(r["num_chunks"] for r in rows if r["state"] == "planned"), 0, rows, dry_run=True)
        self._wait()
        with self._lock:
            work = self._going_on(select) if select.cursor else self._begin(select)
            work.used = time.monotonic()
            nbytes, rows = work.step()
            if work.over:
                self._work = None
            else:
                self._give_up_later(work)
            return _reply("" if work.over else work.name, work.num_done, work.num_total, nbytes, rows)

    def close(self) -> None:
        """Give up what is under way: nothing of it stays."""
        with self._lock:
            if self._work is not None:
                self._work.end()
                self._work = None

    def _begin(self, select: Select) -> _Work:
        if self._work is not None:
            raise BusyError(
                f"a compaction is under way here; wait for it, or {self._idle_s:g} s after it was interrupted"
            )
        self._work = _Work(self._disk, self._found(select))
        return self._work

    def _going_on(self, select: Select) -> _Work:
        if self._work is None or self._work.name != select.cursor:
            raise NotFoundError("this work was not gone on with for too long, or the server was restarted; start again")
        return self._work

    def _found(self, select: Select) -> list[tuple[bytes, Namespace, Slack]]:
        """Return what is on the disk of what is meant, those first that need the least room."""
        spaces = self._chosen(select)
        found = self._disk.slack(list(spaces))
        return sorted(((i, spaces[i], s) for i, s in found.items()), key=lambda item: item[2].needed_nbytes)

    def _give_up_later(self, work: _Work) -> None:
        timer = threading.Timer(self._idle_s, self._give_up, (work, work.used))
        timer.daemon = True
        work.keep(timer)
        timer.start()

    def _give_up(self, work: _Work, used: float) -> None:
        with self._lock:
            if self._work is work and work.used == used:
                work.end()
                self._work = None


class _Work:
    """The namespaces of one compaction: one of them is being copied, others wait."""

    def __init__(self, disk: DiskTier, found: Sequence[tuple[bytes, Namespace, Slack]]) -> None:
        self.name = secrets.token_hex(8)
        self.used = 0.0
        self._disk = disk
        self._waiting = list(found)
        self._now: tuple[bytes, Namespace, Slack] | None = None
        self._compaction: Compaction | None = None
        self._num_before = 0
        self._timer: threading.Timer | None = None

    @property
    def over(self) -> bool:
        return not self._waiting and self._now is None

    @property
    def num_done(self) -> int:
        return self._num_before + (self._compaction.num_done if self._compaction else 0)

    @property
    def num_total(self) -> int:
        here = self._compaction.num_total if self._compaction else 0
        return self._num_before + here + sum(s.num_chunks for _, _, s in self._waiting if s.worth)

    def keep(self, timer: threading.Timer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def end(self) -> None:
        if self._compaction is not None:
            self._compaction.end()

    def step(self) -> tuple[int, list[dict[str, Any]]]:
        """Do a step; returns the bytes that were written, and the rows of namespaces that it is through with."""
        rows = []
        while self._now is None and self._waiting:
            item = self._waiting.pop(0)
            if not item[2].worth:
                rows.append(_row(*item, state="left"))
                continue
            try:
                self._compaction = self._disk.compact(item[0])
                self._now = item
            except RefusedError as error:
                rows.append(_row(*item, state="refused", reason=str(error)))
        if self._now is None or self._compaction is None:
            return 0, rows
        try:
            nbytes = self._compaction.step()
        except RefusedError as error:
            rows.append(self._through("refused", str(error)))
            return 0, rows
        if self._compaction.done:
            rows.append(self._through("compacted"))
        return nbytes, rows

    def _through(self, state: str, reason: str = "") -> dict[str, Any]:
        assert self._now is not None and self._compaction is not None
        ns_id, namespace, slack = self._now
        compaction, self._now, self._compaction = self._compaction, None, None
        compaction.end()
        self._num_before += compaction.num_done
        slack = slack._replace(before_nbytes=compaction.before_nbytes, after_nbytes=compaction.after_nbytes)
        return _row(ns_id, namespace, slack, state=state, reason=reason) | {"num_bad": compaction.num_bad}


def _row(ns_id: bytes, namespace: Namespace, slack: Slack, *, state: str, reason: str = "") -> dict[str, Any]:
    """Return the row of a namespace: ``after_nbytes`` is what its file takes at the end, or would take."""
    if state == "planned" and slack.reason:
        state, reason = "refused", slack.reason
    after = slack.after_nbytes if state in ("planned", "compacted") else slack.before_nbytes
    return {
        "namespace": ns_id.hex(),
        "model": namespace.model,
        "state": state,
        "reason": reason,
        "num_chunks": slack.num_chunks,
        "num_bad": 0,
        "before_nbytes": slack.before_nbytes,
        "after_nbytes": after,
        "freed_nbytes": slack.before_nbytes - after,
        "needed_nbytes": slack.needed_nbytes if state in ("planned", "refused") else 0,
    }


def _reply(
    cursor: str, num_done: int, num_total: int, nbytes: int, rows: list[dict[str, Any]], dry_run: bool = False
) -> dict[str, Any]:
    return {
        "cursor": cursor,
        "dry_run": dry_run,
        "num_done": num_done,
        "num_total": num_total,
        "nbytes": nbytes,
        "namespaces": rows,
    }

"""What people ask of a running server: what :mod:`tierkv_server.lister` answers, and evict, pins, statistics.

The host pools live in the engines; the server asks them over their push connections, which idle engines answer too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import msgspec

from tierkv import __version__
from tierkv.errors import NotFoundError, RefusedError
from tierkv.layout import Namespace
from tierkv.messages import HostEntry, HostStat, Select
from tierkv.prefixes import ID_DIGITS, Forest, Node, least_used
from tierkv.sessions import SessionSelect
from tierkv.tiers.base import Pin, Ref, Tier
from tierkv.tiers.redis_memory import Memory
from tierkv_server.lister import HOST, Lister
from tierkv_server.service import Service
from tierkv_server.session import Session

logger = logging.getLogger("tierkv")

#: An engine answers from a thread of its own; one that is stopped must not hold a listing up for long.
ASK_TIMEOUT_S = 2.0
#: The same of one that did not answer last time: it is asked all the same, and heard again when it goes on.
SILENT_TIMEOUT_S = 0.1
#: How often what engines loaded while it was being evicted is evicted again.
EVICT_ROUNDS = 3
#: Ids of pinned chunks that the reply of an eviction names.
MAX_PINNED_IDS = 100


class Inspector(Lister):
    """Answers people's questions about a service."""

    def __init__(self, service: Service, about: dict[str, Any]) -> None:
        super().__init__(service)
        self._service = service
        self._about = about
        self._started = time.monotonic()
        self.network: Callable[[], dict[str, int]] = dict  #: connections, and counters since start
        self.fleet: Callable[[], dict[str, int]] = dict  #: counters of this node's part in the fleet's control stream
        self._silent: set[str] = set()  # sessions that did not answer when they were asked last

    # -- the engines

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that a tier or an engine has, by id."""
        return super().namespaces() | {s.ns_id: s.hello.namespace for s in list(self._service.sessions.values())}

    def stores(self, select: Select) -> list[Tier]:
        """Return the tiers that are meant but for the host pools: those are the engines' own."""
        names = self.tier_names(select)
        return [tier for tier in self._service.tiers() if tier.name in names]

    def ask_engines(self, what: str, body: bytes, ns_id: bytes | None = None) -> list[tuple[Session, bytes]]:
        """Ask the engines (of a namespace) and return the answers that came in time."""
        sessions = [s for s in list(self._service.sessions.values()) if s.subscribed and ns_id in (None, s.ns_id)]
        self._silent.intersection_update(list(self._service.sessions))
        asks = [(s, s.ask(what, body)) for s in sessions]
        asked = time.monotonic()
        answers = []
        for session, ask in sorted(asks, key=lambda a: a[0].id in self._silent):  # what others say is heard first
            patience_s = SILENT_TIMEOUT_S if session.id in self._silent else ASK_TIMEOUT_S
            answer = ask.result(max(0.0, asked + patience_s - time.monotonic())) if ask else None
            if answer is None:
                if session.id not in self._silent:  # once, however often it is asked
                    logger.warning("engine %s did not answer %r in time", session.hello.engine_id, what)
                self._silent.add(session.id)
            else:
                if session.id in self._silent:
                    logger.warning("engine %s answers again", session.hello.engine_id)
                self._silent.discard(session.id)
                answers.append((session, answer))
        return answers

    # -- evict

    def evict(self, select: Select) -> dict[str, Any]:
        """Remove a prefix, a prompt, a tenant's chunks, what is old, or a namespace, and say what was removed where.

        Pinned chunks stay, and with them their ancestors, unless ``select.force``.

        Raises:
            RefusedError: the selection names nothing in particular, or several things, or what is pinned.
        """
        if not (select.prefix or select.keys or select.everything or select.tenant or _narrows(select)):
            raise RefusedError("nothing was named to evict; name a prefix, token ids, a tenant or a namespace")
        if select.everything and not select.tenant and len(self.chosen(select)) > 1:
            raise RefusedError(f"namespace {select.ns!r} fits {len(self.chosen(select))}; write more digits of its id")
        tiers = self.tier_names(select)
        total: dict[str, int] = dict.fromkeys(tiers, 0)
        prefixes: list[str] = []
        pinned: list[str] = []
        nbytes, silent, num_pinned = dict.fromkeys(tiers, 0), set[str](), 0
        all_tiers = set(tiers) == set(self.tier_names(Select()))
        for ns_id, nodes in self._doomed(select, tiers):
            kept = [] if select.force else _held(nodes)
            num_pinned += len(kept)
            pinned += [n.key.hex()[:ID_DIGITS] for n in kept if n.pins][:MAX_PINNED_IDS]
            if kept:
                keep = {n.key for n in kept}
                nodes = [n for n in nodes if n.key not in keep]
            whole = select.everything and not select.tenant and not _narrows(select) and all_tiers and not kept
            if select.dry_run:
                removed = {tier: sum(n.num_copies.get(tier, 0) for n in nodes) for tier in tiers}
            else:
                removed, mute = self._evict(ns_id, nodes, tiers, whole, select.force)
                silent |= mute
            for tier in tiers:
                total[tier] += removed.get(tier, 0)
                nbytes[tier] += sum(n.nbytes.get(tier, 0) for n in nodes)
            prefixes += [n.key.hex()[:ID_DIGITS] for n in nodes if not n.children]
        return {
            "dry_run": select.dry_run,
            "prefixes": prefixes,
            "removed": total,
            "nbytes": nbytes,
            "num_removed": sum(total.values()),
            "num_pinned": num_pinned,
            "pinned": pinned[:MAX_PINNED_IDS],
            "incomplete": [f"engine {name} did not answer" for name in sorted(silent)]
            + self._tiers_out(tiers)
            + self._disk_read_only(tiers),
        }

    def _disk_read_only(self, tiers: Sequence[str]) -> list[str]:
        """Return a sentence if the disk takes no writes, deletions among them."""
        stats = [tier.stat() for tier in self._service.tiers() if tier.name in tiers]
        return [
            f"the {s.name} tier takes no writes, deletions among them ({s.reason})"
            for s in stats
            if s.state == "read-only" and s.name == self._service.disk.name
        ]

    def _tiers_out(self, tiers: Sequence[str]) -> list[str]:
        """Return a sentence for each of ``tiers`` that does not answer now."""
        stats = [tier.stat() for tier in self._service.tiers() if tier.name in tiers]
        return [f"the {s.name} tier is out ({s.reason})" for s in stats if s.state == "out"]

    def _doomed(self, select: Select, tiers: Sequence[str]) -> list[tuple[bytes, list[Node]]]:
        """Return what a selection means to evict: for each namespace, the chunks, parents first."""
        forests: dict[bytes, Forest] = {}
        found: dict[bytes, list[Node]] = {}
        now = time.time()
        for ns_id, _, forest in self.forests(select):
            if select.prefix:
                key = forest.resolve(select.prefix)
                keys = forest.own_part(key) if key else []
            elif select.keys:
                keys = forest.prompt_part([bytes.fromhex(k) for k in select.keys.get(ns_id.hex(), [])])
            else:
                keys = sorted(forest.nodes, key=lambda k: forest.nodes[k].position)
            nodes = [n for k in keys if (n := forest.nodes[k]).tenant.hex().startswith(select.tenant)]
            if select.older_s or select.unused_s:
                nodes = forest.closed(n for n in nodes if select.ages(now, n.created, n.last_used))
            if nodes:
                forests[ns_id], found[ns_id] = forest, nodes
        if select.prefix and len(found) > 1:
            raise RefusedError(f"prefix {select.prefix!r} is in {len(found)} namespaces; name one of them too")
        if select.free_nbytes:
            named = {(ns_id, node.key) for ns_id, nodes in found.items() for node in nodes}

            def may_go(ns_id: bytes, node: Node) -> bool:
                return (ns_id, node.key) in named and (select.force or not node.pins)

            found = least_used(forests, tiers, select.free_nbytes, may_go)
        return list(found.items())

    def _evict(
        self, ns_id: bytes, nodes: Sequence[Node], tiers: Sequence[str], whole: bool, force: bool
    ) -> tuple[dict[str, int], set[str]]:
        """Remove chunks and return how many each tier had, and the engines that did not answer."""
        keys, refs = [n.key for n in nodes], _refs(nodes)
        removed: dict[str, int] = {}
        silent: set[str] = set()
        if HOST in tiers:  # first: an engine that has answered sends no more stores of these keys
            removed[HOST], silent = self.invalidate(ns_id, keys)
        removed |= self._service.evict(ns_id, refs, tiers, whole=whole, force=force)
        for _ in range(EVICT_ROUNDS if HOST in tiers and len(tiers) > 1 else 0):
            num, mute = self.invalidate(ns_id, keys)  # once more: what was loaded before the tiers had removed it
            silent |= mute
            if not num:
                break
            for tier, more in self._service.evict(ns_id, refs, tiers, whole=whole, force=force).items():
                removed[tier] += more
        return removed, silent

    def invalidate(self, ns_id: bytes, keys: Sequence[bytes]) -> tuple[int, set[str]]:
        """Have the engines drop chunks; returns how many they had, and the engines that did not answer."""
        engines = [s for s in list(self._service.sessions.values()) if s.ns_id == ns_id]
        answers = self.ask_engines("invalidate", b"".join(keys), ns_id)
        heard = {s.id for s, _ in answers}
        silent = {s.hello.engine_id for s in engines if s.id not in heard and s.id in self._service.sessions}
        return sum(int(answer) for _, answer in answers), silent

    def host_keys(self, ns_id: bytes) -> list[bytes]:
        """Return the keys in the host pools of a namespace's engines."""
        answers = self.ask_engines("list", b"", ns_id)
        return list({e.key for _, body in answers for e in msgspec.msgpack.decode(body, type=list[HostEntry])})

    # -- lifetime

    def pin(self, select: Select) -> dict[str, Any]:
        """Keep a prefix in the disk and shared tiers, its ancestors included, until ``select.seconds`` from now.

        Returns:
            For each tier the number of its chunks that are pinned, ``num_chunks`` of the prefix, ``until``.

        Raises:
            RefusedError: no prefix or owner or time is named.
        """
        if not select.owner or not select.seconds > 0:
            raise RefusedError("a pin needs an owner and a time; name both, such as owner 'ops' for 24h")
        pin = Pin(select.owner, time.time() + select.seconds)
        ns_id, _, nodes = self.chain(select)
        refs = _refs(nodes)
        pinned = {} if select.dry_run else {t.name: sum(t.pin(ns_id, refs, pin)) for t in self.stores(select)}
        return self._lifetime(select, ns_id, nodes, pinned) | {"owner": pin.owner, "until": pin.until}

    def unpin(self, select: Select) -> dict[str, Any]:
        """Take the pins of an owner (all owners', if none is named) off a prefix; says how many chunks had one."""
        ns_id, _, nodes = self.chain(select)
        refs = _refs(nodes)
        num = {} if select.dry_run else {t.name: t.unpin(ns_id, refs, select.owner) for t in self.stores(select)}
        return self._lifetime(select, ns_id, nodes, num)

    def ttl(self, select: Select) -> dict[str, Any]:
        """Let a prefix's own part expire ``select.seconds`` from now; 0: as the tiers' limits say."""
        until = time.time() + select.seconds if select.seconds > 0 else 0.0
        if not (select.prefix or select.keys):
            raise RefusedError("name one stored prefix, or token ids of one, whose time is to be set")
        found = self._doomed(select, self.tier_names(select))
        if not found:
            raise NotFoundError("nothing stored fits; 'tierkv ls' lists what is stored")
        if len(found) > 1:
            raise RefusedError(f"this is stored in {len(found)} namespaces; name one of them too")
        ns_id, nodes = found[0]
        refs = _refs(nodes)
        num = {} if select.dry_run else {t.name: t.expire_at(ns_id, refs, until) for t in self.stores(select)}
        return self._lifetime(select, ns_id, nodes, num) | {"until": until}

    def _lifetime(self, select: Select, ns_id: bytes, nodes: Sequence[Node], num: dict[str, int]) -> dict[str, Any]:
        names = [tier.name for tier in self.stores(select)]
        return {
            "dry_run": select.dry_run,
            "id": nodes[-1].key.hex()[:ID_DIGITS],
            "namespace": ns_id.hex(),
            "num_chunks": len(nodes),
            "nbytes": {name: sum(n.nbytes.get(name, 0) for n in nodes) for name in names},
            "stored": {name: sum(name in n.nbytes for n in nodes) for name in names},
            "tiers": num,
            "incomplete": self._tiers_out(names),
        }

    def usage(self, select: Select) -> list[dict[str, Any]]:
        """Return what each tenant has in each namespace, a row a tier, largest first."""
        rows = []
        for ns_id, namespace in self.chosen(select).items():
            for tier in self.stores(select):
                for tenant, usage in tier.usage(ns_id).items():
                    if tenant.hex().startswith(select.tenant):
                        about = {"namespace": ns_id.hex(), "model": namespace.model, "tenant": tenant.hex()}
                        rows.append(about | {"tier": tier.name} | usage._asdict())
        return sorted(rows, key=lambda row: -row["nbytes"])

    # -- sessions

    def sessions(self, select: SessionSelect) -> list[dict[str, Any]]:
        """Return the sessions that engines told of, a row each, last noted first."""
        table = self._service.session_table
        return table.rows(select, self.namespaces()) if table else []

    def release_session(self, select: SessionSelect) -> dict[str, Any]:
        """Let go of a session: here, and in the engines' host pools with their next request.

        Raises:
            RefusedError, NotFoundError: not one session is meant.
        """
        table = self._service.session_table
        if table is None:
            raise RefusedError("this server keeps no sessions")
        session = table.release(select)
        return {"id": session.hex(), "num_engines": self._order(b"r", session)}

    def prefetch_session(self, select: SessionSelect) -> dict[str, Any]:
        """Bring what the shared tier has of a session's last turn to this node's disk.

        Its next request goes before others that wait for the host pool. Returns how many chunks were looked at.

        Raises:
            RefusedError, NotFoundError: not one session is meant, or there is no shared tier.
        """
        table = self._service.session_table
        if table is None:
            raise RefusedError("this server keeps no sessions")
        session, num_chunks = table.prefetch(select)
        return {"id": session.hex(), "num_chunks": num_chunks, "num_engines": self._order(b"p", session)}

    def _order(self, order: bytes, session: bytes) -> int:
        """Tell the engines of an order about a session, and return how many took it."""
        return sum(answer == b"1" for _, answer in self.ask_engines("session", order + session))

    # -- statistics

    def room(self) -> dict[str, Any]:
        """Return what each tier has room for before it evicts, in bytes (None: not known), and how often it did.

        Of a tier that somebody else bounds, Redis, it is what that one says; evictions there are its own, of any key.
        """
        rows = []
        for tier in self._service.tiers():
            stat = tier.stat()
            free: int | None = max(0, stat.budget - stat.nbytes)
            num_evicted = stat.num_evicted
            if not stat.budget:
                memory = cast(_LimitedElsewhere, tier).memory() if hasattr(tier, "memory") else Memory(None, 0)
                free, num_evicted = memory.free_nbytes, num_evicted + memory.num_evicted
            rows.append({"name": stat.name, "free_nbytes": free, "num_evicted": num_evicted})
        return {"tiers": rows}

    def take_farewells(self) -> list[dict[str, Any]]:
        """Return the rows of engines that have left since the last call, as they were when they left."""
        farewells, rows = self._service.farewells, []
        while farewells:
            rows.append(msgspec.to_builtins(farewells.popleft()))
        return rows

    def reuse(self) -> dict[str, Any]:
        """Return what host pools and disks of other sizes would have hit, and what gave chunks over the last day."""
        return self._service.reuse.describe(self.namespaces())

    def stat(self) -> dict[str, Any]:
        """Return the state of the server, its tiers and its engines."""
        service = self._service
        num_sessions = len(service.sessions)
        engines = [msgspec.json.decode(body, type=HostStat) for _, body in self.ask_engines("stat", b"")]
        silent = max(0, num_sessions - len(engines))
        tiers = [_host_row(engines)]
        queued, dropped = service.queued_nbytes(), service.num_dropped()
        for tier in service.tiers():
            row = tier.stat()._asdict()
            row["queued_nbytes"] = queued[tier.name]
            row["num_dropped"] += dropped[tier.name]
            tiers.append(row)
        return {
            "server": self._about
            | {
                "version": __version__,
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - self._started, 3),
                "num_engines": len(service.sessions),
                "num_silent_engines": silent,
                "num_stale": service.moves.num_stale,
                "num_unstaged": service.moves.num_unstaged,
                "num_declined": service.storer.num_declined,
                "num_joined": service.fetcher.flights.num_joined,
                "num_brought": service.session_table.num_brought if service.session_table else 0,
                "network": self.network(),
                "fleet": self.fleet(),
                "spill": {tier: policy.value for tier, policy in service.moves.spill.policies.items()},
            },
            "tiers": tiers,
            "engines": [msgspec.to_builtins(e) for e in engines],
            "namespaces": [
                {"id": i.hex(), "model": n.model, "layout": n.layout.describe(), "payload_nbytes": n.payload_nbytes}
                for i, n in self.namespaces().items()
            ],
        }


class _LimitedElsewhere(Protocol):
    """A tier whose room somebody else bounds."""

    def memory(self) -> Memory: ...


def _narrows(select: Select) -> bool:
    """Return whether the selection picks by age, by last use or by bytes to free."""
    return bool(select.older_s or select.unused_s or select.free_nbytes)


def _held(nodes: Sequence[Node]) -> list[Node]:
    """Return those of ``nodes`` (parents first) that are pinned, or an ancestor of one that is."""
    held = {n.key for n in nodes if n.pins}
    for node in reversed(nodes):
        if node.key in held:
            held.add(node.parent)
    return [n for n in nodes if n.key in held]


def _refs(nodes: Sequence[Node]) -> list[Ref]:
    return [Ref(n.key, n.anchor or n.key) for n in nodes]


def _host_row(engines: Sequence[HostStat]) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(e.counters.get(name, 0) for e in engines)

    return {
        "name": HOST,
        "state": "up" if engines else "none",
        "reason": "" if engines else "no engine is connected",
        "since": 0.0,
        "num_entries": sum(e.num_entries for e in engines),
        "nbytes": sum(e.num_entries * e.payload_nbytes for e in engines),
        "budget": sum(e.budget for e in engines),
        "num_hits": total("host_hits"),
        "num_misses": total("disk_hits") + total("shared_hits") + total("missed"),
        "num_stored": total("spilled"),
        "num_evicted": sum(e.num_evicted for e in engines),
        "num_dropped": total("not_spilled") + total("not_sent"),
        "num_declined": total("not_admitted"),
        "policy": ", ".join(sorted({e.policy for e in engines if e.policy})),
        "num_bad": 0,
        "num_errors": total("load_failures"),
        "queued_nbytes": 0,
    }

"""The places that ``tierkv copy`` copies from and to: a store server, or a Redis itself."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tierkv.admin_client import AdminClient
from tierkv.copying import Fault, Item, Page, Wrote
from tierkv.errors import BusyError, DamagedError, NotAdmittedError, NotFoundError, RefusedError, UnavailableError
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, Header, record_nbytes
from tierkv.resp import MAX_BULK_NBYTES
from tierkv.selection import Select
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Record, Ref, Status
from tierkv.tiers.control import ControlFeed, Event
from tierkv.tiers.shared import SharedTier
from tierkv.transport import Address
from tierkv.urls import redact_url
from tierkv_server.chunks import Chunks, unpack_page
from tierkv_server.lister import Lister

#: A server without memory for a record now is asked again so often, and so far apart.
_BUSY_TRIES, _BUSY_S = 20, 0.25
#: How long a Redis's control stream may take to be read when writing begins and ends.
_FEED_S = 5.0


class ServerPlace:
    """A store server: read from the nearest tier that has a chunk, written to its disk.

    Args:
        address: where it is.
        role: ``SRC`` or ``DST``, for the sentence where nobody is there.

    Raises:
        UnavailableError: nobody answers there.
        RefusedError: the token or the certificate is not taken.
    """

    max_nbytes = MAX_BULK_NBYTES

    def __init__(self, address: Address, role: str) -> None:
        self.name = f"the store server at {address}"
        try:
            self._client = AdminClient(address)
        except UnavailableError as error:
            reason = error.__context__ or error
            raise UnavailableError(f"{self.name} does not answer ({reason}); check {role}, and that it runs") from None

    def identity(self) -> str:
        return f"server {self._ask('TKV.STAT')['server']['boot']}"

    def namespaces(self) -> dict[bytes, Namespace]:
        found = msgspec.convert(self._ask("TKV.NS"), dict[str, Namespace])
        return {bytes.fromhex(ns): namespace for ns, namespace in found.items()}

    def pages(self, select: Select) -> Iterator[Page]:
        while True:
            page = self._ask("TKV.CHUNKS", select)
            if page["namespace"]:
                yield _page(page)
            if not page["cursor"]:
                return
            select = Select(cursor=page["cursor"])

    def chain(self, select: Select) -> Page:
        return _chain(self._ask("TKV.SHOW", select))

    def stored(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        letters = self._call("TKV.STORED", ns_id, b"".join(ref.key + ref.anchor for ref in refs))
        return [letter != ord("-") for letter in letters]

    def read(self, namespace: Namespace, refs: Sequence[Ref]) -> Iterator[bytes | Fault]:
        ns_id = namespace.ns_id()
        for ref in refs:
            try:
                yield self._call("TKV.DUMP", ns_id, ref.key, ref.anchor)
            except NotFoundError:
                yield Fault.GONE
            except DamagedError:
                yield Fault.BAD

    def write(self, namespace: Namespace, records: Sequence[tuple[bytes, float]]) -> Iterator[Wrote]:
        described = namespace.to_json()
        for record, until in records:
            yield self._restore(described, record, until)

    def _restore(self, described: bytes, record: bytes, until: float) -> Wrote:
        for left in reversed(range(_BUSY_TRIES)):
            try:
                reply = self._call("TKV.RESTORE", described, record, repr(until))
                return Wrote("there" if reply == b"EXISTS" else "copied")
            except BusyError as error:
                if not left:
                    return Wrote("refused", str(error))
                time.sleep(_BUSY_S)
            except NotAdmittedError:
                raise
            except RefusedError as error:
                return Wrote("refused", str(error))
        raise AssertionError("unreachable")

    def cost(self, namespace: Namespace) -> int:
        return record_nbytes(namespace.payload_nbytes) + 16

    def room(self) -> int | None:
        rows = {row["name"]: row for row in self._ask("TKV.ROOM")["tiers"]}
        free: int | None = rows["disk"]["free_nbytes"]
        return free

    def trouble(self) -> str:
        rows = {row["name"]: row for row in self._ask("TKV.STAT")["tiers"]}
        disk = rows["disk"]
        return "" if disk["state"] == "up" else f"its disk is {disk['state']}: {disk['reason']}"

    def finish(self) -> None:
        """Do nothing: it tells its engines, and its fleet, itself."""

    def close(self) -> None:
        self._client.close()

    def _ask(self, command: str, body: Any = None) -> Any:
        words = [command] if body is None else [command, msgspec.json.encode(body)]
        return msgspec.json.decode(self._call(*words))

    def _call(self, *words: bytes | str | int) -> bytes:
        try:
            return self._client.call(*words)
        except UnavailableError:
            raise UnavailableError(f"{self.name} went away, or does not answer any more") from None


class RedisPlace:
    """A Redis or Valkey, without a server.

    It is written to as a node of its fleet writes: evictions that are ordered meanwhile reach what is copied, and
    the nodes' filters hear of it.

    Args:
        config: where it is and how to get in.
        role: ``SRC`` or ``DST``.

    Raises:
        ConfigError: the URL, the prefix, or a file is not usable.
        UnavailableError: nobody answers there.
    """

    max_nbytes = 1 << 40  # a value's own limit is Redis's, 512 MiB; namespaces there have been stored there

    def __init__(self, config: SharedConfig, role: str) -> None:
        self.name = f"the Redis at {redact_url(config.url)}"
        self._prefix = config.prefix
        self._tier = SharedTier(config)
        self._feed: ControlFeed | None = None
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._tier.close)
        self._wrote_at = 0.0
        self._lister = Lister(self)
        stat = self._tier.stat()
        if stat.state == "out":
            self.close()
            raise UnavailableError(f"{self.name} does not answer ({stat.reason}); check {role}, and that it runs")

    def tiers(self) -> Sequence[SharedTier]:
        """Return the one tier, for the lister."""
        return [self._tier]

    def identity(self) -> str:
        return f"redis {self._tier.url} {self._prefix}"

    def namespaces(self) -> dict[bytes, Namespace]:
        found = self._tier.namespaces()
        self._check()
        return found

    def pages(self, select: Select) -> Iterator[Page]:
        chunks = Chunks(self._lister)
        while True:
            page = chunks.step(select)
            self._check()
            if page["namespace"]:
                yield _page(page)
            if not page["cursor"]:
                return
            select = Select(cursor=page["cursor"])

    def chain(self, select: Select) -> Page:
        found = self._lister.show(select)
        self._check()
        return _chain(found)

    def stored(self, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
        found = self._tier.stored(ns_id, refs)
        self._check()
        return found

    def read(self, namespace: Namespace, refs: Sequence[Ref]) -> Iterator[bytes | Fault]:
        ns_id, nbytes = namespace.ns_id(), namespace.payload_nbytes
        buffers = np.empty((len(refs), nbytes), dtype=np.uint8)
        found = self._tier.fetch(ns_id, refs, lambda i: [buffers[i].data], quiet=True, keep=True)
        for ref, (status, header), buffer in zip(refs, found, buffers, strict=True):
            if header is not None:
                yield b"".join((header.pack(), buffer.data, self._tier.tokens(ns_id, ref)))
            elif status is Status.ERROR:
                self._check()
                raise UnavailableError(f"{self.name} went away, or does not answer any more")
            else:
                yield Fault.BAD if status is Status.BAD else Fault.GONE

    def write(self, namespace: Namespace, records: Sequence[tuple[bytes, float]]) -> Iterator[Wrote]:
        ns_id = namespace.ns_id()
        self._tier.add_namespace(namespace)
        ready = [_record(record, namespace.payload_nbytes) for record, _ in records]
        refs = [Ref(record.header.key, record.header.anchor) for record in ready]
        feed = self._open_feed()
        with feed.writing(ns_id, refs) as may_write:
            statuses = self._tier.store(ns_id, ready) if may_write else [Status.DROPPED] * len(ready)
        copied = [i for i, status in enumerate(statuses) if status is Status.OK]
        for until in sorted({records[i][1] for i in copied if records[i][1]}):
            self._tier.expire_at(ns_id, [refs[i] for i in copied if records[i][1] == until], until)
        if copied:
            feed.tell(ns_id, [refs[i].key for i in copied])
            self._wrote_at = time.monotonic()
        for status in statuses:
            yield self._wrote(status)

    def _wrote(self, status: Status) -> Wrote:
        if status is Status.OK:
            return Wrote("copied")
        if status is Status.EXISTS:
            return Wrote("there")
        if status is Status.ERROR:
            self._check()
        return Wrote("refused", self.trouble() or "it has no room, or cannot follow its fleet's evictions")

    def cost(self, namespace: Namespace) -> int:
        return HEADER_NBYTES + namespace.payload_nbytes

    def room(self) -> int | None:
        return self._tier.memory().free_nbytes

    def trouble(self) -> str:
        return self._tier.stat().reason

    def finish(self) -> None:
        """Wait until every eviction that was ordered before the last write has been read, and reaches it."""
        deadline = time.monotonic() + _FEED_S
        while self._feed is not None and self._feed.silent_s > time.monotonic() - self._wrote_at:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self.name} went away, or does not answer any more")
            time.sleep(0.02)

    def close(self) -> None:
        with contextlib.suppress(UnavailableError):
            if self._feed is not None:  # of a copy that was broken off, too
                self._check()
                self.finish()
        self._undo.close()

    def _open_feed(self) -> ControlFeed:
        if self._feed is None:
            directory = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-copy-"))
            feed = self._tier.open_feed(Path(directory), _Nobody())
            self._undo.callback(feed.close)
            feed.start()
            deadline = time.monotonic() + _FEED_S
            while feed.silent_s == float("inf"):
                self._check()
                if time.monotonic() > deadline:
                    raise UnavailableError(f"the control stream of {self.name} cannot be read")
                time.sleep(0.01)
            self._feed = feed
        return self._feed

    def _check(self) -> None:
        """See that Redis answers.

        Raises:
            UnavailableError: it does not.
        """
        stat = self._tier.stat()
        if stat.state == "out":
            raise UnavailableError(f"{self.name} went away, or does not answer any more ({stat.reason})")


class _Nobody:
    """A node that has nothing which an eviction could be about."""

    def apply(self, event: Event) -> None: ...

    def on_gap(self, reason: str) -> None: ...

    def on_news(self, ns_id: bytes, heads: list[bytes]) -> None: ...

    def on_news_lost(self) -> None: ...


def _page(page: dict[str, Any]) -> Page:
    return Page(bytes.fromhex(page["namespace"]), [Item(*item) for item in unpack_page(page)], page["num_host"])


def _chain(shown: dict[str, Any]) -> Page:
    items, num_host = [], 0
    for chunk in shown["chunks"]:
        if not {"disk", "shared"} & set(chunk["tiers"]):
            num_host += 1
            continue
        lives = list(chunk["expires"].values())
        ref = Ref(bytes.fromhex(chunk["key"]), bytes.fromhex(chunk["anchor"] or chunk["key"]))
        items.append(Item(ref, max(lives) if lives and all(lives) else 0.0))
    return Page(bytes.fromhex(shown["namespace"]), items, num_host)


def _record(data: bytes, payload_nbytes: int) -> Record:
    """Return a record to be stored, of what :meth:`read` of a place gives."""
    end = HEADER_NBYTES + payload_nbytes
    return Record(Header.unpack(data), memoryview(data)[:end], data[end:])

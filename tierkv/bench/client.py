"""One client of a measurement: a process that does what lines on its standard input say, and answers with lines.

It is an engine to the server, with a host pool of one command's chunks, and has one operation under way at a time. It
leaves when its input ends: with whoever started it, however that ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tierkv import __version__
from tierkv.admin_client import AdminClient
from tierkv.bench.figures import Round
from tierkv.client import NUM_LANES, StoreClient
from tierkv.config import COMMAND_NBYTES, PROTOCOL_VERSION
from tierkv.errors import RefusedError, TierKVError, UnavailableError
from tierkv.hostindex import Entry, Fetch
from tierkv.keys import anchor_index, chain_keys, root_key
from tierkv.layout import Namespace
from tierkv.messages import (
    DECLINED,
    DROPPED,
    EXISTS,
    FAILED,
    FROM_DISK,
    FROM_SHARED,
    STORED,
    Hello,
    HostStat,
    StoreItem,
)
from tierkv.pool import HostPool, PoolShape, Segment
from tierkv.transport import Address

_ADDRESS_FILES = ("path", "token_file", "ca_file", "cert_file", "key_file")
_LETTERS = {"disk": FROM_DISK, "shared": FROM_SHARED}
_NOT_STORED = {
    DROPPED: "it has no room for them; measure less (--size)",
    DECLINED: "its spill policy has changed",
    FAILED: "it failed; 'tierkv stat' says how it is",
    EXISTS: "it has them already",
}
#: How long an answer to a STORE or FETCH is waited for; the store client gives up before.
_PATIENCE_S = 60.0
_DRAIN_S = 30


class Job(msgspec.Struct, frozen=True):
    """What a client is. ``address`` is a :class:`tierkv.transport.Address` as plain values."""

    address: dict[str, str | int | bool | None]
    namespace: Namespace
    number: int
    num_chunks: int


class Order(msgspec.Struct, frozen=True):
    """What a client is to do now.

    Attributes:
        op: ``new`` (choose another chain), ``store``, ``offer`` (what is stored, to the shared tier), ``match``,
            ``fetch``.
        tier: where from, or where to.
        seconds: go on for so long; 0: its chunks once.
        reason: of what is stored (:class:`tierkv.messages.StoreItem`).
    """

    op: str
    tier: str = ""
    seconds: float = 0.0
    reason: int = 0


class Joined(msgspec.Struct, frozen=True):
    """First answer of a client: when chunks go to each tier, or why it could not join (``refused``: by the server)."""

    spill: dict[str, str] = {}
    failed: str = ""
    refused: bool = False


def pack_address(address: Address) -> dict[str, str | int | bool | None]:
    """Return an address as plain values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in msgspec.structs.asdict(address).items()
    }


def unpack_address(values: dict[str, str | int | bool | None]) -> Address:
    """Return the address that :func:`pack_address` made ``values`` of."""
    paths = {name: Path(str(values[name])) if values[name] is not None else None for name in _ADDRESS_FILES}
    return Address(host=str(values["host"]), port=int(values["port"] or 0), tls=bool(values["tls"]), **paths)


class _Awaited(Fetch):
    """A FETCH that can be waited for."""

    __slots__ = ("_letters", "done")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.done = threading.Event()
        super().__init__(entries)

    @property
    def results(self) -> bytes | None:
        return self._letters

    @results.setter
    def results(self, letters: bytes | None) -> None:
        self._letters = letters
        if letters is not None:
            self.done.set()


class Client:
    """Stores, matches and fetches one chain after another.

    Args:
        job: which server, what chunks and how many.

    Raises:
        TierKVError: the server is not to be had, or refuses.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._address = unpack_address(job.address)
        self._namespace = job.namespace
        nbytes = self._namespace.payload_nbytes
        self._step = max(1, min(job.num_chunks, COMMAND_NBYTES // nbytes))
        shape = PoolShape(self._step, 1, nbytes)
        self._pool = HostPool(shape, [Segment.create(shape.segment_nbytes(0))])
        self._fill()
        self._hello = Hello(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            engine_id=f"bench-{job.number}",
            pid=os.getpid(),
            namespace=self._namespace,
            shape=shape,
        )
        self._admin = AdminClient(self._address)
        self._client = StoreClient(self._address, self._hello, self._pool, None, self._pushed)
        welcome = self._client.start()
        if welcome is None:
            raise UnavailableError(f"the store server at {self._address} does not take another engine now")
        self.spill = welcome.spill
        self._root = root_key(bytes.fromhex(self._namespace.identity), b"", b"")
        self._keys: list[bytes] = []
        self._num_chains = 0

    def close(self) -> None:
        """Leave the server."""
        self._client.close()
        self._admin.close()
        self._pool.close()

    def do(self, order: Order) -> Round:
        """Do what is ordered; what goes wrong is in what is returned."""
        if order.op == "new":
            self._new_chain()
            return Round()
        once: dict[str, Callable[[Order, int], int]] = {
            "store": self._store,
            "offer": self._offer,
            "match": self._match,
            "fetch": self._fetch,
        }
        step = len(self._keys) if order.op == "match" else self._step
        latencies: list[float] = []
        num_chunks = 0
        cpu, began = time.process_time(), time.monotonic()
        try:
            while True:
                for at in range(0, len(self._keys), step):
                    started = time.perf_counter()
                    num_chunks += once[order.op](order, at)
                    latencies.append(time.perf_counter() - started)
                    if 0 < order.seconds < time.monotonic() - began:
                        break
                if not order.seconds or time.monotonic() - began > order.seconds:
                    break
        except (TierKVError, OSError) as error:
            lost = isinstance(error, UnavailableError | OSError) or not self._client.connected()
            return Round(failed=str(error), lost=lost)
        moved = 0 if order.op == "match" else num_chunks * self._namespace.payload_nbytes
        return Round(latencies, began, time.monotonic(), time.process_time() - cpu, num_chunks, moved)

    # -- operations: of the chunks from ``at`` on

    def _store(self, order: Order, at: int) -> int:
        letters = self._send(at, order.reason)
        if left := letters.replace(STORED, b""):
            why = _NOT_STORED.get(left[:1], f"the server answered {left[:1].decode('ascii', 'replace')!r}")
            raise RefusedError(f"{len(left)} of {len(letters)} chunks were not stored in the {order.tier} tier: {why}")
        return len(letters)

    def _offer(self, order: Order, at: int) -> int:
        letters = self._send(at, order.reason)
        if self._admin.call("TKV.DRAIN", _DRAIN_S) != b"1":
            raise UnavailableError(f"the {order.tier} tier did not take what was queued within {_DRAIN_S} s")
        return len(letters)

    def _match(self, order: Order, at: int) -> int:
        words = ("TKV.MATCH", self._namespace.ns_id(), 0, self._keys[0], b"".join(self._keys))
        letters = self._admin.call(*words)
        if letters != _LETTERS[order.tier] * len(self._keys):
            raise RefusedError(f"only {len(letters)} of {len(self._keys)} chunks were found in the {order.tier} tier")
        return len(letters)

    def _fetch(self, order: Order, at: int) -> int:
        entries = [
            Entry(self._keys[i], b"", i, 0, i - at, self._take(i - at))
            for i in range(at, min(len(self._keys), at + self._step))
        ]
        fetch = _Awaited(entries)
        self._client.fetch(self._job.number % NUM_LANES, at, self._keys[anchor_index(at)], fetch)
        if not fetch.done.wait(_PATIENCE_S) or fetch.results != _LETTERS[order.tier] * len(entries):
            got = (fetch.results or b"").decode("ascii", "replace")
            raise RefusedError(f"chunks were not fetched from the {order.tier} tier: the server answered {got!r}")
        return len(entries)

    def _send(self, at: int, reason: int) -> bytes:
        """Have a command's chunks stored and return its letters."""
        items = []
        for i in range(at, min(len(self._keys), at + self._step)):
            items.append(
                StoreItem(
                    key=self._keys[i],
                    parent=self._keys[i - 1] if i else self._root,
                    anchor=self._keys[anchor_index(i)],
                    position=i,
                    num_tokens=self._namespace.layout.chunk_tokens,
                    tenant=bytes(16),
                    slot=i - at,
                    generation=int(self._pool.generations[i - at]),
                    reason=reason,
                )
            )
        answered, replies = threading.Event(), []

        def done(letters: bytes | None) -> None:
            replies.append(letters)
            answered.set()

        self._client.store(items, set(), done)
        if not answered.wait(_PATIENCE_S) or not replies[0]:
            raise UnavailableError("the store server did not answer a STORE")
        letters: bytes = replies[0]
        return letters

    # -- what it has

    def _new_chain(self) -> None:
        chunk = self._namespace.layout.chunk_tokens
        start = self._job.number << 20 | self._num_chains
        self._num_chains += 1
        self._keys = chain_keys(self._root, [start] * (chunk * self._job.num_chunks), chunk)

    def _fill(self) -> None:
        """Fill the slots with bytes that no compression makes smaller."""
        rng = np.random.default_rng(self._job.number)
        for slot in range(self._pool.shape.num_slots):
            for part in self._pool.parts(slot):
                part[:] = rng.bytes(len(part))
            self._take(slot)

    def _take(self, slot: int) -> int:
        """Give a slot to other contents and return its generation."""
        self._pool.generations[slot] += 1
        return int(self._pool.generations[slot])

    def _pushed(self, what: str, body: bytes) -> bytes:
        """Answer the server's questions: this pool keeps nothing."""
        if what == "stat":
            shape = self._pool.shape
            return msgspec.json.encode(
                HostStat(
                    engine_id=self._hello.engine_id,
                    pid=self._hello.pid,
                    namespace=self._namespace.ns_id().hex(),
                    num_slots=shape.num_slots,
                    num_entries=0,
                    num_quarantined=0,
                    payload_nbytes=shape.payload_nbytes,
                    budget=shape.nbytes,
                    num_evicted=0,
                    counters={},
                )
            )
        answers = {"list": msgspec.msgpack.encode([]), "has": bytes(len(body) // 32), "invalidate": b"0"}
        return answers.get(what, b"0")


def main() -> int:
    """Serve standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this says when it is over
    logging.getLogger("tierkv").addHandler(logging.NullHandler())  # and what went wrong
    lines = sys.stdin.buffer
    job = msgspec.json.decode(lines.readline(), type=Job)
    try:
        client = Client(job)
    except (TierKVError, OSError) as error:
        _say(Joined(failed=str(error), refused=isinstance(error, RefusedError)))
        return 1
    try:
        _say(Joined(spill=client.spill))
        for line in lines:
            _say(client.do(msgspec.json.decode(line, type=Order)))
    except BrokenPipeError:  # whoever started this is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        client.close()
    return 0


def _say(value: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())

"""The store server under test: the real one, whose operations are wrapped with *points* at which a fault happens.

The process (``python -m fire.store FD``) takes orders as JSON lines on a socket, and writes a line there each time that
an order is carried out, before it is: also of a signal that ends this process the harness hears. Points, and how often
an operation passes them:

============  ==========================================================================================
hello         an engine is being taken in: before and after its session opens, and at each further connection of it
match         a MATCH: before the tiers are asked, and before the answer is given
fetch         a FETCH: before each payload is written to its slot, and before the answer is given
store         a STORE: before and after each payload is copied out of its slot
commit        an LMDB transaction that stores: all is written in it, its commit comes next
redis-write   records on their way to Redis: after each eighth of a batch's bytes
disk-read     a payload is about to be read from LMDB
disk-write    records are about to be put into LMDB
clock         at once: the wall clock is ``arg`` seconds off
============  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import lmdb

from fire import clock  # before anything that takes note of time.time
from fire.kind import BACKOFF_MAX_S
from tierkv import health
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.environment import Environment
from tierkv.tiers.redis_wire import Wire
from tierkv.tiers.shared import SharedTier
from tierkv_server.__main__ import main
from tierkv_server.commands import Commands
from tierkv_server.moves import Moves
from tierkv_server.service import Service

#: Nobody hangs longer than this at a point.
HANG_S = 60.0
_NUM_PARTS = 8


class Order(NamedTuple):
    """What is to happen at a point.

    Attributes:
        point: which.
        do: ``"kill"`` or ``"stop"`` (this process), ``"raise"`` (LMDB's error for the errno ``arg``), ``"sleep"``
            (``arg`` seconds), ``"hang"`` (until the order is taken back).
        first: the pass at which it happens, 1 for the next one.
        once: False: at every pass from then on.
        arg: see ``do``; of ``"kill"`` and ``"stop"``: seconds after the pass, which goes on meanwhile.
    """

    point: str
    do: str
    first: int = 1
    once: bool = True
    arg: float = 0.0


class Points:
    """The points of this process, and the orders that hold."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._orders: dict[str, Order] = {}
        self._passes: Counter[str] = Counter()
        self._release = threading.Event()

    def listen(self) -> None:
        """Take orders until the harness hangs up: ``[point, do, first, once, arg]``, or null to take all back."""
        with self._control.makefile("r") as lines:
            for line in lines:
                self.take(json.loads(line))

    def take(self, order: list[Any] | None) -> None:
        """Take an order, or take all back; the passes of its point are counted from here."""
        with self._lock:
            self._release.set()
            self._release = threading.Event()
            self._passes.clear()
            if order is None:
                self._orders.clear()
                clock.jump(0.0)
            elif order[0] == "clock":
                clock.jump(Order(*order).arg)
            else:
                self._orders[order[0]] = Order(*order)
        self._say({"taken": order})

    def reach(self, point: str) -> None:
        """Pass a point: this is where a fault happens."""
        with self._lock:
            order, release = self._orders.get(point), self._release
            if order is None:
                return
            self._passes[point] += 1
            number = self._passes[point]
            if number < order.first or (order.once and number > order.first):
                return
        self._say({"struck": point, "number": number})
        if order.do in ("kill", "stop"):
            self._signal(signal.SIGKILL if order.do == "kill" else signal.SIGSTOP, order.arg)
        elif order.do == "raise":
            raise lmdb.DiskError(f"mdb_{point}: {os.strerror(int(order.arg or errno.EIO))}")
        elif order.do == "sleep":
            release.wait(order.arg)
        else:
            release.wait(HANG_S)

    def _signal(self, number: int, after_s: float) -> None:
        def strike() -> None:
            time.sleep(after_s)
            os.kill(os.getpid(), number)

        if after_s:
            threading.Thread(target=strike).start()
        else:
            strike()

    def _say(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(what).encode() + b"\n")


def install(points: Points) -> None:
    """Put the points into the operations."""
    here = threading.local()  # what this thread is doing
    _around(points, Service, "open_session", "hello")
    _around(points, Commands, "_attach", "hello")
    _around(points, Service, "match", "match")
    _around(points, Moves, "copy", "store")
    for tier in (DiskTier, SharedTier):
        _wrap(tier, "fetch", functools.partial(_fetch, points))
    _wrap(Service, "fetch", functools.partial(_after, points, "fetch"))
    _wrap(Environment, "put", functools.partial(_put, points, here))
    _wrap(Environment, "read", functools.partial(_before, points, "disk-read"))
    _wrap(SharedTier, "_write", functools.partial(_marked, here, "to_redis"))
    _wrap(Wire, "send", functools.partial(_send, points, here))
    writing = Environment._writing

    @contextlib.contextmanager
    def with_commit(self: Environment) -> Iterator[lmdb.Transaction]:
        with writing(self) as txn:
            yield txn
            if getattr(here, "storing", False):
                points.reach("commit")

    Environment._writing = with_commit  # type: ignore[method-assign]


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    setattr(owner, name, _bound(getattr(owner, name), wrapper))


def _bound(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    return call


def _around(points: Points, owner: type, name: str, point: str) -> None:
    def wrapper(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        points.reach(point)
        result = original(*args, **options)
        points.reach(point)
        return result

    _wrap(owner, name, wrapper)


def _before(points: Points, point: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    points.reach(point)
    return original(*args, **options)


def _after(points: Points, point: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    result = original(*args, **options)
    points.reach(point)
    return result


def _marked(here: threading.local, mark: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    setattr(here, mark, True)
    try:
        return original(*args, **options)
    finally:
        setattr(here, mark, False)


def _put(points: Points, here: threading.local, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    points.reach("disk-write")
    return _marked(here, "storing", original, *args, **options)


def _fetch(
    points: Points, original: Callable[..., Any], tier: Any, ns_id: bytes, refs: Any, sink: Any, **options: Any
) -> Any:
    """A tier's fetch; reads of the server's own (``quiet``) pass no point."""

    def passing(at: int) -> Sequence[memoryview]:
        parts: Sequence[memoryview] = sink(at)
        points.reach("fetch")
        return parts

    return original(tier, ns_id, refs, sink if options.get("quiet") else passing, **options)


def _send(points: Points, here: threading.local, original: Callable[..., Any], wire: Any, pieces: Any) -> None:
    """Send what a write of records is in parts, and pass the point between them."""
    if not getattr(here, "to_redis", False):
        original(wire, pieces)
        return
    data = b"".join(pieces)
    step = -(-len(data) // _NUM_PARTS)
    for at in range(0, len(data), step):
        if at:
            points.reach("redis-write")
        original(wire, [data[at : at + step]])


if __name__ == "__main__":
    health.BACKOFF_MAX_S = BACKOFF_MAX_S
    _points = Points(socket.socket(fileno=int(sys.argv[1])))
    for _order in json.loads(sys.argv[2]):
        _points.take(_order)
    install(_points)
    threading.Thread(target=_points.listen, name="orders", daemon=True).start()
    sys.exit(main())

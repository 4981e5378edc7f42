"""The shared tier's link to Redis: asks, within bounds of time, and knows what is up and whether it takes writes.

Theory of operation. :mod:`tierkv.tiers.redis_nodes` says which node has a key and gives connections, on which
:mod:`tierkv.tiers.redis_wire` talks. A :class:`Call` is one exchange with one node. Whatever goes wrong in it closes
its connection, so that no late reply ever answers another question, and puts the node out for a back-off period in
which it is not asked. Where keys lie on several nodes their commands are all sent before the first reply is awaited.
After a redirection, or where one node of several failed, the map is read again and what is missing is asked once more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from tierkv.health import Health, Repeated
from tierkv.resp import Error, Value
from tierkv.server_config import SharedConfig
from tierkv.tiers.redis_errors import (
    FAILURES,
    NODE_OUT,
    REDIRECTS,
    UNSETTLED,
    WRITES_OUT,
    RefusedError,
    code_of,
    explain,
)
from tierkv.tiers.redis_nodes import Node, check_access, open_topology
from tierkv.tiers.redis_wire import Command, Packed, Wire, pack
from tierkv.urls import redact_url, url_secrets

T = TypeVar("T")

#: Bytes a second that every Redis is expected to move: payloads have that much time beside the timeout of one answer.
SLOWEST_NBYTES_S = 16 << 20
#: Where the name of a key stands in commands whose first argument is none.
_NAME_AT = {"OBJECT": 2, "XGROUP": 2, "XINFO": 2, "MEMORY": 2, "EVAL": 3, "EVALSHA": 3, "FCALL": 3, "BITOP": 2}


class OnError(Enum):
    """What a reply that is an error means. A connection that fails is a fault of the tier in any case."""

    OUT = 1  #: the tier is out, nothing is returned
    STOP_WRITES = 2  #: Redis takes no writes; the error is among the replies
    IGNORE = 3  #: nothing; the error is among the replies


class NodeOut(Error):
    """Stands for the reply of a node that is out. Only a Cluster has them, whose other nodes answer."""

    __slots__ = ()


class Target(NamedTuple):
    """Whom a command is for, and whether ASKING goes before it (a key that a Cluster is moving)."""

    node: Node
    asking: bool = False


class RedisLink:
    """Asks a Redis, within bounds of time, and never raises because of it.

    Args:
        config: where Redis is and how to get in.

    Attributes:
        url: where it is, without secrets.
        health: of Redis as a whole.
        writes: whether it takes writes; a Redis that is full, or a replica, is up all the same.
        damage: logs records that failed verification.

    Raises:
        ConfigError: the URL, an option or a file is wrong. A Redis that is down is no error.

    Notes:
        Thread-safe: every call has a connection of its own.
    """

    def __init__(self, config: SharedConfig) -> None:
        access = check_access(config)
        self.url = redact_url(config.url)
        self.health = Health(f"The shared tier ({self.url})")
        self.writes = Health(
            f"Writing to the shared tier ({self.url})",
            meanwhile="What is stored is served on; nothing new is written there.",
        )
        self.damage = Repeated()
        self.timeout_s = config.timeout_s
        self.closed = False
        self._secrets = url_secrets(config.url)
        self._password_file = access.password_file
        self._topology = open_topology(access, self.health)

    @property
    def up(self) -> bool:
        """Whether a node that was tried last answered."""
        return self.state.up

    @property
    def state(self) -> Health:
        """The health that speaks for the tier: that of Redis as a whole, or of a node where every node is out."""
        known = self._topology.known()
        return known[0].health if known and not any(node.health.up for node in known) else self.health

    @property
    def partly_out(self) -> Health | None:
        """The health of a node that is out while others answer, or None."""
        known = self._topology.known()
        out = [node.health for node in known if not node.health.up]
        return out[0] if out and len(out) < len(known) else None

    def until(self, nbytes: int = 0) -> float:
        """Return the monotonic time at which an exchange of so many bytes that begins now must be over."""
        return time.monotonic() + self.timeout_s + nbytes / SLOWEST_NBYTES_S

    def ask(
        self, commands: Sequence[Command | Packed], on_error: OnError = OnError.OUT, *, node: Node | None = None
    ) -> list[Value] | None:
        """Send commands in one pipeline a node and return their replies, or None where Redis failed or is out.

        Replies are RESP2 as they come: ``Simple``, ``bytes``, ``int``, lists, None, and ``Error`` where ``on_error``
        lets them through. A HGETALL is a flat list, a cursor is bytes. Each command goes to the node that has its
        (first) key, or to ``node``; one without a key to any.
        """
        began = self.health.now()
        if self.closed or not self.health.available():
            return None
        if not commands:
            return []
        replies: list[Value] = [NodeOut("the node is out")] * len(commands)
        wanted: dict[int, Target | None] = dict.fromkeys(range(len(commands)), Target(node) if node else None)
        for last in (True,) if node else (False, True):  # a cursor means something to its own node only
            if not wanted:
                break
            again = self._round(commands, wanted, replies, on_error, self.tolerated(last))
            if again is None:
                return None
            wanted = again
        return self._judge(replies, on_error, began)

    def nodes(self) -> list[Node]:
        """Return the nodes that have keys; nothing where that is not known now."""
        if self.closed or not self.health.available():
            return []
        try:
            return self._topology.nodes()
        except FAILURES as error:
            self.health.failed(self.say(error))
            return []

    def route(self, names: Iterable[tuple[T, bytes]], known: dict[T, Target | None]) -> dict[Target, list[T]] | None:
        """Return who has which keys, in the order of the names; None where the map cannot be read.

        Args:
            names: what is asked for, and the name of its key.
            known: targets that were learned from a redirection.
        """
        found: dict[Target, list[T]] = {}
        try:
            for item, name in names:
                target = known.get(item) or Target(self._topology.node_of(name))
                found.setdefault(target, []).append(item)
        except FAILURES as error:
            self.health.failed(self.say(error))
            return None
        return found

    def tolerated(self, last: bool) -> frozenset[str]:
        """Return the codes of errors after which somebody else is asked, or the same once more.

        Args:
            last: what is asked now is asked a second time.
        """
        if not self._topology.is_cluster:
            return frozenset()
        return REDIRECTS if last else REDIRECTS | UNSETTLED

    def redirect(self, error: str) -> Target | None:
        """Return whom a MOVED or ASK reply names, None where that cannot be told."""
        try:
            node = self._topology.redirected(error)
        except FAILURES:
            return None
        return Target(node, error.startswith("ASK")) if node else None

    def look_again(self, node: Node) -> None:
        """Find out who does a node's work now; a failure to do so shows when that one is asked."""
        with contextlib.suppress(*FAILURES):
            self._topology.look_again(node)

    def call(self, node: Node, until: float) -> Call:
        """Return an exchange with a node, to be used as a context."""
        return Call(self, node, until)

    def say(self, error: object) -> str:
        """Return what an error says as a sentence, without secrets."""
        text = explain(error)
        for secret in (*self._secrets, *(self._password_file.seen if self._password_file else ())):
            text = text.replace(secret, "***")
        return text

    def close(self) -> None:
        """Close every connection; from now on nothing is asked. Idempotent."""
        self.closed = True
        self._topology.close()

    def _round(
        self,
        commands: Sequence[Command | Packed],
        wanted: dict[int, Target | None],
        replies: list[Value],
        on_error: OnError,
        tolerated: frozenset[str],
    ) -> dict[int, Target | None] | None:
        """Ask what is wanted, put the replies in their places, and return what is to be asked again."""
        routes = self.route(((i, name_of(commands[i])) for i in wanted), wanted)
        if routes is None:
            return None
        asked: list[tuple[Call, Target, list[int]]] = []
        failed: list[tuple[Node, list[int]]] = []
        with contextlib.ExitStack() as stack:
            for target, places in routes.items():
                pieces = pack(_asking(commands, places) if target.asking else [commands[i] for i in places])
                call = stack.enter_context(self.call(target.node, self.until(sum(map(len, pieces)))))
                call.do(partial(Wire.send, pieces=pieces))
                asked.append((call, target, places))
            for call, target, places in asked:
                step = 2 if target.asking else 1
                found = call.do(partial(_settled, num=len(places) * step, on_error=on_error, tolerated=tolerated))
                if found is None:
                    failed.append((target.node, places))
                for i, reply in zip(places, (found or ())[step - 1 :: step], strict=False):
                    replies[i] = reply
        return self._again(wanted, replies, failed, asked)

    def _again(
        self,
        wanted: dict[int, Target | None],
        replies: list[Value],
        failed: list[tuple[Node, list[int]]],
        asked: list[tuple[Call, Target, list[int]]],
    ) -> dict[int, Target | None]:
        """Return what is to be asked again, and whom: those that a redirection names, or whom the map says then."""
        again: dict[int, Target | None] = {}
        stale = {id(node.pool): node for node, _ in failed}
        again.update((i, None) for _, places in failed for i in places)
        for _, target, places in asked:
            codes = {i: code for i in places if (code := code_of(replies[i]))}
            for i, code in codes.items():
                if code in REDIRECTS:
                    again[i] = self.redirect(str(replies[i]))
                elif code in UNSETTLED:
                    again[i] = None
                if code in UNSETTLED or code == "READONLY":
                    stale[id(target.node.pool)] = target.node
        for node in stale.values():
            self.look_again(node)
        return {i: again[i] for i in wanted if i in again}

    def _judge(self, replies: list[Value], on_error: OnError, began: float) -> list[Value] | None:
        faults = [reply for reply in replies if isinstance(reply, Error)]
        out = sum(isinstance(fault, NodeOut) for fault in faults)
        if out and (out == len(replies) or on_error is OnError.OUT):
            return None
        said = next((fault for fault in faults if not isinstance(fault, NodeOut)), None)
        if said is not None and on_error is OnError.OUT:
            self.health.failed(self.say(said))
            return None
        self.health.worked(began)
        unwritable = next((fault for fault in faults if code_of(fault) in WRITES_OUT), None)
        if on_error is OnError.STOP_WRITES and unwritable is None:
            unwritable = said
        if unwritable is not None:
            self.writes.failed(self.say(unwritable))
        elif on_error is OnError.STOP_WRITES:
            self.writes.worked(began)
        return replies


class Call:
    """One exchange with one node, on a connection of its own. See :class:`RedisLink`.

    Attributes:
        failed: the node was out, or failed; every later step does nothing.
    """

    def __init__(self, link: RedisLink, node: Node, until: float) -> None:
        self._link, self._node, self._until = link, node, until
        self._connection: Any = None
        self._wire: Wire | None = None
        self._replace = False
        self._began = 0.0
        self.failed = False

    def __enter__(self) -> Call:
        self._began = self._node.health.now()
        if self._link.closed or not self._node.health.available():
            self.failed = True
            return self
        try:
            self._connection = self._node.pool.get_connection()
            self._wire = Wire(self._connection._sock, self._link.timeout_s, self._until)
        except FAILURES as error:
            self._fail(error)
        return self

    def do(self, work: Callable[[Wire], T]) -> T | None:
        """Let ``work`` talk with the node and return what it returns; None where the node failed or is out."""
        if self.failed or self._wire is None:
            return None
        try:
            return work(self._wire)
        except FAILURES as error:
            self._fail(error)
        except RefusedError as error:
            self._fail(error.args[0])
        return None

    def replace(self) -> None:
        """Have the connection closed: what is still to come on it is not wanted."""
        self._replace = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            if self.failed or self._replace or kind is not None:
                self._connection.disconnect()
            self._node.pool.release(self._connection)
            self._connection = None
        if not self.failed and kind is None:
            self._node.health.worked(self._began)

    def _fail(self, error: object) -> None:
        self.failed = True
        self._node.health.failed(self._link.say(error))


def name_of(command: Command | Packed) -> bytes:
    """Return the name of the first key of a command, which says what node it is for; empty where it has none."""
    if isinstance(command, Packed):
        return command.name
    verb = str(command[0])
    at = _NAME_AT.get(verb, 1)
    if verb in ("XREAD", "XREADGROUP"):
        at = command.index("STREAMS") + 1
    words = command[at : at + 1] if verb not in ("PING", "SCAN") else ()
    return b"".join(word if isinstance(word, bytes) else str(word).encode() for word in words)


def _asking(commands: Sequence[Command | Packed], places: Sequence[int]) -> list[Command | Packed]:
    return [item for i in places for item in (("ASKING",), commands[i])]


def _settled(wire: Wire, num: int, on_error: OnError, tolerated: frozenset[str]) -> list[Value]:
    """Return the next replies, unless one says that the node can do nothing now.

    Raises:
        RefusedError: one does, with a code that is not tolerated, because others are asked then.
    """
    replies = wire.replies(num)
    for reply in replies:
        code = code_of(reply)
        if code and code not in tolerated and (code in NODE_OUT or on_error is OnError.OUT):
            raise RefusedError(reply)
    return replies

"""Redis dies, freezes, or answers what it should not: eight kinds.

The bytes come from a real Redis; where it cannot be made to say what a kind needs, the relay before it says it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from fire.kind import Kind, register
from fire.meddler import Edit
from fire.stage import Stage
from servers import free_port


class RedisFault(Kind):
    """A fault of Redis. What is to be hit lies in the shared tier alone."""

    group = "redis"
    source = "shared"
    both_engines = True


class Dies(RedisFault):
    """SIGKILL. Redis comes back empty."""

    name = "redis dies"

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._before = stage.meddler.num_lost
        stage.redis.kill()

    def end(self, stage: Stage) -> None:
        if not stage.redis.running:
            stage.redis.start()

    def struck(self, stage: Stage) -> int:
        return stage.meddler.num_lost - self._before


class Freezes(RedisFault):
    """SIGSTOP: it keeps its sockets and says nothing."""

    name = "redis freezes"

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self.outlives = rng.choice([0.0, 0.0, 2.0])
        stage.redis.sigstop()
        self._before = stage.meddler.num_passed

    def end(self, stage: Stage) -> None:
        stage.redis.sigcont()

    def struck(self, stage: Stage) -> int:
        return stage.meddler.num_passed - self._before


class Answers(RedisFault):
    """The relay changes replies.

    Args:
        name: the kind's.
        make: given the fault's random numbers, returns what becomes of replies.
    """

    def __init__(self, name: str, make: Callable[[random.Random], Edit]) -> None:
        self.name = name
        self._make = make
        self._before = 0

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._before = stage.meddler.num_edited
        stage.meddler.edit = self._make(rng)

    def end(self, stage: Stage) -> None:
        stage.meddler.edit = None

    def struck(self, stage: Stage) -> int:
        return stage.meddler.num_edited - self._before


class Refuses(RedisFault):
    """A real error of a real Redis, which is configured so that writes meet it.

    Args:
        name: the kind's.
        code: what its error replies start with.
        begin, end: commands.
        outlives: see :class:`Kind`.
    """

    def __init__(
        self,
        name: str,
        code: bytes,
        begin: list[tuple[str, ...]],
        end: list[tuple[str, ...]],
        outlives: float = 0.0,
    ) -> None:
        self.name = name
        self.outlives = outlives
        self._code = code
        self._begin, self._end = begin, end
        self._num = 0

    def begin(self, stage: Stage, rng: random.Random) -> None:
        self._num = 0

        def count(command: list[bytes], reply: bytes) -> bytes:
            self._num += reply.startswith(b"-" + self._code)
            return reply

        _do(stage, self._begin)
        stage.meddler.edit = count

    def end(self, stage: Stage) -> None:
        stage.meddler.edit = None
        _do(stage, self._end)

    def struck(self, stage: Stage) -> int:
        _wait_for(lambda: self._num)  # stores are written behind the requests
        return self._num


def _do(stage: Stage, commands: list[tuple[str, ...]]) -> None:
    with stage.redis.client() as client:
        for command in commands:
            client.execute_command(*command)


def _wait_for(condition: Callable[[], object], timeout_s: float = 2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


# -- what the relay says


def _is_payload(command: list[bytes], reply: bytes) -> bool:
    return command[0].upper() == b"GET" and len(reply) > 1024


def _bulk(body: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(body), body)


def _body(reply: bytes) -> bytes:
    return reply[reply.index(b"\r\n") + 2 : -2]


def _nil(rng: random.Random) -> Edit:
    """Records that EXISTS has are not there for GET: some, or all."""
    share = rng.choice([0.3, 1.0])

    def edit(command: list[bytes], reply: bytes) -> bytes:
        return b"$-1\r\n" if _is_payload(command, reply) and rng.random() < share else reply

    return edit


def _wrong_size(rng: random.Random) -> Edit:
    """Records are shorter or longer than they should be: cut anywhere, or with more behind; the framing is sound."""

    def edit(command: list[bytes], reply: bytes) -> bytes:
        if not _is_payload(command, reply):
            return reply
        body = _body(reply)
        body = body[: rng.randrange(len(body))] if rng.random() < 0.7 else body + rng.randbytes(rng.randint(1, 5000))
        return _bulk(body)

    return edit


def _garbage(rng: random.Random) -> Edit:
    """Bytes that mean nothing: within a record, in place of one, or of any reply whatever."""
    where = rng.choice(["within", "record", "reply"])

    def edit(command: list[bytes], reply: bytes) -> bytes:
        if where == "reply" and rng.random() < 0.5:
            return rng.randbytes(rng.randint(1, 200))
        if not _is_payload(command, reply):
            return reply
        body = bytearray(_body(reply))
        if where == "record":
            return _bulk(rng.randbytes(len(body)))
        at = rng.randrange(len(body) - 64)
        body[at : at + 64] = rng.randbytes(64)
        return _bulk(bytes(body))

    return edit


def _loading(rng: random.Random) -> Edit:
    """What a Redis says that has just started and reads its data back."""
    return lambda command, reply: b"-LOADING Redis is loading the dataset in memory\r\n"


register(Dies())
register(Freezes())
register(Answers("redis answers nil", _nil))
register(Answers("redis answers a wrong size", _wrong_size))
register(Answers("redis answers garbage", _garbage))
register(
    Refuses(
        "redis says OOM",
        b"OOM",
        [("CONFIG", "SET", "maxmemory-policy", "noeviction"), ("CONFIG", "SET", "maxmemory", "1")],
        [("CONFIG", "SET", "maxmemory", "128mb"), ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")],
    )
)
register(Answers("redis says LOADING", _loading))
register(
    Refuses(
        "redis says READONLY",
        b"READONLY",
        [("REPLICAOF", "127.0.0.1", str(free_port()))],
        [("REPLICAOF", "NO", "ONE")],
        outlives=1.5,  # a Redis that becomes a replica hangs up on who waits in it: the tier is out for a moment first
    )
)

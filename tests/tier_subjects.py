"""The tiers that the conformance suite is run on, each with what a test needs beside the contract."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from faulty_tier import FaultyTier
from memory_tier import MemoryTier
from records import Clock
from servers import RedisServer, server_binaries, start_redis
from tierkv.tiers.base import Limits, Ref, Tier
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.shared import SharedTier

KINDS = ("memory", "disk", "redis", "valkey")
BUDGET = 64 << 20


def open_shared(url: str, limits: Limits | None = None) -> SharedTier:
    """Open the shared tier with timeouts that a busy machine keeps."""
    return SharedTier(url, limits, timeout_s=10.0)


class Subject(ABC):
    """A tier under test.

    Attributes:
        tier: the tier, perhaps inside a :class:`~faulty_tier.FaultyTier` without faults.
        clock: the wall clock that the tier goes by.
        budget: bytes that it starts with; None where somebody else sets it.
    """

    budget: int | None = BUDGET

    def __init__(self, kind: str, wrapped: bool) -> None:
        self.kind = kind
        self.clock: Callable[[], float] = time.time
        self.limits = Limits(budget=self.budget)
        self._wrapped = wrapped
        self.tier: Tier

    def limit(self, **limits: Any) -> None:
        """Set the tier's limits to ``limits``, with the budget that it started with unless they say another."""
        self.limits = Limits(**({"budget": self.budget} | limits))
        self.tier.set_limits(self.limits)

    def reopen(self) -> None:
        """Close the tier and open what it left, as a restart of the process does."""
        self.tier.close()
        self.open()

    def open(self) -> None:
        """Open the tier on what is there."""
        inner = self.make()
        self.tier = FaultyTier(inner) if self._wrapped else inner

    @property
    def inner(self) -> Any:
        return self.tier.inner if isinstance(self.tier, FaultyTier) else self.tier

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the tier."""
        time.sleep(seconds)

    @abstractmethod
    def make(self) -> Tier:
        """Return a new tier on what is there."""

    @abstractmethod
    def raw(self, ns_id: bytes, ref: Ref) -> bytes | None:
        """Return the bytes that are stored for a ref."""

    @abstractmethod
    def edit(self, ns_id: bytes, ref: Ref, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes that are stored for a ref, behind the tier's back."""

    @abstractmethod
    def dump(self) -> object:
        """Return all that is stored, in whatever form: equal if and only if nothing was written or renewed."""


class MemorySubject(Subject):
    def __init__(self, kind: str, wrapped: bool) -> None:
        super().__init__(kind, wrapped)
        self.clock: Clock = Clock()
        self.open()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    def make(self) -> Tier:
        return MemoryTier(self.limits, self.clock)

    def raw(self, ns_id: bytes, ref: Ref) -> bytes | None:
        entry = self.inner.spaces.get(ns_id, {}).get(ref.key)
        return entry.data if entry else None

    def edit(self, ns_id: bytes, ref: Ref, change: Callable[[bytes], bytes]) -> None:
        entry = self.inner.spaces[ns_id][ref.key]
        entry.data = change(entry.data)

    def dump(self) -> object:
        return repr(self.inner.spaces)


class DiskSubject(Subject):
    def __init__(self, kind: str, wrapped: bool, path: Path) -> None:
        super().__init__(kind, wrapped)
        self.clock: Clock = Clock()
        self._path = path
        self.open()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    def make(self) -> Tier:
        return DiskTier(self._path, self.limits, clock=self.clock)

    def raw(self, ns_id: bytes, ref: Ref) -> bytes | None:
        env = self.inner._environments.get(ns_id)
        if env is None:
            return None
        with env._env.begin() as txn:
            value = txn.get(ref.key, db=env._records)
            return None if value is None else bytes(value)

    def edit(self, ns_id: bytes, ref: Ref, change: Callable[[bytes], bytes]) -> None:
        env = self.inner._environments[ns_id]
        value = self.raw(ns_id, ref)
        assert value is not None
        with env._env.begin(write=True) as txn:
            txn.put(ref.key, change(value), db=env._records)

    def dump(self) -> object:
        found: dict[bytes, object] = {}
        for ns_id, env in self.inner._environments.items():
            with env._env.begin() as txn:
                names = [bytes(name) for name in txn.cursor().iternext(values=False)]
            databases = {name: env._env.open_db(name, create=False) for name in names}
            with env._env.begin() as txn:
                found[ns_id] = {name: list(txn.cursor(db=db)) for name, db in databases.items()}
        return found, repr(self.inner._catalog.order._all.dump())


class SharedSubject(Subject):
    budget = None  # Redis has its own

    def __init__(self, kind: str, wrapped: bool, server: RedisServer) -> None:
        super().__init__(kind, wrapped)
        self.server = server
        self.client: Any = server.client()
        self.client.flushall()
        self.open()

    def make(self) -> Tier:
        return open_shared(self.server.url, self.limits)

    def raw(self, ns_id: bytes, ref: Ref) -> bytes | None:
        value: bytes | None = self.client.get(self._name(ns_id, ref))
        return value

    def edit(self, ns_id: bytes, ref: Ref, change: Callable[[bytes], bytes]) -> None:
        value = self.raw(ns_id, ref)
        assert value is not None
        self.client.set(self._name(ns_id, ref), change(value), keepttl=True)

    def dump(self) -> object:
        names = sorted(name for name in self.client.scan_iter(count=1000) if not name.endswith(b":usage"))
        # Usage is a cached sum; a hash that is only read may be dumped in another order.
        return {name: (self._value(name), self.client.pexpiretime(name)) for name in names}

    def _value(self, name: bytes) -> object:
        return self.client.hgetall(name) if self.client.type(name) == b"hash" else self.client.dump(name)

    def _name(self, ns_id: bytes, ref: Ref) -> str:
        return f"tierkv:1:{ns_id.hex()}:{{{ref.anchor.hex()[:16]}}}:{ref.key.hex()}"


class Servers:
    """Redis and Valkey for many tests: each is started once, and emptied for every test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, RedisServer] = {}

    def get(self, kind: str) -> RedisServer:
        """Return the server; skips the test where it is not installed."""
        binary = server_binaries().get(kind)
        if binary is None:
            pytest.skip(f"{kind} is not installed")
        if kind not in self._running:
            self._running[kind] = start_redis(self._directory, binary=binary)
        return self._running[kind]

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()


@contextmanager
def open_subject(kind: str, servers: Servers, path: Path, wrapped: bool = False) -> Iterator[Subject]:
    """Open a tier of a kind on nothing, and close it at the end."""
    subject: Subject
    if kind == "memory":
        subject = MemorySubject(kind, wrapped)
    elif kind == "disk":
        subject = DiskSubject(kind, wrapped, path)
    else:
        subject = SharedSubject(kind, wrapped, servers.get(kind))
    with ExitStack() as stack:
        if isinstance(subject, SharedSubject):
            stack.callback(subject.client.close)
        stack.callback(lambda: subject.tier.close())
        yield subject

"""Random operations on a tier and on the model in memory, in lockstep: every answer is the same, after every step.

Where nothing forces a tier to lose an entry it loses none, so all is compared. With a budget that is too small, tiers
may choose differently; then what the contract fixes is checked: the budget, leaves first, pins, and the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memory_tier import MemoryTier
from records import Buffers, make_chain, make_namespace, payload_of
from tier_subjects import KINDS, Servers, SharedSubject, Subject, open_subject
from tierkv.layout import Namespace
from tierkv.tiers.base import EntryInfo, Limits, Pin, Record, Ref, Status, Tier

NAMESPACES = [make_namespace("one", payload_nbytes=2048), make_namespace("two", payload_nbytes=4096, num_parts=2)]
LARGE = make_namespace("large", payload_nbytes=1 << 20)
LENGTH = 6
FAR = 1e6
OWNERS = ("me", "you")

settings.register_profile(
    "tiers",
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
PROFILE = settings.get_profile("tiers")

namespaces = st.sampled_from(NAMESPACES)
chains = st.integers(0, 3)
owners_or_all = st.sampled_from(("", *OWNERS))
runs = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(lambda run: slice(run[0], run[0] + run[1]))


def chain_of(namespace: Namespace, chain: int, created: float) -> tuple[list[Ref], list[Record]]:
    """Two chains that share their first three chunks, one of another tenant, and one across an anchor."""
    if chain == 3:
        refs, records = make_chain(namespace, 62 + LENGTH, 3, created=created)
        return refs[62:], records[62:]
    return make_chain(
        namespace,
        LENGTH,
        seed=0 if chain < 2 else 1,
        branch=3 if chain == 1 else None,
        salt="tenant" if chain == 2 else "",
        created=created,
    )


def read(tier: Tier, namespace: Namespace, refs: list[Ref], quiet: bool) -> list[Status]:
    buffers = Buffers(namespace, len(refs))
    results = tier.fetch(namespace.ns_id(), refs, buffers, quiet=quiet)
    for ref, result, cell in zip(refs, results, buffers.cells, strict=True):
        assert result.status is not Status.OK or bytes(cell) == payload_of(ref.key, namespace.payload_nbytes)
        assert result.header is None or result.header.key == ref.key
    return [result.status for result in results]


@functools.cache
def large_chain(seed: int) -> tuple[list[Ref], list[Record]]:
    return make_chain(LARGE, 8, seed)


class Lockstep(RuleBasedStateMachine):
    """A tier without pressure beside the model: every operation on both, every answer compared."""

    def __init__(self, subject: Subject, resources: ExitStack) -> None:
        super().__init__()
        self._resources = resources
        self.subject = subject
        self.tier = subject.tier
        self.model = MemoryTier(Limits(), subject.clock)
        self.shared = isinstance(subject, SharedSubject)
        for namespace in NAMESPACES:
            self.tier.add_namespace(namespace)
            self.model.add_namespace(namespace)
        # Made once: what is stored twice has the same bytes and time.
        self.chains = {(ns.ns_id(), i): chain_of(ns, i, subject.clock()) for ns in NAMESPACES for i in range(4)}

    def same(self, operation: str, *args: Any, **options: Any) -> Any:
        """Do it to both, compare, and return the answer."""
        ours, theirs = (getattr(tier, operation)(*args, **options) for tier in (self.tier, self.model))
        assert ours == theirs, f"{operation}: {ours} where the model says {theirs}"
        return ours

    @rule(ns=namespaces, chain=chains, run=runs)
    def store(self, ns: Namespace, chain: int, run: slice) -> None:
        self.same("store", ns.ns_id(), self.chains[ns.ns_id(), chain][1][run])

    @rule(ns=namespaces, chain=chains, run=runs, quiet=st.booleans())
    def fetch(self, ns: Namespace, chain: int, run: slice, quiet: bool) -> None:
        refs = self.chains[ns.ns_id(), chain][0][run]
        assert read(self.tier, ns, refs, quiet) == read(self.model, ns, refs, quiet)

    @rule(ns=namespaces, chain=chains)
    def match(self, ns: Namespace, chain: int) -> None:
        refs = self.chains[ns.ns_id(), chain][0]
        ours, theirs = (tier.match(ns.ns_id(), refs) for tier in (self.tier, self.model))
        end = theirs.index(False) if False in theirs else len(theirs)
        assert ours[: end + 1] == theirs[: end + 1]
        assert not any(our and not their for our, their in zip(ours, theirs, strict=True))

    @rule(ns=namespaces, chain=chains, run=runs)
    def evict(self, ns: Namespace, chain: int, run: slice) -> None:
        self.same("evict", ns.ns_id(), self.chains[ns.ns_id(), chain][0][run])

    # A tier may keep the ancestors of what is pinned, too. Here they always are pinned: what is pinned is the beginning
    # of a chain, and pins come off, and what is pinned is removed, from the end.

    @rule(ns=namespaces, chain=st.sampled_from([0, 2, 3]), stop=st.integers(1, LENGTH), owner=st.sampled_from(OWNERS))
    def pin(self, ns: Namespace, chain: int, stop: int, owner: str) -> None:
        until = float(int(self.subject.clock() + FAR))
        self.same("pin", ns.ns_id(), self.chains[ns.ns_id(), chain][0][:stop], Pin(owner, until))

    @rule(ns=namespaces, chain=st.sampled_from([0, 2, 3]), at=st.integers(0, LENGTH), owner=owners_or_all)
    def unpin(self, ns: Namespace, chain: int, at: int, owner: str) -> None:
        self.same("unpin", ns.ns_id(), self.chains[ns.ns_id(), chain][0][at:], owner)

    @rule(ns=namespaces, chain=st.sampled_from([0, 2, 3]), at=st.integers(0, LENGTH))
    def force(self, ns: Namespace, chain: int, at: int) -> None:
        self.same("evict", ns.ns_id(), self.chains[ns.ns_id(), chain][0][at:], force=True)

    @rule(ns=namespaces, chain=chains, run=runs, until=st.sampled_from([0.0, FAR, 2 * FAR, None]))
    def expire_at(self, ns: Namespace, chain: int, run: slice, until: float | None) -> None:
        when = float(int(self.subject.clock() + until)) if until else 0.0 if until == 0.0 else self.subject.clock()
        self.same("expire_at", ns.ns_id(), self.chains[ns.ns_id(), chain][0][run], when)

    @rule(ns=namespaces, chain=chains, at=st.integers(0, LENGTH - 1))
    def tokens(self, ns: Namespace, chain: int, at: int) -> None:
        self.same("tokens", ns.ns_id(), self.chains[ns.ns_id(), chain][0][at])

    @rule(ns=namespaces, sure=st.integers(0, 3))
    def drop_namespace(self, ns: Namespace, sure: int) -> None:
        if not sure:
            self.same("drop_namespace", ns.ns_id())

    @precondition(lambda self: not self.shared)
    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.subject.pass_time(seconds)

    @precondition(lambda self: not self.shared)
    @rule(ttl_s=st.sampled_from([None, 60.0, 200.0]), idle_s=st.sampled_from([None, 50.0]))
    def set_limits(self, ttl_s: float | None, idle_s: float | None) -> None:
        self.subject.limit(ttl_s=ttl_s, idle_s=idle_s)
        self.model.set_limits(Limits(ttl_s=ttl_s, idle_s=idle_s))

    @precondition(lambda self: self.subject.kind != "memory")
    @rule(sure=st.integers(0, 3))
    def restart(self, sure: int) -> None:
        if sure:
            return
        counted = self.tier.stat()
        self.subject.reopen()
        self.tier = self.subject.tier
        for namespace in NAMESPACES:
            self.tier.add_namespace(namespace)
        assert self.shared or self.tier.stat().num_entries == counted.num_entries

    @invariant()
    def the_same_is_stored(self) -> None:
        for namespace in NAMESPACES:
            ours, theirs = (self.view(tier, namespace.ns_id()) for tier in (self.tier, self.model))
            assert ours == theirs
        assert self.same_usage()

    def same_usage(self) -> bool:
        """Compare what each tenant has, by entries: bytes differ with a tier's padding."""
        for namespace in NAMESPACES:
            ours, theirs = (
                {
                    tenant: (u.num_entries, u.num_entries * u.pinned_nbytes / u.nbytes)
                    for tenant, u in tier.usage(namespace.ns_id()).items()
                }
                for tier in (self.tier, self.model)
            )
            assert ours == theirs
        return True

    def view(self, tier: Tier, ns_id: bytes) -> dict[bytes, EntryInfo]:
        """Return the entries without what tiers may differ in: padding; Redis's idle time and times below a second."""
        return {
            e.key: e._replace(
                nbytes=0,
                last_used=0.0 if self.shared or not e.num_hits else e.last_used,
                num_hits=0 if self.shared else e.num_hits,
                expires=float(round(e.expires)) if self.shared else e.expires,
                pins=tuple(sorted(e.pins)),
            )
            for e in tier.entries(ns_id)
        }

    def teardown(self) -> None:
        self._resources.close()


class Pressure(RuleBasedStateMachine):
    """A tier whose budget is too small: what goes is its own choice, but not how."""

    BUDGET = 20 << 20
    num_evicted = 0  #: over all examples

    def __init__(self, subject: Subject, resources: ExitStack) -> None:
        super().__init__()
        self._resources = resources
        self.subject, self.tier = subject, subject.tier
        self.ns_id = LARGE.ns_id()
        self.pinned: set[bytes] = set()
        self.num_stored = self.num_gone = 0

    @initialize()
    def limit(self) -> None:
        self.tier.add_namespace(LARGE)
        self.subject.limit(budget=self.BUDGET)

    @rule(seed=st.integers(0, 7), num=st.sampled_from([8, 3, 1]))
    def store(self, seed: int, num: int) -> None:
        self.subject.pass_time(1)
        statuses = self.tier.store(self.ns_id, large_chain(seed)[1][:num])
        assert set(statuses) <= {Status.OK, Status.EXISTS, Status.DROPPED}
        if not self.pinned:
            assert Status.DROPPED not in statuses
        self.num_stored += statuses.count(Status.OK)

    @rule(seed=st.integers(0, 7), num=st.integers(1, 8), quiet=st.booleans())
    def fetch(self, seed: int, num: int, quiet: bool) -> None:
        refs = large_chain(seed)[0][:num]
        found = read(self.tier, LARGE, refs, quiet)
        assert [status is Status.OK for status in found] == self.tier.match(self.ns_id, refs)

    @rule(seed=st.integers(0, 7), num=st.integers(1, 3))
    def pin(self, seed: int, num: int) -> None:
        refs = large_chain(seed)[0][:num]
        done = self.tier.pin(self.ns_id, refs, Pin("me", self.subject.clock() + FAR))
        self.pinned |= {ref.key for ref, ok in zip(refs, done, strict=True) if ok}

    @rule(seed=st.integers(0, 7))
    def unpin(self, seed: int) -> None:
        refs, _ = large_chain(seed)
        self.tier.unpin(self.ns_id, refs)
        self.pinned -= {ref.key for ref in refs}

    @rule(seed=st.integers(0, 7), start=st.integers(0, 7))
    def evict(self, seed: int, start: int) -> None:
        refs, _ = large_chain(seed)
        last = max([i for i, ref in enumerate(refs) if ref.key in self.pinned], default=-1)
        self.num_gone += self.tier.evict(self.ns_id, refs[max(start, last + 1) :])

    @invariant()
    def what_is_fixed(self) -> None:
        stat, entries = self.tier.stat(), {e.key: e for e in self.tier.entries(self.ns_id)}
        assert stat.nbytes <= self.BUDGET
        assert stat.nbytes == sum(entry.nbytes for entry in entries.values())
        assert stat.num_entries == len(entries) == self.num_stored - stat.num_evicted - self.num_gone
        assert stat.num_removed == self.num_gone
        assert self.pinned <= entries.keys()
        assert all(entry.position == 0 or entry.parent in entries for entry in entries.values()), "leaves go first"

    def teardown(self) -> None:
        type(self).num_evicted += self.tier.stat().num_evicted
        self._resources.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


class Factory:
    """Makes a state machine on a new tier, each in a directory of its own."""

    def __init__(self, machine: type[Lockstep] | type[Pressure], kind: str, servers: Servers, path: Path) -> None:
        self._make = machine
        self._args = kind, servers
        self._path = path
        self._number = 0

    def __call__(self) -> RuleBasedStateMachine:
        self._number += 1
        stack = ExitStack()
        kind, servers = self._args
        subject = stack.enter_context(open_subject(kind, servers, self._path / str(self._number)))
        return self._make(subject, stack)


@pytest.mark.parametrize("kind", KINDS)
def test_lockstep_with_the_model(kind: str, servers: Servers, tmp_path: Path) -> None:
    profile = PROFILE
    if kind not in ("memory", "disk"):
        servers.get(kind)
        profile = settings(PROFILE, max_examples=20, phases=[Phase.generate])  # each step is many round trips
    run_state_machine_as_test(Factory(Lockstep, kind, servers, tmp_path), settings=profile)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_under_pressure(kind: str, servers: Servers, tmp_path: Path) -> None:
    before = Pressure.num_evicted
    run_state_machine_as_test(
        Factory(Pressure, kind, servers, tmp_path), settings=settings(PROFILE, max_examples=8, stateful_step_count=60)
    )
    assert Pressure.num_evicted > before + 50, "there was pressure"

"""Compaction: the disk space of records that have gone is given back while the tier, or the server, goes on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_tools import as_json, refused, tierkv
from fake_engine import FakeEngine
from fake_engine import make_namespace as fake_namespace
from network import with_listen
from records import Buffers, Clock, fetch, make_chain, make_namespace, payload_of, wait_until
from servers import free_port
from serving import make_config, serving
from soak import Soak
from tierkv.admin_client import AdminClient
from tierkv.errors import RefusedError, TierKVError
from tierkv.payload import HEADER_NBYTES, Header, checksum
from tierkv.sizes import format_size
from tierkv.tiers import disk_compact, environment
from tierkv.tiers.base import EntryInfo, Limits, Pin, Record, Ref, Status
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_compact import STEP_NBYTES, Compaction, chain_order
from tierkv.tiers.disk_index import IndexEntry
from tierkv_server.server import Server

MIB = 1 << 20
NAMESPACE = make_namespace(payload_nbytes=256 << 10)
NS_ID = NAMESPACE.ns_id()
COST = 256 * 1024 + 4096
BUDGET = 256 * MIB
#: What trees and the copy's own transactions take beside the records.
TREES = MIB


@pytest.fixture(autouse=True)
def _no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that takes no pages back one by one."""
    monkeypatch.setattr(environment, "_fallocate", lambda *_: 1)


@contextlib.contextmanager
def opened(path: Path, limits: Limits | int = BUDGET, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(path, limits, **({"sync_interval_s": 3600.0} | options))  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    try:
        yield tier
    finally:
        tier.close()


def fill(tier: DiskTier, num_kept: int = 6, num_gone: int = 30) -> list[list[Ref]]:
    """Store chains of ten chunks and evict most of them; returns those that stay."""
    chains = []
    for seed in range(num_kept + num_gone):
        refs, records = make_chain(NAMESPACE, 10, seed=seed)
        assert tier.store(NS_ID, records) == [Status.OK] * 10
        chains.append(refs)
    for refs in chains[num_kept:]:
        assert tier.evict(NS_ID, refs) == 10
    return chains[:num_kept]


def run(compaction: Compaction) -> None:
    try:
        for _ in range(1000):
            compaction.step()
            if compaction.done:
                return
        raise AssertionError("it does not come to an end")
    finally:
        compaction.end()


def known(tier: DiskTier) -> dict[bytes, EntryInfo]:
    return {entry.key: entry for entry in tier.entries(NS_ID)}


def check_payloads(tier: DiskTier, refs: list[Ref]) -> None:
    results, cells = fetch(tier, NAMESPACE, refs)
    assert {result.status for result in results} == {Status.OK}
    for ref, cell in zip(refs, cells, strict=True):
        assert bytes(cell) == payload_of(ref.key, NAMESPACE.payload_nbytes)


def blocks_of(path: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def leftovers(path: Path) -> list[str]:
    return [p.name for p in (path / "ns").iterdir() if "compact" in p.name]


# What it does


def test_it_gives_back_what_is_not_used_and_changes_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        kept = fill(tier)
        tier.pin(NS_ID, kept[0], Pin("me", clock.now + 500))
        tier.expire_at(NS_ID, kept[1], clock.now + 300)
        fetch(tier, NAMESPACE, kept[2])
        before, nbytes, live = known(tier), tier.allocated_nbytes(), tier.stat().nbytes
        assert nbytes > 300 * COST
        found = tier.slack([NS_ID])[NS_ID]
        assert found.worth and found.num_chunks == 60 and found.before_nbytes == nbytes
        compaction = tier.compact(NS_ID)
        run(compaction)
        assert known(tier) == before and tier.stat().nbytes == live
        assert 60 * COST <= tier.allocated_nbytes() <= 60 * COST + TREES
        assert compaction.before_nbytes == nbytes and compaction.after_nbytes == tier.allocated_nbytes()
        assert abs(tier.allocated_nbytes() - found.after_nbytes) <= found.needed_nbytes - found.after_nbytes
        assert not tier.slack([NS_ID])[NS_ID].worth, "a second one has nothing to do"
        assert leftovers(tmp_path) == []
        check_payloads(tier, [ref for refs in kept for ref in refs])
        assert tier.tokens(NS_ID, kept[0][0]) == make_chain(NAMESPACE, 1)[1][0].tokens
        assert tier.evict(NS_ID, kept[0]) == 0, "it is pinned"
        for seed in range(100, 150):  # and it is written to as before
            assert set(tier.store(NS_ID, make_chain(NAMESPACE, 10, seed=seed)[1])) == {Status.OK}
        at_the_end = known(tier)
    with opened(tmp_path, clock=clock) as tier:
        assert known(tier) == at_the_end
        check_payloads(tier, [ref for refs in kept for ref in refs])
        assert tier.stat().num_bad == 0
        clock.now += 301
        assert not any(tier.match(NS_ID, kept[1])), "its own time is kept"
        clock.now += 200
        assert tier.evict(NS_ID, kept[0]) == 10


def test_a_chain_lies_in_one_piece_afterwards(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        chains = [make_chain(NAMESPACE, 10, seed=seed) for seed in range(8)]
        for i in range(10):
            for _, records in chains:
                tier.store(NS_ID, records[i : i + 1])
        for refs, _ in chains[4:]:
            tier.evict(NS_ID, refs)
        run(tier.compact(NS_ID))
        entries = tier._environments[NS_ID].index.entries
        for refs, _ in chains[:4]:
            pages = [entries[ref.key].page for ref in refs]
            assert pages == sorted(pages) and pages[-1] - pages[0] < 2 * 10 * COST // 4096


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=60))
def test_the_order_is_a_permutation_with_parents_first(spec: list[tuple[int, int]]) -> None:
    def key(i: int) -> bytes:
        return i.to_bytes(32, "big")

    entries: dict[bytes, IndexEntry] = {}
    for i, (parent, used) in enumerate(spec):
        header = Header(b"", b"", key(i + 1), key(parent), b"", i if parent <= i else 0, 1, b"", float(used), 1, b"")
        entries[key(i + 1)] = IndexEntry(header, 0, 0.0)
    order = chain_order(entries)
    assert sorted(order) == sorted(entries)
    place = {k: i for i, k in enumerate(order)}
    for k, entry in entries.items():
        parent = entries.get(entry.parent)
        if parent is not None and parent.position < entry.position:
            assert place[entry.parent] < place[k]


# While the tier goes on


def test_what_changes_meanwhile_is_in_the_new_file_as_it_is_then(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        kept = fill(tier, num_kept=10)
        compaction = tier.compact(NS_ID)
        while compaction.num_done < compaction.num_total:
            compaction.step()
        # All is copied; from here on the copy is behind.
        tier.evict(NS_ID, kept[0])
        refs, records = make_chain(NAMESPACE, 12, seed=70)
        tier.store(NS_ID, records)
        tier.pin(NS_ID, kept[1], Pin("me", clock.now + 100))
        tier.expire_at(NS_ID, kept[2], clock.now + 50)
        tier.expire_at(NS_ID, kept[3], clock.now + 1)
        fetch(tier, NAMESPACE, kept[4])
        assert tier._upkeep.flush(tier._environments[NS_ID]), "the use of these is written, to the old file"
        again = make_chain(NAMESPACE, 10, seed=5)[1]  # evicted and stored again: other bytes under the same keys
        tier.evict(NS_ID, kept[5])
        others = [other_payload(record) for record in again]
        tier.store(NS_ID, others)
        clock.now += 2
        assert not any(tier.match(NS_ID, kept[3]))
        expected = known(tier)
        run(compaction)
        assert known(tier) == expected
        _, cells = fetch(tier, NAMESPACE, kept[5])
        assert [bytes(c) for c in cells] == [
            bytes(r.data[HEADER_NBYTES : HEADER_NBYTES + NAMESPACE.payload_nbytes]) for r in others
        ]
        check_payloads(tier, refs + kept[1] + kept[2])
        expected = known(tier)
    with opened(tmp_path, clock=clock) as tier:
        assert known(tier) == expected, "hits and last use too"
        assert not any(tier.match(NS_ID, kept[0] + kept[3]))
        check_payloads(tier, refs)


def other_payload(record: Record) -> Record:
    data = bytearray(record.data)
    payload = bytes(reversed(record.data[HEADER_NBYTES : HEADER_NBYTES + NAMESPACE.payload_nbytes]))
    header = record.header._replace(checksum=checksum(payload))
    data[:HEADER_NBYTES] = header.pack()
    data[HEADER_NBYTES : HEADER_NBYTES + len(payload)] = payload
    return Record(header, memoryview(data), record.tokens)


def test_what_has_expired_but_is_not_swept_takes_no_room(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as tier:
        kept = fill(tier, num_kept=4)
        tier.expire_at(NS_ID, kept[3], clock.now + 1)
        compaction = tier.compact(NS_ID)
        while compaction.num_done < compaction.num_total:
            compaction.step()
        with tier._write:  # so that nothing is swept: it has been copied and has expired since
            clock.now += 2
            assert not any(tier.match(NS_ID, kept[3]))
            assert len(tier._environments[NS_ID].index.dead) == 10
            run(compaction)
            assert len(tier._environments[NS_ID].index.dead) == 0, "they are not in the new file"
        wait_until(lambda: not tier._environments[NS_ID].index.dead)
        assert tier.stat().nbytes == 30 * COST
    with opened(tmp_path, clock=clock) as tier:
        assert len(known(tier)) == 30


def test_readers_never_miss_what_stays_and_writers_never_wait_for_long(tmp_path: Path) -> None:
    """Stores, fetches, evictions and pins from several threads while compactions follow each other."""
    stop = threading.Event()
    problems: list[str] = []
    counts = dict.fromkeys(("read", "stored", "evicted"), 0)
    with opened(tmp_path, 64 * MIB, sync_interval_s=0.05) as tier:
        kept = fill(tier, num_kept=4, num_gone=16)
        for refs in kept:
            tier.pin(NS_ID, refs, Pin("test", time.time() + 1000))

        def read() -> None:
            rng = random.Random(1)
            while not stop.is_set():
                refs = kept[rng.randrange(4)]
                if not all(tier.match(NS_ID, refs)):
                    problems.append("what is pinned is not matched")
                results, cells = fetch(tier, NAMESPACE, refs)
                for ref, result, cell in zip(refs, results, cells, strict=True):
                    if result.status is not Status.OK or bytes(cell) != payload_of(ref.key, len(cell)):
                        problems.append(f"what stays is {result.status.name}")
                counts["read"] += len(refs)

        def churn() -> None:
            rng = random.Random(2)
            while not stop.is_set():
                refs, records = make_chain(NAMESPACE, rng.randint(1, 8), seed=rng.randint(100, 140))
                statuses = tier.store(NS_ID, records)
                if not set(statuses) <= {Status.OK, Status.EXISTS}:
                    problems.append(f"stored as {statuses}")
                counts["stored"] += len(refs)
                results, cells = fetch(tier, NAMESPACE, refs)
                for ref, result, cell in zip(refs, results, cells, strict=True):
                    if result.status is Status.OK and bytes(cell) != payload_of(ref.key, len(cell)):
                        problems.append("wrong bytes")
                    elif result.status not in (Status.OK, Status.MISS):
                        problems.append(f"what was stored is {result.status.name}")
                if rng.random() < 0.6:
                    counts["evicted"] += tier.evict(NS_ID, refs)

        threads = [threading.Thread(target=target) for target in (read, read, churn)]
        for thread in threads:
            thread.start()
        num_done = 0
        try:
            deadline = time.monotonic() + 60
            while num_done < 12 and time.monotonic() < deadline and not problems:
                run(tier.compact(NS_ID))
                num_done += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert problems == [] and num_done == 12
        assert min(counts.values()) > 20
        stat = tier.stat()
        assert (stat.num_bad, stat.num_errors, stat.state) == (0, 0, "up") and stat.nbytes <= 64 * MIB
        index = set(known(tier))
        tier._upkeep.flush(tier._environments[NS_ID])
    with opened(tmp_path, 64 * MIB) as tier:
        assert set(known(tier)) == index, "file and index say the same"
        check_payloads(tier, [Ref(e.key, e.anchor) for e in tier.entries(NS_ID)])


def test_a_reader_that_is_inside_is_waited_for_and_one_that_comes_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_compact, "_ADOPT_S", 0.2)
    inside, go_on = threading.Event(), threading.Event()
    got: list[Status] = []

    class Slow(Buffers):
        def __call__(self, at: int) -> list[memoryview]:  # type: ignore[override]
            inside.set()
            assert go_on.wait(20)
            return list(super().__call__(at))

    with opened(tmp_path) as tier:
        kept = fill(tier, num_kept=2)
        buffers = Slow(NAMESPACE, 1)
        reader = threading.Thread(target=lambda: got.extend(r.status for r in tier.fetch(NS_ID, kept[0][:1], buffers)))
        compaction = tier.compact(NS_ID)
        while compaction.num_done < compaction.num_total:
            compaction.step()
        reader.start()
        assert inside.wait(20)
        compaction.step()
        assert not compaction.done, "a reader is inside"
        check_payloads(tier, kept[1])
        late: list[Status] = []
        monkeypatch.setattr(disk_compact, "_ADOPT_S", 20.0)
        stepper = threading.Thread(target=compaction.step)
        stepper.start()
        wait_until(lambda: tier._environments[NS_ID]._adopting)
        second = threading.Thread(target=lambda: late.extend(r.status for r in fetch(tier, NAMESPACE, kept[1])[0]))
        second.start()
        assert all(tier.match(NS_ID, kept[1])), "what asks no file does not wait"
        time.sleep(0.1)
        assert not late and not compaction.done
        go_on.set()
        for thread in (reader, stepper, second):
            thread.join(20)
        assert compaction.done and got == [Status.OK] and late == [Status.OK] * 10
        compaction.end()
        assert bytes(buffers.cells[0]) == payload_of(kept[0][0].key, NAMESPACE.payload_nbytes)


def test_readers_do_not_wait_for_a_sync(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        fill(tier, num_kept=2)
        compaction = tier.compact(NS_ID)
        env = tier._environments[NS_ID]
        env.syncing = True
        for _ in range(6):
            compaction.step()
        assert not compaction.done and not env._adopting
        env.syncing = False
        run(compaction)


# What ends it


def test_without_room_nothing_is_begun_and_the_reserve_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(disk_compact.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free[0] // 4096, f_frsize=4096))
    with opened(tmp_path, Limits(budget=BUDGET, reserve_nbytes=100 * MIB)) as tier:
        fill(tier)
        needed = tier.slack([NS_ID])[NS_ID].needed_nbytes
        free[0] = 100 * MIB + needed - 4096
        assert format_size(needed) in tier.slack([NS_ID])[NS_ID].reason
        with pytest.raises(RefusedError, match=r"needs .*MiB, and the volume has .*MiB free, of which 100 MiB are its"):
            tier.compact(NS_ID)
        assert leftovers(tmp_path) == []
        free[0] += 4096
        compaction = tier.compact(NS_ID)
        compaction.step()
        free[0] = 100 * MIB  # others have taken it meanwhile
        before = known(tier)
        with pytest.raises(RefusedError, match="evict first"):
            compaction.step()
        compaction.end()
        assert leftovers(tmp_path) == [] and known(tier) == before
        free[0] = 1 << 40
        run(tier.compact(NS_ID))
        assert known(tier) == before and tier.stat().state == "up"


def test_a_copy_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        kept = fill(tier)
        compaction = tier.compact(NS_ID)
        compaction.step()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_NBYTES + MIB, hard))  # the kernel refuses what is behind that
        try:
            with pytest.raises(RefusedError, match=r"could not be written \(.*\); nothing was changed"):
                compaction.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        compaction.end()
        assert leftovers(tmp_path) == []
        check_payloads(tier, [ref for refs in kept for ref in refs])
        run(tier.compact(NS_ID))
        assert tier.stat().state == "up"


def test_a_damaged_record_is_deleted_counted_and_not_copied(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        kept = fill(tier, num_kept=3)
        page = tier._environments[NS_ID].index.entries[kept[1][4].key].page
        with open(tmp_path / "ns" / NS_ID.hex() / "data.mdb", "r+b") as file:
            file.seek(page * 4096 + 5000)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        compaction = tier.compact(NS_ID)
        run(compaction)
        assert compaction.num_bad == 1 and tier.stat().num_bad == 1
        assert [r.status for r in fetch(tier, NAMESPACE, kept[1])[0]].count(Status.OK) == 9
        assert not tier.match(NS_ID, [kept[1][4]])[0]
        check_payloads(tier, kept[0] + kept[2])


def test_a_namespace_that_goes_or_is_opened_anew_ends_it(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        fill(tier)
        compaction = tier.compact(NS_ID)
        compaction.step()
        tier.drop_namespace(NS_ID)
        with pytest.raises(RefusedError, match="removed, or opened anew"):
            for _ in range(20):
                compaction.step()
        compaction.end()
        assert list((tmp_path / "ns").iterdir()) == []
        with pytest.raises(RefusedError, match="not on the disk"):
            tier.compact(NS_ID)
        kept = fill(tier)
        compaction = tier.compact(NS_ID)
        with pytest.raises(RefusedError, match="another compaction"):
            tier.compact(NS_ID)
        tier.set_limits(Limits(budget=4 * BUDGET))  # the next store opens the file with a larger map
        refs, records = make_chain(NAMESPACE, 2, seed=90)
        tier.store(NS_ID, records)
        with pytest.raises(RefusedError, match="opened anew"):
            for _ in range(20):
                compaction.step()
        compaction.end()
        run(tier.compact(NS_ID))
        check_payloads(tier, [*refs, *kept[0]])


def test_records_of_another_version_are_left_as_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        refs = fill(tier, num_kept=2)[0]
        env = tier._environments[NS_ID]
        with env._env.begin(write=True) as txn:
            row = bytearray(txn.get(refs[0].key, db=env._heads))  # type: ignore[arg-type]
            row[8:10] = b"\x63\x00"
            txn.put(refs[0].key, bytes(row), db=env._heads)
    with opened(tmp_path) as tier:
        assert "another version" in tier.slack([NS_ID])[NS_ID].reason
        with pytest.raises(RefusedError, match="another version"):
            tier.compact(NS_ID)


def test_closing_the_tier_ends_it(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        kept = fill(tier)
        compaction = tier.compact(NS_ID)
        compaction.step()
    assert leftovers(tmp_path) == []
    with pytest.raises(RefusedError, match="was ended"):
        compaction.step()
    with opened(tmp_path) as tier:
        check_payloads(tier, [ref for refs in kept for ref in refs])


def test_stores_that_are_faster_than_the_copy_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        kept = fill(tier, num_kept=2)
        compaction = tier.compact(NS_ID)
        copy, stored = compaction._copy, list[list[Ref]]()

        def behind(keys: list[bytes]) -> int:
            refs, records = make_chain(NAMESPACE, 40, seed=1000 + len(stored))
            tier.store(NS_ID, records)
            stored.append(refs)
            if len(stored) > 3:
                tier.evict(NS_ID, stored[-4])
            return copy(keys)

        monkeypatch.setattr(compaction, "_copy", behind)
        nbytes = 0
        with pytest.raises(RefusedError, match="faster than they are copied"):
            while not compaction.done:
                compaction.step()
                nbytes = max(nbytes, blocks_of(compaction._new.directory))
        compaction.end()
        assert leftovers(tmp_path) == []
        assert nbytes < 300 * COST, "what went meanwhile was taken out of the copy"
        check_payloads(tier, kept[0] + kept[1])


# Killed

#: Fills a tier, begins a compaction, and dies where it is told to. Arguments: directory, where.
CHILD = """
import os, signal, sys
from pathlib import Path
from test_compact import NAMESPACE, NS_ID, fill, make_chain
from tierkv.tiers import disk_compact, environment
from tierkv.tiers.base import Pin
from tierkv.tiers.disk import DiskTier

environment._fallocate = lambda *_: 1
path, where = Path(sys.argv[1]), sys.argv[2]
tier = DiskTier(path, 256 << 20, sync_interval_s=3600)
tier.add_namespace(NAMESPACE)
kept = fill(tier)
tier.pin(NS_ID, kept[0], Pin("me", 4e9))

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

compaction = tier.compact(NS_ID)
replace, calls = Path.replace, []

def counted(self, target):
    if self.name.endswith("mdb"):
        calls.append(self.name)
        if where == "before" and len(calls) == 1 or where == "between" and len(calls) == 2:
            die()
    return replace(self, target)

Path.replace = counted
if where == "settle":
    compaction._settle = die
if where == "catch-up":
    compaction._catch_up = die
if where == "copying":
    compaction.step()
    die()
while not compaction.done:
    compaction.step()
    if compaction.num_done == compaction.num_total and not calls:
        tier.evict(NS_ID, kept[5])
        tier.store(NS_ID, make_chain(NAMESPACE, 3, seed=77)[1])
if where == "after":
    tier.evict(NS_ID, kept[4])
    die()
compaction.end()
die()
"""


@pytest.mark.parametrize("where", ["copying", "catch-up", "before", "between", "settle", "after", "end"])
def test_killed_anywhere_it_leaves_one_whole_file(tmp_path: Path, where: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", CHILD, str(tmp_path), where]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode == -signal.SIGKILL
    assert bool(leftovers(tmp_path)) == (where != "end")
    with opened(tmp_path) as tier:
        assert leftovers(tmp_path) == [], "the next opening removes what is left"
        chains = [make_chain(NAMESPACE, 10, seed=seed)[0] for seed in range(7)]
        changed = where not in ("copying",)
        gone = {"copying": [6], "after": [4, 5, 6]}.get(where, [5, 6])
        for i, refs in enumerate(chains):
            assert tier.match(NS_ID, refs) == [i not in gone] * 10, (where, i)
        stay = [ref for i, refs in enumerate(chains) if i not in gone for ref in refs]
        check_payloads(tier, stay)
        late = make_chain(NAMESPACE, 3, seed=77)[0]
        assert tier.match(NS_ID, late) == [changed] * 3
        assert tier.evict(NS_ID, chains[0]) == 0, "pins are kept"
        assert len(known(tier)) == len(stay) + 3 * changed and tier.stat().num_bad == 0
        small = where in ("between", "settle", "after", "end")
        assert (tier.allocated_nbytes() < 80 * COST) == small, "the old file or the new one"
        expected = known(tier)
        run(tier.compact(NS_ID))
        assert known(tier) == expected
        assert tier.allocated_nbytes() <= len(expected) * COST + TREES


# Through a server, and by its command line


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server(short_dir: Path, _plain: None) -> Iterator[Server]:
    with serving(make_config(short_dir, disk_bytes=BUDGET)) as server:
        yield server


@pytest.fixture
def at(server: Server) -> tuple[str, Path]:
    return ("--server", server.config.socket)


def spread(server: Server) -> list[list[Ref]]:
    """Store chains in the server's disk and evict most; returns those that stay."""
    disk = server.service.disk
    disk.add_namespace(NAMESPACE)
    assert isinstance(disk, DiskTier)
    return fill(disk)


def test_the_command_line_says_and_does_what_it_comes_to(server: Server, at: tuple[str, Path]) -> None:
    other = make_namespace("other", payload_nbytes=256 << 10)
    refused(tierkv("compact", *at), 1, "nothing is on the disk")
    assert as_json("compact", *at, code=1)["namespaces"] == []
    kept = spread(server)
    server.service.disk.add_namespace(other)
    server.service.disk.store(other.ns_id(), make_chain(other, 4)[1])
    refused(tierkv("compact", "--namespace", "ff00ff", *at), 1, "'ff00ff'", "tierkv ns")
    plan = as_json("compact", "--dry-run", *at)
    rows = {row["namespace"]: row for row in plan["namespaces"]}
    assert (rows[NS_ID.hex()]["state"], rows[other.ns_id().hex()]["state"]) == ("planned", "left")
    disk = server.service.disk
    assert isinstance(disk, DiskTier)
    nbytes = disk.allocated_nbytes()
    assert plan["dry_run"] and plan["before_nbytes"] == nbytes and 0 < plan["freed_nbytes"] < nbytes
    assert rows[NS_ID.hex()]["needed_nbytes"] >= 60 * COST and rows[other.ns_id().hex()]["freed_nbytes"] == 0
    shown = tierkv("compact", "--dry-run", *at)
    assert shown.code == 0 and "would be compacted" in shown.out and "Would give back" in shown.out
    assert disk.allocated_nbytes() == nbytes, "so far nothing was done"
    done = as_json("compact", *at)
    assert done["before_nbytes"] == nbytes and done["after_nbytes"] == disk.allocated_nbytes()
    assert done["freed_nbytes"] == nbytes - disk.allocated_nbytes() and done["num_bad"] == 0
    assert abs(done["after_nbytes"] - plan["after_nbytes"]) < TREES
    states = {row["namespace"]: (row["state"], row["num_chunks"]) for row in done["namespaces"]}
    assert states == {NS_ID.hex(): ("compacted", 60), other.ns_id().hex(): ("left", 4)}
    check_payloads(disk, [ref for refs in kept for ref in refs])
    refused(tierkv("compact", *at), 1, "nothing to give back")
    assert tierkv("compact", "--quiet", *at) == (1, "", "")


def test_an_engine_goes_on_and_its_filter_stays_right(server: Server, at: tuple[str, Path]) -> None:
    namespace = fake_namespace(block_nbytes=64 << 10)
    prompts = [[seed * 1000 + i for i in range(4 * 32)] for seed in range(20)]
    with FakeEngine(server.config.socket, namespace, num_slots=100) as engine:
        for tokens in prompts:
            engine.put(tokens)
        for tokens in prompts[5:]:
            as_json("evict", engine.keys(tokens)[0].hex(), *at)
        engine.forget()
        keys = sorted(server.node._stored_keys(namespace.ns_id()))
        assert len(keys) == 20
        assert as_json("compact", *at)["freed_nbytes"] > 0
        assert sorted(server.node._stored_keys(namespace.ns_id())) == keys
        for tokens in prompts[:5]:
            assert engine.match(tokens) == b"dddd"
            assert engine.get(tokens) == engine.expected(tokens) and engine.last_sources == ["disk"] * 4
        assert engine.get(prompts[7]) == []
        engine.put(prompts[7])
        engine.forget()
        assert engine.get(prompts[7]) == engine.expected(prompts[7])


def test_one_at_a_time_and_what_is_abandoned_is_given_up(
    server: Server, at: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = spread(server)
    assert server.commands._compactor is not None
    monkeypatch.setattr(server.commands._compactor, "_idle_s", 1.0)
    root = server.config.disk_dir
    with AdminClient(server.config.socket) as client:
        first = client.ask("TKV.COMPACT", {})
        assert first["cursor"] and first["num_total"] == 60 and first["nbytes"] > 0 and len(leftovers(root)) == 1
        refused(tierkv("compact", *at), 4, "under way")
        assert as_json("compact", "--dry-run", *at)["namespaces"][0]["state"] == "planned"
        with pytest.raises(RefusedError, match="start again"):
            client.ask("TKV.COMPACT", {"cursor": "0123"})
        wait_until(lambda: not leftovers(root))
        with pytest.raises(RefusedError, match="start again"):
            client.ask("TKV.COMPACT", {"cursor": first["cursor"]})
        check_payloads(server.service.disk, kept[0])  # type: ignore[arg-type]
        assert as_json("compact", *at)["namespaces"][0]["state"] == "compacted"


def test_without_room_it_is_refused_in_a_sentence(
    server: Server, at: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(server)
    monkeypatch.setattr(disk_compact.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    for flag in ("--dry-run", "--no-color"):
        said = tierkv("compact", flag, *at)
        refused(said, 4, "not everything was compacted", "needs 16.4 MiB", "3.9 MiB free", "disk.reserve_bytes")
        assert "refused" in said.out


def test_no_server_no_directory_no_right(short_dir: Path, tmp_path: Path, _plain: None) -> None:
    refused(tierkv("compact", "--server", tmp_path / "none.sock"), 3, "none.sock", "tierkv serve")
    refused(tierkv("compact", "--rate", "fast"), 2, "'fast'")
    refused(tierkv("compact", "--disk", tmp_path), 2, "no disk directory")
    refused(tierkv("compact", "--disk", tmp_path, "--server", "x"), 2, "one of them")
    token = tmp_path / "reader"
    token.write_text("r" * 32)
    token.chmod(0o600)
    port = free_port()
    options = {"tcp": f"127.0.0.1:{port}", "insecure": True, "reader_token_file": token}
    with serving(with_listen(make_config(short_dir), **options)):
        said = tierkv("compact", "--server", f"tkv://127.0.0.1:{port}", "--token-file", token)
        refused(said, 4, "reader's token does not allow TKV.COMPACT", "admin's")


def test_without_a_server(short_dir: Path, _plain: None) -> None:
    config = make_config(short_dir, disk_bytes=BUDGET)
    with serving(config) as server:
        kept = spread(server)
        through = as_json("compact", "--dry-run", "--disk", config.disk_dir)
        assert through["namespaces"][0]["state"] == "planned", "the server that owns it is asked"
    plan = as_json("compact", "--dry-run", "--disk", config.disk_dir)
    assert plan["freed_nbytes"] == through["freed_nbytes"]
    done = as_json("compact", "--disk", config.disk_dir)
    assert 0 < done["freed_nbytes"] == plan["before_nbytes"] - done["after_nbytes"]
    refused(tierkv("compact", "--disk", config.disk_dir), 1, "nothing to give back")
    with opened(config.disk_dir) as tier:
        check_payloads(tier, [ref for refs in kept for ref in refs])


class CompactingSoak(Soak):
    """A soak in which somebody compacts all the time."""

    num_compacted = 0

    def _judge(self) -> None:
        self.report.max_file_nbytes -= int(1.1 * self.report.budget)  # of a copy that is being written
        super()._judge()

    def _live_until(self, moment: float) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=self._compact, args=(stop,))
        thread.start()
        try:
            super()._live_until(moment)
            self._kill_server()  # in the middle of a compaction, mostly
            self._start_server()
        finally:
            stop.set()
            thread.join(30)

    def _compact(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TierKVError, OSError), AdminClient(self._config.socket) as admin:
                cursor = ""
                while not stop.is_set():
                    reply = admin.ask("TKV.COMPACT", {"cursor": cursor})
                    self.num_compacted += sum(row["state"] == "compacted" for row in reply["namespaces"])
                    refusals = [row["reason"] for row in reply["namespaces"] if row["state"] == "refused"]
                    self.report.problems += [why for why in refusals if "opened anew" not in why]
                    if not (cursor := reply["cursor"]):
                        break
            stop.wait(0.05)


@pytest.mark.timeout(200)
def test_a_soak_with_kills_and_compactions(short_dir: Path) -> None:
    soak = CompactingSoak(short_dir, seconds=30, kill_every_s=4, budget=96 << 20, redis=None)
    report = soak.run()
    assert report.problems == []
    assert report.kills >= 4 and report.counts["payloads"] > 100
    assert soak.num_compacted >= 3, "it was seldom worth it: the soak says little"
    assert leftovers(short_dir / "store") == []

"""A disk that fills up, fails, hangs; readers that die: what the tier answers meanwhile, and how it comes back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from records import fetch, make_chain, make_namespace, payload_of, wait_until
from tierkv.tiers import disk_space, disk_upkeep, environment
from tierkv.tiers.base import Limits, Ref, Status
from tierkv.tiers.disk import DiskTier

MIB = 1 << 20
NAMESPACE = make_namespace(payload_nbytes=256 << 10)
NS_ID = NAMESPACE.ns_id()
COST = 256 * 1024 + 4096
BUDGET = 32 * MIB
OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR


@contextmanager
def opened(path: Path, limits: Limits | int = BUDGET, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(path, limits, **options)  # type: ignore[arg-type]
    tier.add_namespace(NAMESPACE)
    try:
        yield tier
    finally:
        tier.close()


class Monotonic:
    """A clock for the back-off of a tier's health."""

    def __init__(self, tier: DiskTier) -> None:
        self.now = 0.0
        tier._health.reads._clock = tier._health.writes._clock = lambda: self.now


def store(tier: DiskTier, num: int, seed: int = 0) -> list[Ref]:
    refs, records = make_chain(NAMESPACE, num, seed=seed)
    assert tier.store(NS_ID, records) == [OK] * num
    return refs


def statuses(tier: DiskTier, refs: list[Ref]) -> list[Status]:
    results, cells = fetch(tier, NAMESPACE, refs)
    for ref, result, cell in zip(refs, results, cells, strict=True):
        assert result.status is not OK or bytes(cell) == payload_of(ref.key, len(cell))
    return [result.status for result in results]


# Writing fails


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MiB of its own."""
    path = tmp_path / "volume"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tierkv-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a filesystem may not be mounted here: needs root with CAP_SYS_ADMIN")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill_up(path: Path) -> None:
    with pytest.raises(OSError, match="No space"), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_within_the_reserve_it_uses_its_own_pages_again(small_volume: Path) -> None:
    """Trees still take a page here and there: that is what the reserve is for."""
    with opened(small_volume, Limits(budget=64 * MIB, reserve_nbytes=2 * MIB)) as tier:
        store(tier, 40)
        fill_up(small_volume / "others")
        os.truncate(small_volume / "others", (small_volume / "others").stat().st_size - MIB)
        size = tier.allocated_nbytes()
        tier._room._space._asked_at = None
        for seed in range(1, 150):
            store(tier, 4, seed=seed)
        stat = tier.stat()
        assert (stat.state, stat.num_errors, stat.num_dropped) == ("up", 0, 0)
        assert stat.num_evicted == 40 + 4 * 149 - stat.num_entries > 0
        assert tier.allocated_nbytes() <= size + MIB // 2, "a tree, and a record"
        entries = [Ref(e.key, e.anchor) for e in tier.entries(NS_ID)]
        assert len(entries) > 20 and statuses(tier, entries) == [OK] * len(entries)


def test_a_full_volume_makes_it_read_only_and_space_makes_it_write_again(
    small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that does not say that it is full, as under a quota of the filesystem."""
    monkeypatch.setattr(disk_space.FreeSpace, "growth_nbytes", lambda self, reserve, wanted: wanted)
    with opened(small_volume, 64 * MIB) as tier:
        clock = Monotonic(tier)
        refs = store(tier, 30)
        fill_up(small_volume / "others")
        _, records = make_chain(NAMESPACE, 20, seed=1)
        assert tier.store(NS_ID, records) == [ERROR] * 20
        stat = tier.stat()
        assert stat.state == "read-only" and "No space left" in stat.reason
        assert tier.store(NS_ID, records) == [ERROR] * 20
        assert statuses(tier, refs) == [OK] * 30, "reads go on"
        clock.now += 60
        assert tier.store(NS_ID, records) == [ERROR] * 20, "tried, and still full"
        assert tier._health.writes.num_faults == 2
        (small_volume / "others").unlink()
        assert tier.store(NS_ID, records) == [ERROR] * 20, "at once, during the back-off"
        clock.now += 120
        assert tier.store(NS_ID, records) == [OK] * 20
        assert tier.stat().state == "up"
    with opened(small_volume, 64 * MIB) as tier:
        assert statuses(tier, refs) == [OK] * 30
        assert tier.stat().num_entries == 50


def test_a_volume_with_no_space_from_the_start(small_volume: Path) -> None:
    with opened(small_volume, 64 * MIB) as tier:
        clock = Monotonic(tier)
        fill_up(small_volume / "others")
        _, records = make_chain(NAMESPACE, 4)
        assert tier.store(NS_ID, records) == [ERROR] * 4, "not even an empty environment"
        assert tier.stat().state == "read-only"
        (small_volume / "others").unlink()
        clock.now += 60
        assert tier.store(NS_ID, records) == [OK] * 4
        assert tier.stat().state == "up"


@pytest.mark.parametrize(
    "error",
    [
        lmdb.DiskError("mdb_txn_commit: No space left on device"),
        lmdb.Error("mdb_txn_commit: Input/output error"),
        OSError(errno.EIO, "Input/output error"),
        lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed"),
        lmdb.CorruptedError("mdb_put: MDB_CORRUPTED"),
    ],
    ids=["ENOSPC", "EIO", "OSError", "panic", "corrupted"],
)
def test_writes_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with opened(tmp_path) as tier:
        clock = Monotonic(tier)
        refs = store(tier, 8)
        more, records = make_chain(NAMESPACE, 4, seed=1)
        tries: list[int] = []

        def failing(*_: object) -> None:
            tries.append(1)
            raise error

        monkeypatch.setattr(tier._environments[NS_ID], "put", failing)
        assert tier.store(NS_ID, records) == [ERROR] * 4
        stat = tier.stat()
        assert stat.state == "read-only" and stat.since > 0 and str(error).split(":")[0][:10] in stat.reason
        for _ in range(5):
            assert tier.store(NS_ID, records) == [ERROR] * 4
        assert len(tries) == 1, "not tried during the back-off"
        assert tier.stat().num_errors == 24
        assert statuses(tier, refs + more) == [OK] * 8 + [MISS] * 4, "reads go on"
        assert tier.stat().state == "read-only", "that reading works says nothing about writing"
        monkeypatch.undo()
        clock.now += 60
        assert tier.store(NS_ID, records) == [OK] * 4
        assert tier.stat().state == "up"
        assert statuses(tier, refs + more) == [OK] * 12


def test_an_eviction_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num = BUDGET // COST
    with opened(tmp_path) as tier:
        clock = Monotonic(tier)
        refs = store(tier, num)

        def failing(*_: object) -> None:
            raise lmdb.Error("mdb_del: Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(tier._environments[NS_ID], "delete", failing)
            assert tier.store(NS_ID, make_chain(NAMESPACE, 4, seed=1)[1]) == [ERROR] * 4
            assert tier.evict(NS_ID, refs[1:]) == 0
        assert all(tier.match(NS_ID, refs))
        assert (tier.stat().num_evicted, tier.stat().num_removed) == (0, 0)
        clock.now += 60
        store(tier, 4, seed=1)
        assert tier.match(NS_ID, refs) == [True] * (num - 4) + [False] * 4


def test_a_sync_that_fails_makes_it_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, sync_interval_s=0.02) as tier:
        clock = Monotonic(tier)

        def failing(_: object) -> None:
            raise lmdb.Error("mdb_env_sync: Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(environment.Environment, "sync", failing)
            refs = store(tier, 4)
            wait_until(lambda: tier.stat().state == "read-only")
            assert statuses(tier, refs) == [OK] * 4
        clock.now += 60
        store(tier, 4, seed=1)
        assert tier.stat().state == "up"
        wait_until(lambda: not tier._environments[NS_ID].dirty)


# Reading fails


def test_reads_that_fail_put_the_tier_out_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        clock = Monotonic(tier)
        refs = store(tier, 8)
        preadv, tries = os.preadv, []

        def failing(file: int, buffers: object, offset: int, flags: int = 0) -> int:
            tries.append(1)
            if len(tries) > 2:
                raise OSError(errno.EIO, "Input/output error")
            return preadv(file, buffers, offset, flags)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(environment.Environment, "prefetch", lambda *_: None)
            patch.setattr(environment.os, "preadv", failing)
            assert statuses(tier, refs) == [OK] * 2 + [ERROR] * 6
            assert len(tries) == 3, "the rest of the fetch is not tried"
            assert tier.stat().state == "out" and "Input/output" in tier.stat().reason
            assert tier.match(NS_ID, refs) == [False] * 8
            assert statuses(tier, refs) == [ERROR] * 8
            assert tier.store(NS_ID, make_chain(NAMESPACE, 2, seed=1)[1]) == [ERROR] * 2
            assert len(tries) == 3
        stat = tier.stat()
        assert (stat.num_hits, stat.num_misses, stat.num_bad, stat.num_errors) == (2, 0, 0, 6 + 8 + 2)
        clock.now += 60
        assert tier.match(NS_ID, refs) == [True] * 8, "nothing was deleted"
        assert statuses(tier, refs) == [OK] * 8
        assert tier.stat().state == "up"


CUT_OFF = """
import os, sys
from pathlib import Path
from records import fetch, make_chain, make_namespace
from tierkv.tiers.disk import DiskTier

namespace = make_namespace(payload_nbytes=256 << 10)
tier = DiskTier(Path(sys.argv[1]), 32 << 20)
tier.add_namespace(namespace)
refs, records = make_chain(namespace, 8)
tier.store(namespace.ns_id(), records)
env = tier._environments[namespace.ns_id()]
last = max(env.index.entries[ref.key].page for ref in refs)
os.truncate(env.directory / "data.mdb", (last + 10) * 4096)
results, _ = fetch(tier, namespace, refs)
print([int(r.status) for r in results].count(5), tier.stat().state, flush=True)
os._exit(0)
"""


def test_a_file_that_was_cut_off_does_not_kill_the_process(tmp_path: Path) -> None:
    """Reading a page that is not there through a memory map is SIGBUS; a device's error is the same."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CUT_OFF, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1 out\n"), done.stderr


def test_an_environment_that_broke_while_reading_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 0.02)
    with opened(tmp_path) as tier:
        clock = Monotonic(tier)
        refs = store(tier, 4)
        first = tier._environments[NS_ID]

        def panic(*_: object) -> None:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC")

        monkeypatch.setattr(first, "read", panic)
        assert statuses(tier, refs) == [ERROR] * 4
        assert tier.stat().state == "out"
        clock.now += 60
        wait_until(lambda: tier._environments.get(NS_ID) not in (None, first))
        assert statuses(tier, refs) == [OK] * 4, "without a store or a restart"
        assert tier.stat().state == "up"


def test_an_environment_that_cannot_be_opened_again_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_upkeep, "_SWEEP_S", 0.02)
    with opened(tmp_path) as tier:
        clock = Monotonic(tier)
        refs = store(tier, 4)

        def failing(*_: object, **__: object) -> None:
            raise lmdb.Error("mdb_env_open: Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(environment.lmdb, "open", failing)
            tier._environments[NS_ID].broken = True
            wait_until(lambda: tier.stat().state == "read-only")
            assert statuses(tier, refs) == [MISS] * 4
            clock.now += 60
            assert tier.store(NS_ID, make_chain(NAMESPACE, 2, seed=1)[1]) == [ERROR] * 2
        clock.now += 60
        wait_until(lambda: NS_ID in tier._environments)
        assert statuses(tier, refs) == [OK] * 4
        store(tier, 2, seed=1)
        assert tier.stat().num_entries == 6, "what was there is still counted"


# Readers, and the end

READER = """
import sys, time
import lmdb
env = lmdb.open(sys.argv[1], map_size=1 << 30, max_dbs=6, readonly=True, lib_version=0)
txn = env.begin()
txn.get(b"format")
print("reading", flush=True)
time.sleep(600)
"""


def test_a_reader_that_was_killed_keeps_no_pages(tmp_path: Path) -> None:
    """Its slot says that it still sees an old state: without reaping no page freed since is used again."""
    with opened(tmp_path, sync_interval_s=0.02) as tier:
        store(tier, 20)
        directory = tmp_path / "ns" / NS_ID.hex()
        child = subprocess.Popen([sys.executable, "-c", READER, str(directory)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "reading\n"
        env = tier._environments[NS_ID]._env
        assert len(env.readers().splitlines()) > 1
        child.send_signal(signal.SIGKILL)
        child.wait()
        wait_until(lambda: str(child.pid) not in env.readers())
        for seed in range(1, 60):
            store(tier, 10, seed=seed)
        assert tier.allocated_nbytes() <= 1.45 * BUDGET, "six turnovers"


def test_our_own_readers_are_gone_when_a_fetch_returns(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        refs = store(tier, 4)
        assert statuses(tier, refs) == [OK] * 4
        pages = [line.split()[2] for line in tier._environments[NS_ID]._env.readers().splitlines()[1:]]
        assert set(pages) <= {"-"}, "no slot sees a transaction"


def test_close_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_upkeep, "_CLOSE_S", 0.2)
    go_on = threading.Event()
    sync, tier = environment.Environment.sync, DiskTier(tmp_path, BUDGET)
    tier.add_namespace(NAMESPACE)
    refs = store(tier, 4)
    monkeypatch.setattr(environment.Environment, "sync", lambda self: go_on.wait(60) and sync(self))
    mark = tmp_path / "ns" / NS_ID.hex() / "tierkv.json"
    tier.close()
    assert tier._upkeep._thread.is_alive() and not go_on.is_set(), "it left while the sync was going on"
    assert "clean" not in mark.read_text(), "and promised nothing"
    assert tier.match(NS_ID, refs) == [False] * 4
    assert tier.store(NS_ID, make_chain(NAMESPACE, 1)[1]) == [ERROR]
    go_on.set()
    tier._upkeep._thread.join(10)
    assert "clean" in mark.read_text()


def test_syncs_come_at_their_interval_only_where_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[float] = []
    sync = environment.Environment.sync

    def counted(self: environment.Environment) -> None:
        synced.append(time.monotonic())
        sync(self)

    monkeypatch.setattr(environment.Environment, "sync", counted)
    with opened(tmp_path, sync_interval_s=0.05) as tier:
        refs = store(tier, 4)
        wait_until(lambda: len(synced) == 1)
        wait_until(lambda: not tier._environments[NS_ID].dirty)
        reaped: list[int] = []
        monkeypatch.setattr(tier._environments[NS_ID], "reap_readers", lambda: reaped.append(1) or 0)
        wait_until(lambda: len(reaped) >= 3)
        assert len(synced) == 1, "three intervals without a change"
        fetch(tier, NAMESPACE, refs)
        wait_until(lambda: len(synced) == 2)

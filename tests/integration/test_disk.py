"""The disk tier alone: budget, files, restarts, crashes, what is not ours."""

from __future__ import annotations

import json
import os
import random
import resource
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

from records import fetch, make_chain, make_namespace, make_record, payload_of, wait_until
from tierkv.errors import ConfigError
from tierkv.layout import Namespace
from tierkv.tiers import disk_mark, environment
from tierkv.tiers.base import Ref, Status
from tierkv.tiers.disk import MIN_BUDGET, DiskTier
from tierkv.tiers.disk_mark import DISK_FORMAT
from tierkv.tiers.filesystem import check_directory, filesystem_type

MIB = 1 << 20
BUDGET = 32 * MIB
NAMESPACE = make_namespace(payload_nbytes=256 << 10)
NS_ID = NAMESPACE.ns_id()
COST = 256 * 1024 + 4096  # header and padding take one page more


@contextmanager
def opened(path: Path, budget: int = BUDGET, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(path, budget, **options)  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close()


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def blocks_of(path: Path) -> int:
    """Bytes that all files below ``path`` take from the filesystem, as ``du`` counts them."""
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def fill(tier: DiskTier, namespace: Namespace, num_chains: int, length: int, first_seed: int = 0) -> list[list[Ref]]:
    chains = []
    for seed in range(first_seed, first_seed + num_chains):
        refs, records = make_chain(namespace, length, seed=seed)
        assert tier.store(namespace.ns_id(), records) == [Status.OK] * length
        chains.append(refs)
    return chains


# Budget


def test_budget_is_exact_and_files_stay_bounded_under_churn(tmp_path: Path) -> None:
    """Ten turnovers, with reads between them whose use counters are written too."""
    rng = random.Random(0)
    sizes = []
    with opened(tmp_path, sync_interval_s=0.05) as tier:
        tier.add_namespace(NAMESPACE)
        chains: list[list[Ref]] = []
        for seed in range(10 * BUDGET // (8 * COST)):
            chains += fill(tier, NAMESPACE, 1, 8, first_seed=seed)
            assert tier.stat().nbytes <= BUDGET
            assert tier.stat().nbytes == tier.stat().num_entries * COST
            fetch(tier, NAMESPACE, rng.choice(chains[-10:]))
            sizes.append(blocks_of(tmp_path))
        assert tier.stat().nbytes > BUDGET - 8 * COST
        assert tier.stat().num_dropped == tier.stat().num_errors == tier.stat().num_bad == 0
    assert max(sizes) <= 1.35 * BUDGET
    assert max(sizes[len(sizes) // 2 :]) <= 1.1 * max(sizes[: len(sizes) // 2])


def test_large_records_reuse_the_pages_of_those_evicted(tmp_path: Path) -> None:
    namespace = make_namespace(payload_nbytes=2 * MIB)
    budget = 128 * MIB
    with opened(tmp_path, budget) as tier:
        tier.add_namespace(namespace)
        fill(tier, namespace, 45, 4)
        assert tier.stat().nbytes > 0.9 * budget
        assert blocks_of(tmp_path) <= 1.25 * budget


def test_leaves_go_first_oldest_first(tmp_path: Path) -> None:
    num = BUDGET // COST
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        old, young = fill(tier, NAMESPACE, 2, num // 2)
        assert tier.match(NS_ID, old + young) == [True] * len(old + young)
        fill(tier, NAMESPACE, 1, 20, first_seed=2)
        kept = [tier.match(NS_ID, refs) for refs in (old, young)]
        gone = kept[0].count(False)
        assert 19 <= gone <= 20
        assert kept[0] == [True] * (len(old) - gone) + [False] * gone, "from the leaf up"
        assert all(kept[1])


def test_a_read_saves_a_chain(tmp_path: Path) -> None:
    num = BUDGET // COST
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        old, young = fill(tier, NAMESPACE, 2, num // 2)
        tier.match(NS_ID, young)
        fetch(tier, NAMESPACE, old)
        fill(tier, NAMESPACE, 1, 10, first_seed=2)
        assert all(tier.match(NS_ID, old))
        assert tier.match(NS_ID, young).count(False) >= 9


def test_a_chain_longer_than_the_budget_keeps_its_prefix(tmp_path: Path) -> None:
    num = BUDGET // COST
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        refs, records = make_chain(NAMESPACE, num + 30)
        statuses = tier.store(NS_ID, records[:64]) + tier.store(NS_ID, records[64:])
        assert statuses == [Status.OK] * num + [Status.DROPPED] * 30
        assert tier.match(NS_ID, refs) == [True] * num + [False] * 30
        assert tier.stat().num_dropped == 30


def test_a_record_larger_than_the_budget_is_dropped_and_evicts_nothing(tmp_path: Path) -> None:
    huge = make_namespace("huge", payload_nbytes=17 * MIB)
    with opened(tmp_path, MIN_BUDGET) as tier:
        tier.add_namespace(NAMESPACE)
        tier.add_namespace(huge)
        (refs,) = fill(tier, NAMESPACE, 1, 8)
        _, records = make_chain(huge, 1)
        assert tier.store(huge.ns_id(), records) == [Status.DROPPED]
        assert all(tier.match(NS_ID, refs))


def test_the_budget_moves_between_namespaces_and_files_follow(tmp_path: Path) -> None:
    other = make_namespace("other", payload_nbytes=128 << 10)
    highest = 0
    with opened(tmp_path) as tier:
        for namespace in (NAMESPACE, other):
            tier.add_namespace(namespace)
        for turn in range(4):
            namespace = (NAMESPACE, other)[turn % 2]
            num = BUDGET // (namespace.payload_nbytes + 4096) // 8
            for seed in range(2 * num):
                fill(tier, namespace, 1, 8, first_seed=1000 * turn + seed)
                assert tier.stat().nbytes <= BUDGET
                highest = max(highest, blocks_of(tmp_path))
            assert list(tier.namespaces()) == [namespace.ns_id()], "the other's environment is gone, files and all"
            assert [d.name for d in (tmp_path / "ns").iterdir()] == [namespace.ns_id().hex()]
    assert highest <= 1.35 * BUDGET


def test_two_namespaces_in_use_share_the_budget(tmp_path: Path) -> None:
    other = make_namespace("other", payload_nbytes=128 << 10)
    highest = 0
    rng = random.Random(1)
    with opened(tmp_path) as tier:
        for namespace in (NAMESPACE, other):
            tier.add_namespace(namespace)
        for seed in range(150):
            fill(tier, rng.choice([NAMESPACE, other, other]), 1, 6, first_seed=seed)
            highest = max(highest, blocks_of(tmp_path))
            assert tier.stat().nbytes <= BUDGET
        assert set(tier.namespaces()) == {NS_ID, other.ns_id()}
        assert tier.stat().nbytes >= 0.6 * BUDGET
    assert highest <= 1.4 * BUDGET


def test_many_small_namespaces_stay_within_the_budget(tmp_path: Path) -> None:
    with opened(tmp_path, MIN_BUDGET) as tier:
        for i in range(40):
            namespace = make_namespace(f"model-{i}")
            tier.add_namespace(namespace)
            fill(tier, namespace, 1, 10)
        assert tier.stat().nbytes <= MIN_BUDGET
        assert blocks_of(tmp_path) <= 1.4 * MIN_BUDGET
        assert tier.match(namespace.ns_id(), make_chain(namespace, 10)[0]) == [True] * 10


def test_a_smaller_budget_at_the_next_start_holds(tmp_path: Path) -> None:
    with opened(tmp_path, 128 * MIB) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 15, 30)
    with opened(tmp_path, MIN_BUDGET) as tier:
        assert tier.stat().nbytes <= MIN_BUDGET
        assert blocks_of(tmp_path) <= 2 * MIN_BUDGET
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 4, 16, first_seed=100)
        assert tier.stat().nbytes <= MIN_BUDGET


# Restarts and crashes


def test_a_restart_keeps_entries_use_and_tokens(tmp_path: Path) -> None:
    times = iter(range(2_000_000_000, 2_000_001_000))
    with opened(tmp_path, clock=lambda: float(next(times))) as tier:
        tier.add_namespace(NAMESPACE)
        refs, records = make_chain(NAMESPACE, 10)
        tier.store(NS_ID, records)
        for _ in range(3):
            fetch(tier, NAMESPACE, refs[:4])
        before = sorted(tier.entries(NS_ID))
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {NS_ID: NAMESPACE}
        assert sorted(tier.entries(NS_ID)) == before
        assert sorted({(e.num_hits, e.last_used > 2e9) for e in before}) == [(0, False), (3, True)]
        assert [tier.tokens(NS_ID, ref) for ref in refs] == [record.tokens for record in records]
        results, cells = fetch(tier, NAMESPACE, refs)
        assert [r.header for r in results] == [r.header for r in records]
        assert [bytes(c) for c in cells] == [payload_of(ref.key, NAMESPACE.payload_nbytes) for ref in refs]


def test_the_order_of_eviction_survives_a_restart(tmp_path: Path) -> None:
    num = BUDGET // COST
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        used, unused = fill(tier, NAMESPACE, 2, num // 2)
        fetch(tier, NAMESPACE, used)
    with opened(tmp_path) as tier:
        fill(tier, NAMESPACE, 1, 16, first_seed=2)
        assert all(tier.match(NS_ID, used))
        assert tier.match(NS_ID, unused).count(False) >= 15


def test_use_is_written_in_the_background(tmp_path: Path) -> None:
    with opened(tmp_path, sync_interval_s=0.02) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 3)
        fetch(tier, NAMESPACE, refs)
        env = tier._environments[NS_ID]

        def written() -> int:
            with env._env.begin() as txn:
                return txn.stat(env._use)["entries"]

        wait_until(lambda: written() == 3)
        wait_until(lambda: not env.dirty)
        tier.evict(NS_ID, refs[2:])
        assert written() == 2


CHILD = """
import sys
from pathlib import Path
from records import make_chain, make_namespace
from tierkv.tiers.disk import DiskTier

namespace = make_namespace(payload_nbytes=256 << 10)
tier = DiskTier(Path(sys.argv[1]), 32 << 20, sync_interval_s=0.05)
tier.add_namespace(namespace)
for seed in range(int(sys.argv[2]), 1000000):
    refs, records = make_chain(namespace, 4, seed=seed)
    tier.store(namespace.ns_id(), records)
    print(seed, flush=True)
"""


def test_sigkill_in_the_middle_of_puts_loses_nothing(tmp_path: Path) -> None:
    """Ten lives of a writer, each killed at a random moment; what it reported as stored is there and verifies."""
    rng = random.Random(2)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seed = 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(seed)], env=variables, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        reported = [int(child.stdout.readline())]
        stop = threading.Timer(rng.uniform(0.05, 0.4), child.send_signal, [signal.SIGKILL])
        stop.start()
        reported += [int(line) for line in child.stdout if line.endswith("\n")]
        child.wait()
        seed = reported[-1] + 100
        with opened(tmp_path) as tier:
            entries = list(tier.entries(NS_ID))
            refs = [Ref(e.key, e.anchor) for e in entries]
            results, cells = fetch(tier, NAMESPACE, refs)
            assert [r.status for r in results] == [Status.OK] * len(refs)
            assert [bytes(c) for c in cells] == [payload_of(r.key, NAMESPACE.payload_nbytes) for r in refs]
            assert tier.stat().num_bad == 0
            assert tier.stat().nbytes <= BUDGET
            for last in reported[-8:]:
                assert all(tier.match(NS_ID, make_chain(NAMESPACE, 4, seed=last)[0])), "the youngest are there"
    assert blocks_of(tmp_path) <= 1.35 * BUDGET


def test_after_a_crash_of_the_machine_an_environment_starts_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 4)
        mark = tmp_path / "ns" / NS_ID.hex() / "tierkv.json"
        while_open = mark.read_bytes()
    assert json.loads(while_open)["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert json.loads(mark.read_bytes())["boot"] == "clean"
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another boot\n")
    monkeypatch.setattr(disk_mark, "_BOOT_ID", boot_id)
    with opened(tmp_path) as tier:
        assert all(tier.match(NS_ID, refs)), "closed properly: another boot is no reason"
    mark.write_bytes(while_open)
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {}, "it was open when the other boot ended"
        assert not mark.parent.exists()
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)


def test_an_environment_that_may_be_torn_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)
    mark = tmp_path / "ns" / NS_ID.hex() / "tierkv.json"
    mark.write_text(json.dumps({"format": DISK_FORMAT, "boot": "another boot"}))
    monkeypatch.setattr(lmdb, "open", lambda *_, **__: pytest.fail("it was opened"))
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {}


def test_a_damaged_environment_of_this_boot_starts_empty(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)
    (tmp_path / "ns" / NS_ID.hex() / "data.mdb").write_bytes(b"torn" * 5000)
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {}
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)


def test_an_unfinished_environment_starts_empty(tmp_path: Path) -> None:
    """Killed between the mark and the first transaction."""
    directory = tmp_path / "ns" / NS_ID.hex()
    directory.mkdir(parents=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (directory / "tierkv.json").write_text(json.dumps({"format": DISK_FORMAT, "boot": boot}))
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {}
    lmdb.open(str(directory), map_size=MIB).close()
    (directory / "tierkv.json").write_text(json.dumps({"format": DISK_FORMAT, "boot": boot}))
    with opened(tmp_path) as tier:
        assert tier.namespaces() == {}
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)


def edit_rows(tier: DiskTier, edits: list[tuple[Ref, int, bytes]], name: str) -> None:
    """Overwrite bytes of rows of a database, behind the tier's back."""
    env = tier._environments[NS_ID]
    database = getattr(env, name)
    with env._env.begin(write=True) as txn:
        for ref, at, value in edits:
            row = bytearray(txn.get(ref.key, db=database))
            row[at : at + len(value)] = value
            txn.put(ref.key, row, db=database)


def test_damaged_heads_are_deleted_at_open_and_foreign_ones_left(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 4)
        edit_rows(tier, [(refs[1], 60, b"\x00\x00"), (refs[2], 8, b"\x09\x00")], "_heads")
    with opened(tmp_path) as tier:
        assert tier.match(NS_ID, refs) == [True, False, False, True]
        assert tier.stat().num_bad == 1
        assert tier.stat().nbytes == 3 * COST, "the foreign record keeps its place in the budget"
        env = tier._environments[NS_ID]
        with env._env.begin() as txn:
            assert txn.get(refs[1].key, db=env._records) is None
            assert txn.get(refs[2].key, db=env._records) is not None
        tier.evict(NS_ID, refs)
        assert (tmp_path / "ns" / NS_ID.hex() / "data.mdb").exists(), "what is not ours is not deleted with the rest"


def test_a_wrong_place_in_a_head_is_found_out(tmp_path: Path) -> None:
    """The record says where it is and whose: LMDB is asked, and nothing is lost."""
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 4)
        other = tier._environments[NS_ID].index.entries[refs[3].key].page.to_bytes(8, "little")
        edit_rows(tier, [(refs[1], 256, other), (refs[2], 256, b"\x01")], "_heads")
    with opened(tmp_path) as tier:
        results, cells = fetch(tier, NAMESPACE, refs)
        assert [r.status for r in results] == [Status.OK] * 4
        assert [bytes(c) for c in cells] == [payload_of(r.key, NAMESPACE.payload_nbytes) for r in refs]


def test_opening_reads_no_records(tmp_path: Path) -> None:
    """The binding touches every page of a value that it returns: opening would read the whole disk."""
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        chains = fill(tier, NAMESPACE, 12, 10)
        data = tmp_path / "ns" / NS_ID.hex() / "data.mdb"
        pages = [tier._environments[NS_ID].index.entries[ref.key].page for refs in chains for ref in refs]
    with open(data, "r+b") as file:
        for page in pages:
            file.seek(page * 4096 + 16)
            file.write(bytes(256))
    with opened(tmp_path) as tier:
        assert all(all(tier.match(NS_ID, refs)) for refs in chains), "their headers were not looked at"
        assert tier.stat().num_bad == 0
        assert {r.status for r in fetch(tier, NAMESPACE, chains[0])[0]} == {Status.BAD}
        assert tier.match(NS_ID, chains[0]) == [False] * 10


def make_format_1(path: Path) -> None:
    """Turn what a closed tier left into what the first version of the format was."""
    directory = path / "ns" / NS_ID.hex()
    env = lmdb.open(str(directory), map_size=256 * MIB, max_dbs=6, lib_version=0)
    with env.begin(write=True) as txn:
        for name in (b"heads", b"life"):
            txn.drop(env.open_db(name, txn=txn))
        txn.put(b"format", b"tierkv-disk-1", db=env.open_db(b"meta", txn=txn))
    env.close()
    (directory / "tierkv.json").write_text('{"format":"tierkv-disk-1","boot":"clean"}')


def test_the_first_format_is_brought_up_to_date(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 6)
        edit_rows(tier, [(refs[4], 60, b"\x00\x00"), (refs[5], 8, b"\x09\x00")], "_records")
        fetch(tier, NAMESPACE, refs[:1])
    make_format_1(tmp_path)
    for num_bad in (1, 0):  # the second time there is nothing left to do
        with opened(tmp_path) as tier:
            assert tier.match(NS_ID, refs) == [True] * 4 + [False] * 2
            assert tier.stat().num_bad == num_bad
            assert tier.stat().nbytes == 5 * COST
            assert sorted(e.num_hits for e in tier.entries(NS_ID))[-1] == (1 if num_bad else 2)
            results, cells = fetch(tier, NAMESPACE, refs[:4])
            assert [bytes(c) for c in cells] == [payload_of(r.key, NAMESPACE.payload_nbytes) for r in refs[:4]]
            assert [r.status for r in results] == [Status.OK] * 4
            with tier._environments[NS_ID]._env.begin() as txn:
                assert txn.get(b"format", db=tier._environments[NS_ID]._meta) == DISK_FORMAT.encode()
    assert json.loads((tmp_path / "ns" / NS_ID.hex() / "tierkv.json").read_text())["format"] == DISK_FORMAT


def test_an_upgrade_that_is_cut_short_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one transaction: the environment is of the one format or of the other."""
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 6)
    make_format_1(tmp_path)
    find, calls = environment.page_of, []

    def failing(record: memoryview) -> int:
        calls.append(1)
        if len(calls) == 4:
            raise lmdb.DiskError("mdb_put: No space left on device")
        return find(record)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "page_of", failing)
        with pytest.raises(ConfigError, match=r"cannot be opened .*No space left on device"):
            DiskTier(tmp_path, BUDGET)
    env = lmdb.open(str(tmp_path / "ns" / NS_ID.hex()), map_size=256 * MIB, max_dbs=6, lib_version=0)
    with env.begin() as txn:
        assert txn.get(b"format", db=env.open_db(b"meta", txn=txn)) == b"tierkv-disk-1"
        assert txn.stat(env.open_db(b"heads", txn=txn))["entries"] == 0
    env.close()
    with opened(tmp_path) as tier:
        assert all(r.status is Status.OK for r in fetch(tier, NAMESPACE, refs)[0])


# What is not ours, and what cannot work


@pytest.mark.parametrize("where", ["mark", "unreadable mark", "no mark", "meta", "namespace"])
def test_another_versions_database_is_refused_and_untouched(tmp_path: Path, where: str) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)
        if where in ("meta", "namespace"):
            env = tier._environments[NS_ID]
            name, value = (b"format", b"tierkv-disk-9") if where == "meta" else (b"namespace", b'{"shape": 1}')
            with env._env.begin(write=True) as txn:
                txn.put(name, value, db=env._meta)
    directory = tmp_path / "ns" / NS_ID.hex()
    mark = directory / "tierkv.json"
    if where == "mark":
        mark.write_text('{"format":"tierkv-disk-9","boot":"some boot","more":1}')
    elif where == "unreadable mark":
        mark.write_text("later")
    elif where == "no mark":
        mark.unlink()
    before = {name: data for name, data in files_of(tmp_path).items() if not name.endswith("lock.mdb")}
    with pytest.raises(ConfigError, match=f"disk_dir={tmp_path} .*{directory}.* set disk_dir to another directory"):
        DiskTier(tmp_path, BUDGET)
    after = {name: data for name, data in files_of(tmp_path).items() if not name.endswith("lock.mdb")}
    assert after == before


def test_what_else_is_in_the_directory_is_never_touched(tmp_path: Path) -> None:
    others = {
        "readme.txt": b"mine",
        "ns/notes": b"mine",
        "ns/" + "f" * 32 + "/data.txt": b"a directory whose name looks like ours",
        "data.mdb": b"not LMDB",
    }
    for name, data in others.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 4)
        (tmp_path / "ns" / NS_ID.hex() / "extra").write_bytes(b"mine")
        assert tier.drop_namespace(NS_ID) == 4
    assert files_of(tmp_path) == others | {f"ns/{NS_ID.hex()}/extra": b"mine"}


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 1, 1)
        directory = tmp_path / "ns" / NS_ID.hex()
        assert directory.stat().st_mode & 0o077 == 0
        assert (directory / "data.mdb").stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_dir=.*file/below cannot be created or written .*; set it to"):
        DiskTier(tmp_path / "file" / "below", BUDGET)


def test_an_impossible_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_bytes=1 MiB is too small .*; set it to at least 16 MiB"):
        DiskTier(tmp_path / "new", MIB)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "fuse"])
def test_network_filesystems_are_refused(tmp_path: Path, kind: str) -> None:
    mount = tmp_path / "a b"
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {str(mount).replace(' ', chr(92) + '040')} {kind} rw 0 0\n")
    with pytest.raises(ConfigError, match=f"disk_dir=.* is on a network filesystem .{kind}.*; set it to"):
        check_directory(mount / "kv", mounts)
    check_directory(tmp_path / "local", mounts)
    assert filesystem_type(tmp_path / "local", mounts) == "ext4"
    assert filesystem_type(tmp_path, tmp_path / "nothing") == ""


# Faults


def test_a_full_disk_is_an_error_and_reads_go_on(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 8)
        _, more = make_chain(NAMESPACE, 40, seed=1)
        now = [0.0]
        tier._health.writes._clock = lambda: now[0]
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
            statuses = tier.store(NS_ID, more)
            assert statuses[-1] is Status.ERROR
            assert tier.stat().state == "read-only" and tier.stat().reason
            assert tier.store(NS_ID, more[:1])[0] is Status.ERROR, "at once, during the back-off"
            assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.OK] * 8
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        now[0] = 60.0
        assert set(tier.store(NS_ID, more)) <= {Status.OK, Status.EXISTS}
        assert tier.stat().state == "up"
        assert tier.stat().nbytes == 48 * COST
        entries = [Ref(e.key, e.anchor) for e in tier.entries(NS_ID)]
        assert {r.status for r in fetch(tier, NAMESPACE, entries)[0]} == {Status.OK}


def test_an_environment_that_lmdb_gave_up_is_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 8)
        first = tier._environments[NS_ID]
        first.broken = True
        fill(tier, NAMESPACE, 1, 8, first_seed=1)
        assert tier._environments[NS_ID] is not first
        assert all(tier.match(NS_ID, refs))
        assert tier.stat().num_entries == 16


def test_a_full_map_evicts_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        fill(tier, NAMESPACE, 4, 8)
        env = tier._environments[NS_ID]
        put, calls = env.put, []

        def full_once(records: list[object], now: float) -> list[object]:
            calls.append(len(records))
            if len(calls) == 1:
                raise lmdb.MapFullError("put")
            return put(records, now)  # type: ignore[arg-type]

        monkeypatch.setattr(env, "put", full_once)
        fill(tier, NAMESPACE, 1, 8, first_seed=9)
        assert len(calls) == 2
        assert tier.stat().num_evicted == 16
        assert tier.stat().state == "up"


def test_a_drop_waits_for_who_is_reading(tmp_path: Path) -> None:
    """A view into a closed map would kill the process."""
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        (refs,) = fill(tier, NAMESPACE, 1, 1)
        inside, go_on = threading.Event(), threading.Event()
        cell = bytearray(NAMESPACE.payload_nbytes)
        results: list[object] = []

        def slow_sink(_: int) -> list[memoryview]:
            inside.set()
            assert go_on.wait(10)
            return [memoryview(cell)]

        reader = threading.Thread(target=lambda: results.extend(tier.fetch(NS_ID, refs, slow_sink)))
        reader.start()
        assert inside.wait(10)
        dropper = threading.Thread(target=lambda: results.append(tier.drop_namespace(NS_ID)))
        dropper.start()
        time.sleep(0.05)
        assert dropper.is_alive()
        assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.MISS], "gone for everybody else"
        go_on.set()
        reader.join()
        dropper.join()
        assert bytes(cell) == payload_of(refs[0].key, len(cell))
        assert results[-1] == 1 or results[0] == 1
    assert not (tmp_path / "ns" / NS_ID.hex()).exists()


def test_churn_with_readers_and_drops(tmp_path: Path) -> None:
    """Readers, a writer and whole environments going away together: nothing hangs, every payload is whole."""
    other = make_namespace("other", payload_nbytes=128 << 10)
    spaces = (NAMESPACE, other)
    problems: list[object] = []
    stop = threading.Event()
    with opened(tmp_path, MIN_BUDGET, sync_interval_s=0.01) as tier:
        for namespace in spaces:
            tier.add_namespace(namespace)

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                namespace = rng.choice(spaces)
                refs, _ = make_chain(namespace, 3, seed=rng.randrange(12))
                results, cells = fetch(tier, namespace, refs)
                for ref, result, cell in zip(refs, results, cells, strict=True):
                    if result.status is Status.OK and bytes(cell) != payload_of(ref.key, len(cell)):
                        problems.append(ref)
                    elif result.status not in (Status.OK, Status.MISS):
                        problems.append(result)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(120):
            namespace = spaces[turn // 15 % 2]
            _, records = make_chain(namespace, 12, seed=turn % 12)
            if set(tier.store(namespace.ns_id(), records)) - {Status.OK, Status.EXISTS}:
                problems.append(turn)
            if turn % 29 == 28:
                tier.drop_namespace(namespace.ns_id())
        stop.set()
        for reader in readers:
            reader.join(30)
            assert not reader.is_alive()
        assert tier.stat().num_errors == tier.stat().num_bad == 0
    assert problems == []


def test_records_of_one_call_do_not_evict_each_other_or_their_parent(tmp_path: Path) -> None:
    num = MIN_BUDGET // COST
    with opened(tmp_path, MIN_BUDGET) as tier:
        tier.add_namespace(NAMESPACE)
        refs, records = make_chain(NAMESPACE, 2)
        tier.store(NS_ID, records[:1])
        fill(tier, NAMESPACE, 1, num - 1, first_seed=1)
        assert tier.store(NS_ID, records[1:]) == [Status.OK]
        assert all(tier.match(NS_ID, refs)), "the parent was the oldest leaf, and stayed"


def test_wrong_size_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.add_namespace(NAMESPACE)
        record = make_record(NAMESPACE, bytes(32), bytes(32), bytes(32), 0)
        assert tier.store(NS_ID, [record._replace(data=record.data[:-4096])]) == [Status.ERROR]


def test_memory_that_was_written_from_is_kept() -> None:
    """Page faults of a transaction's worth of allocations, again and again."""
    program = """
import resource, sys
import ctypes
from tierkv.tiers.disk_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for turn in range(12):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(1 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", program, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "give back")
    }
    assert faults["keep"] < 500
    assert faults["give back"] > 10 * faults["keep"]

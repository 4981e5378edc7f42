"""What every tier promises, checked on every tier: LMDB, Redis, Valkey."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import lmdb
import pytest

from records import Buffers, fetch, make_chain, make_namespace, make_record, payload_of
from servers import server_binaries, start_redis
from tierkv.payload import HEADER_NBYTES
from tierkv.tiers.base import Ref, Status, Tier
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.shared import SharedTier

NAMESPACE = make_namespace(num_parts=2)
NS_ID = NAMESPACE.ns_id()
OTHER = make_namespace("other", payload_nbytes=16 << 10)

#: Reads the stored bytes of a ref, or replaces them by what the function returns.
Edit = Callable[[Ref, Callable[[bytes], bytes]], None]


class Subject(NamedTuple):
    tier: Tier
    edit: Edit
    raw: Callable[[Ref], bytes | None]


@pytest.fixture(params=["disk", "redis", "valkey"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    if request.param == "disk":
        yield from disk_subject(tmp_path)
    else:
        binary = server_binaries().get(request.param)
        if binary is None:
            pytest.skip(f"{request.param} is not installed")
        yield from shared_subject(tmp_path, binary)


def disk_subject(tmp_path: Path) -> Iterator[Subject]:
    tier = DiskTier(tmp_path, 64 << 20)

    def raw(ref: Ref) -> bytes | None:
        environment = tier._environments.get(NS_ID)
        if environment is None:
            return None
        with environment._env.begin() as txn:
            value = txn.get(ref.key, db=environment._records)
            return None if value is None else bytes(value)

    def edit(ref: Ref, change: Callable[[bytes], bytes]) -> None:
        environment = tier._environments[NS_ID]
        value = raw(ref)
        assert value is not None
        with environment._env.begin(write=True) as txn:
            txn.put(ref.key, change(value), db=environment._records)

    yield Subject(tier, edit, raw)
    tier.close()


def shared_subject(tmp_path: Path, binary: str) -> Iterator[Subject]:
    server = start_redis(tmp_path, binary=binary)
    tier = SharedTier(server.url)
    client = server.client()

    def name(ref: Ref) -> str:
        return f"tierkv:1:{NS_ID.hex()}:{{{ref.anchor.hex()[:16]}}}:{ref.key.hex()}"

    def raw(ref: Ref) -> bytes | None:
        value: bytes | None = client.get(name(ref))  # type: ignore[assignment]
        return value

    def edit(ref: Ref, change: Callable[[bytes], bytes]) -> None:
        value = raw(ref)
        assert value is not None
        client.set(name(ref), change(value))

    yield Subject(tier, edit, raw)
    tier.close()
    server.stop()


def flip(at: int, mask: int = 1) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ mask]) + value[at + 1 :]


def test_what_was_stored_is_fetched(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 130)  # three anchors
    assert tier.match(NS_ID, refs) == [False] * 130
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.MISS] * 130
    assert tier.store(NS_ID, records) == [Status.OK] * 130
    assert tier.match(NS_ID, refs) == [True] * 130
    results, cells = fetch(tier, NAMESPACE, refs)
    assert [r.status for r in results] == [Status.OK] * 130
    assert [r.header for r in results] == [r.header for r in records]
    assert [bytes(c) for c in cells] == [payload_of(ref.key, NAMESPACE.payload_nbytes) for ref in refs]
    stat = tier.stat()
    assert (stat.num_hits, stat.num_misses, stat.num_stored, stat.num_errors) == (130, 130, 130, 0)
    assert stat.state == "up"


def test_results_are_per_key_and_in_order(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 8)
    tier.store(NS_ID, records[:3])
    tier.store(NS_ID, records[5:6])
    results, cells = fetch(tier, NAMESPACE, refs)
    found = {0, 1, 2, 5}
    assert [r.status for r in results] == [Status.OK if i in found else Status.MISS for i in range(8)]
    for i in found:
        assert bytes(cells[i]) == payload_of(refs[i].key, NAMESPACE.payload_nbytes)
    assert tier.match(NS_ID, refs)[:3] == [True] * 3
    assert not any(r.header for i, r in enumerate(results) if i not in found)


def test_buffers_are_asked_for_only_where_there_is_something(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records[:2])
    buffers = Buffers(NAMESPACE, 4)
    tier.fetch(NS_ID, refs, buffers)
    assert sorted(buffers.asked) == [0, 1]


def test_store_is_write_once(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 3)
    assert tier.store(NS_ID, records[:2]) == [Status.OK] * 2
    before = [subject.raw(ref) for ref in refs[:2]]
    again = [make_record(NAMESPACE, r.header.key, r.header.parent, r.header.anchor, 0, created=9.0) for r in records]
    assert tier.store(NS_ID, again) == [Status.EXISTS, Status.EXISTS, Status.OK]
    assert [subject.raw(ref) for ref in refs[:2]] == before
    assert tier.stat().num_stored == 3


def test_the_same_key_twice_in_one_store(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 1)
    assert tier.store(NS_ID, [records[0], records[0]]) == [Status.OK, Status.EXISTS]
    assert [e.key for e in tier.entries(NS_ID)] == [refs[0].key]


def test_nothing_asked_nothing_answered(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    assert tier.match(NS_ID, []) == []
    assert fetch(tier, NAMESPACE, [])[0] == []
    assert tier.store(NS_ID, []) == []
    assert tier.evict(NS_ID, []) == 0


def test_an_unknown_namespace_is_a_miss(subject: Subject) -> None:
    tier = subject.tier
    refs, records = make_chain(NAMESPACE, 2)
    assert tier.match(NS_ID, refs) == [False] * 2
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.MISS] * 2
    assert tier.store(NS_ID, records) == [Status.ERROR] * 2
    assert tier.evict(NS_ID, refs) == 0
    assert tier.drop_namespace(NS_ID) == 0
    assert list(tier.entries(NS_ID)) == []


def test_entries_say_what_a_listing_needs(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 70)
    tier.store(NS_ID, records)
    fetch(tier, NAMESPACE, refs[:2])
    entries = {e.key: e for e in tier.entries(NS_ID)}
    assert set(entries) == {ref.key for ref in refs}
    for i, (ref, record) in enumerate(zip(refs, records, strict=True)):
        entry, header = entries[ref.key], record.header
        assert (entry.parent, entry.anchor, entry.position) == (header.parent, ref.anchor, i)
        assert (entry.num_tokens, entry.tenant, entry.created) == (16, header.tenant, header.created)
        assert NAMESPACE.payload_nbytes < entry.nbytes <= NAMESPACE.payload_nbytes + 8192
        assert entry.last_used >= entry.created
        assert entry.num_hits == (1 if i < 2 else 0)


def test_evict_removes_and_counts(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 6)
    tier.store(NS_ID, records)
    assert tier.evict(NS_ID, refs[4:]) == 2
    assert tier.evict(NS_ID, refs[4:]) == 0
    assert tier.match(NS_ID, refs) == [True] * 4 + [False] * 2
    assert len(list(tier.entries(NS_ID))) == 4
    assert tier.stat().num_evicted == 2
    assert tier.store(NS_ID, records) == [Status.EXISTS] * 4 + [Status.OK] * 2


def test_namespaces_are_apart(subject: Subject) -> None:
    tier = subject.tier
    for namespace in (NAMESPACE, OTHER):
        tier.add_namespace(namespace)
        tier.add_namespace(namespace)
    refs, records = make_chain(NAMESPACE, 4)
    other_refs, other_records = make_chain(OTHER, 4)
    tier.store(NS_ID, records)
    assert tier.match(OTHER.ns_id(), refs) == [False] * 4
    tier.store(OTHER.ns_id(), other_records)
    assert tier.namespaces() == {NS_ID: NAMESPACE, OTHER.ns_id(): OTHER}
    assert tier.drop_namespace(NS_ID) == 4
    assert tier.drop_namespace(NS_ID) == 0
    assert tier.namespaces() == {OTHER.ns_id(): OTHER}
    assert tier.match(NS_ID, refs) == [False] * 4
    assert list(tier.entries(NS_ID)) == []
    assert tier.match(OTHER.ns_id(), other_refs) == [True] * 4
    assert tier.store(NS_ID, records) == [Status.OK] * 4


def test_a_record_of_another_namespace_is_refused(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    _, records = make_chain(OTHER, 1)
    assert tier.store(NS_ID, records) == [Status.ERROR]
    assert list(tier.entries(NS_ID)) == []


@pytest.mark.parametrize(
    "at",
    [HEADER_NBYTES, HEADER_NBYTES + NAMESPACE.payload_nbytes - 1, 0, 50, 200],
    ids=["first byte", "last byte", "magic", "key", "checksum"],
)
def test_a_flipped_bit_is_a_miss_deleted_and_counted(subject: Subject, at: int) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 3)
    tier.store(NS_ID, records)
    subject.edit(refs[1], flip(at, 0x40))
    results, cells = fetch(tier, NAMESPACE, refs)
    assert [r.status for r in results] == [Status.OK, Status.BAD, Status.OK]
    assert bytes(cells[2]) == payload_of(refs[2].key, NAMESPACE.payload_nbytes)
    assert results[1].header is None
    assert subject.raw(refs[1]) is None
    assert tier.match(NS_ID, refs)[:2] == [True, False]
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.OK, Status.MISS, Status.OK]
    assert {e.key for e in tier.entries(NS_ID)} == {refs[0].key, refs[2].key}
    stat = tier.stat()
    assert (stat.num_bad, stat.num_misses, stat.num_hits) == (1, 2, 4)
    assert tier.store(NS_ID, records[1:2]) == [Status.OK]
    assert fetch(tier, NAMESPACE, refs[1:2])[0][0].status is Status.OK


@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: v[:100], lambda v: b"", lambda v: v + b"x" * 4096])
def test_a_record_of_the_wrong_length_is_bad(subject: Subject, change: Callable[[bytes], bytes]) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 1)
    tier.store(NS_ID, records)
    subject.edit(refs[0], change)
    assert fetch(tier, NAMESPACE, refs)[0][0].status is Status.BAD
    assert subject.raw(refs[0]) is None


def test_the_record_of_another_key_is_bad(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    other = subject.raw(refs[1])
    assert other is not None
    subject.edit(refs[0], lambda _: other)
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.BAD, Status.OK]
    assert subject.raw(refs[0]) is None


def test_another_versions_record_is_a_miss_and_left_alone(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    subject.edit(refs[0], lambda value: value[:8] + b"\x02\x00" + value[10:])
    foreign = subject.raw(refs[0])
    assert [r.status for r in fetch(tier, NAMESPACE, refs)[0]] == [Status.MISS, Status.OK]
    assert tier.store(NS_ID, records[:1]) == [Status.EXISTS]
    assert subject.raw(refs[0]) == foreign
    assert tier.stat().num_bad == 0


def test_match_and_entries_renew_nothing(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    before = list(tier.entries(NS_ID))
    for _ in range(3):
        tier.match(NS_ID, refs)
    after = list(tier.entries(NS_ID))
    assert sorted(e.num_hits for e in after) == sorted(e.num_hits for e in before) == [0, 0]


def test_several_threads(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    chains = [make_chain(NAMESPACE, 20, seed=i) for i in range(4)]
    problems: list[object] = []

    def work(at: int) -> None:
        refs, records = chains[at % 4]
        for _ in range(5):
            tier.store(NS_ID, records)
            results, cells = fetch(tier, NAMESPACE, refs)
            for ref, result, cell in zip(refs, results, cells, strict=True):
                if result.status is Status.OK and bytes(cell) != payload_of(ref.key, len(cell)):
                    problems.append(ref)
                elif result.status not in (Status.OK, Status.MISS):
                    problems.append(result)
            tier.evict(NS_ID, refs[10:])
            list(tier.entries(NS_ID))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert tier.stat().num_errors == 0
    assert all(tier.match(NS_ID, chains[0][0][:10]))


def test_after_close_everything_is_a_miss(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 2)
    tier.store(NS_ID, records)
    tier.close()
    tier.close()
    assert tier.match(NS_ID, refs) == [False] * 2
    assert {r.status for r in fetch(tier, NAMESPACE, refs)[0]} <= {Status.MISS, Status.ERROR}
    assert tier.store(NS_ID, records) == [Status.ERROR] * 2
    assert tier.evict(NS_ID, refs) == 0
    assert list(tier.entries(NS_ID)) == []
    tier.stat()


def test_lmdb_is_the_one_whose_file_format_we_wrote_down() -> None:
    assert lmdb.version(lib_version=0)[:2] == (0, 9)

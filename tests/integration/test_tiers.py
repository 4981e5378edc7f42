"""What every tier promises, checked on every tier: memory (the model), LMDB, Redis, Valkey, and each inside a wrapper.

``docs/tiers.md`` has the contract in words. What a tier promises beyond it is tested in ``test_disk.py`` and
``test_shared*.py``; random operations in lockstep with the model in ``test_tiers_lockstep.py``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import pytest

from records import Buffers, fetch, make_chain, make_namespace, make_record, payload_of, wait_until
from tier_subjects import BUDGET, KINDS, Servers, SharedSubject, Subject, open_subject
from tierkv.keys import tenant_digest
from tierkv.payload import HEADER_NBYTES
from tierkv.tiers.base import EntryInfo, Fetched, Pin, Record, Ref, Status, Tier, Usage, below

NAMESPACE = make_namespace(num_parts=2)
NS_ID = NAMESPACE.ns_id()
OTHER = make_namespace("other", payload_nbytes=16 << 10)
LARGE = make_namespace("large", payload_nbytes=1 << 20)
FAR = 1e6  #: seconds; nothing waits so long
OK, MISS, EXISTS, BAD, DROPPED, ERROR, _ = Status


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(params=[*KINDS, *(f"{kind}-wrapped" for kind in KINDS)])
def subject(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Subject]:
    kind, _, wrapped = request.param.partition("-")
    with open_subject(kind, servers, tmp_path, bool(wrapped)) as subject:
        subject.tier.add_namespace(NAMESPACE)
        yield subject


def chain(subject: Subject, num: int, seed: int = 0, **options: object) -> tuple[list[Ref], list[Record]]:
    """A chain of the usual namespace, created now by the tier's clock."""
    return make_chain(NAMESPACE, num, seed, **({"created": subject.clock()} | options))  # type: ignore[arg-type]


def stored(subject: Subject, num: int, seed: int = 0, **options: object) -> list[Ref]:
    """Store a chain of the usual namespace and return its refs."""
    refs, records = chain(subject, num, seed, **options)
    assert subject.tier.store(NS_ID, records) == [OK] * num
    return refs


def statuses(results: Sequence[Fetched]) -> list[Status]:
    return [result.status for result in results]


def read(tier: Tier, refs: Sequence[Ref], *, quiet: bool = False) -> list[Status]:
    """Fetch refs of the usual namespace; what is found has the right bytes."""
    buffers = Buffers(NAMESPACE, len(refs))
    results = tier.fetch(NS_ID, refs, buffers, quiet=quiet)
    for ref, result, cell in zip(refs, results, buffers.cells, strict=True):
        assert (result.header is not None) == (result.status is OK)
        assert result.status is not OK or bytes(cell) == payload_of(ref.key, NAMESPACE.payload_nbytes)
    return statuses(results)


def listing(tier: Tier, ns_id: bytes = NS_ID) -> dict[bytes, EntryInfo]:
    return {entry.key: entry for entry in tier.entries(ns_id)}


def keys_of(refs: Sequence[Ref]) -> set[bytes]:
    return {ref.key for ref in refs}


def settled(subject: Subject) -> object:
    """Return all that is stored when it has stayed the same for a while: reads may be noted in the background."""
    found: list[object] = [None]

    def same() -> bool:
        found.append(subject.dump())
        time.sleep(0.1)
        return found[-3:-1] == [found[-1]] * 2

    wait_until(same)
    return found[-1]


def flip(at: int, mask: int = 1) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ mask]) + value[at + 1 :]


def no_orphans(tier: Tier, roots: set[bytes], ns_id: bytes = NS_ID) -> bool:
    """Return whether the parent of every entry is stored too, or a root."""
    entries = listing(tier, ns_id)
    return all(entry.parent in entries or entry.parent in roots for entry in entries.values())


# Match, fetch, store


def test_what_was_stored_is_fetched(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 130)  # three anchors
    assert tier.match(NS_ID, refs) == [False] * 130
    assert read(tier, refs) == [MISS] * 130
    assert tier.store(NS_ID, records) == [OK] * 130
    assert tier.match(NS_ID, refs) == [True] * 130
    results, cells = fetch(tier, NAMESPACE, refs)
    assert [r.header for r in results] == [r.header for r in records]
    assert [bytes(c) for c in cells] == [payload_of(ref.key, NAMESPACE.payload_nbytes) for ref in refs]
    stat = tier.stat()
    assert (stat.num_hits, stat.num_misses, stat.num_stored, stat.num_errors) == (130, 130, 130, 0)
    assert (stat.state, stat.reason, stat.since) == ("up", "", 0.0)


def test_results_are_per_key_and_in_order(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 8)
    tier.store(NS_ID, records[:3])
    tier.store(NS_ID, records[5:6])
    found = {0, 1, 2, 5}
    assert read(tier, refs) == [OK if i in found else MISS for i in range(8)]
    assert read(tier, refs[::-1]) == [OK if 7 - i in found else MISS for i in range(8)]
    assert tier.match(NS_ID, refs)[:4] == [True] * 3 + [False]
    assert read(tier, [refs[5], refs[6], refs[5]]) == [OK, MISS, OK]


def test_match_may_stop_at_a_hole_and_never_says_what_is_not_so(subject: Subject) -> None:
    """Who asks wants the longest prefix: behind the first hole a tier may say False without having looked."""
    tier = subject.tier
    refs, records = chain(subject, 700)
    tier.store(NS_ID, records[:2])
    tier.store(NS_ID, records[3:4])
    found = tier.match(NS_ID, refs)
    assert len(found) == 700
    assert found[:3] == [True, True, False]
    assert not any(found[4:])


def test_buffers_are_asked_for_only_where_there_is_something(subject: Subject) -> None:
    refs = stored(subject, 2)
    more, _ = chain(subject, 4)
    buffers = Buffers(NAMESPACE, 4)
    subject.tier.fetch(NS_ID, more, buffers)
    assert more[:2] == refs
    assert sorted(buffers.asked) == [0, 1]


def test_store_is_write_once(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 3)
    assert tier.store(NS_ID, records[:2]) == [OK] * 2
    subject.pass_time(0.01)
    before = subject.dump()
    again = [make_record(NAMESPACE, r.header.key, r.header.parent, r.header.anchor, 0, created=9.0) for r in records]
    assert tier.store(NS_ID, again[:2]) == [EXISTS] * 2
    assert subject.dump() == before, "a key that is there is left alone"
    assert tier.store(NS_ID, again) == [EXISTS, EXISTS, OK]
    assert read(tier, refs) == [OK] * 3
    assert tier.stat().num_stored == 3


def test_store_has_a_result_for_each_record(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 4)
    tier.store(NS_ID, records[1:2])
    foreign = make_chain(OTHER, 1)[1][0]
    short = records[2]._replace(data=records[2].data[:-70_000])
    batch = [records[0], records[0], records[1], foreign, short, records[3]]
    assert tier.store(NS_ID, batch) == [OK, EXISTS, EXISTS, ERROR, ERROR, OK]
    assert keys_of([refs[i] for i in (0, 1, 3)]) == set(listing(tier))
    assert tier.stat().num_errors == 2


def test_nothing_asked_nothing_answered(subject: Subject) -> None:
    tier = subject.tier
    assert tier.match(NS_ID, []) == []
    assert fetch(tier, NAMESPACE, [])[0] == []
    assert tier.store(NS_ID, []) == []
    assert tier.evict(NS_ID, []) == 0
    assert tier.pin(NS_ID, [], Pin("me", subject.clock() + FAR)) == []
    assert tier.unpin(NS_ID, []) == 0
    assert tier.expire_at(NS_ID, [], 1.0) == 0
    assert tier.usage(NS_ID) == {}


def test_an_unknown_namespace_is_a_miss(subject: Subject) -> None:
    tier = subject.tier
    refs, records = make_chain(OTHER, 2)
    ns_id = OTHER.ns_id()
    assert tier.match(ns_id, refs) == [False] * 2
    assert statuses(fetch(tier, OTHER, refs)[0]) == [MISS] * 2
    assert tier.store(ns_id, records) == [ERROR] * 2
    assert tier.evict(ns_id, refs) == tier.evict(ns_id, refs, force=True) == 0
    assert tier.drop_namespace(ns_id) == 0
    assert tier.pin(ns_id, refs, Pin("me", subject.clock() + FAR)) == [False] * 2
    assert tier.unpin(ns_id, refs) == tier.expire_at(ns_id, refs, 1.0) == 0
    assert (list(tier.entries(ns_id)), tier.usage(ns_id), tier.tokens(ns_id, refs[0])) == ([], {}, b"")
    assert tier.namespaces() == {}


def test_namespaces_are_apart(subject: Subject) -> None:
    tier = subject.tier
    for namespace in (NAMESPACE, OTHER):
        tier.add_namespace(namespace)
        tier.add_namespace(namespace)
    refs, records = chain(subject, 4)
    other_refs, other_records = make_chain(OTHER, 4)
    tier.store(NS_ID, records)
    assert tier.match(OTHER.ns_id(), refs) == [False] * 4
    tier.store(OTHER.ns_id(), other_records)
    assert tier.namespaces() == {NS_ID: NAMESPACE, OTHER.ns_id(): OTHER}
    assert tier.evict(OTHER.ns_id(), refs, force=True) == 0
    assert tier.drop_namespace(NS_ID) == 4
    assert tier.drop_namespace(NS_ID) == 0
    assert tier.namespaces() == {OTHER.ns_id(): OTHER}
    assert tier.match(NS_ID, refs) == [False] * 4
    assert (list(tier.entries(NS_ID)), tier.usage(NS_ID)) == ([], {})
    assert tier.match(OTHER.ns_id(), other_refs) == [True] * 4
    assert tier.store(NS_ID, records) == [OK] * 4


# Nothing but a read renews


def test_asking_touches_nothing(subject: Subject) -> None:
    tier = subject.tier
    subject.limit(ttl_s=FAR, idle_s=FAR)
    refs = stored(subject, 70)
    tier.pin(NS_ID, refs[:3], Pin("me", subject.clock() + FAR))
    assert read(tier, refs[:5]) == [OK] * 5
    more = refs + make_chain(NAMESPACE, 3, seed=1)[0]
    before, counted, held = settled(subject), tier.stat(), listing(tier)
    for _ in range(3):
        assert tier.match(NS_ID, more) == [True] * 70 + [False] * 3
        assert read(tier, more, quiet=True) == [OK] * 70 + [MISS] * 3
        assert len(list(tier.entries(NS_ID))) == 70
        tier.usage(NS_ID), tier.tokens(NS_ID, refs[0]), tier.namespaces(), tier.stat()
    assert subject.dump() == before
    assert tier.stat() == counted
    now = listing(tier)
    assert {key: (e.num_hits, e.pins) for key, e in now.items()} == {
        key: (e.num_hits, e.pins) for key, e in held.items()
    }


def test_a_read_is_noted(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 3)
    subject.pass_time(0.05)
    assert read(tier, refs[:2]) == [OK] * 2
    assert read(tier, refs[:1]) == [OK]
    entries = listing(tier)
    assert [entries[ref.key].num_hits for ref in refs] == [2, 1, 0]
    assert all(entries[ref.key].last_used >= entries[ref.key].created for ref in refs)


def test_looking_does_not_change_what_goes_first(subject: Subject) -> None:
    """Match, listing and a quiet read leave the order of eviction as it is; a read changes it."""
    if subject.budget is None:
        pytest.skip("Redis chooses for itself what goes")
    tier, ns_id = subject.tier, LARGE.ns_id()
    tier.add_namespace(LARGE)
    refs: list[Ref] = []
    for seed in range(30):
        (ref,), records = make_chain(LARGE, 1, seed=seed)
        refs.append(ref)
        assert tier.store(ns_id, records) == [OK]
        subject.pass_time(1)
    tier.match(ns_id, refs[:20])
    tier.fetch(ns_id, refs[:20], Buffers(LARGE, 20), quiet=True)
    list(tier.entries(ns_id))
    assert statuses(fetch(tier, LARGE, refs[5:6])[0]) == [OK]
    subject.limit(budget=20 << 20)
    wait_until(lambda: tier.stat().nbytes <= 20 << 20)
    kept = [i for i in range(30) if refs[i].key in listing(tier, ns_id)]
    assert 18 <= len(kept) <= 20
    assert kept == [5, *range(31 - len(kept), 30)], "the oldest went, but not the one that was read"


# Bytes that are not what they should be


@pytest.mark.parametrize(
    "at",
    [HEADER_NBYTES, HEADER_NBYTES + NAMESPACE.payload_nbytes - 1, 0, 50, 200],
    ids=["first byte", "last byte", "magic", "key", "checksum"],
)
@pytest.mark.parametrize("quiet", [False, True], ids=["read", "quiet"])
def test_a_flipped_bit_is_a_miss_deleted_and_counted(subject: Subject, at: int, quiet: bool) -> None:
    tier = subject.tier
    refs, records = chain(subject, 3)
    tier.store(NS_ID, records)
    subject.edit(NS_ID, refs[1], flip(at, 0x40))
    assert read(tier, refs, quiet=quiet) == [OK, BAD, OK]
    assert subject.raw(NS_ID, refs[1]) is None
    assert tier.match(NS_ID, refs)[:2] == [True, False]
    assert read(tier, refs, quiet=quiet) == [OK, MISS, OK]
    assert set(listing(tier)) == keys_of([refs[0], refs[2]])
    stat = tier.stat()
    assert (stat.num_bad, stat.num_misses, stat.num_hits) == ((1, 0, 0) if quiet else (1, 2, 4))
    assert (stat.num_evicted, stat.num_removed, stat.num_expired) == (0, 0, 0)
    assert tier.store(NS_ID, records[1:2]) == [OK]
    assert read(tier, refs) == [OK] * 3


def test_a_damaged_record_goes_although_it_is_pinned(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 2)
    assert tier.pin(NS_ID, refs, Pin("me", subject.clock() + FAR)) == [True] * 2
    subject.edit(NS_ID, refs[1], flip(HEADER_NBYTES + 9))
    assert read(tier, refs) == [OK, BAD]
    assert tier.match(NS_ID, refs) == [True, False]
    assert tier.usage(NS_ID)[bytes(16)].num_entries == 1


@pytest.mark.parametrize(
    "change",
    [lambda v: v[:-1], lambda v: v[:100], lambda v: b"", lambda v: v + b"x" * 4096],
    ids=["a byte short", "no header", "empty", "too long"],
)
def test_a_record_of_the_wrong_length_is_bad(subject: Subject, change: Callable[[bytes], bytes]) -> None:
    tier = subject.tier
    refs, records = chain(subject, 3)
    tier.store(NS_ID, records)
    subject.edit(NS_ID, refs[1], change)
    if subject.kind == "disk" and len(change(bytes(100))) > 100:
        pytest.skip("records on disk are padded: what is behind the payload does not count")
    assert read(tier, refs) == [OK, BAD, OK], "the one after it is read from where it starts"
    assert subject.raw(NS_ID, refs[1]) is None
    assert read(tier, refs) == [OK, MISS, OK]


def test_the_record_of_another_key_is_bad(subject: Subject) -> None:
    """A block of the right length, whole and with a checksum that fits, but not what was asked for."""
    tier = subject.tier
    refs = stored(subject, 2)
    other = subject.raw(NS_ID, refs[1])
    assert other is not None
    subject.edit(NS_ID, refs[0], lambda _: other)
    assert read(tier, refs) == [BAD, OK]
    assert subject.raw(NS_ID, refs[0]) is None


def test_another_payload_under_the_right_header_is_bad(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 2)
    other = subject.raw(NS_ID, refs[1])
    assert other is not None
    subject.edit(NS_ID, refs[0], lambda value: value[:HEADER_NBYTES] + other[HEADER_NBYTES:])
    assert read(tier, refs) == [BAD, OK]


def test_another_versions_record_is_a_miss_and_left_alone(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 2)
    tier.store(NS_ID, records)
    subject.edit(NS_ID, refs[0], lambda value: value[:8] + b"\x02\x00" + value[10:])
    foreign = subject.raw(NS_ID, refs[0])
    assert read(tier, refs) == [MISS, OK]
    assert tier.store(NS_ID, records[:1]) == [EXISTS]
    assert subject.raw(NS_ID, refs[0]) == foreign
    assert tier.stat().num_bad == 0


# Removing


def test_evict_removes_what_it_names(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 6)
    tier.store(NS_ID, records)
    assert tier.evict(NS_ID, [refs[4], refs[5], refs[5]]) == 2
    assert tier.evict(NS_ID, refs[4:]) == 0
    assert tier.match(NS_ID, refs) == [True] * 4 + [False] * 2
    assert keys_of(refs[:4]) == set(listing(tier))
    stat = tier.stat()
    assert (stat.num_removed, stat.num_evicted, stat.num_expired) == (2, 0, 0), "by order: nobody needed the room"
    assert tier.store(NS_ID, records) == [EXISTS] * 4 + [OK] * 2


def test_evict_takes_ancestors_too_where_they_are_named(subject: Subject) -> None:
    """An order is an order: it keeps no chain together, and what is left below can still be named."""
    tier = subject.tier
    refs = stored(subject, 4)
    assert tier.evict(NS_ID, refs[:1]) == 1
    assert tier.match(NS_ID, refs)[0] is False
    assert read(tier, refs) == [MISS] + [OK] * 3
    assert tier.evict(NS_ID, refs) == 3


def test_below_finds_a_prefix_and_what_descends_from_it(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 5)
    branch, records = chain(subject, 5, branch=3)
    assert branch[:3] == refs[:3]
    assert tier.store(NS_ID, records) == [EXISTS] * 3 + [OK] * 2
    found = below(tier.entries(NS_ID), refs[2].key)
    assert found[0].key == refs[2].key
    assert {entry.key for entry in found} == keys_of([*refs[2:], *branch[3:]])
    assert tier.evict(NS_ID, [Ref(entry.key, entry.anchor) for entry in found]) == 5
    assert set(listing(tier)) == keys_of(refs[:2])


def test_drop_namespace_takes_everything(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 70)
    tier.store(NS_ID, records)
    tier.pin(NS_ID, refs[:5], Pin("me", subject.clock() + FAR))
    assert tier.drop_namespace(NS_ID) == 70
    assert (tier.match(NS_ID, refs), tier.usage(NS_ID), tier.namespaces()) == ([False] * 70, {}, {})
    assert tier.stat().num_removed == 70
    assert tier.stat().pinned_nbytes == 0
    assert tier.store(NS_ID, records[:3]) == [OK] * 3, "the namespace is still known"
    assert [entry.pins for entry in tier.entries(NS_ID)] == [()] * 3, "pins do not outlive what they are on"
    assert [entry.num_hits for entry in tier.entries(NS_ID)] == [0] * 3


# Listing


def test_entries_say_what_a_listing_needs(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 70, salt="tenant")
    tier.store(NS_ID, records)
    read(tier, refs[:2])
    entries = listing(tier)
    assert set(entries) == keys_of(refs)
    for i, (ref, record) in enumerate(zip(refs, records, strict=True)):
        entry, header = entries[ref.key], record.header
        assert (entry.parent, entry.anchor, entry.position) == (header.parent, ref.anchor, i)
        assert (entry.num_tokens, entry.tenant, entry.created) == (16, tenant_digest(b"tenant"), header.created)
        assert NAMESPACE.payload_nbytes < entry.nbytes <= NAMESPACE.payload_nbytes + 8192
        assert entry.last_used >= entry.created
        assert entry.num_hits == (1 if i < 2 else 0)
        assert (entry.expires, entry.pins) == (0.0, ())


def test_usage_is_by_tenant(subject: Subject) -> None:
    tier = subject.tier
    stored(subject, 5)
    refs = stored(subject, 3, seed=1, salt="a")
    each = listing(tier)[refs[0].key].nbytes
    a = tenant_digest(b"a")
    assert tier.usage(NS_ID) == {bytes(16): Usage(5, 5 * each, 0), a: Usage(3, 3 * each, 0)}
    until = subject.clock() + FAR
    assert tier.pin(NS_ID, refs[:2], Pin("me", until)) == tier.pin(NS_ID, refs[:2], Pin("you", until)) == [True] * 2
    assert tier.usage(NS_ID)[a] == Usage(3, 3 * each, 2 * each), "several pins on an entry count once"
    tier.evict(NS_ID, refs, force=True)
    assert tier.usage(NS_ID) == {bytes(16): Usage(5, 5 * each, 0)}


def test_tokens_come_back_as_they_were_stored(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 3)
    records = [records[0], records[1]._replace(tokens=b""), records[2]]
    tier.store(NS_ID, records)
    assert [tier.tokens(NS_ID, ref) for ref in refs] == [r.tokens for r in records]
    assert records[0].tokens
    tier.evict(NS_ID, refs[:1])
    assert tier.tokens(NS_ID, refs[0]) == b""


# Lifetime


def test_what_expires_when(subject: Subject) -> None:
    """The earliest of what applies: time since the store, since the last read, and the time set."""
    tier = subject.tier
    now = subject.clock()
    subject.limit(ttl_s=9000.0)
    first = stored(subject, 2)
    subject.limit(ttl_s=9000.0, idle_s=5000.0)
    second = stored(subject, 2, seed=1)
    subject.limit()
    third = stored(subject, 2, seed=2)
    subject.limit(ttl_s=9000.0, idle_s=5000.0)
    assert tier.expire_at(NS_ID, [first[0], second[0], third[0]], now + 3000.0) == 3
    assert tier.expire_at(NS_ID, [make_chain(NAMESPACE, 1, seed=9)[0][0]], now + 3000.0) == 0
    entries = listing(tier)
    for refs in (first, second, third):
        assert entries[refs[0].key].expires == pytest.approx(now + 3000.0, abs=60)
    assert entries[second[1].key].expires == pytest.approx(now + 5000.0, abs=60)
    assert tier.expire_at(NS_ID, second[:1], 0.0) == 1, "as the limits say again"
    assert listing(tier)[second[0].key].expires == pytest.approx(now + 5000.0, abs=60)


def test_what_has_expired_is_a_miss_at_once(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 5, salt="a")
    tier.store(NS_ID, records)
    assert tier.expire_at(NS_ID, refs[3:], subject.clock()) == 2
    assert tier.match(NS_ID, refs) == [True] * 3 + [False] * 2
    assert read(tier, refs, quiet=True) == read(tier, refs) == [OK] * 3 + [MISS] * 2
    assert set(listing(tier)) == keys_of(refs[:3])
    assert tier.usage(NS_ID)[tenant_digest(b"a")].num_entries == 3
    assert tier.tokens(NS_ID, refs[4]) == b""
    assert tier.pin(NS_ID, refs[3:], Pin("me", subject.clock() + FAR)) == [False] * 2
    assert tier.expire_at(NS_ID, refs[3:], 0.0) == 0, "nothing brings it back"
    assert tier.evict(NS_ID, refs[3:]) == 0
    assert tier.store(NS_ID, records) == [EXISTS] * 3 + [OK] * 2
    assert read(tier, refs) == [OK] * 5
    assert [listing(tier)[ref.key].expires for ref in refs] == [0.0] * 5
    stat = tier.stat()
    assert (stat.num_removed, stat.num_evicted, stat.num_bad) == (0, 0, 0)


def test_a_time_set_for_what_is_not_there_says_nothing_of_what_comes(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 3)
    assert tier.store(NS_ID, records[:1]) == [OK]
    assert tier.expire_at(NS_ID, refs, subject.clock() + FAR) == 1
    assert tier.evict(NS_ID, refs[:1]) == 1
    assert tier.store(NS_ID, records) == [OK] * 3
    assert [listing(tier)[ref.key].expires for ref in refs] == [0.0] * 3


def test_a_time_to_live_ends(subject: Subject) -> None:
    tier = subject.tier
    subject.limit(ttl_s=0.5)
    refs = stored(subject, 3)
    read(tier, refs)
    subject.pass_time(0.6)
    assert tier.match(NS_ID, refs) == [False] * 3, "a read does not prolong it"
    assert read(tier, refs) == [MISS] * 3
    subject.limit()
    assert tier.match(NS_ID, refs) == [False] * 3, "a limit that is lifted brings nothing back"
    forever = stored(subject, 2, seed=7)
    subject.pass_time(0.6)
    assert tier.match(NS_ID, forever) == [True] * 2
    assert set(listing(tier)) == keys_of(forever)


def test_a_record_older_than_the_time_to_live_is_no_fault(subject: Subject) -> None:
    """Chunks come from other tiers, where they may have been for long."""
    tier = subject.tier
    subject.limit(ttl_s=1000.0, idle_s=500.0)
    old, records = chain(subject, 2, seed=1, created=subject.clock() - 5000.0)
    assert set(tier.store(NS_ID, records)) <= {OK, DROPPED}
    found = tier.match(NS_ID, old)
    assert read(tier, old) == [OK if there else MISS for there in found]
    young = stored(subject, 2)
    assert read(tier, young) == [OK] * 2
    assert (tier.stat().state, tier.stat().num_errors) == ("up", 0)


def test_idle_time_ends_unless_it_is_read(subject: Subject) -> None:
    tier = subject.tier
    subject.limit(idle_s=2.0)
    since = subject.clock()
    refs = stored(subject, 3)
    subject.pass_time(1.2)
    early = subject.clock() - since < 2.0
    assert not early or read(tier, refs[:1]) == [OK]
    read_at = subject.clock()
    tier.match(NS_ID, refs)
    read(tier, refs[1:2], quiet=True)
    subject.pass_time(1.0)
    found = tier.match(NS_ID, refs)
    assert found[1:] == [False] * 2, "looking is not reading"
    if early and subject.clock() - read_at < 2.0:  # or this machine was too slow to see it
        assert found[0]
    subject.pass_time(2.1)
    assert tier.match(NS_ID, refs) == [False] * 3


def test_expired_is_counted_apart(subject: Subject) -> None:
    tier = subject.tier
    subject.limit(ttl_s=0.3)
    stored(subject, 4)
    subject.pass_time(0.4)
    subject.limit(ttl_s=0.3)
    stored(subject, 1, seed=1)
    if isinstance(subject, SharedSubject):
        subject.limit()
        assert tier.stat().num_expired in (0, 4), "Redis expires by itself, and may not tell"
    else:
        wait_until(lambda: tier.stat().num_expired == 4)
    assert (tier.stat().num_evicted, tier.stat().num_removed) == (0, 0)


# Pins


def test_a_pin_keeps_an_entry_from_an_order(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 5)
    until = subject.clock() + FAR
    assert tier.pin(NS_ID, refs[:3], Pin("me", until)) == [True] * 3
    assert [listing(tier)[ref.key].pins for ref in refs] == [(Pin("me", until),)] * 3 + [()] * 2
    assert tier.evict(NS_ID, refs) == 2
    assert tier.match(NS_ID, refs) == [True] * 3 + [False] * 2
    assert tier.evict(NS_ID, refs[:1], force=True) == 1
    assert tier.unpin(NS_ID, refs, "me") == 2
    assert tier.evict(NS_ID, refs) == 2


def test_pins_have_owners(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 2)
    until = subject.clock() + FAR
    assert tier.pin(NS_ID, refs, Pin("me", until)) == [True] * 2
    assert tier.pin(NS_ID, refs[:1], Pin("you", until + 1)) == [True]
    assert set(listing(tier)[refs[0].key].pins) == {Pin("me", until), Pin("you", until + 1)}
    assert tier.unpin(NS_ID, refs, "nobody") == 0
    assert tier.unpin(NS_ID, refs, "me") == 2
    assert tier.unpin(NS_ID, refs, "me") == 0
    assert tier.evict(NS_ID, refs) == 1, "the other owner's pin holds"
    assert tier.pin(NS_ID, refs[:1], Pin("me", until)) == [True]
    assert tier.unpin(NS_ID, refs) == 1, "all owners' pins of one entry"
    assert listing(tier)[refs[0].key].pins == ()


def test_a_second_pin_of_an_owner_replaces_the_first(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 1)
    now = subject.clock()
    tier.pin(NS_ID, refs, Pin("me", now + FAR))
    tier.pin(NS_ID, refs, Pin("me", now + 2 * FAR))
    assert listing(tier)[refs[0].key].pins == (Pin("me", now + 2 * FAR),)
    tier.pin(NS_ID, refs, Pin("me", now + FAR))
    assert listing(tier)[refs[0].key].pins == (Pin("me", now + FAR),), "also by one that ends earlier"
    assert tier.pin(NS_ID, refs, Pin("me", now - 1)) == [False], "one that is over already holds nothing"
    assert listing(tier)[refs[0].key].pins == ()
    assert tier.evict(NS_ID, refs) == 1


def test_a_pin_ends_with_its_time(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 1)
    assert tier.pin(NS_ID, refs, Pin("me", subject.clock() + 0.5)) == [True]
    subject.pass_time(0.6)
    assert listing(tier)[refs[0].key].pins == ()
    assert tier.usage(NS_ID)[bytes(16)].pinned_nbytes == 0
    assert tier.unpin(NS_ID, refs, "me") == 0
    assert tier.match(NS_ID, refs) == [True], "the pin is over, not the entry"
    assert tier.evict(NS_ID, refs) == 1


def test_pinning_stops_at_a_hole(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 5)
    tier.evict(NS_ID, refs[2:3])
    assert tier.pin(NS_ID, refs, Pin("me", subject.clock() + FAR)) == [True] * 2 + [False] * 3
    entries = listing(tier)
    assert [bool(entries[ref.key].pins) for ref in refs if ref.key in entries] == [True, True, False, False]


def test_pinning_stops_at_its_quota(subject: Subject) -> None:
    tier = subject.tier
    refs = stored(subject, 5)
    each, until = listing(tier)[refs[0].key].nbytes, subject.clock() + FAR
    subject.limit(pinned_nbytes=3 * each)
    assert tier.pin(NS_ID, refs, Pin("me", until)) == [True] * 3 + [False] * 2
    assert tier.stat().pinned_nbytes == 3 * each
    assert tier.pin(NS_ID, refs, Pin("you", until)) == [True] * 3 + [False] * 2, "what is pinned costs nothing more"
    assert tier.unpin(NS_ID, refs[:1]) == 1
    assert tier.pin(NS_ID, refs[3:], Pin("me", until)) == [True, False]
    subject.limit(pinned_nbytes=None)
    assert tier.pin(NS_ID, refs, Pin("me", until)) == [True] * 5


def test_a_pinned_entry_does_not_expire(subject: Subject) -> None:
    tier = subject.tier
    subject.limit(ttl_s=0.4)
    refs, records = chain(subject, 3)
    tier.store(NS_ID, records)
    assert tier.pin(NS_ID, refs[:2], Pin("me", subject.clock() + FAR)) in ([True] * 2, [False] * 2)  # or too late
    if not all(tier.match(NS_ID, refs[:2])):
        pytest.skip("this machine was too slow to pin in time")
    subject.pass_time(0.6)
    assert tier.match(NS_ID, refs) == [True, True, False]
    assert read(tier, refs) == [OK, OK, MISS]
    assert tier.expire_at(NS_ID, refs[:1], subject.clock()) == 1
    assert tier.match(NS_ID, refs[:1]) == [True]
    assert tier.unpin(NS_ID, refs[:2], "me") == 2
    assert tier.match(NS_ID, refs) == [False] * 3, "the pin kept it, and nothing else"


# Room


def test_the_budget_holds_and_leaves_go_first(subject: Subject) -> None:
    if subject.budget is None:
        pytest.skip("Redis has its own budget")
    tier, ns_id = subject.tier, LARGE.ns_id()
    tier.add_namespace(LARGE)
    subject.limit(budget=24 << 20)
    roots = set()
    pinned, records = make_chain(LARGE, 3, seed=99)
    assert tier.store(ns_id, records) == [OK] * 3
    assert tier.pin(ns_id, pinned, Pin("me", subject.clock() + FAR)) == [True] * 3
    roots.add(records[0].header.parent)
    for seed in range(12):
        _, records = make_chain(LARGE, 5, seed=seed)
        subject.pass_time(1)
        assert tier.store(ns_id, records) == [OK] * 5
        assert tier.stat().nbytes <= 24 << 20
        assert no_orphans(tier, roots, ns_id)
    stat = tier.stat()
    assert stat.num_evicted == 63 - stat.num_entries
    assert stat.num_entries >= 20
    assert tier.match(ns_id, pinned) == [True] * 3
    assert stat.budget == 24 << 20


def test_the_budget_may_change_while_it_runs(subject: Subject) -> None:
    if subject.budget is None:
        pytest.skip("Redis has its own budget")
    tier, ns_id = subject.tier, LARGE.ns_id()
    tier.add_namespace(LARGE)
    refs, records = make_chain(LARGE, 40)
    assert tier.store(ns_id, records) == [OK] * 40
    subject.limit(budget=20 << 20)
    wait_until(lambda: tier.stat().nbytes <= 20 << 20)
    num = tier.stat().num_entries
    assert 18 <= num <= 20
    assert tier.match(ns_id, refs) == [True] * num + [False] * (40 - num), "a chain loses its end"
    subject.limit(budget=BUDGET)
    assert tier.store(ns_id, records) == [EXISTS] * num + [OK] * (40 - num)


def test_a_namespace_makes_room_among_its_own(subject: Subject) -> None:
    tier = subject.tier
    tier.add_namespace(OTHER)
    other_refs, other_records = make_chain(OTHER, 10)
    tier.store(OTHER.ns_id(), other_records)
    refs, records = chain(subject, 4)
    tier.store(NS_ID, records)
    each = listing(tier)[refs[0].key].nbytes
    subject.limit(namespace_nbytes={NS_ID: 6 * each})
    roots = {records[0].header.parent}
    for seed in (1, 2, 3):
        subject.pass_time(0.02)
        assert set(tier.store(NS_ID, chain(subject, 4, seed)[1])) <= {OK, DROPPED}
    wait_until(lambda: tier.usage(NS_ID)[bytes(16)].nbytes <= 6 * each)
    assert tier.usage(NS_ID)[bytes(16)].num_entries >= 4
    assert no_orphans(tier, roots)
    assert tier.match(OTHER.ns_id(), other_refs) == [True] * 10
    assert tier.stat().num_evicted >= 1


def test_a_tenant_makes_room_among_its_own(subject: Subject) -> None:
    tier = subject.tier
    b = stored(subject, 5, seed=50, salt="b")
    a = stored(subject, 3, seed=60, salt="a")
    each, tenant = listing(tier)[a[0].key].nbytes, tenant_digest(b"a")
    subject.limit(tenant_nbytes={tenant: 4 * each})
    for seed in (61, 62):
        subject.pass_time(0.02)
        assert set(tier.store(NS_ID, chain(subject, 3, seed, salt="a")[1])) <= {OK, DROPPED}
    wait_until(lambda: tier.usage(NS_ID)[tenant].nbytes <= 4 * each)
    assert tier.usage(NS_ID)[tenant].num_entries >= 1
    assert tier.match(NS_ID, b) == [True] * 5
    assert tier.usage(NS_ID)[tenant_digest(b"b")].num_entries == 5


@pytest.mark.parametrize("who", ["namespace", "tenant"])
def test_where_all_is_pinned_a_store_is_dropped(subject: Subject, who: str) -> None:
    tier = subject.tier
    refs = stored(subject, 4, salt="a")
    each = listing(tier)[refs[0].key].nbytes
    assert tier.pin(NS_ID, refs, Pin("me", subject.clock() + FAR)) == [True] * 4
    if who == "namespace":
        subject.limit(namespace_nbytes={b"": 4 * each})
    else:
        subject.limit(tenant_nbytes={b"": 4 * each})
    more, records = chain(subject, 2, seed=1, salt="a")
    assert tier.store(NS_ID, records) == [DROPPED] * 2
    assert tier.match(NS_ID, refs) == [True] * 4
    assert tier.match(NS_ID, more) == [False] * 2
    assert tier.stat().num_dropped == 2
    tier.unpin(NS_ID, refs)
    assert OK in tier.store(NS_ID, records)


# Statistics


def test_every_key_that_was_asked_for_is_counted_once(subject: Subject) -> None:
    tier, rng = subject.tier, random.Random(4)
    chains = [chain(subject, 6, seed) for seed in range(4)]
    asked = offered = removed = 0
    answers: dict[Status, int] = dict.fromkeys(Status, 0)
    for _ in range(60):
        refs, records = rng.choice(chains)
        first, last = sorted(rng.sample(range(7), 2))
        match rng.randrange(5):
            case 0 | 1:
                results = tier.store(NS_ID, records[first:last])
                offered += len(results)
                assert ERROR not in results
                answers[OK] += results.count(OK)
            case 2 | 3:
                asked += last - first
                if rng.random() < 0.2 and subject.raw(NS_ID, refs[first]) is not None:
                    subject.edit(NS_ID, refs[first], flip(300 + rng.randrange(1000)))
                found = read(tier, refs[first:last])
                answers[BAD] += found.count(BAD)
                answers[MISS] += found.count(MISS)
                answers[EXISTS] += found.count(OK)
            case _:
                removed += tier.evict(NS_ID, refs[first:last])
    stat = tier.stat()
    assert stat.num_hits + stat.num_misses + stat.num_errors == asked
    assert (stat.num_hits, stat.num_misses, stat.num_bad) == (
        answers[EXISTS],
        answers[MISS] + answers[BAD],
        answers[BAD],
    )
    assert (stat.num_stored, stat.num_removed) == (answers[OK], removed)
    assert (stat.num_evicted, stat.num_expired, stat.num_dropped) == (0, 0, 0)
    assert answers[BAD] > 0 and removed > 0
    num = answers[OK] - removed - answers[BAD]
    assert len(listing(tier)) == num
    if not isinstance(subject, SharedSubject):  # a Redis that others use is counted now and then
        assert stat.num_entries == num
        assert stat.nbytes == sum(usage.nbytes for usage in tier.usage(NS_ID).values())


# Threads


def test_several_threads(subject: Subject) -> None:
    tier = subject.tier
    chains = [chain(subject, 20, seed) for seed in range(4)]
    problems: list[object] = []

    def work(at: int) -> None:
        refs, records = chains[at % 4]
        try:
            for turn in range(5):
                tier.store(NS_ID, records)
                found = read(tier, refs, quiet=turn % 2 == 1)
                if not set(found) <= {OK, MISS}:
                    problems.append(found)
                tier.pin(NS_ID, refs[:5], Pin(f"owner {at}", subject.clock() + FAR))
                tier.evict(NS_ID, refs[10:])
                list(tier.entries(NS_ID)), tier.usage(NS_ID), tier.stat()
                tier.unpin(NS_ID, refs, f"owner {at}")
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stat = tier.stat()
    assert (stat.num_errors, stat.num_bad) == (0, 0)
    assert all(tier.match(NS_ID, chains[0][0][:10]))
    assert not any(entry.pins for entry in tier.entries(NS_ID))
    for refs, _ in chains:
        tier.evict(NS_ID, refs)
    assert (list(tier.entries(NS_ID)), tier.usage(NS_ID)) == ([], {})


def test_of_many_who_store_one_key_one_wrote_it(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 10)
    results: list[list[Status]] = []
    threads = [threading.Thread(target=lambda: results.append(tier.store(NS_ID, records))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(10):
        assert sorted(result[i] for result in results) == [OK] + [EXISTS] * 5
    assert read(tier, refs) == [OK] * 10
    assert tier.usage(NS_ID)[bytes(16)].num_entries == 10


# The end


def test_after_close_everything_is_a_miss(subject: Subject) -> None:
    tier = subject.tier
    refs, records = chain(subject, 2)
    tier.store(NS_ID, records)
    tier.close()
    tier.close()
    assert tier.match(NS_ID, refs) == [False] * 2
    assert set(read(tier, refs)) | set(read(tier, refs, quiet=True)) <= {MISS, ERROR}
    assert tier.store(NS_ID, records) == [ERROR] * 2
    assert tier.evict(NS_ID, refs) == tier.evict(NS_ID, refs, force=True) == tier.drop_namespace(NS_ID) == 0
    assert tier.pin(NS_ID, refs, Pin("me", subject.clock() + FAR)) == [False] * 2
    assert tier.unpin(NS_ID, refs) == tier.expire_at(NS_ID, refs, 1.0) == 0
    assert (list(tier.entries(NS_ID)), tier.usage(NS_ID), tier.tokens(NS_ID, refs[0])) == ([], {}, b"")
    assert tier.namespaces() == {}
    tier.add_namespace(OTHER)
    subject.limit(ttl_s=1.0)
    stat = tier.stat()
    assert stat.num_hits + stat.num_misses + stat.num_errors == 2 + 2, "two reads and two stores came to nothing"


def test_a_restart_keeps_what_was_said(subject: Subject) -> None:
    if subject.kind == "memory":
        pytest.skip("memory keeps nothing")
    refs = stored(subject, 5)
    stored(subject, 3, seed=1, salt="a")
    until = float(int(subject.clock() + FAR))
    assert subject.tier.pin(NS_ID, refs[:2], Pin("me", until)) == [True] * 2
    assert subject.tier.expire_at(NS_ID, refs[3:], until) == 2
    before, usage = listing(subject.tier), subject.tier.usage(NS_ID)
    subject.reopen()
    tier = subject.tier
    assert tier.namespaces() == {NS_ID: NAMESPACE}
    assert tier.usage(NS_ID) == usage
    after = listing(tier)
    assert after.keys() == before.keys()
    for key, entry in before.items():
        assert after[key]._replace(last_used=0.0, expires=0.0) == entry._replace(last_used=0.0, expires=0.0)
        assert after[key].expires == pytest.approx(entry.expires, abs=1.0)
    assert tier.evict(NS_ID, refs) == 3
    assert read(tier, refs) == [OK] * 2 + [MISS] * 3
    assert tier.tokens(NS_ID, refs[0])


def test_lmdb_is_the_one_whose_file_format_we_wrote_down() -> None:
    assert lmdb.version(lib_version=0)[:2] == (0, 9)

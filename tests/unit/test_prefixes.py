"""The forest of stored prefixes: leaves, chains, own parts, and damaged entries."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import RefusedError
from tierkv.prefixes import Forest, least_used, sum_by_tier

ROOT = bytes(32)


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def forest(*chains: str, tier: str = "disk") -> Forest:
    """Return the forest of chains such as ``"abc"``: chunk a, its child ab, its child abc."""
    found = Forest()
    for chain in chains:
        for i in range(len(chain)):
            if key(chain[: i + 1]) not in found.nodes:
                parent = key(chain[:i]) if i else ROOT
                found.add(tier, key(chain[: i + 1]), parent, i, 16, 100)
    found.link()
    return found


def names(keys: list[bytes]) -> list[str]:
    return [k.decode().rstrip(".") for k in keys]


def test_leaves_and_chains() -> None:
    f = forest("abc", "abd", "x")
    assert sorted(names([n.key for n in f.leaves()])) == ["abc", "abd", "x"]
    assert names([n.key for n in f.chain(key("abd"))]) == ["a", "ab", "abd"]
    assert f.chain(key("nothing")) == []


def test_a_chain_begins_at_its_first_stored_ancestor() -> None:
    f = Forest()
    f.add("disk", key("abc"), key("ab"), 2, 16, 100)
    f.add("disk", key("abcd"), key("abc"), 3, 16, 100)
    f.link()
    assert names([n.key for n in f.chain(key("abcd"))]) == ["abc", "abcd"]


def test_own_part_ends_at_the_first_fork() -> None:
    f = forest("abcd", "abxy", "m")
    assert names(f.own_part(key("abcd"))) == ["abc", "abcd"]
    assert names(f.own_part(key("abxy"))) == ["abx", "abxy"]
    assert names(f.own_part(key("m"))) == ["m"]


def test_own_part_includes_all_that_continues_it() -> None:
    f = forest("abcd", "abxy")
    assert sorted(names(f.own_part(key("ab")))) == ["a", "ab", "abc", "abcd", "abx", "abxy"]
    assert names(forest("abcd").own_part(key("ab"))) == ["a", "ab", "abc", "abcd"]


def test_parents_come_first_below() -> None:
    f = forest("abcd", "abxy", "abz")
    found = f.below(key("a"))
    assert len(found) == len(set(found)) == 7
    for k in found:
        parent = f.nodes[k].parent
        assert parent == ROOT or found.index(parent) < found.index(k)


def test_the_part_of_a_prompt() -> None:
    f = forest("abcd", "abxy")
    assert names(f.prompt_part([key("a"), key("ab"), key("abc"), key("abcd"), key("abcdE")])) == ["abc", "abcd"]
    assert f.prompt_part([key("a"), key("ab"), key("abE")]) == []  # all that is stored of it is shared
    assert len(f.prompt_part([key("a"), key("ab")])) == 6  # whole: the prefix of all of them
    assert f.prompt_part([key("b")]) == []
    assert f.prompt_part([]) == []


def test_resolve() -> None:
    f = forest("abc", "abd")
    assert f.resolve(key("abc").hex()) == key("abc")
    assert f.resolve(key("abc").hex()[:6]) == key("abc")
    assert f.resolve("ffff") is None
    with pytest.raises(RefusedError, match=r"4 stored chunks start with '61'; write more digits"):
        f.resolve("61")


def test_tiers_add_up() -> None:
    f = Forest()
    f.add("disk", key("a"), ROOT, 0, 16, 100, num_hits=2, last_used=5.0)
    f.add("shared", key("a"), ROOT, 0, 16, 90, num_hits=1, last_used=4.0)
    f.add("host", key("a"), ROOT, 0, 16, 80, num_hits=1, last_used=6.0)
    f.add("host", key("a"), ROOT, 0, 16, 80, num_hits=1, last_used=3.0)  # a second engine
    f.add("disk", key("ab"), key("a"), 1, 16, 100)
    f.link()
    node = f.nodes[key("a")]
    assert node.nbytes == {"disk": 100, "shared": 90, "host": 160}
    assert (node.num_hits, node.last_used) == (5, 6.0)
    assert sum_by_tier(f.nodes.values()) == {"disk": 200, "shared": 90, "host": 160}
    assert node.children == [key("ab")]


def test_damaged_entries_make_no_cycle() -> None:
    f = Forest()
    f.add("shared", key("a"), key("a"), 0, 16, 1)  # its own parent
    f.add("shared", key("b"), key("c"), 1, 16, 1)  # two that name each other
    f.add("shared", key("c"), key("b"), 1, 16, 1)
    f.add("shared", key("d"), key("e"), 1, 16, 1)
    f.add("shared", key("e"), key("d"), 2, 16, 1)
    f.link()
    for k in list(f.nodes):
        assert 1 <= len(f.chain(k)) <= 2
        assert 1 <= len(f.own_part(k)) <= 2
    assert {n.key for n in f.leaves()} == {key("a"), key("b"), key("c"), key("e")}


chains_st = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=8)


@given(chains_st, st.data())
def test_evicting_an_own_part_leaves_the_neighbours_whole(chains: list[str], data: st.DataObject) -> None:
    f = forest(*chains)
    chosen = data.draw(st.sampled_from(sorted(f.nodes)))
    doomed = set(f.own_part(chosen))
    assert chosen in doomed
    assert set(f.below(chosen)) <= doomed
    for k, node in f.nodes.items():
        if k in doomed:
            assert set(node.children) <= doomed
    for leaf in f.leaves():
        if leaf.key not in doomed:
            assert not doomed & {n.key for n in f.chain(leaf.key)}


@given(chains_st)
def test_every_chunk_is_on_the_chain_of_a_leaf(chains: list[str]) -> None:
    f = forest(*chains)
    assert {n.key for leaf in f.leaves() for n in f.chain(leaf.key)} == set(f.nodes)


def test_prefixes_have_their_own_parts_and_the_sums_of_their_chains() -> None:
    f = forest("abcd", "abxy", "m")
    found = {names([p.leaf.key])[0]: p for p in f.prefixes()}
    assert set(found) == {"abcd", "abxy", "m"}
    p = found["abcd"]
    assert names([n.key for n in p.own]) == ["abc", "abcd"] and p.num_stored == 4
    assert p.nbytes == {"disk": 400} and p.branch is f.nodes[key("ab")]
    assert found["m"].branch is None and found["m"].nbytes == {"disk": 100}


def test_a_part_of_a_forest() -> None:
    part = forest("abcd", "abxy", "m").part(key("abc"))
    assert names([p.leaf.key for p in part.prefixes()]) == ["abcd"]
    assert sorted(names(list(part.nodes))) == ["abc", "abcd"]


@given(chains_st)
def test_prefixes_agree_with_chains(chains: list[str]) -> None:
    f = forest(*chains)
    found = list(f.prefixes())
    assert {p.leaf.key for p in found} == {n.key for n in f.leaves()}
    for p in found:
        chain = f.chain(p.leaf.key)
        assert p.num_stored == len(chain) and p.nbytes == sum_by_tier(chain)
        assert {n.key for n in p.own} == set(f.own_part(p.leaf.key))
        forks = [n for n in chain if len(n.children) > 1]
        assert p.branch is (forks[-1] if forks else None)


@given(chains_st, st.data())
def test_what_is_closed_leaves_no_chunk_without_its_ancestors(chains: list[str], data: st.DataObject) -> None:
    f = forest(*chains)
    chosen = data.draw(st.sets(st.sampled_from(sorted(f.nodes))))
    doomed = {n.key for n in f.closed(f.nodes[k] for k in chosen)}
    assert doomed == {k for k in chosen if set(f.below(k)) <= chosen}


@given(chains_st, st.data())
def test_room_is_made_of_least_recently_used_leaves(chains: list[str], data: st.DataObject) -> None:
    f = forest(*chains)
    for node in f.nodes.values():
        node.last_used = data.draw(st.integers(0, 5))
    pinned = data.draw(st.sets(st.sampled_from(sorted(f.nodes))))
    wanted = data.draw(st.integers(1, 1000))
    found = least_used({b"ns": f}, ["disk"], wanted, lambda ns, node: node.key not in pinned)
    doomed = [n.key for n in found.get(b"ns", [])]
    assert not pinned & set(doomed) and len(doomed) == len(set(doomed))
    for k in doomed:
        assert set(f.below(k)) <= set(doomed), "an ancestor went before its descendant"
        assert f.nodes[k].parent not in doomed[doomed.index(k) :], "parents come first"
    may_go = {k for k in f.nodes if not pinned & set(f.below(k))}
    assert len(doomed) == min(-(-wanted // 100), len(may_go))


def test_chunks_that_are_elsewhere_are_passed_over() -> None:
    f = Forest()
    for tier, chunk, parent, position in (("disk", "a", "", 0), ("disk", "ab", "a", 1), ("host", "abc", "ab", 2)):
        f.add(tier, key(chunk), key(parent) if parent else ROOT, position, 16, 100)
    f.link()
    found = least_used({b"ns": f}, ["disk"], 150, lambda ns, node: True)
    assert names([n.key for n in found[b"ns"]]) == ["a", "ab"]


def work(f: Forest) -> int:
    """Return the calls that listing a forest's prefixes takes."""
    num = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        list(f.prefixes())
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("shape", ["chain", "comb", "leaves"])
def test_the_work_of_a_listing_grows_with_the_chunks(shape: str) -> None:
    def make(size: int) -> Forest:
        f = Forest()
        for i in range(size):
            parent = ROOT if shape == "leaves" or i == 0 else i.to_bytes(32, "big")
            f.add("disk", (i + 1).to_bytes(32, "big"), parent, 0 if shape == "leaves" else i, 16, 100)
            if shape == "comb":  # a prefix ends at every chunk of a long chain
                f.add("disk", b"leaf" + (i + 1).to_bytes(28, "big"), (i + 1).to_bytes(32, "big"), i + 1, 16, 100)
        f.link()
        return f

    small, large = work(make(500)), work(make(4000))
    assert large < 9 * small

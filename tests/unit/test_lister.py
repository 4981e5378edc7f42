"""Listings over many chunks: what they say, and that their work grows with the chunks alone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_engine import make_namespace
from tierkv.errors import RefusedError
from tierkv.messages import Select
from tierkv.tiers.base import EntryInfo
from tierkv_server import lister as lister_module
from tierkv_server.collector import Pause
from tierkv_server.lister import Lister

NAMESPACE = make_namespace()
NS = NAMESPACE.ns_id()
LONG = make_namespace("fake/other-model", chunk_tokens=16)


class Stub:
    """A tier, and the stores with that tier alone, that lists what it is told."""

    name = "disk"

    def __init__(self, num_chains: int, length: int) -> None:
        self.found = [
            EntryInfo(
                key=_key(chain, i),
                parent=_key(chain, i - 1) if i else bytes(32),
                anchor=bytes(32),
                position=i,
                num_tokens=32,
                nbytes=100,
                tenant=bytes([chain % 3]) * 16,
                created=1.0,
                last_used=float(chain),
                num_hits=chain % 7,
            )
            for chain in range(num_chains)
            for i in range(length)
        ]

    def tiers(self) -> list[Any]:
        return [self]

    def namespaces(self) -> dict[bytes, Any]:
        return {NS: NAMESPACE}

    def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
        return iter(self.found)


def _key(chain: int, i: int) -> bytes:
    return b"%08d" % chain + b"%024d" % i


def test_a_hundred_thousand_chunks() -> None:
    lister = Lister(Stub(1000, 100))
    page = lister.page(Select(limit=3))
    assert page["total"] == 1000 and [row["last_used"] for row in page["prefixes"]] == [999.0, 998.0, 997.0]
    assert page["prefixes"][0]["nbytes"] == {"disk": 10_000} and page["prefixes"][0]["num_stored"] == 100
    assert lister.page(Select(sort="hits", limit=5))["prefixes"][4]["hits"] == 6
    found = lister.du(Select(by="tenant"))
    assert found["total"]["num_chunks"] == 100_000 and found["num_rows"] == 3
    depth = lister.du(Select(by="depth"))["rows"]
    assert [row["num_chunks"] // 1000 for row in depth] == [1, 1, 2, 4, 8, 16, 32, 36]
    (space,) = lister.tree(Select(limit=10))["namespaces"]
    assert len(space["roots"]) == 10 and space["num_hidden"] == 990


@pytest.mark.parametrize("what", ["page", "du", "tree"])
def test_work_grows_with_the_chunks(what: str) -> None:
    small = calls(lambda: getattr(Lister(Stub(50, 10)), what)(Select(limit=10)))
    more = calls(lambda: getattr(Lister(Stub(400, 10)), what)(Select(limit=10)))
    longer = calls(lambda: getattr(Lister(Stub(50, 80)), what)(Select(limit=10)))
    assert more < 9 * small and longer < 9 * small
    assert max(more, longer) < 40 * 4000, "calls a chunk"


def calls(function: Callable[[], object]) -> int:
    """Return the calls of functions that ``function`` makes: work, whatever else the machine does."""
    num = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("sort", ["last_used", "hits", "nbytes", "tokens", "created"])
def test_pages_are_slices_of_the_whole_and_only_their_rows_are_made(sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Stub):
        """Two namespaces, whose chunks have other numbers of tokens."""

        def namespaces(self) -> dict[bytes, Any]:
            return {NS: NAMESPACE, LONG.ns_id(): LONG}

        def entries(self, ns_id: bytes) -> Iterator[EntryInfo]:
            cut = 3 if ns_id == NS else 5
            return (entry for entry in self.found if entry.position < cut + entry.key[7] % 2)

    made = []
    row = lister_module._row
    monkeypatch.setattr(lister_module, "_row", lambda *args: made.append(1) or row(*args))
    lister = Lister(Two(30, 6))
    whole = lister.page(Select(sort=sort))
    assert whole["total"] == len(whole["prefixes"]) == len(made) == 60
    ranks = [sum(r["nbytes"].values()) if sort == "nbytes" else r[sort] for r in whole["prefixes"]]
    assert ranks == sorted(ranks, reverse=True) and (sort == "created" or len(set(ranks)) > 1)
    for offset, limit in ((0, 7), (7, 7), (55, 7), (60, 7), (1000, 1)):
        made.clear()
        page = lister.page(Select(sort=sort, limit=limit), offset)
        assert page == {"total": 60, "prefixes": whole["prefixes"][offset : offset + limit]}
        assert len(made) == len(page["prefixes"])


def test_what_is_not_known_is_refused() -> None:
    lister = Lister(Stub(1, 1))
    with pytest.raises(RefusedError, match="sort 'age' is unknown"):
        lister.page(Select(sort="age"))
    with pytest.raises(RefusedError, match="sort 'tokens' is unknown"):
        lister.tree(Select(sort="tokens"))
    with pytest.raises(RefusedError, match="by 'colour' is unknown"):
        lister.du(Select(by="colour"))
    with pytest.raises(RefusedError, match="tier 'shared' is not here"):
        lister.page(Select(tiers=["shared"]))


def test_the_collector_runs_again_after_the_last_listing() -> None:
    pause = Pause()
    assert gc.isenabled()
    with pause:
        with pause:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with pause:
        pass
    assert not gc.isenabled(), "whoever turned it off keeps it off"
    gc.enable()


def test_a_listing_leaves_no_cycles_behind() -> None:
    stub = Stub(20, 20)
    gc.collect()
    gc.disable()
    try:
        Lister(stub).page(Select())
        Lister(stub).tree(Select())
        assert gc.collect() < 20
    finally:
        gc.enable()

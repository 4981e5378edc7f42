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
from tierkv_server.collector import Pause
from tierkv_server.lister import Lister

NAMESPACE = make_namespace()
NS = NAMESPACE.ns_id()


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


def test_what_is_not_known_is_refused() -> None:
    lister = Lister(Stub(1, 1))
    with pytest.raises(RefusedError, match="sort 'age' is unknown"):
        lister.page(Select(sort="age"))
    with pytest.raises(RefusedError, match="sort 'tokens' is unknown"):
        lister.tree(Select(sort="tokens"))
    with pytest.raises(RefusedError, match="by 'age' is unknown"):
        lister.du(Select(by="age"))
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

"""What is asked of vLLM's inside by probes: block ids where steps tell only what is new."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv_connector.compat import BlockTables, _minor, block_ids_of, hit_sources


@dataclass
class Output:
    """A step, as vLLM up to 0.28 tells it: its block state is no field."""

    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(default_factory=lambda: cached())
    finished_req_ids: set[str] = field(default_factory=set)


@dataclass
class Output29(Output):
    """As 0.29 does: the field is there, and answers nothing."""

    kv_connector_block_state: Any = None


def cached(ids: dict[str, list[int] | None] | None = None, resumed: tuple[str, ...] = ()) -> Any:
    new = [None if blocks is None else (blocks,) for blocks in (ids or {}).values()]
    return SimpleNamespace(req_ids=list(ids or {}), new_block_ids=new, resumed_req_ids=set(resumed))


def new(req_id: str, blocks: list[int]) -> Any:
    return SimpleNamespace(req_id=req_id, block_ids=(blocks,))


@pytest.mark.parametrize("kind", [Output, Output29])
def test_tables_follow_what_every_step_says_is_new(kind: type[Output]) -> None:
    tables = BlockTables()

    def seen(output: Output, *req_ids: str) -> list[Any]:
        before = dict(vars(output))
        with tables.shown(output):
            found = [block_ids_of(output, req_id) for req_id in req_ids]
        assert vars(output) == before, "it travels to the workers as it came"
        return found

    first = kind([new("a", [1, 2]), new("b", [3])])
    assert seen(first, "a", "b", "c") == [([1, 2],), ([3],), None]
    first.scheduled_new_reqs[0].block_ids[0].append(99)  # vLLM's lists are vLLM's
    assert seen(kind(scheduled_cached_reqs=cached({"a": [4, 5], "b": None})), "a", "b") == [([1, 2, 4, 5],), ([3],)]
    assert seen(kind(scheduled_cached_reqs=cached({"b": [6]})), "a", "b") == [([1, 2, 4, 5],), ([3, 6],)]
    resumed = kind(scheduled_cached_reqs=cached({"a": [7, 8]}, resumed=("a",)))
    assert seen(resumed, "a") == [([7, 8],)], "after a preemption all blocks are new"
    assert seen(kind([new("b", [9])], finished_req_ids={"a", "b"}), "a", "b") == [None, ([9],)]


def test_where_vllm_answers_its_answer_counts() -> None:
    state = SimpleNamespace(get_block_ids=lambda req_id: ([5],) if req_id == "a" else None)
    output = Output29([new("a", [1])], kv_connector_block_state=state)
    tables = BlockTables()
    with tables.shown(output):
        assert block_ids_of(output, "a") == ([5],) and output.kv_connector_block_state is state
    assert tables.get_block_ids("a") is None, "nothing is followed that vLLM can be asked"


def test_a_step_that_raises_leaves_the_output_as_it_was() -> None:
    output = Output([new("a", [1])])
    with pytest.raises(RuntimeError), BlockTables().shown(output):
        raise RuntimeError
    assert not hasattr(output, "kv_connector_block_state")


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.26.0", (0, 26)), ("0.31.2rc1", (0, 31)), ("1.0.0", (1, 0)), ("0.1.dev7+gabc", None), ("unknown", None)],
)
def test_what_was_built_from_source_has_no_version_to_judge_by(version: str, minor: tuple[int, int] | None) -> None:
    assert _minor(version) == minor


def test_sources_have_vllms_names_and_keep_their_sum() -> None:
    sources = hit_sources({"host": 64, "disk": 0, "shared": 32})
    assert {source.value: num for source, num in sources.items()} == {"host": 64, "external_unspecified": 32}

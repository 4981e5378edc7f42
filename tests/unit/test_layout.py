"""Layouts and namespaces: canonical bytes, what changes an id, and the size of a chunk."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.layout import (
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    TARGET_PAYLOAD_NBYTES,
    BlockTable,
    LayerGroup,
    Layout,
    Namespace,
    Shard,
    canonical_json,
    check_chunk_tokens,
    chunk_tokens_for,
    default_chunk_tokens,
)

GROUP = LayerGroup(
    kind="FullAttentionSpec",
    layers=("model.layers.0.attn", "model.layers.1.attn"),
    num_kv_heads=3,
    head_size=64,
    block_nbytes=(12288, 12288),
    shape=(2, 16, 3, 64),
    order=(0, 2, 1, 3),
)
LAYOUT = Layout(group=GROUP, dtype="bfloat16", block_tokens=16, chunk_tokens=64, backend="CPU_ATTN", isa="amx")
NAMESPACE = Namespace(identity="ab" * 32, model="org/model", layout=LAYOUT, shard=Shard(tp_size=2, num_parts=2))

# Part of the format: if one changes, every store in the field turns cold.
GOLDEN_CANONICAL = (
    b'{"backend":"CPU_ATTN","block_tokens":16,"chunk_tokens":64,"dtype":"bfloat16","group":{"block_nbytes":[12288,12288'
    b'],"head_size":64,"kind":"FullAttentionSpec","layers":["model.layers.0.attn","model.layers.1.attn"],"num_kv_heads"'
    b':3,"order":[0,2,1,3],"shape":[2,16,3,64]},"isa":"amx","version":1}'
)
GOLDEN_LAYOUT_ID = "3359cddedda0de6a1f28d68384e68aa2"
GOLDEN_NS_ID = "ac84c49456483ddf1ca38ba7812acaee"

# A model with windows: every group by its kind, its window and its layers.
WINDOWED = msgspec.structs.replace(
    LAYOUT,
    others=(
        msgspec.structs.replace(
            GROUP, kind="SlidingWindowSpec", layers=("model.layers.2.attn",), block_nbytes=(12288,), window=48, table=1
        ),
        msgspec.structs.replace(
            GROUP, kind="SlidingWindowSpec", layers=("x",), block_nbytes=(99,), window=48, table=2, block_tokens=32
        ),
    ),
)
GOLDEN_WINDOWED = (
    b'{"block_nbytes":[12288],"head_size":64,"kind":"SlidingWindowSpec","layers":["model.layers.2.attn"],'
    b'"num_kv_heads":3,"order":[0,2,1,3],"shape":[2,16,3,64],"table":1,"window":48}'
)
GOLDEN_WINDOWED_ID = "b64f8a221b67717765c76121b9dad663"


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return (*value, changed(value[0]) if value else GROUP)
    raise AssertionError(type(value))


def variants(struct: msgspec.Struct) -> list[Any]:
    """Return copies of ``struct`` with one field changed, for every field, at every depth."""
    found = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        others = variants(value) if isinstance(value, msgspec.Struct) else [changed(value)]
        found += [msgspec.structs.replace(struct, **{name: other}) for other in others]
    return found


def test_golden_canonical_form() -> None:
    assert LAYOUT.canonical() == GOLDEN_CANONICAL
    assert LAYOUT.layout_id().hex() == GOLDEN_LAYOUT_ID
    assert NAMESPACE.ns_id().hex() == GOLDEN_NS_ID


def test_golden_canonical_form_of_several_groups() -> None:
    assert GOLDEN_WINDOWED in WINDOWED.canonical()
    assert WINDOWED.layout_id().hex() == GOLDEN_WINDOWED_ID
    assert WINDOWED.canonical().startswith(GOLDEN_CANONICAL[: GOLDEN_CANONICAL.index(b',"version"')])


def test_what_was_stored_before_there_were_several_groups_is_described_as_it_was() -> None:
    assert json.loads(NAMESPACE.to_json())["layout"] == json.loads(GOLDEN_CANONICAL)


def test_every_field_of_every_group_changes_the_layout_id() -> None:
    ids = {LAYOUT.layout_id(), WINDOWED.layout_id()}
    for at, group in enumerate(WINDOWED.others):
        for other in variants(group):
            others = (*WINDOWED.others[:at], other, *WINDOWED.others[at + 1 :])
            ids.add(msgspec.structs.replace(WINDOWED, others=others).layout_id())
    assert len(ids) == 2 + 2 * 13
    assert msgspec.structs.replace(WINDOWED, others=WINDOWED.others[::-1]).layout_id() not in ids


def test_every_field_changes_the_layout_id() -> None:
    ids = [layout.layout_id() for layout in [LAYOUT, *variants(LAYOUT)]]
    assert len(ids) == 1 + 7 + 13  # the layout's own fields and the group's
    assert len(set(ids)) == len(ids)
    assert {len(i) for i in ids} == {16}


def test_the_order_of_layers_and_axes_changes_the_layout_id() -> None:
    for name in ("layers", "order", "shape"):
        group = msgspec.structs.replace(GROUP, **{name: getattr(GROUP, name)[::-1]})
        assert msgspec.structs.replace(LAYOUT, group=group).layout_id() != LAYOUT.layout_id()


def test_every_field_but_the_model_changes_the_namespace() -> None:
    others = variants(NAMESPACE)
    ids = {other.ns_id() for other in others if other.model == NAMESPACE.model}
    assert len(ids) == len(others) - 1
    assert NAMESPACE.ns_id() not in ids


@given(st.text())
def test_the_name_of_the_model_is_no_part_of_the_namespace(name: str) -> None:
    assert msgspec.structs.replace(NAMESPACE, model=name).ns_id() == NAMESPACE.ns_id()


def test_strings_do_not_run_into_each_other() -> None:
    one = msgspec.structs.replace(LAYOUT, dtype="a", backend="b,c")
    other = msgspec.structs.replace(LAYOUT, dtype="a,b", backend="c")
    quoted = msgspec.structs.replace(LAYOUT, dtype='a","backend":"b,c', backend="")
    assert len({one.layout_id(), other.layout_id(), quoted.layout_id()}) == 3


@given(st.text(), st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=4), st.integers(0, 2**40))
def test_json_round_trip(model: str, dtype: str, layers: list[str], nbytes: int) -> None:
    group = msgspec.structs.replace(GROUP, layers=tuple(layers), block_nbytes=(nbytes,) * len(layers))
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype, group=group)
    namespace = msgspec.structs.replace(NAMESPACE, model=model, layout=layout)
    body = namespace.to_json()
    assert body.isascii()
    again = Namespace.from_json(body)
    assert again == namespace
    assert again.to_json() == body
    assert again.ns_id() == namespace.ns_id()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"identity": 1}', b"\xff", NAMESPACE.to_json()[:-1]])
def test_json_of_something_else_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Namespace.from_json(body)


def test_json_round_trip_of_several_groups() -> None:
    namespace = msgspec.structs.replace(NAMESPACE, layout=WINDOWED)
    assert Namespace.from_json(namespace.to_json()) == namespace
    assert namespace.ns_id() != NAMESPACE.ns_id()


def test_canonical_json_ignores_the_order_of_keys() -> None:
    assert (
        canonical_json({"b": 1, "a": [1, "é"]})
        == canonical_json({"a": [1, "é"], "b": 1})
        == b'{"a":[1,"\\u00e9"],"b":1}'
    )


def test_sizes() -> None:
    assert LAYOUT.blocks_per_chunk == 4
    assert LAYOUT.part_nbytes == 4 * 2 * 12288
    assert NAMESPACE.payload_nbytes == 2 * LAYOUT.part_nbytes
    assert WINDOWED.part_nbytes == 4 * 2 * 12288 + 4 * 12288 + 2 * 99


def test_layers_of_one_group_share_a_block_table() -> None:
    assert LAYOUT.tables() == (BlockTable(0, 16, "FullAttentionSpec", 0),)
    sliding = BlockTable(1, 16, "SlidingWindowSpec", 48), BlockTable(2, 32, "SlidingWindowSpec", 48)
    assert WINDOWED.tables() == (LAYOUT.tables()[0], *sliding)
    narrow = msgspec.structs.replace(GROUP, layers=("narrow",), head_size=32)
    assert msgspec.structs.replace(WINDOWED, others=(narrow, *WINDOWED.others)).tables() == WINDOWED.tables()


def test_a_layout_in_words() -> None:
    assert LAYOUT.describe() == (
        "2 layers of FullAttentionSpec, 3 KV heads of 64, bfloat16, chunks of 64 tokens in blocks of 16, CPU_ATTN (amx)"
    )
    assert WINDOWED.describe() == (
        "2 layers of FullAttentionSpec, 3 KV heads of 64; 2 layers of SlidingWindowSpec (48 tokens), 3 KV heads of 64, "
        "bfloat16, chunks of 64 tokens in blocks of 16 and 32, CPU_ATTN (amx)"
    )


def test_what_a_token_looks_at() -> None:
    assert BlockTable(0, 16).first_needed(1000) == 0
    sliding = BlockTable(0, 16, "SlidingWindowSpec", 48)
    assert [sliding.first_needed(n) for n in (0, 47, 48, 1000)] == [0, 0, 1, 953]
    local = BlockTable(0, 16, "ChunkedLocalAttentionSpec", 48)
    assert [local.first_needed(n) for n in (0, 47, 48, 95, 96)] == [0, 0, 48, 48, 96]


@pytest.mark.parametrize(
    ("block_tokens", "block_nbytes", "chunk_tokens"),
    [
        (16, 1 << 20, 64),  # 4 MiB is four blocks
        (16, 2 << 20, 32),
        (16, 64 << 10, 256),  # small model: as large as is allowed
        (16, 1, 256),
        (16, 8 << 20, 16),  # large model: one block
        (16, 1 << 30, 16),
        (16, 368640, 176),  # SmolLM2-135M in bfloat16: 11 blocks are 3.9 MiB
        (32, 1 << 20, 128),
        (32, 1, 256),
        (32, 1 << 30, 32),
        (128, 1 << 20, 256),
        (128, 4 << 20, 128),
        (128, 1, 256),
        (256, 1, 256),
        (256, 1 << 30, 256),
        (512, 1, 512),  # longer than any chunk should be: a chunk of its own
        (512, 1 << 30, 512),
        (8, 1 << 30, 16),
        (1, 1 << 30, 16),
        (24, 1, 240),
    ],
)
def test_default_chunk_tokens(block_tokens: int, block_nbytes: int, chunk_tokens: int) -> None:
    assert default_chunk_tokens(block_tokens, block_nbytes) == chunk_tokens


@given(st.integers(1, 1024), st.integers(1, 1 << 32))
def test_default_chunk_tokens_keeps_its_promises(block_tokens: int, block_nbytes: int) -> None:
    tokens = default_chunk_tokens(block_tokens, block_nbytes)
    assert tokens % block_tokens == 0
    if block_tokens <= MAX_CHUNK_TOKENS:
        assert MIN_CHUNK_TOKENS <= tokens <= max(MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS + block_tokens - 1)
    else:
        assert tokens == block_tokens
    payload = tokens // block_tokens * block_nbytes
    if MIN_CHUNK_TOKENS + block_tokens <= tokens <= MAX_CHUNK_TOKENS - block_tokens:
        assert abs(payload - TARGET_PAYLOAD_NBYTES) <= block_nbytes / 2
    assert check_chunk_tokens(tokens, block_tokens) == tokens


@pytest.mark.parametrize(
    ("chunk", "block", "fix"), [(20, 16, 16), (30, 16, 32), (8, 16, 16), (0, 16, 16), (-16, 16, 16)]
)
def test_chunks_of_part_blocks_are_refused(chunk: int, block: int, fix: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^chunk_tokens={chunk} .*blocks of {block} tokens; set chunk_tokens={fix},"
    ):
        check_chunk_tokens(chunk, block)


FULL = BlockTable(0, 16, "FullAttentionSpec")


@pytest.mark.parametrize(
    ("tables", "chunk_tokens"),
    [
        ([FULL], 256),
        ([FULL, BlockTable(1, 16, "SlidingWindowSpec", 1024)], 256),
        ([FULL, BlockTable(1, 16, "SlidingWindowSpec", 128)], 128),
        ([FULL, BlockTable(1, 16, "SlidingWindowSpec", 129)], 144),  # a block more than the window: 144 < 129 + 16
        ([FULL, BlockTable(1, 16, "SlidingWindowSpec", 4)], 16),
        ([FULL, BlockTable(1, 32, "SlidingWindowSpec", 70), BlockTable(2, 48, "SlidingWindowSpec", 512)], 96),
        ([BlockTable(0, 512), BlockTable(1, 16, "SlidingWindowSpec", 128)], 512),  # no shorter one is whole
        ([FULL, BlockTable(1, 16, "ChunkedLocalAttentionSpec", 8192)], 256),
        ([FULL, BlockTable(1, 16, "ChunkedLocalAttentionSpec", 96)], 96),
        ([FULL, BlockTable(1, 16, "ChunkedLocalAttentionSpec", 160)], 160),
    ],
)
def test_a_chunk_is_no_longer_than_its_blocks_live(tables: list[BlockTable], chunk_tokens: int) -> None:
    assert chunk_tokens_for(tables, [1] * len(tables)) == chunk_tokens
    assert chunk_tokens_for(tables, [1] * len(tables), chunk_tokens) == chunk_tokens


def test_a_chunk_counts_the_bytes_of_every_group() -> None:
    tables = [FULL, BlockTable(1, 64, "SlidingWindowSpec", 1024)]
    assert chunk_tokens_for(tables, [1 << 18, 1 << 20]) == 128  # 64 tokens are 2 MiB
    assert chunk_tokens_for([FULL], [1 << 18]) == 256


def test_a_chunk_longer_than_its_blocks_live_is_refused() -> None:
    tables = [FULL, BlockTable(1, 16, "SlidingWindowSpec", 128)]
    with pytest.raises(ConfigError, match=r"^chunk_tokens=160 is too long .*windows of 128 tokens.*chunk_tokens=128,"):
        chunk_tokens_for(tables, [1, 1], 160)
    with pytest.raises(ConfigError, match=r"^chunk_tokens=24 is not a whole number of blocks of 16"):
        chunk_tokens_for(tables, [1, 1], 24)


@given(
    st.sampled_from(["SlidingWindowSpec", "ChunkedLocalAttentionSpec"]),
    st.integers(1, 400),
    st.sampled_from([16, 32]),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
)
def test_whatever_the_steps_a_chunk_is_there_when_it_is_computed(
    kind: str, window: int, block_tokens: int, steps: list[int]
) -> None:
    """vLLM frees, before each step, the whole blocks before what the step's first token looks at."""
    if kind == "ChunkedLocalAttentionSpec":
        window = -(-window // block_tokens) * block_tokens
    table = BlockTable(1, block_tokens, kind, window)
    size = chunk_tokens_for([FULL, table], [1, 1])
    computed = 0
    for step in steps:
        num_freed = table.first_needed(computed) // block_tokens
        for chunk in range(computed // size, (computed + step) // size):
            assert num_freed * block_tokens <= chunk * size
        computed += step

"""Layouts and namespaces: canonical bytes, what changes an id, and the size of a chunk."""

from __future__ import annotations

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
    LayerGroup,
    Layout,
    Namespace,
    Shard,
    canonical_json,
    check_chunk_tokens,
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


def changed(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, tuple):
        return (*value, changed(value[0]))
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


def test_every_field_changes_the_layout_id() -> None:
    ids = [layout.layout_id() for layout in [LAYOUT, *variants(LAYOUT)]]
    assert len(ids) == 1 + 6 + 7  # the layout's own fields and the group's
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

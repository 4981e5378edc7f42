"""Keys: golden bytes, an independent second implementation, and what must and must not change them."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.keys import (
    ANCHOR_SPAN,
    KEY_NBYTES,
    Extra,
    Part,
    anchor_index,
    chain_keys,
    next_key,
    pack_tokens,
    root_key,
    tenant_digest,
)

IDENTITY = bytes(range(32))

# Written down once. They are part of the format: if one changes, every store in the field turns cold.
GOLDEN_ROOT = "8ff0e099bcb29ec4ba728a7c509466f7f465b70538b8516f6878cb1c44efe1da"
GOLDEN_TENANT_ROOT = "56c8b5c4066033ce51ab5daf7822fc2d88eff8a39e4892453ee1cd3139c0bc98"
GOLDEN_CHAIN = (
    "539a093eb78d73489eec2c36344fabe2789504c49d889755a6c9fa5711f707ac",
    "db4ac232769b44134881bfc3d0ffb8960ce574bc69b56346ac3f2e7d16ea503a",
    "46f0949b3b7de6dbe05d655f77e91e64fa94bc2dc03908acb5fe4789aab84db2",
)
GOLDEN_EXTRAS = "b5876550d3960e7d586de1870b9c719ba31cf3767fdc08821bb10976bfdb49cd"
GOLDEN_ITEMS = (
    "539a093eb78d73489eec2c36344fabe2789504c49d889755a6c9fa5711f707ac",
    "26a4c35596c41003718f74e3c673fbbfea11163690a8b80fbcd21ce27f1497b5",
    "856c105e6e33ca592a099c9b52532615f2f729cb5295e4f43b4b42cca8d0bd9d",
)
GOLDEN_TENANT = "5d2e804ce024f99e2ebffa53ccceae14"


def second_root(identity: bytes, epoch: bytes = b"", tenant: bytes = b"") -> bytes:
    """The description in the module's docstring, written again."""
    digest = hashlib.sha256()
    for kind, data in ((1, b"tierkv-key-1"), (2, identity), (3, epoch), (4, tenant)):
        digest.update(struct.pack("<BQ", kind, len(data)))
        digest.update(data)
    return digest.digest()


def second_key(parent: bytes, tokens: list[int], extras: list[tuple[int, bytes, int]] = []) -> bytes:  # noqa: B006
    packed = b"".join(struct.pack("<I", token) for token in tokens)
    digest = hashlib.sha256()
    for kind, data in ((16, parent), (17, packed)):
        digest.update(struct.pack("<BQ", kind, len(data)))
        digest.update(data)
    for kind, data, offset in sorted(extras):
        digest.update(struct.pack("<BQq", kind, len(data) + 8, offset))
        digest.update(data)
    return digest.digest()


tokens_st = st.integers(0, 2**32 - 1)
extras_st = st.lists(
    st.builds(
        Extra,
        kind=st.sampled_from([Part.LORA, Part.MULTIMODAL, Part.PROMPT_EMBEDS]),
        data=st.binary(max_size=40),
        offset=st.integers(-(2**31), 2**31),
    ),
    max_size=4,
)


# -- golden


def test_golden_root() -> None:
    assert root_key(IDENTITY).hex() == GOLDEN_ROOT
    assert root_key(IDENTITY, b"epoch-1", "mandant é".encode()).hex() == GOLDEN_TENANT_ROOT


def test_golden_chain() -> None:
    keys = chain_keys(root_key(IDENTITY), list(range(50)), 16)
    assert tuple(key.hex() for key in keys) == GOLDEN_CHAIN


def test_golden_extras() -> None:
    extras = [
        Extra(Part.MULTIMODAL, b"image-1", -3),
        Extra(Part.LORA, b"adapter"),
        Extra(Part.PROMPT_EMBEDS, bytes(32), 5),
    ]
    assert next_key(root_key(IDENTITY), pack_tokens([0, 1, 2**32 - 1]), extras).hex() == GOLDEN_EXTRAS


def test_golden_chain_with_items_and_embeddings() -> None:
    extras = {
        1: [Extra(Part.MULTIMODAL, bytes(range(32)), -3), Extra(Part.MULTIMODAL, bytes(32), 9)],
        2: [Extra(Part.PROMPT_EMBEDS, bytes(range(32)), 4)],
    }
    keys = chain_keys(root_key(IDENTITY), list(range(50)), 16, extras)
    assert tuple(key.hex() for key in keys) == GOLDEN_ITEMS
    assert GOLDEN_ITEMS[0] == GOLDEN_CHAIN[0], "a chunk of text before them is that of the text"


def test_golden_tenant_digest() -> None:
    assert tenant_digest(b"tenant-1").hex() == GOLDEN_TENANT
    assert tenant_digest(b"") == bytes(16)


@given(st.binary(max_size=64), st.binary(max_size=20), st.binary(max_size=20))
def test_root_equals_second_implementation(identity: bytes, epoch: bytes, tenant: bytes) -> None:
    assert root_key(identity, epoch, tenant) == second_root(identity, epoch, tenant)


@given(st.binary(min_size=32, max_size=32), st.lists(tokens_st, max_size=40), extras_st)
def test_key_equals_second_implementation(parent: bytes, tokens: list[int], extras: list[Extra]) -> None:
    assert next_key(parent, pack_tokens(tokens), extras) == second_key(parent, tokens, [tuple(e) for e in extras])


@pytest.mark.parametrize("seed", ["0", "1", "4242", "random"])
def test_same_bytes_in_another_process(seed: str) -> None:
    program = (
        "from tierkv.keys import *;"
        "extras = {i: [Extra(Part.LORA, b'a'), Extra(Part.MULTIMODAL, b'm', i)] for i in range(4)};"
        "print(*[k.hex() for k in chain_keys(root_key(b'model', b'e', b't'), list(range(64)), 16, extras)])"
    )
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout
    extras = {i: [Extra(Part.LORA, b"a"), Extra(Part.MULTIMODAL, b"m", i)] for i in range(4)}
    expected = chain_keys(root_key(b"model", b"e", b"t"), list(range(64)), 16, extras)
    assert out.split() == [key.hex() for key in expected]


# -- parts never collide


def test_adapter_and_salt_of_one_name_never_meet() -> None:
    tokens = pack_tokens(range(16))
    plain, salted = root_key(IDENTITY), root_key(IDENTITY, tenant=b"x")
    seen = {
        next_key(plain, tokens),
        next_key(salted, tokens),
        next_key(plain, tokens, [Extra(Part.LORA, b"x")]),
        next_key(salted, tokens, [Extra(Part.LORA, b"x")]),
        next_key(plain, tokens, [Extra(Part.MULTIMODAL, b"x")]),
        next_key(plain, tokens, [Extra(Part.PROMPT_EMBEDS, b"x")]),
        next_key(root_key(IDENTITY, epoch=b"x"), tokens),
        next_key(root_key(IDENTITY + b"x"), tokens),
    }
    assert len(seen) == 8


@given(st.binary(max_size=24), st.integers(0, 24), st.integers(0, 24), st.integers(0, 24), st.integers(0, 24))
def test_moving_bytes_between_parts_of_the_root_changes_it(data: bytes, a: int, b: int, c: int, d: int) -> None:
    def cut(i: int, j: int) -> tuple[bytes, bytes, bytes]:
        i, j = sorted((min(i, len(data)), min(j, len(data))))
        return data[:i], data[i:j], data[j:]

    one, other = cut(a, b), cut(c, d)
    assert (root_key(*one) == root_key(*other)) == (one == other)


@given(extras_st, extras_st)
def test_extras_are_a_multiset(one: list[Extra], other: list[Extra]) -> None:
    parent, tokens = bytes(32), pack_tokens([1, 2])
    equal = next_key(parent, tokens, one) == next_key(parent, tokens, other)
    assert equal == (sorted(one) == sorted(other))


def test_an_extra_that_imitates_other_parts_does_not_collide() -> None:
    parent = bytes(32)
    inner = bytes((Part.LORA,)) + (9).to_bytes(8, "little") + bytes(8) + b"b"
    two = next_key(parent, b"", [Extra(Part.LORA, b"a"), Extra(Part.LORA, b"b")])
    assert two != next_key(parent, b"", [Extra(Part.LORA, b"a" + inner)])
    assert next_key(parent, inner) != next_key(parent, b"", [Extra(Part.LORA, b"b")])


def test_a_chunk_boundary_is_part_of_the_key() -> None:
    root, tokens = root_key(IDENTITY), list(range(64))
    assert not set(chain_keys(root, tokens, 16)) & set(chain_keys(root, tokens, 32))


# -- a change shows from there on


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, dict[int, list[Extra]]]:
    chunk = draw(st.sampled_from([1, 2, 4, 16]))
    num_chunks = draw(st.integers(1, 6))
    rest = draw(st.integers(0, chunk - 1))
    tokens = draw(
        st.lists(st.integers(0, 150_000), min_size=num_chunks * chunk + rest, max_size=num_chunks * chunk + rest)
    )
    extras = draw(st.dictionaries(st.integers(0, num_chunks - 1), extras_st, max_size=3))
    return tokens, chunk, extras


def assert_changes_from(before: list[bytes], after: list[bytes], index: int) -> None:
    assert before[:index] == after[:index]
    assert not set(before[index:]) & set(after[index:])


@given(prompts(), st.data())
def test_one_token_changes_its_key_and_every_later_one(prompt, data: st.DataObject) -> None:
    tokens, chunk, extras = prompt
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= 1 << data.draw(st.integers(0, 31))
    root = root_key(IDENTITY)
    before, after = chain_keys(root, tokens, chunk, extras), chain_keys(root, changed, chunk, extras)
    assert len(before) == len(tokens) // chunk
    assert_changes_from(before, after, at // chunk)


@given(prompts(), st.data())
def test_one_extra_changes_its_key_and_every_later_one(prompt, data: st.DataObject) -> None:
    tokens, chunk, extras = prompt
    num_chunks = len(tokens) // chunk
    at = data.draw(st.integers(0, num_chunks - 1))
    kind = data.draw(st.sampled_from(["add", "offset", "data", "kind"]))
    old = Extra(Part.LORA, b"adapter", 0)
    new = {
        "add": [old, old],
        "offset": [old._replace(offset=1)],
        "data": [old._replace(data=b"adapter2")],
        "kind": [old._replace(kind=Part.MULTIMODAL)],
    }[kind]
    root, rest = root_key(IDENTITY), extras.get(at, [])
    before = chain_keys(root, tokens, chunk, extras | {at: [*rest, old]})
    after = chain_keys(root, tokens, chunk, extras | {at: rest + new})
    assert_changes_from(before, after, at)


@given(prompts())
def test_root_parts_change_every_key(prompt) -> None:
    tokens, chunk, extras = prompt
    roots = [
        root_key(IDENTITY),
        root_key(IDENTITY[::-1]),
        root_key(IDENTITY, epoch=b"2"),
        root_key(IDENTITY, tenant=b"2"),
        root_key(IDENTITY, epoch=b"2", tenant=b"2"),
    ]
    keys = [key for root in roots for key in chain_keys(root, tokens, chunk, extras)]
    assert len(set(keys)) == len(keys) == len(roots) * (len(tokens) // chunk)
    assert {len(key) for key in keys} == {KEY_NBYTES}


# -- incremental


@given(prompts(), st.data())
def test_incremental_equals_from_scratch(prompt, data: st.DataObject) -> None:
    tokens, chunk, extras = prompt
    root = root_key(IDENTITY)
    whole = chain_keys(root, tokens, chunk, extras)
    start = data.draw(st.integers(0, len(whole)))
    parent = whole[start - 1] if start else root
    assert chain_keys(parent, tokens, chunk, extras, start=start) == whole[start:]


@given(prompts(), st.lists(tokens_st, max_size=40))
def test_more_tokens_keep_the_keys(prompt, more: list[int]) -> None:
    tokens, chunk, extras = prompt
    root = root_key(IDENTITY)
    whole = chain_keys(root, tokens, chunk, extras)
    assert chain_keys(root, tokens + more, chunk, extras)[: len(whole)] == whole


def test_a_rest_shorter_than_a_chunk_has_no_key() -> None:
    root = root_key(IDENTITY)
    assert chain_keys(root, [], 16) == []
    assert chain_keys(root, list(range(15)), 16) == []
    assert len(chain_keys(root, list(range(16)), 16)) == 1
    assert len(chain_keys(root, list(range(31)), 16)) == 1


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_tokens_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([1, token])


def test_anchors_are_the_first_of_their_span() -> None:
    assert [anchor_index(i) for i in (0, 1, 63, 64, 65, 127, 128)] == [0, 0, 0, 64, 64, 64, 128]
    assert ANCHOR_SPAN == 64

"""What is called by its content: golden digests, vLLM's own requests with items, and names that are trusted no more."""

from __future__ import annotations

import hashlib
import struct
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.request import Request

from scheduler_bench import CHUNK_TOKENS, DEADLINE_S, Bench, small_world
from tierkv.keys import Extra, Part, chain_keys, root_key
from tierkv_connector import extras as module
from tierkv_connector.compat import is_plain_prompt
from tierkv_connector.digests import UnknownContentError, content_digest, place_digest, rows_digest, zero_rows
from tierkv_connector.extras import Content, Contents
from tierkv_connector.model import item_settings
from tierkv_connector.requests import RequestState

CHUNK = 8
ROOT = root_key(bytes(32))
TOKENS = list(range(100, 140))

# Written down once. They are part of the format: if one changes, every stored prompt with an item turns cold.
GOLDEN_CONTENT = "20464f734e75947ed669068755807be9ab982103b5653ea8a189f6b66bb570be"
GOLDEN_PLACE = "c0ecdfe11bec6ccca23db91a5167fbc23e9703594d331246a090ab178f8ce709"
GOLDEN_ROWS = "421057ffc6f1c0eaa60a1b957d2ba6da4f9c74338145a242ed1574430b8dd255"


def pixels(value: float = 1.0) -> dict[str, Any]:
    return {
        "pixel_values": torch.full((2, 3), value),
        "grid": torch.tensor([1, 4, 6]),
        "half": torch.ones(4, dtype=torch.bfloat16),
        "mask": np.array([True, False]),
        "more": [None, 3, -2.5, "text", b"bytes", {"b": False, "a": ()}],
    }


def item(value: float = 1.0) -> MultiModalKwargsItem:
    field = MultiModalSharedField(batch_size=1)
    elems = {name: MultiModalFieldElem(data=data, field=field) for name, data in pixels(value).items()}
    return MultiModalKwargsItem(elems)


def feature(name: str, data: Any, offset: int, length: int, modality: str = "image", **more: Any) -> Any:
    place = PlaceholderRange(offset=offset, length=length, **more)
    return MultiModalFeatureSpec(data=data, modality=modality, identifier=name, mm_position=place, mm_hash=name)


def request(tokens: list[int] | None = TOKENS, features: Any = None, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=4)
    return Request(
        "a", prompt_token_ids=tokens, sampling_params=sampling, pooling_params=None, mm_features=features, **more
    )


def keys_of(contents: Contents, given: Request) -> list[bytes]:
    content = contents.of(given, ROOT)
    return content.keys if content is not None else chain_keys(ROOT, given.prompt_token_ids or [], CHUNK)


@pytest.fixture
def contents() -> Any:
    contents = Contents(CHUNK, {})
    yield contents
    contents.close()


# -- the format


def test_golden_digests() -> None:
    content = content_digest("image", pixels(), {"video_pruning_rate": 0.5})
    assert content.hex() == GOLDEN_CONTENT
    assert place_digest(content, [5, 5, 6], torch.tensor([True, True, False])).hex() == GOLDEN_PLACE
    assert rows_digest(torch.arange(6, dtype=torch.bfloat16).view(2, 3)).hex() == GOLDEN_ROWS


def spelt(value: Any) -> bytes:
    """The table of docs/formats.md, written again."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        shape = list(value.shape)
        data = value.contiguous().view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
        return b"t" + spelt([str(value.dtype)[6:], shape]) + spelt(data.tobytes())
    if isinstance(value, dict):
        inner = b"".join(spelt(name) + spelt(value[name]) for name in sorted(value))
        return b"m" + struct.pack("<Q", len(value)) + inner
    if isinstance(value, list | tuple):
        return b"l" + struct.pack("<Q", len(value)) + b"".join(map(spelt, value))
    if value is None or isinstance(value, bool):
        return b"n" if value is None else b"b" + bytes([value])
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    kind = {str: b"s", bytes: b"y", int: b"i"}[type(value)]
    data = value if isinstance(value, bytes) else str(value).encode()
    return kind + struct.pack("<Q", len(data)) + data


def test_digests_equal_a_second_implementation() -> None:
    expected = hashlib.sha256(b"tierkv-content-1:" + spelt(["image", pixels(), {"a": [1]}])).digest()
    assert content_digest("image", pixels(), {"a": [1]}) == expected
    mask, tokens = torch.tensor([True, False]), struct.pack("<2I", 7, 2**31)
    place = hashlib.sha256(b"tierkv-place-1:" + spelt([expected, tokens, mask])).digest()
    assert place_digest(expected, [7, 2**31], mask) == place
    given = torch.arange(12, dtype=torch.float16).view(6, 2)[::2]
    rows = hashlib.sha256(b"tierkv-rows-1:float16:2:" + given.contiguous().numpy().tobytes()).digest()
    assert rows_digest(given) == rows


def test_every_part_of_an_item_counts() -> None:
    one = pixels()
    seen = {content_digest("image", one, {}), content_digest("video", one, {}), content_digest("image", one, {"a": 1})}
    changes: list[dict[str, Any]] = [
        {"pixel_values": torch.full((3, 2), 1.0)},
        {"pixel_values": torch.full((2, 3), 1.0, dtype=torch.float64)},
        {"pixel_values": torch.tensor([[1.0, 1, 1], [1, 1, 1.5]])},
        {"pixel_values": [torch.full((3,), 1.0)] * 2},
        {"grid": torch.tensor([1, 6, 4])},
        {"mask": np.array([1, 0], dtype=np.uint8)},
        {"more": [None, 3, -2.5, "text", "bytes", {"b": False, "a": ()}]},
        {"more": [None, 3, -2.5, "text", b"bytes", {"b": 0, "a": ()}]},
        {"more": [None, 3, -2.5, "text", b"bytes", {"b": False}, ()]},
        {"another": None},
    ]
    for change in changes:
        seen.add(content_digest("image", one | change, {}))
    assert len(seen) == 3 + len(changes)
    assert content_digest("image", dict(reversed(one.items())), {}) in seen, "but not their order"
    strided = torch.full((2, 6), 1.0)[:, ::2]
    assert content_digest("image", one | {"pixel_values": strided}, {}) in seen, "nor how they lie in memory"


def test_what_has_no_spelling_is_unknown() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (object(), {1: 2}, endless, np.array(["text"]), torch.empty(2, device="meta")):
        with pytest.raises(UnknownContentError):
            content_digest("image", {"field": value}, {})


def test_zero_rows_are_counted_by_their_bits() -> None:
    rows = torch.zeros(4, 3, dtype=torch.float16)
    rows[1, 2], rows[2, 0] = 1e-7, -0.0
    assert zero_rows(rows) == 2


# -- which chunks an item is in


def test_an_item_counts_in_every_chunk_that_has_some_of_it(contents: Contents) -> None:
    place = {"is_embed": torch.tensor([True] * 11 + [False])}
    given = request(features=[feature("x", item(), 6, 12, **place), feature("y", item(2.0), 18, 5)])
    first = place_digest(content_digest("image", pixels(), {}), TOKENS[6:18], place["is_embed"])
    second = place_digest(content_digest("image", pixels(2.0), {}), TOKENS[18:23], None)
    expected = {
        0: [Extra(Part.MULTIMODAL, first, 6)],
        1: [Extra(Part.MULTIMODAL, first, -2)],
        2: [Extra(Part.MULTIMODAL, first, -10), Extra(Part.MULTIMODAL, second, 2)],
    }
    content = contents.of(given, ROOT)
    assert content is not None and content.extras == expected
    assert content.keys == chain_keys(ROOT, TOKENS, CHUNK, expected)


def test_keys_are_those_of_the_text_up_to_the_item(contents: Contents) -> None:
    text = keys_of(contents, request())
    with_item = keys_of(contents, request(features=[feature("x", item(), 16, 3)]))
    assert with_item[:2] == text[:2] and not set(with_item[2:]) & set(text)


def test_an_item_that_ends_at_a_chunk_is_not_in_the_next(contents: Contents) -> None:
    content = contents.of(request(features=[feature("x", item(), 8, 8), feature("y", item(), 24, 1)]), ROOT)
    assert content is not None and set(content.extras or {}) == {1, 3}


def test_kind_place_mask_and_tokens_count(contents: Contents) -> None:
    mask = torch.tensor([True, False, True])
    given = [
        request(features=[feature("a", item(), 10, 3)]),
        request(features=[feature("a", item(), 11, 3)]),
        request(features=[feature("a", item(), 10, 4)]),
        request(features=[feature("a", item(), 10, 3, is_embed=mask)]),
        request(features=[feature("b", item(2.0), 10, 3)]),
        request(features=[feature("c", item(), 10, 3, modality="video")]),
    ]
    lasts = {keys_of(contents, each)[-1] for each in given}
    assert len(lasts) == len(given)
    settings = Contents(CHUNK, {"video_pruning_rate": 0.5})
    assert keys_of(settings, given[0])[-1] not in lasts
    tail = [*TOKENS[:16], 7, *TOKENS[17:]]  # of the item, in a later chunk than its beginning
    one, other = (keys_of(contents, request(t, [feature("a", item(), 10, 9)])) for t in (TOKENS, tail))
    assert one[0] == other[0] and one[1] != other[1]


def test_a_name_of_vllm_is_no_part_of_a_key(contents: Contents) -> None:
    one, other = (keys_of(contents, request(features=[feature(n, item(), 10, 3)])) for n in ("x", "y"))
    assert one == other


# -- names


def test_a_name_with_two_contents_is_trusted_no_more(contents: Contents) -> None:
    first = contents.of(request(features=[feature("mine", item(1.0), 10, 3)]), ROOT)
    again = contents.of(request(features=[feature("mine", item(1.0), 12, 3)]), ROOT)
    assert first is not None and again is not None and first.known and again.known
    state = RequestState(request(), ROOT, first.keys, bytes(16), 0, True)
    state.content = first
    assert state.store == "prompt" and state.tiers
    second = contents.of(request(features=[feature("mine", item(2.0), 10, 3), feature("new", item(3.0), 20, 3)]), ROOT)
    assert second is not None and not second.known and not second.keys
    assert not first.known and state.store == "none" and not state.tiers, "what is under way stops being stored"
    later = contents.of(request(features=[feature("mine", item(1.0), 10, 3)]), ROOT)
    other = contents.of(request(features=[feature("new", item(3.0), 10, 3)]), ROOT)
    assert later is not None and not later.known
    assert other is not None and other.known


def test_a_name_whose_content_was_not_seen_is_not_trusted(contents: Contents) -> None:
    unseen = contents.of(request(features=[feature("x", None, 10, 3)]), ROOT)
    seen = contents.of(request(features=[feature("x", item(), 10, 3)]), ROOT)
    assert unseen is not None and unseen.failed and seen is not None and not seen.known


def test_items_that_may_be_added_later_end_all_trust(contents: Contents) -> None:
    kept = contents.of(request(features=[feature("x", item(), 10, 3)]), ROOT)
    streamed = request(resumable=True)
    assert not is_plain_prompt(streamed) and contents.of(streamed, None) is None
    assert kept is not None and not kept.known
    assert contents.of(request(), ROOT) is None, "text goes on"


def test_the_same_object_is_hashed_once(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = module.content_digest
    monkeypatch.setattr(module, "content_digest", lambda kind, *rest: hashed.append(kind) or real(kind, *rest))
    data = item()
    for offset in (1, 9, 17):
        contents.of(request(features=[feature("x", data, offset, 3), feature("x", data, offset + 4, 3)]), ROOT)
    assert len(hashed) == 1
    contents.of(request(features=[feature("x", item(), 1, 3)]), ROOT)
    assert len(hashed) == 2


def test_names_are_forgotten_in_the_order_of_their_use(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    for name in ("a", "b", "a", "c"):
        contents.of(request(features=[feature(name, item(), 1, 3)]), ROOT)
    assert list(contents._names) == ["a", "c"]


# -- embeddings


def rows(num: int = 20, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_embeddings_are_named_chunk_by_chunk(contents: Contents) -> None:
    given = rows()
    content = contents.of(request(None, prompt_embeds=given), ROOT)
    parts = [(0, given[:8]), (1, given[8:16]), (2, given[16:])]
    expected = {i: [Extra(Part.PROMPT_EMBEDS, rows_digest(part))] for i, part in parts}
    assert content is not None and content.extras == expected
    assert content.keys == chain_keys(ROOT, [0] * 20, CHUNK, expected)
    changed = given.clone()
    changed[9, 3] += 1e-6
    one, other = (
        keys_of(contents, request(None, prompt_embeds=given)),
        keys_of(contents, request(None, prompt_embeds=changed)),
    )
    assert one[0] == other[0] and one[1] != other[1]


def test_embeddings_among_tokens(contents: Contents) -> None:
    given, mask = rows(), [True] * 10 + [False] * 8 + [True] * 2
    given[mask] = 0
    content = contents.of(request(TOKENS[:20], prompt_embeds=given, prompt_is_token_ids=mask), ROOT)
    expected = {
        1: [Extra(Part.PROMPT_EMBEDS, rows_digest(given[10:16]), 2)],
        2: [Extra(Part.PROMPT_EMBEDS, rows_digest(given[16:18]))],
    }
    assert content is not None and content.extras == expected
    tokens = [*TOKENS[:10], *[0] * 8, *TOKENS[18:20]]
    assert content.keys == chain_keys(ROOT, tokens, CHUNK, expected)
    assert content.tokens([*[99] * 20, 7, 8, 9, 10], 16, 24) == [0, 0, *TOKENS[18:20], 7, 8, 9, 10]
    assert content.keys[:1] == chain_keys(ROOT, TOKENS[:8], CHUNK)


def test_all_embeddings_are_the_same_with_a_mask_and_without(contents: Contents) -> None:
    masked = request([5] * 20, prompt_embeds=rows(), prompt_is_token_ids=[False] * 20)
    assert keys_of(contents, masked) == keys_of(contents, request(None, prompt_embeds=rows())) != []


def test_embeddings_of_two_kinds_are_not_trusted(contents: Contents) -> None:
    """vLLM tells them apart by their bytes, and these may be equal."""
    first = contents.of(request(None, prompt_embeds=rows()), ROOT)
    assert first is not None and first.known
    second = contents.of(request(None, prompt_embeds=rows(dtype=torch.bfloat16)), ROOT)
    assert second is not None and not second.known and not first.known


def test_zeros_among_embeddings_are_not_trusted_beside_tokens(contents: Contents) -> None:
    given, mask = rows(), [True] * 10 + [False] * 10
    given[:10] = 0
    mixed = contents.of(request(TOKENS[:20], prompt_embeds=given, prompt_is_token_ids=mask), ROOT)
    pure = contents.of(request(None, prompt_embeds=rows()), ROOT)
    assert mixed is not None and mixed.known and pure is not None and pure.known
    zeros = contents.of(request(None, prompt_embeds=given), ROOT)
    assert zeros is not None and not zeros.known and not mixed.known and pure.known


def test_tokens_with_rows_of_their_own_end_all_trust(contents: Contents) -> None:
    """vLLM computes from the tokens, and remembers it under the rows too."""
    pure = contents.of(request(None, prompt_embeds=rows()), ROOT)
    assert pure is not None and pure.known
    odd = contents.of(request(TOKENS[:20], prompt_embeds=rows(), prompt_is_token_ids=[True] * 10 + [False] * 10), ROOT)
    assert odd is not None and not odd.known and not pure.known


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_embeds": rows(40)},
        {"prompt_embeds": rows(40), "prompt_is_token_ids": [True] * 39},
        {"prompt_is_token_ids": [True] * 40},
    ],
)
def test_what_does_not_fit_together_is_passed_by(contents: Contents, more: dict[str, Any]) -> None:
    content = contents.of(request(TOKENS, **more), ROOT)
    assert content is not None and content.failed


# -- time


def settle(content: Content) -> None:
    deadline = time.monotonic() + 20
    while content.awaited and time.monotonic() < deadline:
        time.sleep(0.002)


def test_large_contents_are_hashed_on_a_thread(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_NBYTES", 0)
    content = contents.of(request(features=[feature("x", item(), 10, 3)]), ROOT)
    assert content is not None
    settle(content)
    assert contents.wait(20) and content.known
    other = Contents(CHUNK, {})
    assert other.of(request(features=[feature("x", item(), 10, 3)]), None).known  # type: ignore[union-attr]
    assert other._thread is None, "without a thread where the request cannot wait"
    monkeypatch.undo()
    assert content.keys == keys_of(other, request(features=[feature("x", item(), 10, 3)])) != []


def test_more_than_the_queue_takes_is_passed_by(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_NBYTES", 0)
    monkeypatch.setattr(module, "QUEUE_NBYTES", 10)
    content = contents.of(request(features=[feature("x", item(), 10, 3)]), ROOT)
    assert content is not None and content.failed and contents._thread is None


def test_what_came_too_late_does_not_count(contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_NBYTES", 0)
    monkeypatch.setattr(contents, "_hash_later", lambda content: True)
    given = request(features=[feature("x", item(), 10, 3)])
    content = contents.of(given, ROOT)
    assert content is not None and content.awaited
    content.give_up()
    contents._hash(content)
    assert not content.known and not content.awaited
    monkeypatch.undo()
    again = contents.of(given, ROOT)
    assert again is not None and not again.known


# -- the scheduler half


class Slow(Contents):
    """Contents whose hashing waits for the test."""

    def __init__(self) -> None:
        super().__init__(CHUNK_TOKENS, {})
        self.queue: list[Content] = []

    def _hash_later(self, content: Content) -> bool:
        self.queue.append(content)
        return True

    def go_on(self) -> None:
        while self.queue:
            self._hash(self.queue.pop())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "INLINE_NBYTES", 0)
    with small_world():
        bench = Bench(0)
        bench.sched.contents = Slow()
        yield bench
        bench.close()


def arrives(bench: Bench, value: float, params: object = None) -> Any:
    """A request with an image comes to the scheduler half: three chunks and a rest."""
    given: Any = bench.new_request(list(range(3 * CHUNK_TOKENS + 1)))
    given.mm_features = [feature(f"name of {value}", item(value), 5, 3)]
    given.kv_transfer_params = params
    bench.sched.on_new_request(given)
    return given


def put_in_host(bench: Bench, given: Any) -> None:
    """What a step that computed the prompt would leave: its chunks in the host pool."""
    state = bench.sched.requests[given.request_id]
    for i in range(3):
        entry = bench.sched.index.reserve(state.keys[i], state.parent(i), i, CHUNK_TOKENS)
        assert entry is not None
        bench.sched.index.filled(entry, "host")


def test_a_request_waits_until_its_image_is_hashed(bench: Bench) -> None:
    first = arrives(bench, 1.0)
    bench.sched.contents.go_on()
    bench.step()
    put_in_host(bench, first)
    second, other = arrives(bench, 1.0), arrives(bench, 2.0)
    ask = bench.sched.get_num_new_matched_tokens
    for _ in range(3):
        assert ask(second, 0) == (None, False)
        bench.step()
    bench.sched.contents.go_on()
    assert ask(second, 0) == (None, False), "keys come between steps"
    bench.step()
    assert ask(second, 0)[0] == 3 * CHUNK_TOKENS
    keys = [set(bench.sched.requests[each.request_id].keys) for each in (second, other)]
    assert keys[0].isdisjoint(keys[1]) and len(keys[1]) == 3


def test_the_wait_for_a_hash_is_bounded(bench: Bench) -> None:
    given = arrives(bench, 1.0, {"tierkv": {"session": "s"}})
    state, ask = bench.sched.requests[given.request_id], bench.sched.get_num_new_matched_tokens
    bench.now += DEADLINE_S - 0.01
    bench.step()
    assert ask(given, 0) == (None, False)
    bench.now += 0.02
    assert ask(given, 0) == (0, False)
    bench.step()
    assert state.content is not None and state.content.failed and ask(given, 0) == (0, False)
    assert state.store == "none" and "request" in state.outcome.hints.ignored
    bench.sched.contents.go_on()
    bench.step()
    assert not state.keys and not bench.sched._unhashed
    later = arrives(bench, 1.0)
    bench.sched.contents.go_on()
    bench.step()
    assert not bench.sched.requests[later.request_id].keys, "its name stands for something that was not seen"


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_request_that_ends_or_is_reset_while_it_waits(bench: Bench, how: str) -> None:
    given = arrives(bench, 1.0)
    if how == "abort":
        bench.sched.request_finished(given)
    else:
        bench.sched.reset_cache()
    bench.sched.contents.go_on()
    bench.step()
    assert not bench.sched._unhashed
    assert how == "abort" or not bench.sched.requests[given.request_id].keys
    bench.sched.request_finished(given)
    again = arrives(bench, 1.0)
    bench.sched.contents.go_on()
    bench.step()
    assert len(bench.sched.requests[again.request_id].keys) == 3, "its name is trusted as before"


# -- settings


def config(**more: Any) -> Any:
    lora = more.pop("lora", None)
    ec = more.pop("ec", None)
    mm = SimpleNamespace(**{"mm_processor_cache_type": "lru"} | more)
    return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=mm), lora_config=lora, ec_transfer_config=ec)


def test_settings_that_are_off_are_left_out(tmp_path: Any) -> None:
    assert item_settings(SimpleNamespace(model_config=SimpleNamespace())) is None
    off = {"mm_processor_kwargs": None, "video_pruning_rate": 0.0, "video_pruning_method": "evs"}
    assert item_settings(config()) == item_settings(config(**off)) == {}
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    on = config(
        mm_processor_kwargs={"size": {"longest_edge": 3}},
        video_pruning_rate=0.5,
        mm_encoder_attn_dtype="fp8",
        mm_encoder_fp8_scale_path=str(scales),
        lora=SimpleNamespace(enable_tower_connector_lora=True),
    )
    assert set(item_settings(on) or ()) == {
        "mm_processor_kwargs",
        "video_pruning_rate",
        "video_pruning_method",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scales",
        "enable_tower_connector_lora",
    }


@pytest.mark.parametrize(
    "more",
    [{"mm_processor_cache_type": "shm"}, {"ec": object()}, {"mm_encoder_attn_dtype": "fp8"}],
)
def test_engines_whose_items_cannot_be_told_say_why(more: dict[str, Any]) -> None:
    settings = item_settings(config(**more))
    assert isinstance(settings, str) and len(settings) > 40
    content = Contents(CHUNK, settings).of(request(features=[feature("x", item(), 10, 3)]), ROOT)
    assert content is not None and content.failed

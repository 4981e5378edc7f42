"""Images, and embeddings in place of tokens, on a real engine: each is found again by its content, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import BLOCK_TOKENS, CHUNK_TOKENS, Answer, Engine, Lab, Prompts, drain
from multimodal_models import IMAGE, IMAGE_TOKENS, write_idefics

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=29)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": False, "enable_prompt_embeds": True}
SETTINGS |= {"limit_mm_per_prompt": {"image": 2}}
EVENTS: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
#: Tokens before and after an image: the first chunk is text, four have something of the image, and one is text again.
BEFORE, AFTER = CHUNK_TOKENS + 6, 120
NUM_CHUNKS = (BEFORE + IMAGE_TOKENS + AFTER) // CHUNK_TOKENS


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idefics(tmp_path_factory.mktemp("models") / "idefics")


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("contents")


@pytest.fixture(scope="module")
def engine(module_lab: Lab, idefics: Path, disk: Path) -> Engine:
    return module_lab.engine(idefics, {"disk_dir": disk}, **SETTINGS)


@pytest.fixture(scope="module")
def other(module_lab: Lab, idefics: Path, disk: Path) -> Engine:
    """Another engine of the same store, whose vLLM processes every image anew."""
    return module_lab.engine(idefics, {"disk_dir": disk}, mm_processor_cache_gb=0, **EVENTS, **SETTINGS)


@pytest.fixture(scope="module")
def plain(module_lab: Lab, idefics: Path) -> Iterator[Engine]:
    """An engine without connector."""
    engine = module_lab.engine(idefics, **SETTINGS)
    yield engine
    engine.stop()


def prompt_of(before: list[int], after: list[int], num_images: int = 1) -> list[int]:
    return [*(token % 2000 for token in before), *[IMAGE] * num_images, *(token % 2000 for token in after)]


def run(engine: Engine, prompt: list[int], max_tokens: int = 8, params: Any = None, **inputs: Any) -> Answer:
    (answer,) = engine.call("run", prompts=[prompt], max_tokens=max_tokens, params=params, inputs=inputs or None)
    return Answer(**answer)


def hits(counters: dict[str, int]) -> tuple[int, int, int]:
    return counters["host_hits"], counters["disk_hits"], counters["missed"]


def counted(engine: Engine, prompt: list[int], **inputs: Any) -> tuple[Answer, tuple[int, int, int]]:
    """Run a prompt with nothing on the GPU, and return its answer and its hits."""
    engine.reset_gpu()
    with engine.counting() as counters:
        answer = run(engine, prompt, **inputs)
    return answer, hits(counters)


def stored(engine: Engine, disk: Path, prompt: list[int], **inputs: Any) -> Answer:
    """Run a prompt on an engine that has nothing in its memory, and wait until the disk has what it stores."""
    engine.clear_host()
    answer = run(engine, prompt, **inputs)
    engine.counters()
    drain(disk)
    return answer


def expected(plain: Engine, prompt: list[int], **inputs: Any) -> tuple[Answer, Answer]:
    """Return the answers of the engine without connector: from nothing, and with all whole chunks on its GPU."""
    plain.reset_gpu()
    cold, hit = run(plain, prompt, **inputs), run(plain, prompt, **inputs)
    assert cold.cached == 0 and hit.cached % CHUNK_TOKENS == 0
    return cold, hit


#: Prompts with something besides token ids, or instead of them, and how many whole chunks each has.
KINDS: dict[str, tuple[list[int], dict[str, Any], int]] = {
    "image": (prompt_of(PROMPTS.new(BEFORE), PROMPTS.new(AFTER)), {"images": [1]}, NUM_CHUNKS),
    # The first ends and the second begins within one chunk.
    "two images": (prompt_of(PROMPTS.new(30), PROMPTS.new(25), 2), {"images": [2, 3]}, 7),
    "embeddings": ([], {"embeds": [1, 4 * CHUNK_TOKENS + 10]}, 4),
    "embeddings among tokens": (
        [token % 2000 for token in PROMPTS.new(4 * CHUNK_TOKENS + 10)],
        {"embeds": [2, 4 * CHUNK_TOKENS + 10], "is_token": [1] * 80 + [0] * 100 + [1] * (4 * CHUNK_TOKENS - 170)},
        4,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_again_in_every_tier_and_by_another_engine(
    engine: Engine, other: Engine, plain: Engine, disk: Path, kind: str
) -> None:
    prompt, inputs, num_chunks = KINDS[kind]
    cold, hit = expected(plain, prompt, **inputs)
    assert hit.cached == num_chunks * CHUNK_TOKENS
    with engine.counting() as counters:
        assert stored(engine, disk, prompt, **inputs).distance(cold) < 1e-4
    assert hits(counters) == (0, 0, num_chunks)
    for which, place in ((engine, 0), (engine, 1), (other, 1)):
        which.reset_gpu() if place == 0 else which.clear_host()
        answer, found = counted(which, prompt, **inputs)
        assert found[place] == num_chunks and found[2] == 0
        assert answer.cached == num_chunks * CHUNK_TOKENS
        assert answer.bits == hit.bits, (kind, place)


def test_what_comes_before_an_image_is_text_as_any(engine: Engine, disk: Path) -> None:
    before, after = PROMPTS.new(BEFORE), PROMPTS.new(AFTER)
    text = [token % 2000 for token in before]
    stored(engine, disk, text)
    engine.clear_host()
    assert counted(engine, prompt_of(before, after), images=[4])[1] == (0, 1, NUM_CHUNKS - 1)
    engine.clear_host()
    mixed: dict[str, Any] = {"embeds": [3, BEFORE + 200], "is_token": [1] * BEFORE + [0] * 200}
    assert counted(engine, [*text, *[0] * 200], **mixed)[1] == (0, 1, 3)


def test_another_image_or_another_place_is_another_prompt(engine: Engine, plain: Engine, disk: Path) -> None:
    before, after = PROMPTS.new(BEFORE), PROMPTS.new(AFTER)
    stored(engine, disk, prompt_of(before, after), images=[5])
    mean = {"image_mean": [0.4, 0.5, 0.5]}
    for prompt, inputs, num_found in (
        (prompt_of(before, after), {"images": [6]}, 1),
        (prompt_of(before, after), {"images": [5], "processor": mean}, 1),
        (prompt_of([*before, 7, 7, 7], after), {"images": [5]}, 1),
        (prompt_of(before[:-6], after), {"images": [5]}, 1),
        (prompt_of(before, after[:20] + PROMPTS.new(100)), {"images": [5]}, 4),  # a hit that ends within the image
        (prompt_of(before, after), {"images": [5]}, NUM_CHUNKS),
    ):
        engine.clear_host()
        answer, found = counted(engine, prompt, **inputs)
        assert found[1] == num_found, (inputs, found)
        assert answer.distance(expected(plain, prompt, **inputs)[0]) < 1e-4


def test_other_embeddings_are_another_prompt(engine: Engine, plain: Engine, disk: Path) -> None:
    num_rows = 4 * CHUNK_TOKENS + 10
    stored(engine, disk, [], embeds=[5, num_rows])
    mask = [0] * CHUNK_TOKENS + [1] * (num_rows - CHUNK_TOKENS)
    for prompt, inputs, num_found in (
        ([], {"embeds": [6, num_rows]}, 0),
        ([], {"embeds": [5, 3 * CHUNK_TOKENS + 1]}, 3),
        ([0] * num_rows, {"embeds": [5, num_rows], "is_token": mask}, 1),
        ([0] * num_rows, {"images": []}, 0),  # the token ids that vLLM shows of embeddings
    ):
        engine.clear_host()
        answer, found = counted(engine, prompt, **inputs)
        assert found[1] == num_found, inputs
        assert answer.distance(expected(plain, prompt, **inputs)[0]) < 1e-4


def test_generated_tokens_after_an_image_are_found_too(engine: Engine, plain: Engine, disk: Path) -> None:
    """The chunk in which the prompt ends with an image, and the generated tokens begin."""
    prompt = prompt_of(PROMPTS.new(100), [])
    params = {"tierkv": {"store": "all"}}
    answer = stored(engine, disk, prompt, max_tokens=60, params=params, images=[7])
    longer = [*prompt, *answer.tokens[:30]]
    for seed, num_found in ((7, 5), (8, 1)):
        engine.clear_host()
        answer, found = counted(engine, longer, images=[seed])
        assert found[1] == num_found
        assert answer.distance(expected(plain, longer, images=[seed])[0]) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_events_name_what_is_in_a_block_as_those_of_vllm_do(other: Engine, kind: str) -> None:
    prompt, inputs, num_chunks = KINDS[kind]
    other.clear_host()
    other.call("events")
    run(other, prompt, **inputs)
    other.counters()
    said: dict[str, dict[str, Any]] = {"CPU": {}, "GPU": {}}
    for event in other.call("events"):
        if event["type"] == "BlockStored":
            hashes = event["block_hashes"]
            said[event["medium"]] |= zip(hashes, event.get("extra_keys") or [None] * len(hashes), strict=True)
    assert len(said["CPU"]) == num_chunks * CHUNK_TOKENS // BLOCK_TOKENS
    assert said["CPU"].items() <= said["GPU"].items()
    assert any(said["CPU"].values())


def test_a_name_that_a_user_gives_says_nothing_to_another_engine(engine: Engine, other: Engine, disk: Path) -> None:
    """One name with two images: vLLM takes the second for the first, and nobody else may."""
    prompt = prompt_of(PROMPTS.new(BEFORE), PROMPTS.new(AFTER))
    with other.counting() as counters:
        first = stored(other, disk, prompt, images=[9], uuids=["mine"])
    assert counters["spilled"] == NUM_CHUNKS
    engine.clear_host()
    answer, found = counted(engine, prompt, images=[9])
    assert found[1] == NUM_CHUNKS and answer.tokens == first.tokens, "the content is what is looked for"
    with other.counting() as counters:
        again = run(other, prompt, images=[10], uuids=["mine"])
        longer = run(other, prompt_of(prompt[:BEFORE], PROMPTS.new(3 * AFTER)), images=[10], uuids=["mine"])
    assert again.cached >= NUM_CHUNKS * CHUNK_TOKENS and longer.cached, "vLLM has been misled"
    assert hits(counters) == (0, 0, 0) and counters["spilled"] == 0
    engine.clear_host()
    answer, found = counted(engine, prompt, images=[10])
    assert found == (0, 1, NUM_CHUNKS - 1) and answer.tokens != again.tokens


def test_a_row_of_zeros_is_no_token(engine: Engine, disk: Path) -> None:
    """vLLM tells neither from the other; its engines have seen none in the tests before this."""
    num_rows = 2 * CHUNK_TOKENS + 10
    tokens = [token % 2000 for token in PROMPTS.new(num_rows)]
    mixed: dict[str, Any] = {"embeds": [8, num_rows], "is_token": [1] * 70 + [0] * (num_rows - 70)}
    assert counted(engine, tokens, **mixed)[1][2] == 2
    assert counted(engine, [], embeds=[9, num_rows], zeros=[3])[1] == (0, 0, 0)
    assert counted(engine, tokens, **mixed)[1] == (0, 0, 0), "it may be on the GPU under what it is not"
    assert counted(engine, [], embeds=[8, num_rows])[1][2] == 2, "those without tokens go on"


def test_without_names_of_contents_answers_are_wrong(engine: Engine, plain: Engine) -> None:
    """The negative control of this module: were every image the same to it, an answer would be another's."""
    before, after = PROMPTS.new(BEFORE), PROMPTS.new(AFTER)
    prompt = prompt_of(before, after)
    cold, _ = expected(plain, prompt, images=[12])
    engine.call("blind")
    counted(engine, prompt, images=[11])
    answer, found = counted(engine, prompt, images=[12])
    assert found[0] == NUM_CHUNKS
    assert answer.distance(cold) > 1e-2

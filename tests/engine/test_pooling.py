"""Embeddings: behind a loaded prefix they are those of a whole computation; what cannot be so is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from engine_process import CHUNK_TOKENS, VOCAB, Engine, Lab, Prompts, drain
from seeded_model import write_seeded_llama

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=83)
NUM_CHUNKS = 4


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model with a tokenizer, which vLLM's pooling wants at hand and which nobody asks here."""
    path = write_seeded_llama(tmp_path_factory.mktemp("models") / "embedding")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(path)
    return path


#: Without chunked prefill, which vLLM then has not, a step has to take a whole prompt.
POOLING: dict[str, Any] = {"runner": "pooling", "skip_tokenizer_init": False, "max_model_len": 1024}


def distance(one: list[str], other: list[str]) -> float:
    return max(abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(one, other, strict=True))


def test_an_embedding_behind_a_loaded_prefix_is_the_same(lab: Lab, embedding_model: Path) -> None:
    """And what generation stored is loaded for it: it is the same model."""
    disk = lab.disk()
    generating = lab.engine(embedding_model, {"disk_dir": disk})
    plain, pooling = (lab.engine(embedding_model, connector, **POOLING) for connector in (None, {"disk_dir": disk}))
    prompt, other = (PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20) for _ in range(2))
    generating.one(prompt)
    generating.counters()
    drain(disk)
    cold, hit = plain.call("embed", prompts=[prompt, prompt])
    with pooling.counting() as counters:
        (from_disk,) = pooling.call("embed", prompts=[prompt])
    assert counters["disk_hits"] == NUM_CHUNKS
    assert from_disk == hit and distance(from_disk, cold) < 1e-4
    pooling.reset_gpu()
    with pooling.counting() as counters:
        (from_host,) = pooling.call("embed", prompts=[prompt])
    assert counters["host_hits"] == NUM_CHUNKS and from_host == hit
    pooling.reset_gpu()
    with pooling.counting() as counters:
        (wrong,) = pooling.call("embed", prompts=[other])
    assert counters["spilled"] == counters["stored"] == NUM_CHUNKS
    assert distance(wrong, cold) > 1e-2, "another prompt's embedding is far away"


def flipped(engine: Engine, prompt: list[int]) -> list[str]:
    engine.reset_gpu()
    engine.call("flip", prompt=prompt, chunk=0, word=100, bit=24)
    (embedding,) = engine.call("embed", prompts=[prompt])
    return list(embedding)


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_only_what_vllm_itself_would_cache_is_loaded(lab: Lab, embedding_model: Path, pooling_type: str) -> None:
    """The mean over a prompt wants the outputs of all its tokens: a prefix that is loaded has none."""
    engine = lab.engine(embedding_model, {"server": "off"}, pooler_config={"seq_pooling_type": pooling_type}, **POOLING)
    prompt = PROMPTS.new(NUM_CHUNKS * CHUNK_TOKENS + 20)
    first, again = engine.call("embed", prompts=[prompt, prompt])
    assert distance(first, again) < 1e-4
    with engine.counting() as counters:
        engine.reset_gpu()
        (third,) = engine.call("embed", prompts=[prompt])
    assert counters["host_hits"] == (NUM_CHUNKS if pooling_type == "LAST" else 0)
    assert distance(first, third) < 1e-4
    if pooling_type == "LAST":
        assert not distance(flipped(engine, prompt), first) < 1e-4, "what is loaded decides the embedding"
    else:
        assert engine.call("stat")["num_entries"] == 0

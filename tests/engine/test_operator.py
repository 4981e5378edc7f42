"""What an operator is told and does from the command line, beside a real engine with a real model that serves."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_tools import as_json, tierkv
from demo_model import ensure_demo_model
from engine_process import CHUNK_TOKENS, THROUGH, Answer, Engine, Lab, Prompts, drain
from records import wait_until
from servers import RedisServer
from tierkv.config import socket_path

pytestmark = pytest.mark.engine

NUM_PROMPTS = 200 if os.environ.get("TIERKV_FULL") else 60
#: Small, so that short prompts have several.
SMALL_CHUNK = 32


@pytest.fixture(scope="module")
def disk(module_lab: Lab) -> Path:
    return module_lab.disk("operator")


@pytest.fixture(scope="module")
def real(module_lab: Lab, redis_server: RedisServer, disk: Path) -> Iterator[Engine]:
    """An engine of a real model, which makes token ids of text and chats itself."""
    engine = module_lab.engine(
        ensure_demo_model(),
        {"disk_dir": disk, "shared_url": redis_server.url, "spill": THROUGH, "chunk_tokens": SMALL_CHUNK},
        skip_tokenizer_init=False,
        max_model_len=1024,
    )
    wait_until(lambda: engine.call("connected"), 60.0)
    yield engine
    engine.stop()


class Sayings:
    """Random texts and chats, many of which begin as earlier ones do."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        document = Path(__file__).parents[2] / "scripts" / "data" / "document.txt"
        self._words = document.read_text().split()
        self._earlier = [self._words[at : at + 100] for at in range(0, 800, 200)]

    def new(self) -> tuple[str, Any]:
        """Return ("text", text) or ("chat", messages)."""
        begin = self._rng.choice(self._earlier)[:120]
        at = self._rng.randrange(len(self._words) - 100)
        words = begin[: self._rng.randrange(60, len(begin) + 1)] + self._words[at : at + self._rng.randrange(1, 60)]
        self._earlier.append(words)
        if self._rng.random() < 0.4:
            return "text", " ".join(words)
        cut = self._rng.randrange(45, len(words))
        chat = [
            {"role": "system", "content": " ".join(words[:45])},
            {"role": "user", "content": [{"type": "text", "text": " ".join(words[45:cut])}]},
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": " ".join(words[cut:])},
        ]
        return "chat", chat[self._rng.choice([0, 0, 0, 1, 3]) :]


def test_match_says_what_the_engine_then_finds(real: Engine, disk: Path, tmp_path: Path) -> None:
    """For 60 (``TIERKV_FULL=1``: 200) random prompts, as text, chats and token ids: exactly the tokens not computed."""
    sayings, seen, file = Sayings(seed=11), Counter[str](), tmp_path / "prompt"
    server = ("--server", str(socket_path(disk)))
    for _ in range(NUM_PROMPTS):
        kind, said = sayings.new()
        file.write_text(said if kind == "text" else json.dumps(said))
        form = "--chat" if kind == "chat" else "--text-file"
        told = match(form, file, *server)
        drain(disk)
        real.clear_host()
        found = real.call("say", **({"text": said} if kind == "text" else {"messages": said}))
        assert found["cached"] == told["loadable"], said
        assert told["tokens"] in (len(found["tokens"]), None), said
        real.counters()
        drain(disk)
        file.write_text(json.dumps(found["tokens"]))
        by_ids = match("--tokens-file", file, *server)
        assert by_ids["loadable"] == (len(found["tokens"]) - 1) // SMALL_CHUNK * SMALL_CHUNK, "it is stored now"
        seen[kind] += 1
        seen["hit" if found["cached"] else "miss"] += 1
    assert min(seen[name] for name in ("text", "chat", "hit", "miss")) >= NUM_PROMPTS // 10, seen


def match(*args: str | Path) -> dict[str, Any]:
    """Return a prompt's tokens, and how many of them ``tierkv match`` says an engine would load."""
    said = tierkv("match", *args, "--json")
    assert said.code in (0, 1), said
    found = json.loads(said.out)
    rows = found["namespaces"]
    return {"tokens": found["tokens"], "loadable": max((row["tokens_loadable"] for row in rows), default=0)}


# -- eviction beside a serving engine


@pytest.fixture(scope="module")
def small_disk(module_lab: Lab) -> Path:
    return module_lab.disk("evicted")


@pytest.fixture(scope="module")
def engine(module_lab: Lab, model: Path, redis_server: RedisServer, small_disk: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": small_disk, "shared_url": redis_server.url, "spill": THROUGH})


PROMPTS = Prompts(seed=12)


def hits(counters: dict[str, int]) -> tuple[int, int, int, int]:
    """Return what was hit in host, disk and shared tier, and what was missed, in chunks."""
    return counters["host_hits"], counters["disk_hits"], counters["shared_hits"], counters["missed"]


def stored(engine: Engine, disk: Path, prompt: list[int]) -> None:
    engine.one(prompt)
    engine.counters()
    drain(disk)


def evict(disk: Path, tmp_path: Path, prompt: list[int]) -> dict[str, Any]:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(prompt))
    result: dict[str, Any] = as_json("evict", "--tokens-file", file, "--server", str(socket_path(disk)))
    return result


def test_what_is_evicted_by_prompt_is_a_miss_everywhere_and_its_neighbours_hit(
    engine: Engine, small_disk: Path, tmp_path: Path, cold: Callable[..., Answer]
) -> None:
    head = PROMPTS.new(2 * CHUNK_TOKENS)
    evicted, neighbour = head + PROMPTS.new(150), head + PROMPTS.new(150)
    stranger = PROMPTS.new(280)
    for prompt in (evicted, neighbour, stranger):
        stored(engine, small_disk, prompt)
    engine.reset_gpu()
    result = evict(small_disk, tmp_path, evicted)
    assert result["removed"] == {"host": 2, "disk": 2, "shared": 2}, "what the neighbour needs stays"
    with engine.counting() as counters:
        answer = engine.one(evicted)
    assert hits(counters) == (2, 0, 0, 2)
    assert answer.distance(cold(evicted)) < 1e-4
    for prompt in (neighbour, stranger):
        engine.reset_gpu()
        with engine.counting() as counters:
            assert engine.one(prompt).distance(cold(prompt)) < 1e-4
        assert hits(counters) == (4, 0, 0, 0)
    engine.clear_host()
    with engine.counting() as counters:
        engine.one(stranger)
    assert hits(counters) == (0, 4, 0, 0)


def test_an_eviction_while_the_prompt_is_loaded_spoils_no_output(
    engine: Engine, small_disk: Path, tmp_path: Path, cold: Callable[..., Answer]
) -> None:
    prompt = PROMPTS.new(280)
    stored(engine, small_disk, prompt)
    for source in ("host", "disk"):
        expected = engine_hit(engine, prompt)
        engine.reset_gpu()
        if source == "disk":
            engine.clear_host()
        engine.add("in flight", prompt)
        engine.step_until(lambda: engine.call("states").get("in flight") == "WAITING_FOR_REMOTE_KVS")
        result = evict(small_disk, tmp_path, prompt)
        assert result["removed"] == {"host": 4, "disk": 4, "shared": 4}
        answer = engine.finish("in flight")["in flight"]
        assert answer.cached == 4 * CHUNK_TOKENS and answer.bits == expected.bits, source
        engine.reset_gpu()
        with engine.counting() as counters:
            again = engine.one(prompt)
        assert hits(counters) == (0, 0, 0, 4), "the load that was under way brought nothing back"
        assert again.distance(cold(prompt)) < 1e-4
        engine.counters()
        drain(small_disk)
    assert not any(engine.call("leases").values())


def engine_hit(engine: Engine, prompt: list[int]) -> Answer:
    """Return the prompt's answer where the host pool has all of it."""
    engine.reset_gpu()
    answer = engine.one(prompt)
    assert answer.cached == 4 * CHUNK_TOKENS
    return answer

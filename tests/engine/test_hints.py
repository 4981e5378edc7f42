"""Hints on real engines: what is stored and loaded, what is answered, in the offline API and by the OpenAI server."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_server import api_server, write_tokenizer
from engine_process import CHUNK_TOKENS, VOCAB, Answer, Engine, Lab, Prompts, admin, drain
from tierkv.keys import tenant_digest
from tierkv.sessions import session_digest

pytestmark = pytest.mark.engine

PROMPTS = Prompts(7)


@pytest.fixture(scope="module")
def engine(module_lab: Lab, model: Path) -> Engine:
    return module_lab.engine(model, {"disk_dir": module_lab.disk("hints")})


@pytest.fixture
def disk(module_lab: Lab, engine: Engine) -> Path:
    engine.ready()
    return module_lab.disk("hints")


def run(engine: Engine, prompt: list[int], max_tokens: int = 8, salt: str | None = None, **own: Any) -> Answer:
    return engine.run(prompt, max_tokens=max_tokens, salt=salt, params={"tierkv": own})[0]


def hits(answer: Answer) -> dict[str, int]:
    """Return the answered hits that are not zero."""
    assert answer.told is not None
    found = {tier: num for tier, num in answer.told["tierkv"]["hit_tokens"].items() if num}
    assert sum(found.values()) == answer.cached, "vLLM counts other hits than ours"
    return found


def on_disk(engine: Engine, disk: Path, prompt: list[int]) -> int:
    engine.counters()
    drain(disk)
    with admin(disk) as client:
        namespaces = client.ask("TKV.NS")
        (row,) = client.ask("TKV.LOCATE", {"keys": dict.fromkeys(namespaces, engine.call("keys", prompt=prompt))})
    return sum("disk" in chunk["tiers"] for chunk in row["chunks"])


def test_a_request_without_hints_is_answered_as_ever(engine: Engine) -> None:
    assert engine.one(PROMPTS.new(200)).told is None
    assert engine.run(PROMPTS.new(70), params={"other": 1})[0].told is None


def test_store_none_stores_nothing(engine: Engine, disk: Path) -> None:
    prompt = PROMPTS.new(200)
    with engine.counting() as counters:
        answer = run(engine, prompt, store="none")
    assert counters["spilled"] == counters["stored"] == 0
    assert engine.call("in_host", prompt=prompt) == [None] * 3 and on_disk(engine, disk, prompt) == 0
    assert answer.told == {
        "tierkv": {
            "hit_tokens": {"gpu": 0, "host": 0, "disk": 0, "shared": 0},
            "prompt_tokens": 200,
            "stored_tokens": 0,
        }
    }


def test_the_answer_says_where_tokens_came_from(engine: Engine, disk: Path) -> None:
    prompt = PROMPTS.new(200)
    size = 3 * CHUNK_TOKENS
    cold = run(engine, prompt)
    assert cold.told is not None and cold.told["tierkv"]["stored_tokens"] == size and hits(cold) == {}
    assert hits(run(engine, prompt)) == {"gpu": size}
    engine.reset_gpu()
    warm = run(engine, prompt)
    assert hits(warm) == {"host": size}
    assert on_disk(engine, disk, prompt) == 3
    engine.clear_host()
    assert hits(run(engine, prompt)) == {"disk": size}
    assert warm.tokens == cold.tokens


def test_a_request_loads_from_the_tiers_that_it_may(engine: Engine, disk: Path) -> None:
    prompt = PROMPTS.new(200)
    run(engine, prompt)
    assert on_disk(engine, disk, prompt) == 3
    for load in (["host"], [], "none", ["shared"]):
        engine.clear_host()
        with engine.counting() as counters:
            assert hits(run(engine, prompt, load=load, store="none")) == {}
        assert counters["disk_hits"] == 0, load
    engine.clear_host()
    assert hits(run(engine, prompt, load=["host", "disk"])) == {"disk": 3 * CHUNK_TOKENS}
    engine.reset_gpu()
    assert hits(run(engine, prompt, load=["host"])) == {"host": 3 * CHUNK_TOKENS}


@pytest.mark.parametrize("max_tokens", [2 * CHUNK_TOKENS + 1])
def test_store_all_stores_the_answer_and_it_is_the_same(engine: Engine, disk: Path, max_tokens: int) -> None:
    prompt = PROMPTS.new(100)
    first = run(engine, prompt, max_tokens, store="all")
    assert first.told is not None and first.told["tierkv"]["stored_tokens"] == 3 * CHUNK_TOKENS
    follow_up = prompt + first.tokens + PROMPTS.new(20)
    on_gpu = run(engine, follow_up)
    assert hits(on_gpu)["gpu"] >= 3 * CHUNK_TOKENS
    assert engine.call("in_host", prompt=follow_up)[:3] == engine.call("on_gpu", prompt=follow_up)[:3]
    assert on_disk(engine, disk, (prompt + first.tokens)[: 3 * CHUNK_TOKENS]) == 3
    engine.clear_host()
    from_disk = run(engine, follow_up)
    assert hits(from_disk)["disk"] >= 3 * CHUNK_TOKENS
    assert from_disk.distance(on_gpu) < 1e-4


def test_of_drafts_only_what_was_accepted_is_stored(lab: Lab, model: Path) -> None:
    """A quarter of all tokens occur in the prompt, so that drafts are made; what is stored is what the GPU has."""
    engine = lab.engine(
        model,
        {"server": "off"},
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 1,
            "prompt_lookup_min": 1,
        },
    )
    prompt = [token for _ in range(2) for token in range(0, VOCAB, 4)][:1000]
    first = run(engine, prompt, 2 * CHUNK_TOKENS + 1, store="all")
    known = (prompt + first.tokens)[: (len(prompt) + len(first.tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS]
    assert len(known) // CHUNK_TOKENS == len(prompt) // CHUNK_TOKENS + 2
    stored = engine.call("in_host", prompt=known)
    assert None not in stored, "a chunk of the answer was not stored"
    follow_up = known + PROMPTS.new(20)
    assert hits(run(engine, follow_up, store="none"))["gpu"] == len(known)
    assert engine.call("on_gpu", prompt=follow_up)[: len(stored)] == stored
    engine.reset_gpu()
    again = run(engine, follow_up)
    engine.reset_gpu()
    engine.call("clear_host")
    assert run(engine, follow_up, load="none").distance(again) < 1e-3


def test_a_session_is_known_to_the_server_and_held(engine: Engine, disk: Path) -> None:
    prompt = PROMPTS.new(200)
    answer = run(engine, prompt, salt="mine", session="agent", retain_s=60)
    session = session_digest(tenant_digest(b"mine"), "agent").hex()
    assert answer.told is not None and answer.told["tierkv"]["session"] == session
    engine.counters()

    def row() -> dict[str, Any]:
        with admin(disk) as client:
            (found,) = [r for r in client.ask("TKV.SESSIONS") if r["id"] == session]
        return dict(found)

    def pins() -> list[list[str]]:
        with admin(disk) as client:
            rows = client.ask("TKV.LS", {"tenant": tenant_digest(b"mine").hex()})
        return [[pin["owner"] for pin in r["pins"]] for r in rows]

    deadline = time.monotonic() + 20
    while pins() != [[f"session:{session}"]]:
        assert time.monotonic() < deadline, (pins(), row())
        time.sleep(0.05)
    assert row()["num_held"] == 3
    run(engine, prompt, salt="mine", session="agent", release=True)
    deadline = time.monotonic() + 20
    while pins() != [[]]:
        assert time.monotonic() < deadline, pins()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("params", "ignored"),
    [
        ({"tierkv": {"store": "some", "sesion": 1, "priority": "high"}}, {"store", "sesion", "priority"}),
        ({"tierkv": {"load": {"a": [1]}, "retain_s": 10}}, {"load", "retain_s"}),
        ({"tierkv": "nonsense"}, {"tierkv"}),
        ({"tierkv": None}, {"tierkv"}),
    ],
)
def test_nonsense_fails_nothing(engine: Engine, params: Any, ignored: set[str]) -> None:
    prompt = PROMPTS.new(100)
    answer = engine.run(prompt, params=params)[0]
    assert answer.reason == "length" and len(answer.tokens) == 8
    assert answer.told is not None and set(answer.told["tierkv"]["ignored"]) == ignored


# -- the OpenAI server


@pytest.fixture(scope="module")
def openai_url(model: Path, module_lab: Lab) -> Iterator[str]:
    """The address of an OpenAI server."""
    directory = module_lab.directory / "served"
    shutil.copytree(model, directory)
    write_tokenizer(directory)
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host_bytes": "64MiB",
            "chunk_tokens": CHUNK_TOKENS,
            "disk_dir": str(module_lab.disk("openai")),
            "disk_bytes": "256MiB",
        },
    }
    with api_server(directory, module_lab.directory / "openai.log", transfer) as url:
        yield url


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/{path}",
        json.dumps({"model": "m", "max_tokens": 4, "temperature": 0} | body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def test_the_openai_server_takes_and_answers_hints(openai_url: str) -> None:
    prompt = PROMPTS.new(200)
    text = " ".join(f"w{t}" for t in prompt)
    size = 3 * CHUNK_TOKENS
    own = {"session": "chat", "retain_s": 30, "store": "prompt"}
    first = post(openai_url, "completions", prompt=prompt, kv_transfer_params={"tierkv": own})
    assert first["kv_transfer_params"]["tierkv"] == {
        "hit_tokens": {"gpu": 0, "host": 0, "disk": 0, "shared": 0},
        "prompt_tokens": 200,
        "stored_tokens": size,
        "session": session_digest(bytes(16), "chat").hex(),
    }
    chat = {"messages": [{"role": "user", "content": text}]}
    again = post(openai_url, "chat/completions", **chat, kv_transfer_params={"tierkv": {"priority": 9, "loads": []}})
    about = again["kv_transfer_params"]["tierkv"]
    assert about["prompt_tokens"] == 200 and about["hit_tokens"]["gpu"] == size
    assert set(about["ignored"]) == {"loads"} and set(about["limited"]) == {"priority"}
    assert post(openai_url, "chat/completions", **chat)["kv_transfer_params"] is None
    assert post(openai_url, "completions", prompt=prompt)["kv_transfer_params"] is None

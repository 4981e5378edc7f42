"""Prefill and decode apart: engines that store only, and engines that load only. And chunks of generated tokens,
several answers to one prompt, and log probabilities of prompts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, VOCAB, Answer, Engine, EngineError, Lab, Prompts, server_pid
from servers import RedisServer
from vllm_versions import CANNOT_DRAFT, wanted_minor

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=71)
PRODUCER, CONSUMER = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}
#: 1,000 tokens are 15 whole chunks and 40 tokens.
LENGTH, NUM_CHUNKS = 1000, 15

Cold = Callable[..., Answer]


@pytest.fixture(scope="module")
def prefill_disk(module_lab: Lab) -> Path:
    return module_lab.disk("prefill")


@pytest.fixture(scope="module")
def prefill(module_lab: Lab, model: Path, prefill_disk: Path, redis_server: RedisServer) -> Engine:
    """An engine that computes prompts for others. Its tiers' spill policies are the defaults: Redis is second-use."""
    return module_lab.engine(
        model, {"disk_dir": prefill_disk, "shared_url": redis_server.url}, transfer=PRODUCER, hash_seed="3"
    )


@pytest.fixture(scope="module")
def decode(module_lab: Lab, model: Path, redis_server: RedisServer) -> Engine:
    """An engine on another node: another disk, the same Redis."""
    return module_lab.engine(
        model, {"disk_dir": module_lab.disk("decode"), "shared_url": redis_server.url}, transfer=CONSUMER
    )


def compute(engine: Engine, prompt: list[int], salt: str | None = None, **own: Any) -> Any:
    """Have an engine compute a prompt, as a router does, and return the ``kv_transfer_params`` of its answer."""
    return engine.run(prompt, max_tokens=1, salt=salt, params={"tierkv": own} if own else None)[0].told


def handed_off(told: Any) -> int:
    """Return how many tokens an answer promises."""
    assert told is not None
    return int(told["tierkv"].get("handoff", {"tokens": 0})["tokens"])


def hits(answer: Answer) -> dict[str, int]:
    assert answer.told is not None
    found = {tier: num for tier, num in answer.told["tierkv"]["hit_tokens"].items() if num}
    assert sum(found.values()) == answer.cached, "vLLM counts other hits than ours"
    return found


def test_the_decode_engine_computes_the_last_chunk_only(prefill: Engine, decode: Engine, cold: Cold) -> None:
    prompt = PROMPTS.new(LENGTH)
    with prefill.counting() as stored, decode.counting() as loaded:
        told = compute(prefill, prompt)
        answer = decode.run(prompt, params=told)[0]
    assert handed_off(told) == NUM_CHUNKS * CHUNK_TOKENS
    assert hits(answer) == {"shared": NUM_CHUNKS * CHUNK_TOKENS}
    assert "ignored" not in answer.told["tierkv"]
    assert answer.distance(cold(prompt)) < 1e-4
    assert (stored["spilled"], stored["stored"], stored["handed_off"]) == (NUM_CHUNKS, NUM_CHUNKS, NUM_CHUNKS)
    assert (loaded["shared_hits"], loaded["missed"], loaded["spilled"], loaded["stored"]) == (NUM_CHUNKS, 0, 0, 0)


def test_a_producer_never_loads_and_a_consumer_never_stores(
    prefill: Engine, decode: Engine, prefill_disk: Path, cold: Cold
) -> None:
    prompt, other = PROMPTS.new(200), PROMPTS.new(200)
    with prefill.counting() as first:
        compute(prefill, prompt)
    for forget in (prefill.reset_gpu, prefill.clear_host):
        forget()
        with prefill.counting() as again:
            assert prefill.run(prompt)[0].cached == 0
        assert (again["host_hits"], again["disk_hits"], again.get("plans", 0), again["missed"]) == (0, 0, 0, 3)
    assert first["stored"] == 3
    with decode.counting() as counters:
        assert decode.one(other).distance(cold(other)) < 1e-4
        decode.reset_gpu()
        assert decode.one(other).cached == 0
    assert (counters["spilled"], counters["stored"], counters["missed"]) == (0, 0, 6)
    assert decode.call("in_host", prompt=other) == [None] * 3
    ignored = prefill.run(prompt, params={"tierkv": {"load": ["host"]}})[0].told["tierkv"]["ignored"]
    assert ignored == {"load": "this engine loads nothing (kv_producer)"}
    ignored = decode.run(other, params={"tierkv": {"store": "all", "handoff": True}})[0].told["tierkv"]["ignored"]
    assert ignored["store"] == "this engine stores nothing (kv_consumer)" and "handoff" in ignored


def test_what_the_prefill_engine_has_already_is_handed_off_too(prefill: Engine, decode: Engine) -> None:
    """On its GPU, in its host pool, and only on its disk."""
    start = PROMPTS.new(4 * CHUNK_TOKENS)
    prefill.run(start, params={"tierkv": {"handoff": False}})
    for forget in (lambda: None, lambda: prefill.call("clear_host"), prefill.reset_gpu):
        forget()
        prompt = start + PROMPTS.new(2 * CHUNK_TOKENS + 5)
        told = compute(prefill, prompt)
        assert handed_off(told) == 6 * CHUNK_TOKENS
        assert sum(hits(decode.run(prompt, params=told)[0]).values()) == 6 * CHUNK_TOKENS
        decode.clear_host()


def promise(engine: Engine, prompt: list[int], num_chunks: int, salt: str | None = None) -> dict[str, Any]:
    """Return what an engine would promise of a prompt, for the one that waits."""
    key = engine.call("keys", prompt=prompt, salt=salt)[num_chunks - 1]
    return {"tierkv": {"handoff": {"namespace": engine.call("stat")["namespace"], "last_key": key}}}


def test_the_decode_engine_waits_for_chunks_that_are_still_to_come(prefill: Engine, decode: Engine) -> None:
    """The request is there before any chunk of its prompt is; while the filter says so, nothing is asked."""
    prompt = PROMPTS.new(LENGTH)
    params = promise(decode, prompt, NUM_CHUNKS)
    with decode.counting() as counters:
        decode.call("add", name="waits", prompt=prompt, max_tokens=4, params=params)
        assert not decode.step(200), "it does not wait"
        assert decode.call("states") == {"waits": "WAITING"}
        num_asked = decode.call("stat")["counters"].get("asked_again", 0)
        told = compute(prefill, prompt)
        assert {name: told["tierkv"]["handoff"][name] for name in ("namespace", "last_key")} == params["tierkv"][
            "handoff"
        ]
        answer = decode.finish("waits")["waits"]
    assert hits(answer) == {"shared": NUM_CHUNKS * CHUNK_TOKENS}
    assert (counters["missed"], counters.get("awaited_late", 0)) == (0, 0)
    assert num_asked <= 20, "200 steps, and the slower they are the more often it is time to ask"
    assert 1 <= counters["asked_again"] <= num_asked + NUM_CHUNKS + 20


def test_one_store_server_for_both(
    lab: Lab, prefill: Engine, model: Path, prefill_disk: Path, redis_server: RedisServer, cold: Cold
) -> None:
    """The decode engine is on the same node: what it waits for comes from the disk. It waits no longer than it may."""
    near = lab.engine(model, {"disk_dir": prefill_disk, "shared_url": redis_server.url}, transfer=CONSUMER)
    prompt = PROMPTS.new(LENGTH)
    near.ready()
    answer = near.run(prompt, params=compute(prefill, prompt))[0]
    assert hits(answer) == {"disk": NUM_CHUNKS * CHUNK_TOKENS}
    assert answer.distance(cold(prompt)) < 1e-4
    near.call("wait_at_most", seconds=0.3)
    lost = PROMPTS.new(LENGTH)
    compute(prefill, lost[: 2 * CHUNK_TOKENS])
    prefill.counters()
    near.call("held")
    with near.counting() as counters:
        answer = near.run(lost, params=promise(near, lost, NUM_CHUNKS))[0]
    assert answer.distance(cold(lost)) < 1e-4
    assert sum(hits(answer).values()) == 2 * CHUNK_TOKENS, "what had come by then is used"
    assert (counters["missed"], counters["awaited_late"]) == (NUM_CHUNKS - 2, NUM_CHUNKS - 2)
    assert max(near.call("held").values()) <= 0.3


def test_a_prefill_engine_that_dies_with_its_store(
    lab: Lab, decode: Engine, model: Path, redis_server: RedisServer, cold: Cold
) -> None:
    """Redis takes no writes while it computes; what waited for it is lost with its store server."""
    disk = lab.disk("doomed")
    doomed = lab.engine(model, {"disk_dir": disk, "shared_url": redis_server.url}, transfer=PRODUCER).ready()
    prompt = PROMPTS.new(LENGTH)
    client = redis_server.client()
    client.client_pause(60_000, all=False)
    try:
        told = compute(doomed, prompt)
        assert handed_off(told) == NUM_CHUNKS * CHUNK_TOKENS
        os.kill(server_pid(disk), signal.SIGKILL)
        doomed.kill()
    finally:
        client.client_unpause()
    decode.call("wait_at_most", seconds=0.3)
    decode.call("held")
    with decode.counting() as counters:
        answer = decode.run(prompt, params=told)[0]
    decode.call("wait_at_most", seconds=30.0)
    assert answer.distance(cold(prompt)) < 1e-4
    assert (answer.cached, counters["missed"]) == (0, NUM_CHUNKS)
    assert counters["awaited_late"] == NUM_CHUNKS
    assert max(decode.call("held").values()) <= 0.3


def test_what_is_promised_of_another_prompt_model_or_tenant_changes_nothing(
    prefill: Engine, decode: Engine, cold: Cold
) -> None:
    prompt = PROMPTS.new(200)
    told = compute(prefill, prompt, salt="alice", session="s", store="prompt", retain_s=5)
    assert handed_off(told) == 3 * CHUNK_TOKENS
    own = told["tierkv"]["handoff"]
    asked = decode.call("stat")["counters"].get("asked_again", 0)
    for params, salt, why in (
        (own, None, "it is no key of this prompt"),
        (own, "bob", "it is no key of this prompt"),
        (own | {"namespace": "00" * 16}, "alice", "it is of another model, layout or shape of ranks"),
        (own | {"last_key": "ff" * 32}, "alice", "it is no key of this prompt"),
        (own | {"last_key": own["last_key"][:-1]}, "alice", "a value of type dict is neither"),
        (own | {"namespace": None}, "alice", "a value of type dict is neither"),
        ([own], "alice", "a value of type list is neither"),
        ("soon", "alice", "'soon' is neither"),
    ):
        answer = decode.run(prompt, salt=salt, params={"tierkv": {"handoff": params}})[0]
        assert answer.told is not None and answer.told["tierkv"]["ignored"]["handoff"].startswith(why), params
        assert answer.cached == (3 * CHUNK_TOKENS if salt == "alice" else 0), "a tenant got what is another's"
        assert answer.distance(cold(prompt)) < 1e-4
        decode.clear_host()
    assert decode.call("stat")["counters"].get("asked_again", 0) == asked, "it waited for what nobody promised"
    answer = decode.run(prompt, salt="alice", params=told)[0]
    assert hits(answer) == {"disk": 3 * CHUNK_TOKENS} and "ignored" not in (answer.told or {})["tierkv"]


# -- options


def test_options_that_do_not_go_together_are_refused_at_start(lab: Lab, model: Path) -> None:
    for transfer, options, sentence in (
        (CONSUMER, {"decode_blocks": True}, "decode_blocks=True has no effect with kv_role='kv_consumer'"),
        ({}, {"decode_blocks": "yes"}, "decode_blocks='yes' is neither true nor false"),
    ):
        with pytest.raises(EngineError) as error:
            lab.engine(model, {"server": "off"} | options, transfer=transfer).ready()
        assert sentence in str(error.value)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def chatty(module_lab: Lab, model: Path) -> Engine:
    """An engine that stores what it generates."""
    return module_lab.engine(model, {"disk_dir": module_lab.disk("chatty"), "decode_blocks": True})


def second_turn(engine: Engine, prompt: list[int]) -> None:
    """A chat's second turn hits every whole chunk of its first answer, and only tokens that were sampled for good."""
    with engine.counting() as counters:
        first = engine.one(prompt, max_tokens=2 * CHUNK_TOKENS + 1)
    known = (prompt + first.tokens)[: (len(prompt) + len(first.tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS]
    num_chunks = len(known) // CHUNK_TOKENS
    assert num_chunks > len(prompt) // CHUNK_TOKENS + 1
    assert counters["spilled"] == num_chunks
    stored = engine.call("in_host", prompt=known)
    assert None not in stored, "a chunk of the answer was not stored"
    follow_up = known + PROMPTS.new(20)
    on_gpu = engine.run(follow_up, params={"tierkv": {"store": "none"}})[0]
    assert engine.call("on_gpu", prompt=follow_up)[:num_chunks] == stored
    engine.reset_gpu()
    with engine.counting() as counters:
        again = engine.one(follow_up)
    assert (counters["host_hits"], counters["missed"], again.cached) == (num_chunks, 0, len(known))
    assert again.distance(on_gpu) < 1e-4


def test_the_second_turn_of_a_chat_hits_the_first_answer(chatty: Engine) -> None:
    second_turn(chatty, PROMPTS.new(100))
    prompt = PROMPTS.new(100)
    answer = chatty.run(prompt, max_tokens=CHUNK_TOKENS + 1, params={"tierkv": {"store": "prompt"}})[0]
    assert answer.told is not None and answer.told["tierkv"]["stored_tokens"] == CHUNK_TOKENS, (
        "the request's word holds"
    )


@pytest.mark.skipif(wanted_minor() in CANNOT_DRAFT, reason="this vLLM cannot draft on CPUs")
def test_of_drafts_only_what_was_accepted_is_stored(lab: Lab, model: Path) -> None:
    """A quarter of all tokens occur in the prompt, so that drafts are made."""
    engine = lab.engine(model, {"server": "off", "decode_blocks": True}, speculative_config=NGRAM)
    second_turn(engine, [token for _ in range(2) for token in range(0, VOCAB, 4)][:1000])


# -- several answers, log probabilities of the prompt


def test_several_answers_to_one_prompt(chatty: Engine, reference: Engine) -> None:
    prompt = PROMPTS.new(5 * CHUNK_TOKENS + 7)
    sampling = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 6}
    reference.reset_gpu()
    expected = reference.call("sample", prompt=prompt, sampling=sampling)["tokens"]
    assert len({tuple(tokens) for tokens in expected}) > 1
    with chatty.counting() as counters:
        assert chatty.call("sample", prompt=prompt, sampling=sampling)["tokens"] == expected
    assert counters["spilled"] == 5, "a prompt is stored once, however many answers it has"
    chatty.reset_gpu()
    with chatty.counting() as counters:
        answer = chatty.call("sample", prompt=prompt, sampling=sampling)
    assert answer["tokens"] == expected and answer["cached"] == 5 * CHUNK_TOKENS
    assert counters["host_hits"] >= 5 and (counters["missed"], counters["spilled"]) == (0, 0)


def test_log_probabilities_of_a_prompt_are_computed_and_its_chunks_stored(chatty: Engine, reference: Engine) -> None:
    prompt = PROMPTS.new(3 * CHUNK_TOKENS + 7)
    sampling = {"temperature": 0, "prompt_logprobs": 1, "max_tokens": 4}
    expected = reference.call("sample", prompt=prompt, sampling=sampling)
    for stored in (3, 0, 0):
        with chatty.counting() as counters:
            answer = chatty.call("sample", prompt=prompt, sampling=sampling)
        assert answer == expected and len(answer["prompt_logprobs"]) == len(prompt) and not answer["cached"]
        assert (counters["spilled"], counters["host_hits"], counters.get("plans", 0)) == (stored, 0, 0)
        chatty.reset_gpu()
    assert chatty.one(prompt).cached == 3 * CHUNK_TOKENS, "others hit what it stored"

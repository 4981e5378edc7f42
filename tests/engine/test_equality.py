"""A load from a tier gives the very output that a GPU prefix hit of the same length gives, bit for bit.

Each prompt is run cold and from the GPU by an engine without connector. An engine with a connector runs it from its
host pool, another one (a new process, a new store server) from disk, and a third one with nothing of its own from the
shared tier. Which tier it was is proven by the counters, and the payloads are compared byte by byte in every tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest
from tokenizers import Tokenizer

from demo_model import ensure_demo_model
from engine_process import CHUNK_TOKENS, THROUGH, VOCAB, Answer, Engine, Lab, Prompts, drain, shut_down
from servers import RedisServer
from tierkv.payload import HEADER_NBYTES

pytestmark = pytest.mark.engine

TIERS = ("host", "disk", "shared")
COLD_TOLERANCE = 1e-4


class Case(NamedTuple):
    """A prompt a tier, and what is run before it.

    Attributes:
        prime: stores the prefix that the prompts share with it.
        prompts: by tier: each leaves more in the tiers than the prime did, so those that differ are one a tier.
        num_hits: chunks that a tier has of the prompt.
    """

    prime: list[int]
    prompts: dict[str, list[int]]
    num_hits: int


def whole(prompt: list[int], num_primed: int | None = None) -> Case:
    """The same prompt again, or what its first ``num_primed`` tokens left of it."""
    return Case(prompt[:num_primed], dict.fromkeys(TIERS, prompt), ((num_primed or len(prompt)) - 1) // CHUNK_TOKENS)


def sharing(prompts: Prompts, num_prime: int, num_chunks: int, num_more: int) -> Case:
    """Prompts that share ``num_chunks`` chunks with another one."""
    prime = prompts.new(num_prime)
    shared = prime[: num_chunks * CHUNK_TOKENS]
    return Case(prime, {tier: shared + prompts.new(num_more) for tier in TIERS}, num_chunks)


def make_cases() -> dict[str, Case]:
    # A GPU hit ends at a block of 32 tokens, ours at a chunk of 64: they are equal where a prompt has 1 to 32 tokens
    # more than whole chunks, and else after a shorter prompt.
    prompts = Prompts(seed=2)
    return {
        "one token": whole(prompts.new(1)),
        "a chunk less one": whole(prompts.new(63)),
        "a chunk": whole(prompts.new(64)),
        "a chunk and one": whole(prompts.new(65)),
        "four chunks": whole(prompts.new(256), 193),
        "four chunks and 20": whole(prompts.new(276)),
        "four chunks and 44": whole(prompts.new(300), 257),
        "long": whole(prompts.new(2390)),
        "sharing nothing": sharing(prompts, 200, 0, 150),
        "sharing one chunk": sharing(prompts, 200, 1, 150),
        "sharing ten chunks": sharing(prompts, 700, 10, 100),
    }


CASES = make_cases()


class Seen(NamedTuple):
    """What happened when a prompt was run: its answer, the counters' rises, and its chunks' digests."""

    answer: Answer
    counters: dict[str, int]
    in_host: list[str | None]
    on_gpu: list[str | None]


class Observed(NamedTuple):
    """Everything that the engines of this module did.

    Attributes:
        cold, gpu: by (case, tier): without connector, from nothing and from a GPU prefix of the same length.
        tiers: by (case, tier): with connector.
        lmdb, redis: digest of every payload there, by key, when the host's prompts had been run.
        keys: keys of the host's prompts.
    """

    cold: dict[tuple[str, str], Answer]
    gpu: dict[tuple[str, str], Answer]
    tiers: dict[tuple[str, str], Seen]
    lmdb: dict[str, str]
    redis: dict[str, str]
    keys: dict[str, list[str]]


@pytest.fixture(scope="module")
def observed(reference: Engine, model: Path, module_lab: Lab, redis_server: RedisServer) -> Observed:
    seen = Observed({}, {}, {}, {}, {}, {})
    lab, url = module_lab, redis_server.url
    for name, case in CASES.items():
        for tier, prompt in case.prompts.items():
            reference.reset_gpu()
            seen.cold[name, tier] = reference.one(prompt)
            reference.reset_gpu()
            if case.num_hits:
                reference.one(case.prime, max_tokens=1)
            seen.gpu[name, tier] = reference.one(prompt)

    first = lab.engine(model, {"disk_dir": lab.disk("first"), "shared_url": url, "spill": THROUGH})
    for case in CASES.values():
        first.one(case.prime, max_tokens=1)
    drain(lab.disk("first"))
    shared = lab.engine(model, {"disk_dir": lab.disk("second"), "shared_url": url, "spill": THROUGH})
    run_cases(shared, "shared", seen)
    shared.stop()
    run_cases(first, "host", seen)
    seen.keys.update({name: first.call("keys", prompt=case.prompts["host"]) for name, case in CASES.items()})
    drain(lab.disk("first"))
    first.stop()
    shut_down(lab.disk("first"))
    seen.lmdb.update(read_lmdb(lab.disk("first")))
    seen.redis.update(read_redis(redis_server))
    again = lab.engine(model, {"disk_dir": lab.disk("first"), "shared_url": url, "spill": THROUGH})
    run_cases(again, "disk", seen)
    return seen


def run_cases(engine: Engine, tier: str, seen: Observed) -> None:
    """Run every case's prompt of a tier with nothing on the GPU."""
    for name, case in CASES.items():
        engine.reset_gpu()
        prompt = case.prompts[tier]
        with engine.counting() as counters:
            answer = engine.one(prompt)
        in_host, on_gpu = engine.call("in_host", prompt=prompt), engine.call("on_gpu", prompt=prompt)
        seen.tiers[name, tier] = Seen(answer, counters, in_host, on_gpu)


def read_lmdb(disk_dir: Path) -> dict[str, str]:
    """Return the digest of every payload of a disk tier, read with nothing but LMDB."""
    found = {}
    for path in disk_dir.glob("ns/*/"):
        with lmdb.open(str(path), readonly=True, max_dbs=8) as env, env.begin(db=env.open_db(b"records")) as txn:
            found.update({key.hex(): payload_digest(record) for key, record in txn.cursor()})
    return found


def read_redis(server: RedisServer) -> dict[str, str]:
    """Return the digest of every payload of a shared tier, read with nothing but Redis."""
    client = server.client()
    names = list(client.scan_iter("tierkv:1:*:{*}:*", count=1000))
    return {n.rsplit(b":", 1)[1].decode(): payload_digest(client.get(n)) for n in names if b":idx:" not in n}


def payload_digest(record: bytes) -> str:
    nbytes = int.from_bytes(record[176:184], "little")
    return hashlib.sha256(record[HEADER_NBYTES : HEADER_NBYTES + nbytes]).hexdigest()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_a_load_equals_a_gpu_hit_of_its_length(observed: Observed, name: str, tier: str) -> None:
    num_hits, seen = CASES[name].num_hits, observed.tiers[name, tier]
    gpu, cold = observed.gpu[name, tier], observed.cold[name, tier]
    hits = {t: seen.counters[f"{t}_hits"] for t in TIERS}
    assert hits == dict.fromkeys(TIERS, 0) | {tier: num_hits}
    assert seen.counters["missed"] == len(CASES[name].prompts[tier]) // CHUNK_TOKENS - num_hits
    assert seen.answer.cached == num_hits * CHUNK_TOKENS == gpu.cached
    assert seen.answer.bits == gpu.bits
    assert seen.answer.distance(cold) < COLD_TOLERANCE
    assert cold.cached == 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_are_on_the_gpu_and_in_the_host_pool(observed: Observed, name: str, tier: str) -> None:
    seen = observed.tiers[name, tier]
    assert len(seen.in_host) == len(CASES[name].prompts[tier]) // CHUNK_TOKENS
    assert None not in seen.in_host
    assert seen.in_host == seen.on_gpu


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_are_in_lmdb_and_in_redis(observed: Observed, name: str) -> None:
    payloads = dict(zip(observed.keys[name], observed.tiers[name, "host"].in_host, strict=True))
    assert {key: observed.lmdb.get(key) for key in payloads} == payloads
    assert {key: observed.redis.get(key) for key in payloads} == payloads


def test_distinct_prompts_give_distinct_outputs(observed: Observed) -> None:
    outputs = {tuple(answer.tokens) for answer in observed.cold.values()}
    prompts = {tuple(prompt) for case in CASES.values() for prompt in case.prompts.values()}
    assert len(outputs) == len(prompts)


@pytest.fixture(scope="module")
def flippable(module_lab: Lab, model: Path) -> Iterator[Engine]:
    engine = module_lab.engine(model, {"server": "off"})
    yield engine
    engine.stop()


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("layer", [0, 3])
def test_one_wrong_exponent_bit_makes_the_comparison_fail(
    observed: Observed, flippable: Engine, chunk: int, layer: int
) -> None:
    prompt, expected = CASES["four chunks and 20"].prompts["host"], observed.gpu["four chunks and 20", "host"]
    flippable.clear_host()
    flippable.one(prompt)
    flippable.reset_gpu()
    assert flippable.one(prompt).bits == expected.bits
    word = layer * 16384 + 8192 + 65
    before, after = flippable.call("flip", prompt=prompt, chunk=chunk, word=word, bit=28)
    assert before != after
    flippable.reset_gpu()
    with flippable.counting() as counters:
        answer = flippable.one(prompt)
    assert counters["host_hits"] == 4
    assert answer.cached == expected.cached
    assert answer.bits != expected.bits
    flippable.call("flip", prompt=prompt, chunk=chunk, word=word, bit=28)
    flippable.reset_gpu()
    assert flippable.one(prompt).bits == expected.bits


def chat_prompt(model: Path) -> list[int]:
    """1,500 tokens of a chat: 28 more than whole chunks, so that GPU and chunks hit equally far."""
    document = (Path(__file__).parents[2] / "scripts" / "data" / "document.txt").read_text()
    question = "<|im_end|>\n<|im_start|>user\nWho is the principal keeper?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    head = tokenizer.encode("<|im_start|>system\n" + document, add_special_tokens=False).ids
    tail = tokenizer.encode(question, add_special_tokens=False).ids
    assert len(head) > 1500
    return head[: 1500 - len(tail)] + tail


def test_a_real_model_answers_the_same_from_every_tier(module_lab: Lab, redis_server: RedisServer) -> None:
    model = ensure_demo_model()
    prompt = chat_prompt(model)
    num_hits = (len(prompt) - 1) // CHUNK_TOKENS
    options: dict[str, Any] = {
        "host_bytes": "256MiB",
        "disk_bytes": "512MiB",
        "shared_url": redis_server.url,
        "spill": THROUGH,
    }
    answers: dict[str, Answer] = {}
    first = module_lab.engine(model, options | {"disk_dir": module_lab.disk("smol")})
    answers["cold"] = first.one(prompt, max_tokens=16)
    answers["gpu"] = first.one(prompt, max_tokens=16)
    first.reset_gpu()
    with first.counting() as counters:
        answers["host"] = first.one(prompt, max_tokens=16)
    assert counters["host_hits"] == num_hits
    drain(module_lab.disk("smol"))
    first.stop()
    shut_down(module_lab.disk("smol"))
    for tier, disk in (("disk", "smol"), ("shared", "smol2")):
        engine = module_lab.engine(model, options | {"disk_dir": module_lab.disk(disk)})
        with engine.counting() as counters:
            answers[tier] = engine.one(prompt, max_tokens=16)
        assert {t: counters[f"{t}_hits"] for t in TIERS} == dict.fromkeys(TIERS, 0) | {tier: num_hits}
        engine.stop()
    assert answers["cold"].cached == 0
    for tier in TIERS:
        assert answers[tier].cached == num_hits * CHUNK_TOKENS == answers["gpu"].cached
        assert answers[tier].bits == answers["gpu"].bits
        assert answers[tier].distance(answers["cold"]) < COLD_TOLERANCE
    assert max(answers["cold"].tokens) >= VOCAB, "this is the real vocabulary, not the seeded model's"

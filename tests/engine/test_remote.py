"""Engines that share no memory with their store server: a real ``tierkv serve`` over TLS, tokens, and a bad network.

The server runs from a TOML file. A proxy stands between it and most engines. What an engine answers is compared, bit
for bit, with an engine without connector that hits as much on its GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_process import CHUNK_TOKENS, Answer, Engine, EngineError, Lab, Prompts
from leaks import pool_files
from proxy import Proxy
from records import wait_until
from servers import RedisServer, TlsFiles, make_certificates
from tierkv_connector.costs import NUM_NEEDED
from toml_store import TomlStore

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=6)
DEADLINE_S = 3.0
PAYLOAD_NBYTES = 256 << 10
#: A step beside those of a run without connector: it plans the load.
LOAD_STEPS = 1

Cold = Callable[..., Answer]
Gpu = Callable[[list[int], int], Answer]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, files: TlsFiles) -> Iterator[TomlStore]:
    """A server with TLS, tokens and every tier."""
    store = TomlStore(tmp_path_factory.mktemp("store") / "tls", redis_server, files)
    yield store.start()
    store.kill()


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TomlStore]:
    """A server without TLS, on the loopback: what is damaged on the way arrives."""
    store = TomlStore(tmp_path_factory.mktemp("store") / "plain")
    yield store.start()
    store.kill()


@pytest.fixture(scope="module")
def proxy(store: TomlStore) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", store.port)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shared_engine(module_lab: Lab, model: Path, store: TomlStore, proxy: Proxy) -> Engine:
    engine = module_lab.engine(model, store.options(proxy.port) | {"deadline_s": DEADLINE_S})
    engine.one(PROMPTS.new(100))  # the first forward takes seconds
    return engine


@pytest.fixture
def engine(shared_engine: Engine, proxy: Proxy) -> Iterator[Engine]:
    """The engine behind the proxy, at rest; after the test nothing may be held by a request."""
    wait_until(lambda: shared_engine.call("connected"), 60.0)
    shared_engine.clear_host()
    yield shared_engine
    proxy.restore()
    wait_until(lambda: not any(shared_engine.call("leases").values()))


@pytest.fixture(scope="module")
def gpu(reference: Engine) -> Gpu:
    """A function that runs a prompt without connector, with so many chunks of it on the GPU."""

    def run(prompt: list[int], num_chunks: int) -> Answer:
        reference.reset_gpu()
        if num_chunks:
            reference.one(prompt[: num_chunks * CHUNK_TOKENS + 1], max_tokens=1)
        answer = reference.one(prompt)
        assert answer.cached == num_chunks * CHUNK_TOKENS
        return answer

    return run


def hits(counters: dict[str, int]) -> tuple[int, int, int, int]:
    """Return what a run hit in host, disk and shared tier, and what it missed."""
    return counters["host_hits"], counters["disk_hits"], counters["shared_hits"], counters["missed"]


def stored(engine: Engine, store: TomlStore, num_tokens: int) -> list[int]:
    """Return a prompt that the server has, and the engine has not."""
    prompt = PROMPTS.new(num_tokens)
    with engine.counting() as counters:
        engine.one(prompt, max_tokens=1)
    assert counters["stored"] == num_tokens // CHUNK_TOKENS
    store.drain()
    engine.clear_host()
    engine.call("asked")
    return prompt


def steps_to_finish(engine: Engine, name: str) -> tuple[int, Answer]:
    """Step until a request has finished; return how many steps that took beside those of a copy, and its answer."""
    num_steps, deadline = 0, time.monotonic() + 30
    while time.monotonic() < deadline:
        num_steps += engine.call("states")[name] != "WAITING_FOR_REMOTE_KVS"
        if name in (finished := engine.step()):
            return num_steps, finished[name]
    raise AssertionError(f"{name} does not finish")


def plain_steps(reference: Engine, prompt: list[int], num_chunks: int) -> int:
    """Return how many steps an engine without connector takes for a prompt with so many chunks on its GPU."""
    reference.reset_gpu()
    reference.one(prompt[: num_chunks * CHUNK_TOKENS + 1], max_tokens=1)
    reference.add("plain", prompt)
    return steps_to_finish(reference, "plain")[0]


# -- what is stored over TLS is hit over TLS


def test_every_tier_over_tls(lab: Lab, model: Path, store: TomlStore, cold: Cold, gpu: Gpu) -> None:
    prompts = [(PROMPTS.new(276), 4), (PROMPTS.new(2390), 37)]
    first = lab.engine(model, store.options())
    for prompt, num_chunks in prompts:
        expected = gpu(prompt, num_chunks)
        with first.counting() as counters:
            answer = first.one(prompt)
        assert hits(counters) == (0, 0, 0, num_chunks)
        assert answer.tokens == cold(prompt).tokens
        assert answer.distance(cold(prompt)) < 1e-4
        first.reset_gpu()
        with first.counting() as counters:
            assert first.one(prompt).bits == expected.bits
        assert hits(counters) == (num_chunks, 0, 0, 0)
    assert pool_files(first.pid)
    assert not pool_files(first.pid) & pool_files(store.pid), "the server has this engine's memory"
    store.drain()
    first.stop()

    second = lab.engine(model, store.options())
    for tier in ("disk", "shared"):
        for prompt, num_chunks in prompts:
            with second.counting() as counters:
                answer = second.one(prompt)
            assert hits(counters) == ((0, num_chunks, 0, 0) if tier == "disk" else (0, 0, num_chunks, 0))
            assert answer.cached == num_chunks * CHUNK_TOKENS
            assert answer.bits == gpu(prompt, num_chunks).bits
        with second.counting() as counters:
            assert second.one(prompts[0][0], salt=f"another tenant, {tier}").cached == 0
        assert hits(counters) == (0, 0, 0, 4)
        store.drain()
        store.evict("disk")
        second.clear_host()
    with second.counting() as counters:
        second.one(prompts[0][0])
    assert hits(counters) == (0, 0, 4, 0)
    store.drain()
    store.evict("disk", "shared")
    second.reset_gpu()
    second.call("settle")
    with second.counting() as counters:
        assert second.one(prompts[0][0]).cached == 0
    assert hits(counters) == (0, 0, 0, 4), "what was evicted everywhere is hit nowhere, in this engine's host pool too"


def test_the_bytes_that_arrive_decide_the_answer(engine: Engine, store: TomlStore, gpu: Gpu) -> None:
    """One wrong exponent bit in what came over the network, and the comparison of these tests fails."""
    prompt = stored(engine, store, 276)
    expected = gpu(prompt, 4)
    assert engine.one(prompt).bits == expected.bits
    engine.call("flip", prompt=prompt, chunk=2, word=8192 + 65, bit=28)
    engine.reset_gpu()
    with engine.counting() as counters:
        assert engine.one(prompt).bits != expected.bits
    assert hits(counters) == (4, 0, 0, 0)


# -- tokens and certificates


@pytest.mark.parametrize("wrong", ["token", "role", "authority"])
def test_an_engine_that_is_not_admitted_serves_without_and_is_admitted_later(
    lab: Lab, model: Path, store: TomlStore, files: TlsFiles, engine: Engine, cold: Cold, wrong: str
) -> None:
    """Its log has one sentence and no secret; a file that is put right needs no restart."""
    token, authority = lab.directory / "token", lab.directory / "ca.crt"
    texts = {"token": "0123456789-not-a-token", "role": store.secret("reader")}
    token.write_text(texts.get(wrong, store.secret("engine")))
    token.chmod(0o600)
    authority.write_bytes((files.other_ca if wrong == "authority" else files.ca).read_bytes())
    options = store.options() | {"server_token_file": token, "server_ca_file": authority}
    sentence = {
        "token": f"does not take the token in {token}",
        "role": "token does not allow TKV.HELLO",
        "authority": "is not trusted",
    }[wrong]
    prompt = stored(engine, store, 276)

    alone = lab.engine(model, options)
    with alone.counting() as counters:
        answer = alone.one(prompt)
        alone.reset_gpu()
        alone.one(prompt)
    assert answer.distance(cold(prompt)) < 1e-4
    assert hits(counters) == (4, 0, 0, 4)
    assert counters["stored"] == 0
    assert not alone.call("connected")
    lines = [line for line in alone.log.read_text().splitlines() if "Serving goes on without it" in line]
    assert len(lines) == 1
    assert sentence in lines[0]

    token.write_text(store.secret("engine"))
    authority.write_bytes(files.ca.read_bytes())
    wait_until(lambda: alone.call("connected"), 60.0)
    alone.clear_host()
    with alone.counting() as counters:
        assert alone.one(prompt).cached == 4 * CHUNK_TOKENS
    assert hits(counters) == (0, 4, 0, 0)
    secrets = {*texts.values(), *(store.secret(role) for role in store.tokens)}
    told = {"engine's log": alone.log.read_text(), "server's log": store.log.read_text()}
    for pid, name in itertools.product((alone.pid, store.pid), ("cmdline", "environ")):
        told[f"{name} of {pid}"] = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    assert str(token) in told["engine's log"], "the file's name is no secret: this is the log that would show one"
    assert str(store.directory) in told[f"cmdline of {store.pid}"]
    for place, text in told.items():
        assert not any(secret in text for secret in secrets), place


@pytest.mark.parametrize(
    "mode, sentence", [(0o644, "every user may read or change (mode 0644)"), (None, "No such file")]
)
def test_a_token_that_is_no_secret_stops_the_engine_in_a_sentence(
    lab: Lab, model: Path, store: TomlStore, mode: int | None, sentence: str
) -> None:
    token = lab.directory / "token"
    if mode is not None:
        token.write_text(store.secret("engine"))
        token.chmod(mode)
    refused = lab.engine(model, store.options() | {"server_token_file": token})
    with pytest.raises(EngineError) as error:
        refused.ready()
    assert str(token) in str(error.value)
    assert sentence in str(error.value)
    assert store.secret("engine") not in str(error.value) + refused.log.read_text()


# -- a server that dies, and one that says nothing more, in the middle of a fetch


@contextlib.contextmanager
def fetching(engine: Engine, store: TomlStore) -> Iterator[list[int]]:
    """Give a prompt of five chunks of which the engine has two; the others are to be fetched in the block."""
    prompt = stored(engine, store, 330)
    engine.one(prompt[: 2 * CHUNK_TOKENS + 1], max_tokens=1)
    engine.reset_gpu()
    engine.call("asked")
    with engine.counting() as counters:
        yield prompt
    assert hits(counters) == (2, 0, 0, 3)


@pytest.mark.parametrize("when", ["before its answer", "in a payload"])
def test_a_server_that_is_killed_while_it_is_asked(
    engine: Engine, store: TomlStore, proxy: Proxy, reference: Engine, gpu: Gpu, when: str
) -> None:
    with fetching(engine, store) as prompt:
        if when == "in a payload":
            kill_after(proxy, store, PAYLOAD_NBYTES * 3 // 2)
        else:
            proxy.freeze()
        engine.add("asking", prompt)
        engine.step()
        assert engine.call("asked")[0][2] is None, "it waits for the fetch"
        if when == "in a payload":
            wait_until(lambda: not engine.call("connected"))
        else:
            store.kill()
            proxy.restore()
            wait_until(lambda: not engine.call("connected"))
        num_steps, answer = steps_to_finish(engine, "asking")
        told = [answer for name, _, answer, _ in engine.call("asked") if name == "asking"]
        assert told == [2 * CHUNK_TOKENS], "nobody waits for a server that has gone: what is there is claimed at once"
    assert num_steps <= plain_steps(reference, prompt, 2) + LOAD_STEPS
    assert answer.bits == gpu(prompt, 2).bits

    proxy.restore()
    store.start()
    wait_until(lambda: engine.call("connected"), 60.0)
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu(prompt, 5).bits
    assert hits(counters) == (0, 5, 0, 0)


def kill_after(proxy: Proxy, store: TomlStore, nbytes: int) -> None:
    """SIGKILL the server when it has sent so much; what it had given to the network by then is lost."""
    passed = 0

    def edit(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        if passed < nbytes:
            return data
        store.kill()
        return b""

    proxy.replies.edit = edit


def test_a_server_that_says_nothing_more_costs_the_deadline_and_the_hit(
    engine: Engine, store: TomlStore, proxy: Proxy, reference: Engine, gpu: Gpu
) -> None:
    with fetching(engine, store) as prompt:
        proxy.freeze()
        engine.add("asking", prompt)
        told: list[int | None] = []

        def answered() -> bool:
            told.extend(answer for name, _, answer, _ in engine.call("asked") if name == "asking")
            return told[-1:] != [None] and bool(told)

        engine.step_until(answered)
        assert engine.call("connected"), "it was the deadline that ended the wait, not the loss of the server"
        num_steps, answer = steps_to_finish(engine, "asking")
        assert set(told) == {None, 2 * CHUNK_TOKENS}
        proxy.restore()
    assert num_steps <= plain_steps(reference, prompt, 2) + LOAD_STEPS
    assert answer.bits == gpu(prompt, 2).bits


def test_a_link_that_is_slower_than_computing_is_left_alone(
    lab: Lab, model: Path, store: TomlStore, proxy: Proxy, cold: Cold
) -> None:
    """Once that is measured: what is stored beyond it is computed, and nobody waits for it."""
    engine = lab.engine(model, store.options(proxy.port) | {"cost_gate": True})
    prompts = [PROMPTS.new(276) for _ in range(NUM_NEEDED + 4)]
    for prompt in prompts:
        engine.one(prompt, max_tokens=3)
    engine.counters()
    store.drain()
    proxy.replies.delay_s = 0.2
    came = []
    for prompt in prompts:
        engine.clear_host()
        with engine.counting() as counters:
            assert engine.one(prompt).distance(cold(prompt)) < 1e-4
        came.append((*hits(counters), counters.get("cut", 0)))
    assert came == [(0, 4, 0, 0, 0)] * NUM_NEEDED + [(0, 0, 0, 4, 4)] * 4
    proxy.restore()


# -- bits that are flipped on the way


def test_bits_flipped_under_tls_end_the_session_and_are_misses(
    engine: Engine, store: TomlStore, proxy: Proxy, cold: Cold, gpu: Gpu
) -> None:
    prompt = stored(engine, store, 276)
    num_faults = proxy.replies.num_faults
    proxy.replies.flip(PAYLOAD_NBYTES * 3 // 2)
    with engine.counting() as counters:
        answer = engine.one(prompt)
    assert proxy.replies.num_faults == num_faults + 1
    assert hits(counters) == (0, 0, 0, 4)
    assert answer.cached == 0
    assert answer.distance(cold(prompt)) < 1e-4
    wait_until(lambda: engine.call("connected"), 60.0)
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu(prompt, 4).bits
    assert hits(counters) == (0, 4, 0, 0)


def test_a_store_that_is_damaged_under_tls_is_sent_again(
    engine: Engine, store: TomlStore, proxy: Proxy, cold: Cold, gpu: Gpu
) -> None:
    prompt, num_faults = PROMPTS.new(276), proxy.requests.num_faults
    lost = engine.counters().get("stores_lost", 0)
    proxy.requests.flip(PAYLOAD_NBYTES * 3 // 2)
    with engine.counting() as counters:
        assert engine.one(prompt).distance(cold(prompt)) < 1e-4
        wait_until(lambda: proxy.requests.num_faults > num_faults)
        wait_until(lambda: engine.call("stat")["counters"].get("stores_lost", 0) == lost + 4)  # connected until then
        wait_until(lambda: engine.call("connected"), 60.0)
        engine.one(PROMPTS.new(1))  # what was lost is sent again by a step
    assert counters["stores_lost"] == counters["stored"] == 4
    store.drain()
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu(prompt, 4).bits
    assert hits(counters) == (0, 4, 0, 0)


@pytest.fixture(scope="module")
def plain_proxy(plain_store: TomlStore) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", plain_store.port)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def plain_engine(module_lab: Lab, model: Path, plain_store: TomlStore, plain_proxy: Proxy) -> Engine:
    return module_lab.engine(model, plain_store.options(plain_proxy.port)).ready()


def test_a_payload_that_arrives_damaged_is_a_miss(
    plain_engine: Engine, plain_store: TomlStore, plain_proxy: Proxy, gpu: Gpu
) -> None:
    """Every chunk in turn, without TLS: what is before it is hit, the session goes on, and no answer is wrong."""
    engine, proxy = plain_engine, plain_proxy
    prompt = stored(engine, plain_store, 276)
    expected = [gpu(prompt, num) for num in range(5)]
    for chunk in range(4):
        engine.clear_host()
        proxy.replies.flip(PAYLOAD_NBYTES * chunk + PAYLOAD_NBYTES // 2, mask=0x40)
        with engine.counting() as counters:
            answer = engine.one(prompt)
        assert hits(counters) == (0, chunk, 0, 4 - chunk)
        assert counters["fetched_bad"] == 1
        assert answer.bits == expected[chunk].bits
    assert proxy.replies.num_faults == 4
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == expected[4].bits
    assert hits(counters) == (0, 4, 0, 0)
    assert counters["fetched_bad"] == 0
    assert "is out" not in engine.log.read_text()
    assert engine.log.read_text().count("arrived damaged, and are misses: 1") == 4


def test_a_payload_that_is_damaged_on_its_way_to_the_server_is_not_stored(
    plain_engine: Engine, plain_store: TomlStore, plain_proxy: Proxy, gpu: Gpu
) -> None:
    engine, prompt = plain_engine, PROMPTS.new(276)
    plain_proxy.requests.flip(PAYLOAD_NBYTES * 3 // 2, mask=0x40)
    with engine.counting() as counters:
        engine.one(prompt, max_tokens=1)
    assert (counters["stored"], counters["stores_failed"]) == (3, 1)
    plain_store.drain()
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu(prompt, 1).bits
    assert hits(counters) == (0, 1, 0, 3), "the second chunk is not there"
    plain_store.drain()
    engine.clear_host()
    with engine.counting() as counters:
        assert engine.one(prompt).bits == gpu(prompt, 4).bits
    assert hits(counters) == (0, 4, 0, 0), "it was computed, and stored again"

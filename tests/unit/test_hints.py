"""Hints: what is taken and what is ignored, what requests do with them, and what sessions may hold."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from scheduler_bench import CHUNK_TOKENS, IDENTITY, PAYLOAD_NBYTES, Bench, small_world
from tierkv.config import EngineConfig, HintLimits
from tierkv.errors import ConfigError
from tierkv.keys import chain_keys, root_key, tenant_digest
from tierkv.policy import Hint
from tierkv.sessions import MAX_SESSIONS, SessionBook, SessionLimits, SessionTurn, session_digest
from tierkv_connector.hints import TIERS, HintReader, Hints
from tierkv_connector.retention import FIRST, RELEASE

TENANT = tenant_digest(b"somebody")
DOCUMENT = Path(__file__).parents[2] / "docs" / "hints.md"
NUM_SEQUENCES = 150
NUM_OPERATIONS = 200


def read(own: object, limits: HintLimits | None = None, **request: Any) -> Hints:
    hints = HintReader(limits or HintLimits()).read(
        SimpleNamespace(kv_transfer_params={"tierkv": own}, **request), TENANT
    )
    assert hints is not None
    return hints


# -- reading


def test_what_is_right_is_taken() -> None:
    hints = read(
        {
            "session": "chat-7",
            "priority": -1,
            "retain_s": 90,
            "store": "all",
            "load": ["disk"],
            "prefetch": "host",
        }
    )
    assert (hints.ignored, hints.limited) == ({}, {})
    assert hints.session == session_digest(TENANT, "chat-7") and len(hints.session) == 16
    assert (hints.priority, hints.retain_s, hints.release, hints.store) == (-1, 90.0, False, "all")
    assert hints.tiers == {"host", "disk"}, "the disk loads through the host pool"
    assert hints.prefetch == "host"


def test_the_default_is_what_a_request_without_hints_does() -> None:
    hints = read({})
    assert (hints.session, hints.priority, hints.retain_s, hints.release) == (b"", 0, None, False)
    assert (hints.store, hints.tiers, hints.prefetch) == ("prompt", TIERS, "")
    assert not hints.ignored and not hints.limited


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("session", [7, "", "x" * 257, ["a"], {"a": 1}, b"a", True]),
        ("priority", ["high", 1.5, True, [1], float("nan")]),
        ("retain_s", [-1, 0, "60", True, float("nan"), [60]]),
        ("release", [1, "true", 0.0, []]),
        ("store", ["some", True, 3, ["none"], {}]),
        ("load", ["disk", ["gpu"], [["host"]], 5, {"host": 1}, [1], [None]]),
        ("prefetch", [True, "gpu", 1, ["disk"]]),
    ],
)
def test_what_is_wrong_is_ignored_and_said(name: str, values: list[object]) -> None:
    untouched = {n: getattr(read({"session": "s"}), n) for n in Hints.__slots__ if n not in ("ignored", "limited")}
    for value in values:
        hints = read({"session": "s"} | {name: value})
        assert set(hints.ignored) == {name}, value
        assert " is " in hints.ignored[name] and len(hints.ignored[name]) < 200
        after = {n: getattr(hints, n) for n in untouched}
        assert after == untouched | ({"session": b""} if name == "session" else {}), value
        json.dumps(hints.ignored)


@pytest.mark.parametrize("own", [None, 5, "text", ["session"], True, [{"session": "s"}]])
def test_what_is_no_object_is_ignored_as_a_whole(own: object) -> None:
    assert set(read(own).ignored) == {"tierkv"}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, "text", 7, ["tierkv"]])
def test_without_hints_there_are_none(params: object) -> None:
    assert HintReader(HintLimits()).read(SimpleNamespace(kv_transfer_params=params), TENANT) is None
    assert HintReader(HintLimits()).read(SimpleNamespace(), TENANT) is None


def test_unknown_names_are_said_and_bounded() -> None:
    hints = read({"sesion": "s", "priority": 1} | {f"{'x' * 80}{i}": i for i in range(100)} | {7: 8})
    assert hints.priority == 1
    assert hints.ignored["sesion"].startswith("no such hint; there are session, priority")
    assert len(hints.ignored) <= 16 and all(len(name) <= 48 for name in hints.ignored)


def test_a_hold_or_a_release_needs_a_session() -> None:
    hints = read({"retain_s": 5, "release": True})
    assert hints.ignored == {"retain_s": "it needs a session", "release": "it needs a session"}
    assert (hints.retain_s, hints.release) == (None, False)
    hints = read({"session": "s", "retain_s": 5, "release": True})
    assert (hints.retain_s, hints.release) == (None, True) and set(hints.ignored) == {"retain_s"}


def test_limits_cut_and_are_said() -> None:
    limits = HintLimits(max_priority=1, max_retain_s=60)
    hints = read({"session": "s", "priority": 100, "retain_s": 1e9}, limits)
    assert (hints.priority, hints.retain_s) == (1, 60.0)
    assert hints.limited["priority"].startswith("1: ") and hints.limited["retain_s"].startswith("60: ")
    assert read({"session": "s", "retain_s": float("inf")}).retain_s == 3600.0
    assert set(read({"session": "s"}, HintLimits(enabled=False)).ignored) == {"tierkv"}


def test_vllms_own_hints_and_session_are_read() -> None:
    def envelope(*actions: tuple[str, Any]) -> KvHintsEnvelope:
        return KvHintsEnvelope("1", "m", [KvHintAction(f"a{i}", t, "1", p) for i, (t, p) in enumerate(actions)])

    request = SimpleNamespace(
        kv_hints=envelope(("other", {"store": "none"}), ("tierkv", {"session": "s", "priority": 1}))
    )
    hints = HintReader(HintLimits()).read(request, TENANT)
    assert hints is not None and (hints.session, hints.priority, hints.store) == (
        session_digest(TENANT, "s"),
        1,
        "prompt",
    )
    both = read({"priority": 2}, kv_hints=envelope(("tierkv", {"priority": 1, "store": "none"})))
    assert (both.priority, both.store) == (2, "none"), "what the request says itself goes before"
    for nothing in (None, SimpleNamespace(), SimpleNamespace(actions=5), envelope(("other", {}))):
        assert HintReader(HintLimits()).read(SimpleNamespace(kv_hints=nothing), TENANT) is None
    assert set(read({}, kv_hints=envelope(("tierkv", "text"))).ignored) == {"tierkv"}
    assert read({}, session_id="s").session == session_digest(TENANT, "s")
    assert read({"session": "t"}, session_id="s").session == session_digest(TENANT, "t")
    assert read({}, session_id=None).session == b""


def test_a_session_is_its_tenants_own_and_its_name_is_not_kept() -> None:
    assert session_digest(TENANT, "s") != session_digest(tenant_digest(b"other"), "s")
    assert session_digest(TENANT, "s") == hashlib.sha256(b"tierkv-session-1" + TENANT + b"s").digest()[:16]
    session_digest(TENANT, "\ud800")  # half a surrogate pair, as JSON may hold it


def test_warnings_are_one_a_minute_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reader = HintReader(HintLimits(), lambda: now[0])
    with caplog.at_level(logging.WARNING, "tierkv"):
        logging.getLogger("tierkv").addHandler(caplog.handler)
        try:
            for i in range(50):
                reader.read(
                    SimpleNamespace(kv_transfer_params={"tierkv": {"store": "secret text", f"n{i}": 1}}), TENANT
                )
            first = [r.getMessage() for r in caplog.records]
            now[0] = 61.0
            reader.read(SimpleNamespace(kv_transfer_params={"tierkv": {"store": 1}}), TENANT)
        finally:
            logging.getLogger("tierkv").removeHandler(caplog.handler)
    later = [r.getMessage() for r in caplog.records][len(first) :]
    assert len(set(first)) == 2 and all("(1 since" in line for line in first)
    assert len(set(later)) == 1 and "hint store was ignored (50 since" in later[0]
    assert not any("secret" in r.getMessage() for r in caplog.records), "a log shows nothing of what requests say"


def test_limits_of_an_engine_are_checked() -> None:
    assert EngineConfig.parse({}).hints == HintLimits()
    assert EngineConfig.parse({"hints": {"tenant_share": 0.1, "enabled": False}}).hints.tenant_share == 0.1
    for value, part in [
        (5, "set an object"),
        ({"tenant_shar": 1}, "did you mean 'tenant_share'"),
        ({"tenant_share": 1.5}, "$.tenant_share"),
        ({"max_priority": 3}, "$.max_priority"),
        ({"enabled": "no"}, "$.enabled"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(part)):
            EngineConfig.parse({"hints": value})


# -- what requests do with them


def hinted(bench: Bench, tokens: list[int], salt: str = "", outputs: int = 1, **own: Any) -> Any:
    request = bench.new_request(tokens, salt, outputs)
    request.kv_transfer_params = {"tierkv": own}
    bench.add(request)
    return request


def run(bench: Bench) -> None:
    """Let everything that can happen happen, without a fault."""
    for _ in range(60):
        bench.answer_all()
        bench.run_device()
        bench.step()
        while bench.client.stores:
            bench.answer_store()
        bench.check()
        if not bench.requests and not bench.sched.spill.copying:
            break
    assert not bench.requests


@pytest.fixture
def bench() -> Any:
    with small_world(PLAN_NBYTES=64 * PAYLOAD_NBYTES, STORE_NBYTES=64 * PAYLOAD_NBYTES):
        bench = Bench(num_slots=32, num_blocks=64)
        yield bench
        bench.close()


PROMPT = [1] * (4 * CHUNK_TOKENS + 2)


def store_remotely(bench: Bench, letter: bytes, tokens: list[int] = PROMPT) -> None:
    keys = chain_keys(root_key(IDENTITY), tokens, CHUNK_TOKENS)
    bench._note_contents(bench.new_request(tokens), keys)
    bench.stored.update(dict.fromkeys(keys, letter))


def test_a_request_without_hints_is_answered_nothing(bench: Bench) -> None:
    bench.submit(PROMPT)
    run(bench)
    assert bench.told == []
    assert all(kind != "turn" for kind, *_ in bench.client.log)


def test_the_answer_counts_tokens_by_tier(bench: Bench) -> None:
    store_remotely(bench, b"d")
    keys = list(bench.stored)
    bench.stored[keys[2]] = bench.stored[keys[3]] = b"s"
    hinted(bench, PROMPT)
    run(bench)
    hinted(bench, PROMPT)
    run(bench)
    size = CHUNK_TOKENS
    first, second = bench.told
    assert first["hit_tokens"] == {"gpu": 0, "host": 0, "disk": 2 * size, "shared": 2 * size}
    assert first["prompt_tokens"] == len(PROMPT) and first["stored_tokens"] == 0
    assert second["hit_tokens"] == {"gpu": 4 * size, "host": 0, "disk": 0, "shared": 0}
    assert "session" not in first and "ignored" not in first


def test_store_none_stores_nothing(bench: Bench) -> None:
    hinted(bench, PROMPT, store="none", outputs=20)
    run(bench)
    assert len(bench.sched.index) == 0 and bench.client.num_commands("store") == 0
    assert bench.told[0]["stored_tokens"] == 0
    bench.submit(PROMPT)
    run(bench)
    assert len(bench.sched.index) == 0, "what was on the GPU already is not computed, so it is not stored"


def test_store_none_passes_nothing_on(bench: Bench) -> None:
    bench.client.spill = {"disk": "second-use", "shared": "never"}
    bench.submit(PROMPT)
    run(bench)
    before = bench.client.num_commands("use")
    hinted(bench, PROMPT, store="none")
    run(bench)
    assert bench.client.num_commands("use") == before
    hinted(bench, PROMPT)
    run(bench)
    assert bench.client.num_commands("use") > before


def test_store_prompt_stores_the_prompt_and_all_the_answer_too(bench: Bench) -> None:
    hinted(bench, PROMPT, outputs=2 * CHUNK_TOKENS + 1)
    run(bench)
    assert len(bench.sched.index) == 4 and bench.told[0]["stored_tokens"] == 4 * CHUNK_TOKENS
    other = [2] * len(PROMPT)
    request = hinted(bench, other, store="all", outputs=2 * CHUNK_TOKENS + 1)
    run(bench)
    assert len(bench.sched.index) == 10 and bench.told[1]["stored_tokens"] == 6 * CHUNK_TOKENS
    bench.gpu.reset()
    follow_up = hinted(bench, [*request.tokens, 5])
    run(bench)
    assert bench.told[2]["hit_tokens"]["host"] == 6 * CHUNK_TOKENS
    assert follow_up.begun == 6 * CHUNK_TOKENS


def test_store_all_of_a_prompt_shorter_than_a_chunk(bench: Bench) -> None:
    hinted(bench, [3], store="all", outputs=2 * CHUNK_TOKENS)
    run(bench)
    assert bench.told[0]["stored_tokens"] == 2 * CHUNK_TOKENS == len(bench.sched.index) * CHUNK_TOKENS


@pytest.mark.parametrize(
    ("load", "letters", "loaded"),
    [
        (["host"], b"dd", 0),
        (["host", "disk"], b"dd", 2),
        (["disk"], b"ds", 1),
        (["shared"], b"ss", 2),
        (["shared"], b"ds", 0),
        (["host", "disk", "shared"], b"ds", 2),
        ([], b"dd", 0),
        ("none", b"dd", 0),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_may(bench: Bench, load: Any, letters: bytes, loaded: int) -> None:
    store_remotely(bench, b"d")
    for key, letter in zip(list(bench.stored), letters + b"dd", strict=True):
        bench.stored[key] = bytes([letter])
    for key in list(bench.stored)[2:]:
        del bench.stored[key]
    commands = len(bench.client.log)
    hinted(bench, PROMPT, load=load, store="none")
    run(bench)
    assert sum(bench.told[0]["hit_tokens"].values()) == loaded * CHUNK_TOKENS
    kinds = Counter(kind for kind, *_ in bench.client.log[commands:])
    if load in (["host"], [], "none"):
        assert not kinds["match"] and not kinds["fetch"]
    assert kinds["fetch"] == (loaded > 0), "what it may not load is not fetched either"


def test_load_host_takes_what_is_in_the_pool_and_load_none_does_not(bench: Bench) -> None:
    bench.submit(PROMPT)
    run(bench)
    for load, tokens in (([], 0), (["host"], 4 * CHUNK_TOKENS)):
        bench.gpu.reset()
        hinted(bench, PROMPT, load=load)
        run(bench)
        assert bench.told[-1]["hit_tokens"]["host"] == tokens


def test_what_another_request_has_fetched_is_in_the_pool(bench: Bench) -> None:
    store_remotely(bench, b"d")
    fetches = bench.new_request(PROMPT)
    bench.add(fetches)
    bench.answer_all()
    bench.sched.prefetch.advance(bench.sched._plan)
    bench.answer_all()
    bench.finish(fetches)  # before it could load
    hinted(bench, PROMPT, load=["host"])
    run(bench)
    assert bench.told[0]["hit_tokens"] == {"gpu": 0, "host": 4 * CHUNK_TOKENS, "disk": 0, "shared": 0}
    assert bench.sched.counters["disk_hits"] == 4, "the disk's hits are counted where they are made"


def test_a_load_that_fails_is_no_hit(bench: Bench) -> None:
    store_remotely(bench, b"d")
    hinted(bench, PROMPT)
    bench.answer_all()
    bench.step()
    while not bench.pending_loads:
        bench.answer_all()
        bench.step()
    bench.run_load(bench.pending_loads[0][0], ok=False)
    run(bench)
    assert not any(bench.told[0]["hit_tokens"].values())


def test_a_request_of_another_kind_says_so(bench: Bench) -> None:
    request = bench.new_request(PROMPT)
    request.pooling_params = object()
    request.kv_transfer_params = {"tierkv": {"store": "all", "session": "s", "prefetch": "disk"}}
    bench.add(request)
    answer = bench.sched.request_finished(request)
    assert answer is not None and set(answer["tierkv"]["ignored"]) == {"request"}
    assert all(kind != "turn" for kind, *_ in bench.client.log)


def test_random_requests_with_hints_keep_every_invariant() -> None:
    """The bench checks each answer against its own model; here is that the runs meet enough of each kind."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 1000 + NUM_SEQUENCES):
        with small_world():
            bench = Bench(seed, num_slots=12 if seed % 5 else 5, num_blocks=40, late_outputs=bool(seed % 2))
            try:
                for _ in range(NUM_OPERATIONS):
                    bench.do()
                    bench.check()
                bench.drain()
                bench.check_idle()
            finally:
                bench.close()
            for about in bench.told:
                seen.update(tier for tier, num in about["hit_tokens"].items() if num)
                seen.update(f"ignored {name}" for name in about.get("ignored", ()))
                seen["longer"] += about["stored_tokens"] > about["prompt_tokens"] // CHUNK_TOKENS * CHUNK_TOKENS
                seen["stored"] += about["stored_tokens"] > 0
            seen["turns"] += bench.client.num_commands("turn")
    few = {name: seen[name] for name in ("gpu", "host", "disk", "shared", "stored", "turns") if seen[name] < 5}
    assert not few
    assert seen["longer"] >= 3, "no chunk of an answer was stored"
    assert all(seen[f"ignored {name}"] > 20 for name in ("session", "store", "load", "retain_s", "sesion", "tierkv"))


# -- sessions in an engine


class Watched:
    """A policy that notes what it is told."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.noted: list[tuple[int, Hint | None]] = []
        self.released: list[str] = []

    def note(self, chain: Any, now: float, *, hint: Hint | None = None, domain: Any = None) -> None:
        self.noted.append((len(chain), hint))
        self._policy.note(chain, now, hint=hint, domain=domain)

    def release(self, session: str, domain: Any = None) -> bool:
        self.released.append(session)
        return bool(self._policy.release(session, domain))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, key: object) -> bool:
        return key in self._policy


def watched(bench: Bench) -> Watched:
    policy = bench.sched.index._policy = Watched(bench.sched.index._policy)  # type: ignore[assignment]
    return policy  # type: ignore[return-value]


def test_the_policy_is_told_once_a_request(bench: Bench) -> None:
    policy = watched(bench)
    bench.submit(PROMPT)
    run(bench)
    hinted(bench, PROMPT, session="s", priority=2, retain_s=30)
    hinted(bench, PROMPT, session="s", release=True)
    run(bench)
    name = session_digest(bytes(16), "s").hex()
    assert policy.noted == [
        (4, None),
        (4, Hint(name, 30.0, False, 2)),
        (4, Hint(name, None, True, 0)),
    ]


def test_no_tenant_holds_more_of_the_host_pool_than_its_share(bench: Bench) -> None:
    """The pool has 32 slots: a tenant may hold 8 of them, two prompts of four chunks."""
    policy = watched(bench)
    for name in ("a", "b", "c"):
        hinted(bench, PROMPT, session=name, retain_s=60)
    assert policy.released == [session_digest(bytes(16), "a").hex()], "the tenant's oldest makes room"
    hinted(bench, PROMPT, salt="other", session="a", retain_s=60)
    assert len(policy.released) == 1, "another tenant's are his own"
    hinted(bench, [2] * 9 * CHUNK_TOKENS, session="d", retain_s=60)
    assert len(policy.released) == 1 and policy.noted[-1][1] == Hint(session_digest(bytes(16), "d").hex(), None)
    run(bench)
    assert next(about for about in bench.told if "retain_s" in about.get("limited", ()))["prompt_tokens"] == 72
    bench.now += 61
    hinted(bench, PROMPT, session="e", retain_s=60)
    hinted(bench, PROMPT, session="f", retain_s=60)
    assert len(policy.released) == 1, "what had its time has made room by itself"


def test_the_server_is_told_of_turns(bench: Bench) -> None:
    hinted(bench, PROMPT, session="s", retain_s=30, prefetch="disk", salt="mine", store="all", outputs=CHUNK_TOKENS)
    run(bench)
    hinted(bench, PROMPT, session="s", release=True)
    run(bench)
    arrived, ended, released = [words[0] for kind, *words in bench.client.log if kind == "turn"]
    name, tenant = session_digest(tenant_digest(b"mine"), "s"), tenant_digest(b"mine")
    assert arrived == SessionTurn(name, tenant, arrived.chain, 30.0, False, True) and len(arrived.chain) == 4 * 32
    assert ended == SessionTurn(name, tenant, ended.chain, 30.0) and len(ended.chain) == 5 * 32
    assert ended.chain.startswith(arrived.chain)
    assert released == SessionTurn(session_digest(bytes(16), "s"), bytes(16), released.chain, 0.0, True)


def test_the_server_is_told_nothing_of_what_stays_here(bench: Bench) -> None:
    hinted(bench, PROMPT, session="before", retain_s=5)
    bench.reset()
    hinted(bench, PROMPT, session="s", retain_s=30, prefetch="disk")
    run(bench)
    assert all(kind != "turn" for kind, *_ in bench.client.log)
    assert len(bench.told) == 2


def test_a_session_that_was_to_be_near_goes_first(bench: Bench) -> None:
    def unstarted(*names: str) -> list[str]:
        store_remotely(bench, b"d", [7] * 40)
        requests = {n: hinted(bench, [7 + i] + [7] * 39, session=n) for i, n in enumerate(("x", "y", "z", *names))}
        waiting = [n for n in requests if requests[n].request_id in bench.sched.prefetch.unstarted]
        order = [n for i in bench.sched.prefetch.unstarted for n in requests if requests[n].request_id == i]
        assert set(order) == set(waiting)
        for request in requests.values():
            bench.finish(request)
        bench.client.lanes[0].clear()
        for lane in bench.client.lanes:
            lane.clear()
        return order

    assert unstarted("a", "b")[-2:] == ["a", "b"]
    request = hinted(bench, PROMPT, session="b", prefetch="host")
    bench.finish(request)
    assert unstarted("a", "b")[0] == "b"
    assert unstarted("a", "b")[-2:] == ["a", "b"], "once"
    assert bench.push("session", [FIRST + session_digest(bytes(16), "b")]) == b"1"
    assert unstarted("a", "b")[0] == "b", "so says an operator"


def test_orders_of_an_operator_wait_for_the_scheduler(bench: Bench) -> None:
    policy = watched(bench)
    hinted(bench, PROMPT, session="s", retain_s=60)
    name = session_digest(bytes(16), "s")
    before = len(policy.released)
    assert bench.push("session", [RELEASE + name]) == b"1"
    assert len(policy.released) == before, "the reader thread changes nothing"
    bench.submit([1])
    hinted(bench, PROMPT)
    assert policy.released == [name.hex()] and bench.sched.retention.dump()["held_nbytes"] == 0
    for nonsense in (b"", b"x" + name, b"r" + name[:5]):
        assert bench.sched._on_push("session", nonsense) == b"0"


# -- the book of sessions


def book(**limits: Any) -> SessionBook:
    return SessionBook(
        SessionLimits(**({"nbytes": 1000, "tenant_nbytes": 400, "tenant_sessions": 8, "retain_s": 100} | limits))
    )


def note(book: SessionBook, name: int, tenant: int, num_chunks: int, now: float, retain_s: float | None = 50) -> Any:
    chain = bytes(32 * num_chunks)
    session = bytes([tenant, name]) * 8
    return book.note(session, bytes([tenant]) * 16, b"ns", chain, num_chunks, 10, now, retain_s)


def test_holds_end_by_themselves_and_with_the_next_turn() -> None:
    b = book()
    session, _ = note(b, 1, 1, 5, now=10, retain_s=1e9)
    assert (session.until, session.num_held, b.held_nbytes) == (110, 5, 50)
    assert [s.id for s in b.expire(109.9)] == [] and [s.id for s in b.expire(110)] == [session.id]
    assert (session.until, session.num_held, b.held_nbytes) == (0, 0, 0) and len(b) == 1
    note(b, 1, 1, 5, now=120)
    session, _ = note(b, 1, 1, 6, now=121, retain_s=None)
    assert (session.num_held, session.num_turns, b.held_nbytes) == (0, 3, 0)
    assert b.release(session.id) is session and b.release(session.id) is None and len(b) == 0


def test_a_chain_too_long_is_cut_at_its_end() -> None:
    b = book()
    assert note(b, 1, 1, 100, now=0)[0].num_held == 40
    assert b.held_nbytes == 400


def test_all_together_the_tenant_with_most_makes_room() -> None:
    b = book()
    note(b, 1, 1, 20, 0), note(b, 2, 1, 20, 1), note(b, 1, 2, 40, 2), note(b, 1, 3, 10, 3)
    session, lost = note(b, 1, 4, 25, 4)
    assert [s.id for s in lost] == [bytes([1, 1]) * 8] or [s.id for s in lost] == [bytes([2, 1]) * 8]
    assert session.num_held == 25 and b.held_nbytes <= 1000
    small, lost = note(b, 2, 3, 1, 5)
    assert small.num_held == 1 and not lost


def test_a_flood_of_tenants_does_not_take_a_tenants_hold_that_is_no_larger() -> None:
    b = book()
    kept, _ = note(b, 1, 200, 3, 0)
    for i in range(150):
        note(b, 1, i, 40, float(i) / 10)
    assert kept.num_held == 3


def test_random_turns_keep_the_books_sums() -> None:
    rng = Random(3)
    for _ in range(30):
        b, now = book(tenant_sessions=rng.choice((1, 3, 8))), 0.0
        for _ in range(300):
            now += rng.random() * 5
            if rng.random() < 0.1:
                b.expire(now)
                b.release(bytes([rng.randrange(4), rng.randrange(9)]) * 8)
            else:
                note(b, rng.randrange(9), rng.randrange(4), rng.randrange(60), now, rng.choice((None, 1, 20, 500)))
            held = [s for s in b if s.num_held]
            assert b.held_nbytes == sum(s.held_nbytes for s in held) <= 1000
            tenants = Counter(s.tenant for s in b)
            assert max(tenants.values(), default=0) <= b.limits.tenant_sessions
            for tenant in tenants:
                assert sum(s.held_nbytes for s in held if s.tenant == tenant) <= 400
            assert all(s.until > now for s in held), "a hold that is over is counted"
            assert all((s.until > 0) == (s.num_held > 0) and s.num_held <= s.num_chunks for s in b)
            assert b._chain_nbytes == sum(len(s.chain) for s in b)
            assert len(b._ends) <= 2 * len(b) + 65


def test_a_book_is_bounded_whatever_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SESSIONS == 16384
    monkeypatch.setattr("tierkv.sessions.MAX_SESSIONS", 20)
    monkeypatch.setattr("tierkv.sessions.MAX_CHAIN_NBYTES", 10 * 32 * 8)
    b = book()
    for i in range(100):
        note(b, i % 5, i // 5, 1, float(i))
    assert len(b) == 20
    for i in range(100):
        note(b, i % 5, i // 5, 8, float(i))
    assert len(b) == 10


# -- the document


def test_the_document_names_every_hint_and_its_examples_are_right() -> None:
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text.split("## Limits")[0], re.MULTILINE)
    assert rows[:8] == ["session", "priority", "retain_s", "release", "store", "load", "prefetch", "handoff"]
    limits = re.findall(r"^\| `hints\.(\w+)` \| `([^`]+)` \|", text, re.MULTILINE)
    fields = msgspec.structs.fields(HintLimits)
    assert limits == [(field.name, json.dumps(field.default)) for field in fields]
    curl = re.search(r"-d '(\{.*?\})'\n", text, re.DOTALL)
    assert curl is not None
    hints = read(json.loads(curl[1])["kv_transfer_params"]["tierkv"])
    assert not hints.ignored and not hints.limited and hints.session
    python = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert python is not None
    calls: list[Any] = []
    answer = SimpleNamespace(
        kv_transfer_params={"tierkv": {"hit_tokens": {"gpu": 1, "host": 2, "disk": 3, "shared": 0}}}, outputs=[]
    )
    llm = SimpleNamespace(generate=lambda prompts, params: (calls.append((prompts, params)), [answer])[1])
    exec(python[1], {"llm": llm, "prompt": "text"})
    assert len(calls) == 2
    for _, params in calls:
        hints = read(params.extra_args["kv_transfer_params"]["tierkv"])
        assert hints.session and not hints.ignored

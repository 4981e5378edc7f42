"""Roles, and chunks that one engine stores for another: what is promised, sent, waited for and asked."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_bench import CHUNK_TOKENS, DEADLINE_S, IDENTITY, PAYLOAD_NBYTES, Bench, Request, small_world
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv.hostindex import Entry
from tierkv.keys import chain_keys, root_key
from tierkv.messages import COMPUTED, HANDOFF
from tierkv_connector.awaited import Awaited, read_awaited, without_answer
from tierkv_connector.handoff import MAX_PAUSE_S, Handoffs, ask_again
from tierkv_connector.hints import TIERS, Hints
from tierkv_connector.roles import Role


@pytest.fixture
def bench() -> Iterator[Bench]:
    with small_world():
        bench = Bench(num_slots=16, num_blocks=64)
        yield bench
        bench.check()
        bench.drain()
        bench.check()
        bench.check_idle()
        bench.close()


def take(bench: Bench, role: Role) -> None:
    """Give an engine a role."""
    bench.sched.role = role
    bench.sched.hints._store = role.store


def prompt(num_chunks: int, family: int = 0) -> list[int]:
    return [100 * family + i % 97 for i in range(num_chunks * CHUNK_TOKENS + 1)]


def keys_of(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return chain_keys(root_key(IDENTITY, tenant=salt), tokens, CHUNK_TOKENS)


def submit(bench: Bench, tokens: list[int], own: Any, max_outputs: int = 1) -> Request:
    request = bench.new_request(tokens, "", max_outputs)
    request.kv_transfer_params = {"tierkv": own}
    bench.add(request)
    return request


def await_all(bench: Bench, tokens: list[int]) -> Request:
    """Add a request to which all of its chunks are promised."""
    bench.step()  # the engine knows its model from here on
    promise = Awaited(bench.sched.membership.ns_id, keys_of(tokens)[-1]).shown(0)
    return submit(bench, tokens, {"handoff": promise})


def go_on(bench: Bench, count: int = 6, stores: bool = False) -> None:
    for _ in range(count):
        bench.answer_all()
        while stores and bench.client.uses:
            bench.answer_use()
        while stores and bench.client.stores:
            bench.answer_store()
        bench.run_device()
        bench.step()


def sent(bench: Bench, reason: int) -> list[bytes]:
    stores = [command[1] for command in bench.client.log if command[0] == "store"]
    return [item.key for items in stores for item in items if item.reason == reason]


# -- roles and what travels


def test_roles() -> None:
    both, producer, consumer = (Role.of(name) for name in ("kv_both", "kv_producer", "kv_consumer"))
    assert [(r.stores, r.loads, r.hands_off) for r in (both, producer, consumer)] == [
        (True, True, False),
        (True, False, True),
        (False, True, False),
    ]
    assert both.describe() == "" and consumer.describe() == ", kv_consumer"
    assert Role.of("kv_producer", decode_blocks=True).describe() == ", kv_producer, stores answers too"
    assert (both.store, Role.of("kv_both", decode_blocks=True).store) == ("prompt", "all")
    with pytest.raises(ConfigError, match="kv_role='kv_nothing' is not served"):
        Role.of("kv_nothing")
    with pytest.raises(ConfigError, match="decode_blocks=True has no effect with kv_role='kv_consumer'"):
        Role.of("kv_consumer", decode_blocks=True)
    with pytest.raises(ConfigError, match="decode_blocks=1 is neither true nor false"):
        EngineConfig.parse({"decode_blocks": 1})
    assert not EngineConfig.parse({}).decode_blocks


def test_a_role_takes_out_of_hints_what_it_does_not_do() -> None:
    producer, consumer = Role.of("kv_producer"), Role.of("kv_consumer")
    assert Role.of("kv_both").fit(None) is None and consumer.fit(None) is None
    plain = producer.fit(None)
    assert plain is not None and plain.handoff and plain.tiers == frozenset() and not plain.ignored
    hints = Hints("none")
    hints.store, hints.handoff = "all", True
    assert consumer.fit(hints) is hints and hints.store == "none" and set(hints.ignored) == {"store"}
    hints = Hints()
    hints.tiers, hints.store = frozenset({"host"}), "none"
    assert producer.fit(hints) is hints and not hints.handoff and set(hints.ignored) == {"load"}
    hints = Hints()
    hints.handoff = False
    assert producer.fit(hints) is hints and hints.handoff is False
    assert Role.of("kv_both").fit(Hints()).tiers == TIERS  # type: ignore[union-attr]


def test_what_travels_is_read_back_and_nothing_else_is() -> None:
    promise = Awaited(bytes(range(16)), bytes(range(32)))
    shown = promise.shown(64)
    assert read_awaited(shown) == promise
    for name, values in (
        ("namespace", ("", "0" * 31, "g" * 32, " " * 32, 7, None)),
        ("last_key", ("0" * 32, b"0" * 64)),
    ):
        for value in values:
            assert read_awaited(shown | {name: value}) is None, (name, value)
    for value in (None, 5, "x", [shown], {}):
        assert read_awaited(value) is None
    answer = {"handoff": shown, "hit_tokens": {}, "session": "00", "ignored": {}}
    assert without_answer(answer) == {"handoff": shown}
    assert without_answer({"handoff": shown, "session": "a"}) == {"handoff": shown, "session": "a"}
    assert without_answer("nonsense") == "nonsense"


# -- handing off


def test_what_is_promised_is_sent_past_the_budget_and_kept_until_it_is_answered(bench: Bench) -> None:
    """Eight chunks, in a queue for five; the policies would not have sent them at all."""
    bench.client.spill = {"disk": "on-evict", "shared": "never"}
    request = submit(bench, prompt(8), {"handoff": True})
    go_on(bench)
    assert request.request_id not in bench.sched.requests
    assert sent(bench, HANDOFF) == keys_of(prompt(8)) and not sent(bench, COMPUTED)
    assert bench.told[-1]["handoff"] == {
        "namespace": bench.sched.membership.ns_id.hex(),
        "last_key": keys_of(prompt(8))[-1].hex(),
        "tokens": 8 * CHUNK_TOKENS,
    }
    assert bench.sched.stat().counters["store_queue_nbytes"] == 8 * PAYLOAD_NBYTES
    bench.check()
    for family in range(1, 12):  # others want the slots
        bench.submit(prompt(2, family))
        go_on(bench, 3)
        bench.check()
    assert all(bench.usable(key) for key in keys_of(prompt(8)))
    go_on(bench, 3, stores=True)
    assert set(bench.stored) >= set(keys_of(prompt(8))) and not bench.sched.spill.handoffs.kept


def test_what_was_there_before_is_asked_about_and_sent_where_it_lacks(bench: Bench) -> None:
    """An engine at rest takes no step for the answer: the chunks are sent when it comes."""
    bench.client.spill = {"disk": "on-evict", "shared": "never"}
    bench.submit(prompt(3))
    go_on(bench, stores=True)
    assert not bench.stored
    submit(bench, prompt(3), {"handoff": True})
    go_on(bench, 2)
    assert [command[4] for command in bench.client.log if command[0] == "hand off"] == [tuple(keys_of(prompt(3)))]
    assert not sent(bench, HANDOFF)
    bench.answer_use(wanted=1.0)
    assert sent(bench, HANDOFF) == keys_of(prompt(3))
    assert bench.told[-1]["handoff"]["tokens"] == 3 * CHUNK_TOKENS


def test_what_is_on_the_gpu_alone_is_copied_for_it(bench: Bench) -> None:
    bench.submit(prompt(3))
    go_on(bench, stores=True)
    bench.sched.index.clear()
    submit(bench, prompt(3), {"handoff": True})
    go_on(bench, stores=True)
    assert sent(bench, HANDOFF) == keys_of(prompt(3))
    assert bench.told[-1]["handoff"]["tokens"] == 3 * CHUNK_TOKENS


def test_a_promise_ends_at_the_first_chunk_that_is_lost() -> None:
    with small_world():
        bench = Bench(num_slots=4, num_blocks=64)
        submit(bench, prompt(7), {"handoff": True})
        go_on(bench, 3)
        assert bench.sched.counters["not_spilled"] and bench.told[-1]["handoff"]["tokens"] == 4 * CHUNK_TOKENS
        bench.drain()
        bench.close()


def test_what_was_lost_with_its_server_is_sent_again_for_the_same_reason(bench: Bench) -> None:
    bench.client.spill = {"disk": "on-evict", "shared": "never"}
    submit(bench, prompt(3), {"handoff": True})
    go_on(bench)
    bench.client.disconnect()
    bench.client.up = True
    go_on(bench, stores=True)
    assert sent(bench, HANDOFF) == 2 * keys_of(prompt(3))
    assert set(bench.stored) == set(keys_of(prompt(3)))


def test_nothing_is_promised_of_what_stays_here(bench: Bench) -> None:
    bench.reset()
    for own in ({"handoff": True}, {"handoff": True, "store": "none"}):
        submit(bench, prompt(3, family=1), own)
        go_on(bench)
        assert "handoff" not in bench.told[-1] and set(bench.told[-1]["ignored"]) == {"handoff"}
    assert not sent(bench, HANDOFF)


class Parts:
    """A :class:`Handoffs` by itself: what it pins, asks and sends."""

    def __init__(self) -> None:
        self.pinned: list[Any] = []
        self.used: list[tuple[int, list[bytes]]] = []
        self.sent: list[Any] = []
        index = SimpleNamespace(
            pin=self.pinned.append,
            unpin=self.pinned.remove,
            pool=SimpleNamespace(shape=SimpleNamespace(payload_nbytes=1 << 20)),
        )
        self.handoffs = Handoffs(index, Counter(), lambda entries, *rest: self.sent.extend(entries))  # type: ignore[arg-type]
        self.client: Any = SimpleNamespace(
            connected=lambda: True,
            denies=lambda key: False,
            use=lambda first, anchor, keys, arrived, reason: self.used.append((first, list(keys))),
        )


def state_of(num_chunks: int, family: int = 0) -> Any:
    keys = [bytes([family, i]) * 16 for i in range(num_chunks)]
    return SimpleNamespace(keys=keys, promised=set(), anchor=lambda first: keys[0])


def entry_of(state: int = Entry.READY, fetch: Any = None, anchor: bytes = b"anchor") -> Any:
    return SimpleNamespace(state=state, fetch=fetch, anchor=anchor, promised=False, key=b"")


def test_the_server_is_asked_for_runs_of_one_request_without_holes() -> None:
    parts, one, other = Parts(), state_of(4), state_of(6, family=1)
    for state, i in ((one, 0), (one, 1), (one, 3), (other, 4), (other, 5)):
        parts.handoffs.finds(state, i, entry_of())
    parts.handoffs.advance(parts.client)
    assert parts.used == [(0, one.keys[:2]), (3, one.keys[3:]), (4, other.keys[4:])]
    assert (one.promised, other.promised) == ({0, 1, 3}, {4, 5})


def test_without_a_server_nothing_that_was_found_stays_pinned() -> None:
    parts, state = Parts(), state_of(2)
    for i, entry in enumerate((entry_of(), None)):
        parts.handoffs.finds(state, i, entry)
    assert len(parts.pinned) == 1
    parts.handoffs.advance(None)
    parts.handoffs.apply_answers()
    assert not parts.pinned and not parts.handoffs.kept and not state.promised


def test_what_is_on_its_way_here_is_not_kept() -> None:
    """Its slot is still the store server's; of what is in a tier that server knows itself."""
    parts, state = Parts(), state_of(1)
    parts.handoffs.finds(state, 0, entry_of(Entry.FILLING, fetch=object()))
    assert not parts.pinned
    parts.handoffs.advance(parts.client)
    assert state.promised == {0}


def test_what_is_private_or_gone_is_not_sent() -> None:
    parts, good = Parts(), entry_of()
    parts.handoffs.send([entry_of(anchor=b""), good, entry_of(Entry.FILLING)], parts.client)
    assert parts.sent == parts.pinned == [good]


@pytest.mark.parametrize(("promised", "num"), [({0, 1, 2}, 3), ({0, 1, 3}, 2), ({0, 2, 3}, 1), ({1, 2, 3}, 0)])
def test_an_answer_promises_up_to_the_first_that_is_lost(promised: set[int], num: int) -> None:
    parts, state, answer = Parts(), state_of(4), {"tierkv": dict[str, Any]()}
    state.promised = promised
    parts.handoffs.tell(state, answer, 3, CHUNK_TOKENS, bytes(16))
    told = answer["tierkv"].get("handoff")
    assert (told and (told["last_key"], told["tokens"])) == (
        (state.keys[num - 1].hex(), num * CHUNK_TOKENS) if num else None
    )


# -- waiting


def test_while_the_filter_denies_nothing_is_asked_and_then_at_once(bench: Bench) -> None:
    keys = keys_of(prompt(4))
    bench.client.known = set()
    request = await_all(bench, prompt(4))
    for _ in range(20):
        go_on(bench, 1)
        bench.now += 0.05
        assert bench.ask(request, 0) == (None, False)
    assert bench.client.num_commands("match") == 1 and bench.client.num_commands("fetch") == 0
    for num in (1, 4):  # the rest comes in two parts
        bench.stored.update(dict.fromkeys(keys[:num], b"s"))
        bench.client.known = set(keys[:num])
        go_on(bench, 2)
    assert bench.client.num_commands("match") == 3
    go_on(bench)
    assert bench.sched.counters["shared_hits"] == 4 and not bench.sched.counters["missed"]
    assert not bench.sched.counters["awaited_late"]


def test_without_a_filter_it_asks_in_growing_pauses_until_the_deadline(bench: Bench) -> None:
    keys = keys_of(prompt(4))
    bench.stored.update(dict.fromkeys(keys[:2], b"d"))
    request = await_all(bench, prompt(4))
    began, asked = bench.now, []
    while bench.ask(request, 0)[0] is None:
        before = bench.client.num_commands("match")
        go_on(bench, 1)
        asked += [bench.now] * (bench.client.num_commands("match") - before)
        bench.now += 0.01
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    assert DEADLINE_S <= bench.now - began < DEADLINE_S + 0.02
    assert 4 <= len(asked) <= 12 and max(pauses) <= MAX_PAUSE_S + 0.03
    assert pauses[1:-1] == sorted(pauses[1:-1])
    assert bench.ask(request, 0)[0] == 2 * CHUNK_TOKENS, "what has come is claimed"
    go_on(bench)
    assert (bench.sched.counters["disk_hits"], bench.sched.counters["awaited_late"]) == (2, 2)


def test_after_the_deadline_nothing_is_asked_any_more() -> None:
    asked: list[list[bytes]] = []
    client: Any = SimpleNamespace(
        connected=lambda: True,
        denies=lambda key: False,
        match=lambda lane, first, anchor, keys: asked.append(list(keys)),
    )
    state = state_of(4)
    for now, num_asked in ((9.9, 1), (10.0, 0)):
        match = SimpleNamespace(letters=bytearray(b"d"))
        about = {"match": match, "again": None, "start": 0, "stop": 4, "awaited": 3, "ask_at": 0.0, "denied": False}
        plan: Any = SimpleNamespace(**about, deadline=10.0, pause_s=0.1, lane=0, failed=lambda: False)
        asked.clear()
        assert ask_again(plan, state, client, now) == bool(num_asked)
        assert asked == [state.keys[1:3]] * num_asked


def test_nobody_waits_for_a_server_that_is_gone_or_a_chunk_that_is(bench: Bench) -> None:
    request = await_all(bench, prompt(3))
    go_on(bench, 1)
    assert bench.ask(request, 0) == (None, False)
    bench.client.disconnect()
    bench.step()
    assert bench.ask(request, 0) == (0, False)
    bench.client.up = True
    tokens = prompt(3, family=1)
    bench.stored.update(dict.fromkeys(keys_of(tokens)[:2], b"d"))
    request = await_all(bench, tokens)
    bench.answer()
    bench.step()
    bench.stored.clear()  # evicted between the match and the read
    bench.answer_all()
    bench.step()
    assert bench.ask(request, 0) == (0, False)


def test_a_plan_for_which_there_is_no_room_yet_is_waited_for_too(bench: Bench) -> None:
    """There is room for three plans; what is awaited is worth more than what may be stored by chance."""
    requests = [await_all(bench, prompt(2, family)) for family in range(5)]
    plain = bench.submit(prompt(2, family=7))
    bench.stored.update(dict.fromkeys(keys_of(prompt(2, family=4)), b"d"))
    bench.step()
    assert [bench.ask(request, 0)[0] for request in requests] == [None] * 5
    assert bench.ask(plain, 0)[0] == 0
    bench.now += DEADLINE_S
    assert [bench.ask(request, 0)[0] for request in requests] == [0] * 5
    bench.check()


def test_a_request_awaits_only_its_own_chunks(bench: Bench) -> None:
    bench.step()
    bench.submit([1])  # the engine knows its model from here on
    own = Awaited(bench.sched.membership.ns_id, keys_of(prompt(3))[-1]).shown(0)
    foreign = {"last_key": keys_of(prompt(3), b"other")[-1].hex()}
    for promise in (own | foreign, own | {"namespace": "00" * 16}, own | {"last_key": "00" * 32}):
        request = submit(bench, prompt(3), {"handoff": promise})
        assert bench.state(request).awaits is None
        go_on(bench)
        assert set(bench.told[-1]["ignored"]) == {"handoff"}


# -- roles in the scheduler half


def test_a_producer_asks_nobody_and_hands_everything_off(bench: Bench) -> None:
    take(bench, Role.of("kv_producer"))
    bench.stored.update(dict.fromkeys(keys_of(prompt(3)), b"d"))
    request = submit(bench, prompt(3), {})
    assert bench.ask(request, 0) == (0, False)
    go_on(bench, stores=True)
    bench.gpu.reset()
    request = submit(bench, prompt(3), {})
    assert bench.ask(request, 0) == (0, False), "not from its own host pool either"
    go_on(bench, stores=True)
    assert not bench.client.num_commands("match") and not bench.client.num_commands("fetch")
    assert [told["handoff"]["tokens"] for told in bench.told] == [3 * CHUNK_TOKENS] * 2
    take(bench, Role())


def test_a_consumer_sends_nothing(bench: Bench) -> None:
    take(bench, Role.of("kv_consumer"))
    bench.client.spill = {"disk": "on-evict", "shared": "second-use"}
    for family in range(20):
        bench.stored.update(dict.fromkeys(keys_of(prompt(2, family))[:1], b"s"))
        bench.submit(prompt(2, family))
        go_on(bench, stores=True)
    assert bench.sched.counters["shared_hits"] == 20 and bench.sched.index.num_evicted
    assert not bench.client.num_commands("store") and not bench.client.num_commands("use")
    assert set(bench.sched.index._entries) <= set(bench.stored), "only what came from below is in its pool"


@pytest.mark.parametrize("late_outputs", [False, True])
def test_generated_chunks_are_stored_when_their_tokens_are_known(late_outputs: bool) -> None:
    """With asynchronous scheduling steps run ahead of the tokens; the bench compares every chunk's bytes with them."""
    with small_world():
        bench = Bench(num_slots=16, num_blocks=64, late_outputs=late_outputs)
        take(bench, Role.of("kv_both", decode_blocks=True))
        request = bench.submit(prompt(1), max_outputs=3 * CHUNK_TOKENS)
        for _ in range(8 * CHUNK_TOKENS):
            bench.answer_all()
            bench.run_device()
            bench.step()
            bench.check()
            while bench.client.stores:
                bench.answer_store()
        keys = keys_of(request.tokens)
        assert len(keys) == 4 and all(bench.usable(key) for key in keys)
        follow_up = bench.submit([*request.tokens, 5])
        bench.gpu.reset()
        assert bench.ask(follow_up, 0)[0] == 4 * CHUNK_TOKENS
        bench.drain()
        bench.close()

"""What the store server is told of the host pool, and what is offered again before it leaves the pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduler_bench import CHUNK_TOKENS, Bench
from tierkv.messages import COMPUTED, DECLINED, EVICTED
from tierkv_connector import holds as holds_module
from tierkv_connector import spill as spill_module
from tierkv_connector.holds import Holds

NUM_SLOTS = 8


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(num_slots=NUM_SLOTS, num_blocks=64)
    bench.client.spill = {"disk": "through", "shared": "never"}
    bench.client.holder = "first"
    bench.sched.index.admits = lambda key, parent: True  # type: ignore[method-assign]
    yield bench
    bench.check()
    bench.close()


def run(bench: Bench, family: int, num_chunks: int = 2, *, answers: bool = True) -> list[bytes]:
    """Run a prompt of its own, and return its keys."""
    tokens = [100 * family + i % 97 for i in range(num_chunks * CHUNK_TOKENS + 1)]
    keys = bench.keys[bench.submit(tokens).request_id]
    for _ in range(8):
        bench.answer_all()
        bench.run_device()
        bench.step()
        if answers:
            bench.settle_stores()
    bench.gpu.reset()
    bench.now += 1
    return keys


def kept(bench: Bench) -> set[bytes]:
    return {key for key, entry in bench.sched.index._entries.items() if not entry.in_transit}


def offered(bench: Bench, reason: int) -> list[bytes]:
    return [i.key for command in bench.client.log if command[0] == "store" for i in command[1] if i.reason == reason]


def test_what_the_pool_keeps_is_told_before_it_is_offered_and_then_what_changes(bench: Bench) -> None:
    keys = run(bench, 1, 3)
    first = next(command for command in bench.client.log if command[0] in ("hold", "store"))
    assert first == ("hold", tuple(keys), ())
    assert bench.client.held == kept(bench) == set(keys)
    assert bench.client.num_commands("hold") == 1, "nothing changed since"
    for family in range(2, 8):
        run(bench, family)
        assert bench.client.held == kept(bench)
    assert not bench.client.held & set(keys), "all of it was let go of"
    bench.push("invalidate", list(kept(bench))[:1])
    bench.step()
    assert bench.client.held == kept(bench)


def test_a_new_session_is_told_all_and_none_is_where_nobody_wants_to_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = run(bench, 1, 3)
    bench.client.held.clear()
    bench.client.holder = ""
    run(bench, 2)
    assert bench.client.held == set()
    bench.client.holder = "second"
    monkeypatch.setattr(holds_module, "_MAX_KEYS", 2)
    num_told = bench.client.num_commands("hold")
    bench.step()
    assert bench.client.held == kept(bench) > set(keys)
    assert bench.client.num_commands("hold") == num_told + 3, "five keys, two a message"
    assert bench.sched.index._kept_changes is not None
    bench.client.holder = ""
    bench.step()
    assert bench.sched.index._kept_changes is None, "nothing is gathered that nobody takes"


def test_what_is_not_for_others_is_not_told(bench: Bench) -> None:
    bench.sched._new_epoch(lambda: bench.sched.epochs.weights_change(gpu_is_empty=True))
    run(bench, 1, 3)
    assert kept(bench) and bench.client.held == set() and bench.client.num_commands("hold") == 0


def test_a_policy_that_keeps_all_is_not_told_of(bench: Bench) -> None:
    holds = Holds(bench.sched.index, is_wanted=False)
    run(bench, 1, 3)
    bench.client.log.clear()
    holds.tell(bench.client)  # type: ignore[arg-type]
    assert bench.client.log == []


def test_nothing_is_offered_again_while_the_disk_has_room(bench: Bench) -> None:
    for family in range(12):
        run(bench, family)
    assert offered(bench, EVICTED) == []
    assert bench.sched.index.num_pushed_out == 2 * 12 - NUM_SLOTS
    assert "not_saved" not in bench.sched.stat().counters, "the disk had all of it"


def test_what_the_disk_may_lack_is_offered_again_before_it_goes(bench: Bench) -> None:
    bench.client.is_full = True
    seen: set[bytes] = set()
    for family in range(12):
        seen |= set(run(bench, family))
        bench.stored.clear()  # the disk does without whatever the pool has
    gone = {key for key in seen if bench.sched.index.get(key) is None}
    assert len(gone) >= 2 * 12 - NUM_SLOTS
    assert gone <= set(offered(bench, EVICTED))
    assert bench.sched.stat().counters.get("not_saved", 0) == bench.sched.spill.holds.num_lost == 0
    held: set[bytes] = set()
    for kind, *words in bench.client.log:
        if kind == "hold":
            held = held - set(words[1]) | set(words[0])
        elif kind == "store":
            wrong = [item for item in words[0] if (item.key in held) != (item.reason == COMPUTED)]
            assert not wrong, "the server takes what the pool keeps for kept, and what goes for gone"


def test_what_came_from_the_disk_is_offered_again_too(bench: Bench) -> None:
    keys = run(bench, 1)
    bench.sched.index.clear()
    bench.client.is_full = True
    assert run(bench, 1) == keys
    assert bench.sched.counters["disk_hits"] == 2
    entries = [bench.sched.index.get(key) for key in keys]
    assert all(entry is not None and entry.saved and not entry.in_transit for entry in entries)
    for family in range(2, 5):
        run(bench, family)
    bench.sched.index.retire = lambda num: type(bench.sched.index).retire(bench.sched.index, 4)  # type: ignore[method-assign]
    run(bench, 5)
    run(bench, 6)
    assert set(keys) <= set(offered(bench, EVICTED)), "the disk may have done without it since"


def test_declined_for_being_kept_does_not_keep_what_follows_from_the_disk(bench: Bench) -> None:
    bench.client.is_full = True
    keys = run(bench, 1, 2)
    for key in keys:
        entry = bench.sched.index.get(key)
        assert entry is not None
        entry.declined = True  # as the server's answer says
    run(bench, 2), run(bench, 3), run(bench, 4)
    again = [e for key in keys if (e := bench.sched.index.get(key)) is not None and e.in_transit]
    assert not any(entry.declined for entry in again), "since it is offered anew"
    assert set(keys) <= set(offered(bench, EVICTED))
    assert DECLINED not in bench.sched.stat().counters


def test_an_engine_that_ends_offers_what_only_its_pool_may_have(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best first, within the queue's bound, once the server knows that the pool keeps it no more."""
    for family in range(4):
        run(bench, family)
    spill, client = bench.sched.spill, bench.client
    monkeypatch.setattr(spill_module, "COMMAND_NBYTES", 2 * bench.pool.shape.payload_nbytes)
    monkeypatch.setattr(bench.sched.index._policy, "worth", lambda key: -bench.sched.index.get(key).position)  # type: ignore[union-attr]
    monkeypatch.setattr(spill_module.time, "sleep", lambda _: [bench.answer_store() for _ in range(len(client.stores))])
    there = kept(bench)
    spill.offer_rest(client)  # type: ignore[arg-type]
    assert client.held == set() and offered(bench, EVICTED) == [], "the disk has it all"
    bench.step()
    client.is_full = True
    spill.offer_rest(client)  # type: ignore[arg-type]
    sent = offered(bench, EVICTED)
    assert set(sent) == there and len(sent) == len(there) > 4
    positions = [entry.position for key in sent if (entry := bench.sched.index.get(key)) is not None]
    assert positions == sorted(positions)
    kinds = [command[0] for command in client.log if command[0] == "hold" or command[0] == "store"]
    assert client.held == set() and kinds[-(len(sent) // 2) - 1 :] == ["hold", *["store"] * (len(sent) // 2)]


def test_an_end_waits_for_no_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in range(4):
        run(bench, family)
    bench.client.is_full = True
    spill, now = bench.sched.spill, [0.0]
    monkeypatch.setattr(spill_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(spill_module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    spill.offer_rest(bench.client)  # type: ignore[arg-type]
    assert spill.queue.nbytes > 0 and spill_module.LAST_OFFER_S <= now[0] < spill_module.LAST_OFFER_S + 0.1
    bench.client.up = False
    num_sent = len(offered(bench, EVICTED))
    spill.offer_rest(bench.client)  # type: ignore[arg-type]
    assert len(offered(bench, EVICTED)) == num_sent
    bench.settle_stores()


def test_a_server_that_does_not_answer_takes_no_slot_and_holds_nobody_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots whose chunks are on their way stay as they are; all others are there for what is computed."""
    bench.client.is_full = True
    for family in range(6):
        run(bench, family)
    monkeypatch.setattr(spill_module, "STORE_NBYTES", bench.sched.spill.queue.nbytes)  # its queue is full
    num_sent, num_spilled = len(offered(bench, EVICTED)), bench.sched.counters["spilled"]
    for family in range(20, 32):
        run(bench, family, answers=False)
    assert len(offered(bench, EVICTED)) == num_sent
    assert bench.sched.counters["spilled"] == num_spilled + 24, "every chunk had its slot"
    assert bench.sched.stat().counters["not_saved"] >= 24 - NUM_SLOTS
    assert bench.sched.spill.num_not_saved(bench.client) == bench.sched.spill.holds.num_lost  # type: ignore[arg-type]

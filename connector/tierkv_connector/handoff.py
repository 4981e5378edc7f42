"""Prefill and decode apart: chunks that one engine stores for another, and the wait of the other for them.

The engine that computes *hands off* a request: each whole chunk of its prompt is promised in the answer, and goes to
the tiers at once, whatever their spill policies (``never`` stays ``never``). Nothing that was promised is dropped for
want of room in a queue: its slot is pinned until the store server has it, and the server waits for room in its queues.

The engine that goes on *awaits* the chunks: its plan asks for them again until all are there, or until the deadline.
The server helps: while its filter of stored keys says that the next one is not there, nothing is asked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from tierkv.client import StoreClient
from tierkv.config import COMMAND_NBYTES
from tierkv.hostindex import Entry, HostIndex
from tierkv.messages import HANDOFF, WANTED
from tierkv_connector.awaited import Awaited
from tierkv_connector.hints import NAME, TIERS
from tierkv_connector.plan import Plan
from tierkv_connector.requests import RequestState

#: A plan whose chunks should be there by what the filter says (or where there is none) asks again after so long, and
#: then after twice as long each time, up to the second.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5


#: Sends chunks to the store server, for a reason, and says when it is done with their slots; from any thread.
Offer = Callable[[Sequence[Entry], StoreClient, int, Callable[[Sequence[Entry]], None]], None]


class Handoffs:
    """What this engine hands off.

    Args:
        index: the host index.
        counters: the engine's.
        offer: sends chunks in one command.

    Attributes:
        kept: pinned until the store server has answered.
    """

    def __init__(self, index: HostIndex, counters: Counter[str], offer: Offer) -> None:
        self._index = index
        self._counters = counters
        self._offer = offer
        self._found: list[tuple[RequestState, int, Entry | None]] = []  # of this step, in order; entries are kept
        self.kept: deque[Entry] = deque()
        self._over: deque[Entry] = deque()  # of these, those that were answered; the reader thread takes note

    def computes(self, state: RequestState, i: int, entry: Entry) -> None:
        """Promise a chunk that is being copied from the GPU, for this request or for another."""
        assert state.promised is not None
        entry.promised = True
        state.promised.add(i)

    def finds(self, state: RequestState, i: int, entry: Entry | None) -> None:
        """Take note of a chunk that was there before the request; None: in no slot, and perhaps in a tier."""
        if entry is not None and entry.state == Entry.FILLING and entry.fetch is None:
            self.computes(state, i, entry)
            return
        if entry is not None and entry.state != Entry.READY:
            entry = None
        if entry is not None:
            self._keep(entry)
        self._found.append((state, i, entry))

    def advance(self, client: StoreClient | None) -> None:
        """Tell the server of what was found: it is to be in every tier."""
        found, self._found = self._found, []
        while found:
            state, first, _ = found[0]
            num = next((n for n, (s, i, _) in enumerate(found) if s is not state or i != first + n), len(found))
            entries = [entry for _, _, entry in found[:num]]
            found = found[num:]
            if client is None or not client.connected():
                self._over += [entry for entry in entries if entry is not None]
            else:
                self._ask(state, first, entries, client)

    def send(self, entries: Sequence[Entry], client: StoreClient) -> None:
        """Send chunks that were promised, past the budget of the queue: their slots are what bounds them."""
        ready = [e for e in entries if _sendable(e)]
        for entry in ready:
            self._keep(entry)
        self._send_kept(ready, client)

    def apply_answers(self) -> None:
        """Let go of the slots that the server is done with."""
        while self._over:
            self.kept.remove(entry := self._over.popleft())
            self._index.unpin(entry)

    def tell(self, state: RequestState, answer: dict[str, Any], num_chunks: int, chunk_tokens: int, ns: bytes) -> None:
        """Put what was promised of a request's first ``num_chunks`` into its answer, up to the first that is lost."""
        promised = state.promised or ()
        num = next((i for i in range(num_chunks) if i not in promised), num_chunks)
        if num:
            self._counters["handed_off"] += num
            answer[NAME]["handoff"] = Awaited(ns, state.keys[num - 1]).shown(num * chunk_tokens)

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values, for tests that compare it."""
        return {
            "found": [(state.request.request_id, i, e and e.key) for state, i, e in self._found],
            "kept": ([e.key for e in self.kept], [e.key for e in self._over]),
        }

    def _ask(self, state: RequestState, first: int, entries: list[Entry | None], client: StoreClient) -> None:
        """Tell the server of chunks that follow each other; what is in no slot is promised if a tier may have it."""
        assert state.promised is not None
        keys = state.keys[first : first + len(entries)]
        state.promised |= {
            first + n
            for n, (key, entry) in enumerate(zip(keys, entries, strict=True))
            if entry is not None or not client.denies(key)
        }

        def arrived(letters: bytes | None) -> None:  # on the reader thread: an engine at rest takes no step for it
            wanted: list[Entry] = []
            rest: list[Entry] = []
            for n, entry in enumerate(entries):
                if entry is not None:
                    is_wanted = letters is not None and letters[n : n + 1] == WANTED and _sendable(entry)
                    (wanted if is_wanted else rest).append(entry)
            self._over.extend(rest)
            self._send_kept(wanted, client)

        client.use(first, state.anchor(first), keys, arrived, reason=HANDOFF)

    def _keep(self, entry: Entry) -> None:
        self._index.pin(entry)
        self.kept.append(entry)

    def _send_kept(self, entries: Sequence[Entry], client: StoreClient) -> None:
        per_command = max(1, COMMAND_NBYTES // self._index.pool.shape.payload_nbytes)
        for at in range(0, len(entries), per_command):
            self._offer(entries[at : at + per_command], client, HANDOFF, self._over.extend)


def _sendable(entry: Entry) -> bool:
    """Return whether others may have it, and it is still there."""
    return bool(entry.anchor) and entry.state == Entry.READY


def take_up(state: RequestState, ns_id: bytes, until: float) -> None:
    """Begin a request whose hints say that it is handed off, or that it awaits what another engine handed off.

    Args:
        ns_id: the namespace of this engine.
        until: monotonic time at which it waits no longer.
    """
    assert state.outcome is not None
    hints = state.outcome.hints
    if hints.handoff:
        if hints.store == "none":
            hints.ignored.setdefault("handoff", "nothing of the request is stored")
        elif not state.shareable:
            hints.ignored["handoff"] = "this engine's KV is for nobody else (now)"
        else:
            state.promised = set()
    if hints.awaits is not None:
        reason = _refusal(state, hints.awaits, ns_id)
        if reason:
            hints.ignored["handoff"] = reason
        else:
            state.awaits = state.keys.index(hints.awaits.last_key) + 1, until


def _refusal(state: RequestState, awaited: Awaited, ns_id: bytes) -> str:
    """Return why a request does not wait; empty where it does. What is refused is looked up as ever, without a wait."""
    if not state.tiers >= TIERS:
        return "the request does not load from every tier"
    if not state.shareable:
        return "this engine's keys are nobody else's (now)"
    if awaited.ns_id != ns_id:
        return "it is of another model, layout or shape of ranks than this engine's"
    if awaited.last_key not in state.keys:
        return "it is no key of this prompt: other tokens, another tenant, or another epoch"
    return ""


def ask_again(plan: Plan, state: RequestState, client: StoreClient, now: float) -> bool:
    """Go on with a plan that awaits chunks: take what the last question brought, and ask the next one in its time.

    Returns whether one was asked.
    """
    if plan.match is None or plan.match.letters is None:
        return False
    if not client.connected():
        plan.awaited = 0
        return False
    if plan.again is not None and plan.again.letters is not None:
        plan.match.letters += plan.again.letters
        plan.pause_s = FIRST_PAUSE_S if plan.again.letters else min(MAX_PAUSE_S, 2 * plan.pause_s)
        plan.again, plan.ask_at = None, now + plan.pause_s
    first = plan.start + len(plan.match.letters)
    if plan.again is not None or first >= min(plan.awaited, plan.stop) or now >= plan.deadline or plan.failed():
        return False
    was_denied, plan.denied = plan.denied, client.denies(state.keys[first])
    if plan.denied or (not was_denied and now < plan.ask_at):  # where the filter has just heard of it: at once
        return False
    plan.again = client.match(plan.lane, first, state.anchor(first), state.keys[first : plan.awaited])
    return True

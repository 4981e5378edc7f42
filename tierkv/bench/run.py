"""Steers a measurement: what is measured in which order, room for it before, and nothing left behind after.

A namespace of its own takes what is stored, one for each payload size. It is removed at the end, however that comes;
what a killed run left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tierkv.admin_client import AdminClient
from tierkv.bench.client import Job, Order, pack_address
from tierkv.bench.figures import Figure, Round, Tally
from tierkv.bench.process import Process, cpu_seconds, local_pid
from tierkv.bench.space import evict, make_namespace, remove_left
from tierkv.errors import RefusedError, TierKVError, UnavailableError
from tierkv.layout import Namespace
from tierkv.messages import COMPUTED, EVICTED, USED
from tierkv.payload import record_nbytes
from tierkv.sizes import format_size
from tierkv.transport import Address

TIERS = ("disk", "shared")
OPS = ("store", "match", "fetch")
#: What all clients together hold at a time, if nothing else is said and there is room for it.
DEFAULT_NBYTES = 256 << 20
#: Of the room that a tier has, what is left to others: files and trees take some, and engines go on storing.
_SPARE = 0.1
_LEAVE_S = 5.0
#: Why a chunk is offered so that a tier with this spill policy stores it at once.
_REASONS = {"through": COMPUTED, "second-use": USED, "on-evict": EVICTED}


class Plan(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        payloads: bytes of a chunk, one after another.
        num_clients: processes at a time.
        seconds: time for each figure.
        nbytes: payload that all clients together hold at a time; 0: ``DEFAULT_NBYTES``, or what there is room for.
        tiers, ops: what of :data:`TIERS` and :data:`OPS`; no tiers: those that the server has.
        allow_eviction: go on where there is no room, and let the tiers evict what others have stored.
    """

    payloads: Sequence[int]
    num_clients: int
    seconds: float
    nbytes: int = 0
    tiers: Sequence[str] = ()
    ops: Sequence[str] = OPS
    allow_eviction: bool = False


class Skipped(msgspec.Struct, frozen=True):
    """What was not measured, and why."""

    tier: str
    reason: str


class Result(msgspec.Struct, frozen=True):
    """What came of it. ``nbytes`` is what the clients held at a time, ``num_evicted`` what tiers evicted meanwhile."""

    version: str
    address: str
    transport: str
    num_clients: int
    seconds: float
    nbytes: int
    figures: list[Figure]
    skipped: list[Skipped]
    num_evicted: dict[str, int]
    num_left: int


class Bench:
    """Measures one server.

    Args:
        admin: a client that may do everything there.
        address: where it is.
        plan: what to measure.
        progress: called with what is measured now and the share that is done, from 0 to 1.
    """

    def __init__(
        self, admin: AdminClient, address: Address, plan: Plan, progress: Callable[[str, float], None]
    ) -> None:
        self.admin, self._address, self.plan = admin, address, plan
        self.progress = progress
        self.pid = local_pid(address, admin)
        self.figures: list[Figure] = []
        self.skipped: dict[str, str] = {}
        self._stores: set[str] = set()  # tiers that what clients store may come to
        self._nbytes = 0

    def run(self) -> Result:
        """Measure, and remove what was stored.

        Raises:
            RefusedError: there is no room, a tier that was asked for is not there, or a client failed.
            UnavailableError: the server went away.
        """
        stat = self.admin.ask("TKV.STAT")
        num_left = remove_left(self.admin, stat)
        states = {tier["name"]: tier for tier in stat["tiers"]}
        for tier in self.plan.tiers:
            if tier not in states or states[tier]["state"] == "out":
                why = states[tier]["reason"] if tier in states else "the server has none"
                raise RefusedError(f"the {tier} tier cannot be measured: {why}; 'tierkv stat' shows the tiers")
        self._stores = {
            name
            for name in TIERS
            if name in states and states[name]["state"] != "out" and stat["server"]["spill"].get(name) != "never"
        }
        before = self.room()
        for payload_nbytes in self.plan.payloads:
            self._measure(payload_nbytes, {name for name in TIERS if name in states}, states)
        self.progress("", 1.0)
        after = self.room()
        return Result(
            version=stat["server"]["version"],
            address=str(self._address),
            transport="inline" if self._address.remote else "shared memory",
            num_clients=self.plan.num_clients,
            seconds=self.plan.seconds,
            nbytes=self._nbytes,
            figures=self.figures,
            skipped=[Skipped(tier, reason) for tier, reason in self.skipped.items()],
            num_evicted={name: after[name]["num_evicted"] - before[name]["num_evicted"] for name in before},
            num_left=num_left,
        )

    # -- one payload size

    def _measure(self, payload_nbytes: int, there: set[str], states: Mapping[str, Any]) -> None:
        namespace = make_namespace(payload_nbytes)
        num_chunks = self._fit(payload_nbytes)
        self._nbytes = max(self._nbytes, num_chunks * self.plan.num_clients * payload_nbytes)
        try:
            with self._clients(namespace, num_chunks) as (clients, spill):
                _Run(self, clients, namespace, spill, there, states).all()
        finally:
            self._remove(namespace.ns_id().hex())

    @contextlib.contextmanager
    def _clients(self, namespace: Namespace, num_chunks: int) -> Iterator[tuple[list[Process], dict[str, str]]]:
        clients: list[Process] = []
        try:
            for number in range(self.plan.num_clients):
                clients.append(Process(Job(pack_address(self._address), namespace, number, num_chunks)))
            joined = [client.joined() for client in clients]
            for each in joined:
                if each.failed:
                    raise (RefusedError if each.refused else UnavailableError)(each.failed)
            yield clients, joined[0].spill
        except BaseException:
            for client in clients:
                client.kill()
            raise
        finally:
            for client in clients:
                client.leave()
            for client in clients:
                client.wait()

    def _fit(self, payload_nbytes: int) -> int:
        """Return how many chunks each client may hold.

        Raises:
            RefusedError: they would push out what others have stored.
        """
        plan = self.plan
        num = max(plan.num_clients, (plan.nbytes or DEFAULT_NBYTES) // payload_nbytes)
        rooms = {name: row for name, row in self.room().items() if name in self._stores and not plan.allow_eviction}
        for name, tier in rooms.items():
            if tier["free_nbytes"] is None:
                raise RefusedError(
                    f"the {name} tier does not say how much room it has (its Redis allows no INFO), so the measurement "
                    f"might push out what others have stored there; --allow-eviction measures all the same"
                )
            fits = max(0, int(tier["free_nbytes"] * (1 - _SPARE)) // _cost(payload_nbytes))
            if fits < plan.num_clients or (plan.nbytes and fits < num):
                free = format_size(max(0, tier["free_nbytes"]))
                least = (num if plan.nbytes else plan.num_clients) * payload_nbytes
                raise RefusedError(
                    f"the {name} tier has {free} free, and the measurement holds {format_size(least)} at a time: it "
                    f"would push out what others have stored; measure less (--size, --payload, --clients), or allow "
                    f"that with --allow-eviction"
                )
            num = min(num, fits)
        return num // plan.num_clients

    def room(self) -> dict[str, dict[str, Any]]:
        """Return what each tier has room for, and how often it evicted."""
        return {row["name"]: row for row in self.admin.ask("TKV.ROOM")["tiers"]}

    def _remove(self, ns: str) -> None:
        """Remove a namespace of ours; a server that is gone keeps it until the next run."""
        # On a connection of its own: Ctrl-C may have left a reply on the other one.
        with contextlib.suppress(TierKVError), AdminClient(self._address) as admin:
            deadline = time.monotonic() + _LEAVE_S
            while any(e["namespace"] == ns for e in admin.ask("TKV.STAT")["engines"]):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            evict(admin, ns, [])


class _Run:
    """The measurements of one payload size, in an order in which none disturbs the next.

    What the disk has is offered to the shared tier before it is fetched from the disk: a second use would send it there
    in the background. What comes from the shared tier goes to the disk, so the disk is emptied before each round.
    """

    def __init__(
        self,
        bench: Bench,
        clients: Sequence[Process],
        namespace: Namespace,
        spill: Mapping[str, str],
        there: set[str],
        states: Mapping[str, Any],
    ) -> None:
        self._bench, self._clients, self._namespace = bench, clients, namespace
        self._plan = bench.plan
        self._there = there
        self._wanted = [tier for tier in TIERS if tier in there and tier in (self._plan.tiers or TIERS)]
        self._evicted_before = {name: row["num_evicted"] for name, row in bench.room().items()}
        self._disk = _REASONS.get(spill.get("disk", ""))
        self._shared: int | None = None
        if states.get("shared", {"state": "out"})["state"] != "out":
            policy = spill.get("shared", "never")
            alone = policy == "on-evict" and self._disk is None
            self._shared = USED if policy in ("through", "second-use") else EVICTED if alone else None
        self._skip(spill, states)

    def _skip(self, spill: Mapping[str, str], states: Mapping[str, Any]) -> None:
        for tier, reason in (("disk", self._disk), ("shared", self._shared)):
            if tier not in self._wanted or reason is not None:
                continue
            out = states[tier]["state"] == "out"
            why = (
                f"it is out ({states[tier]['reason']})"
                if out
                else f"its spill policy, {spill.get(tier, 'never')}, lets no client store there"
            )
            self._bench.skipped[tier] = why
            self._wanted.remove(tier)

    def all(self) -> None:
        """Do all of them."""
        if self._disk is not None and "disk" in self._wanted:
            self._store("disk", Order("store", "disk", reason=self._disk), list(TIERS))
        elif self._disk is not None:
            self._order(Order("new"))
            self._order(Order("store", "disk", reason=self._disk))
        else:
            self._order(Order("new"))
        if self._shared is not None:
            offer = Order("offer", "shared", reason=self._shared)
            if "shared" in self._wanted:
                self._store("shared", offer, ["shared"], again=True)
            else:
                self._order(offer)
        if "disk" in self._wanted:
            self._read("disk")
        if "shared" in self._wanted:
            self._read("shared")

    def _store(self, tier: str, order: Order, clear: Sequence[str], again: bool = False) -> None:
        """Store rounds until the time is over. What one stored is removed before the next, untimed."""
        tally, first = Tally(), True
        while first or ("store" in self._plan.ops and tally.seconds < self._plan.seconds):
            if again or not first:
                self._bench.admin.call("TKV.DRAIN", 30)
                evict(self._bench.admin, self._ns, [name for name in clear if name in self._there])
            if not again:
                self._order(Order("new"))
            self._round(tally, order)
            self._watch()
            first = False
        self._note(tally, tier, "store")

    def _read(self, tier: str) -> None:
        """Match and fetch what is stored."""
        if tier == "shared":
            self._empty_disk()
            self._order(Order("match", tier))  # all of it arrived
        if "match" in self._plan.ops:
            tally = Tally()
            self._round(tally, Order("match", tier, seconds=self._plan.seconds))
            self._note(tally, tier, "match")
        if "fetch" not in self._plan.ops:
            return
        tally = Tally()
        if tier == "disk":
            self._round(tally, Order("fetch", tier, seconds=self._plan.seconds))
        while tally.seconds < self._plan.seconds and tier == "shared":
            self._empty_disk()
            self._round(tally, Order("fetch", tier))
        self._note(tally, tier, "fetch")

    def _empty_disk(self) -> None:
        if "disk" in self._there:
            evict(self._bench.admin, self._ns, ["disk"])

    @property
    def _ns(self) -> str:
        return self._namespace.ns_id().hex()

    def _order(self, order: Order) -> list[Round]:
        for client in self._clients:
            client.order(order)
        rounds = [client.round() for client in self._clients]
        for each in rounds:
            if each.failed:
                raise (UnavailableError if each.lost else RefusedError)(each.failed)
        return rounds

    def _round(self, tally: Tally, order: Order) -> None:
        op = "store" if order.op == "offer" else order.op
        self._bench.progress(f"{order.tier} {op}, {format_size(self._namespace.payload_nbytes)}", self._share())
        cpu = cpu_seconds(self._bench.pid)
        rounds = self._order(order)
        after = cpu_seconds(self._bench.pid)
        tally.add(rounds, after - cpu if cpu is not None and after is not None else None)

    def _share(self) -> float:
        total = len(self._plan.payloads) * max(1, len(self._wanted)) * len(self._plan.ops)
        return min(1.0, len(self._bench.figures) / total)

    def _note(self, tally: Tally, tier: str, op: str) -> None:
        if op in self._plan.ops:
            self._bench.figures.append(tally.figure(tier, op, self._namespace.payload_nbytes))

    def _watch(self) -> None:
        """Stop where a tier began to evict.

        Raises:
            RefusedError: it did, and that was not allowed.
        """
        if self._plan.allow_eviction:
            return
        for name, row in self._bench.room().items():
            if row["num_evicted"] > self._evicted_before[name]:
                raise RefusedError(
                    f"stopped: the {name} tier began to evict while this ran, perhaps what others have stored; "
                    f"measure less (--size), or allow that with --allow-eviction"
                )


def _cost(payload_nbytes: int) -> int:
    """Return what a chunk takes at most: its record, pages that it fills in part, and what an index says of it."""
    return record_nbytes(payload_nbytes) + 8192

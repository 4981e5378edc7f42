"""What tenants use of the shared tier, and their quotas: kept in Redis, and held by all store servers together.

*Usage* counts rows of the index: who adds a row adds its bytes, who removes one takes them off. It is advisory. Redis
may evict a record behind the index, so that usage is too high until a listing, a fetch or a recount finds out; a server
that dies between a record and its row leaves usage too low, by that batch (8 MiB at most), until the next recount; and
where Redis loses the usage itself, it is too low until the recount that the next store asks for.

*Quotas.* A store first adds its bytes to the usage, which Redis adds up over all servers, and looks at the sum: beyond
the quota it removes the least recently used leaves among ``_SAMPLE_PAGES`` pages of the index (all of it, where the
index is no larger), and drops what still does not fit. So the records of a tenant that the index knows are never more
than its quota, however many servers store, save for what is not counted at the moment. The reserved bytes of stores
that come to nothing are given back.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tierkv.keys import ANCHOR_SPAN
from tierkv.payload import Header
from tierkv.resp import Value
from tierkv.tiers.base import Ref, Usage
from tierkv.tiers.redis_index import LiveRow, RedisIndex, Row, pairs
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_wire import Command
from tierkv.tiers.shared_lifetime import Lifetime

#: Seconds after which usage is counted anew: when asked for it, and when a quota is reached.
RECOUNT_S = 600.0
FULL_RECOUNT_S = 60.0
#: Seconds that a store or a removal takes at most between its count and its row.
QUIET_S = 1.0
#: Pages of the index that making room looks at; entries that it removes at most.
_SAMPLE_PAGES = 8
_MAX_VICTIMS = 512
_TENANT_NBYTES = 16


class SharedUsage:
    """Usage and quotas of the shared tier.

    Args:
        link: to Redis.
        names: of its keys.
        index: of its records.
        lifetime: knows the pins and the limits, and has the thread that counts anew.
        evict: removes entries to make room and returns how many bytes went.
        clock: wall clock, seconds since 1970.
    """

    def __init__(
        self,
        link: RedisLink,
        names: Names,
        index: RedisIndex,
        lifetime: Lifetime,
        evict: Callable[[bytes, Sequence[Ref]], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link, self._names, self._index = link, names, index
        self._lifetime = lifetime
        self._evict = evict
        self._clock = clock

    def recount_soon(self, ns_id: bytes) -> None:
        """Have a namespace's usage counted anew. Returns at once."""
        self._lifetime.soon(lambda: self.recount(ns_id), ns_id)

    def count(self, ns_id: bytes, rows: Iterable[tuple[bytes, int]], sign: int = 1) -> None:
        """Add rows (tenant, bytes) to the usage of their tenants, or take them off (``sign`` -1)."""
        commands = self._count_commands(ns_id, rows, sign)
        if commands:
            self._link.ask(commands, OnError.IGNORE)

    def _count_commands(self, ns_id: bytes, rows: Iterable[tuple[bytes, int]], sign: int) -> list[Command]:
        sums: dict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        for tenant, nbytes in rows:
            sums[tenant][0] += 1
            sums[tenant][1] += nbytes
        name = self._names.usage(ns_id)
        return [
            ("HINCRBY", name, tenant + kind, sign * amount)
            for tenant, (num, total) in sums.items()
            for kind, amount in ((b"n", num), (b"b", total))
        ]

    def usage(self, ns_id: bytes) -> dict[bytes, Usage]:
        """Return what each tenant has in a namespace; counted anew where that was done long ago."""
        found, counted_at = self._read_usage(ns_id)
        if self._clock() - counted_at > RECOUNT_S and self.recount(ns_id):
            found, _ = self._read_usage(ns_id)
        pinned: dict[bytes, int] = defaultdict(int)
        for pin in self._lifetime.marks(ns_id).pinned(self._clock()):
            pinned[pin.tenant] += pin.nbytes
        return {t: u._replace(pinned_nbytes=pinned[t]) for t, u in found.items() if u.num_entries > 0}

    def _read_usage(self, ns_id: bytes) -> tuple[dict[bytes, Usage], float]:
        replies = self._link.ask([("HGETALL", self._names.usage(ns_id))], OnError.IGNORE)
        return _parse_usage(replies[0] if replies else None)

    def recount(self, ns_id: bytes) -> bool:
        """Count a namespace's index and correct its usage by what is wrong; returns whether that could be done.

        A usage goes down only if nothing was stored or removed for ``QUIET_S``: what is reserved is not there yet. What
        is stored meanwhile may be counted twice, until the next time.
        """
        before, _ = self._read_usage(ns_id)
        quiet_at = time.monotonic() + QUIET_S
        counted: dict[bytes, Usage] = defaultdict(Usage)
        for page in self._index.live_pages(ns_id):
            for live in page:
                counted[live.row.tenant] += Usage(1, live.row.nbytes)
        if not self._link.up:
            return False
        name = self._names.usage(ns_id)
        commands: list[Command] = [("HSET", name, "at", repr(self._clock()))]
        if any(counted[tenant].nbytes < had.nbytes for tenant, had in before.items()):
            time.sleep(max(0.0, quiet_at - time.monotonic()))
        after, _ = self._read_usage(ns_id)
        for tenant in {*before, *counted}:
            had, has = before.get(tenant, Usage()), counted[tenant]
            if has.nbytes < had.nbytes and after.get(tenant) != had:
                continue
            commands.append(("HINCRBY", name, tenant + b"n", has.num_entries - had.num_entries))
            commands.append(("HINCRBY", name, tenant + b"b", has.nbytes - had.nbytes))
        return self._link.ask(commands, OnError.IGNORE) is not None

    def admit(self, headers: Sequence[Header], nbytes: Sequence[int]) -> list[bool]:
        """Add records of one namespace that are about to be stored to the usage, and return which may be.

        Where a quota is reached room is made among the entries that it is about. The caller takes off what it then does
        not store (:meth:`count`); what may not be stored is off already.
        """
        if not headers:
            return []
        ns_id = headers[0].ns_id
        sizes = [(header.tenant, n) for header, n in zip(headers, nbytes, strict=True)]
        replies = self._link.ask(
            [
                ("HSETNX", self._names.usage(ns_id), "at", repr(self._clock())),
                *self._count_commands(ns_id, sizes, 1),
                ("HGETALL", self._names.usage(ns_id)),
            ],
            OnError.IGNORE,
        )
        admitted = [True] * len(sizes)
        if replies is None or not isinstance(replies[-1], list):
            return admitted  # Redis is out: storing fails by itself
        usage, counted_at = _parse_usage(replies[-1])
        keep = {header.parent for header in headers}
        over = self._is_over(ns_id, usage, dict.fromkeys(tenant for tenant, _ in sizes))
        orphans = self._orphans(ns_id, headers) if over else set()
        for i in orphans:
            admitted[i] = False
            tenant, n = sizes[i]
            usage[tenant] = usage.get(tenant, Usage()) + Usage(-1, -n)
        for tenant in dict.fromkeys(tenant for tenant, _ in sizes):
            mine = [i for i, (t, _) in enumerate(sizes) if t == tenant and admitted[i]]
            used = usage.get(tenant, Usage()).nbytes
            self._fit(ns_id, tenant, self._lifetime.limits.of_tenant(tenant), used, mine, sizes, admitted, keep)
        total = sum(u.nbytes for u in usage.values()) - sum(
            n for i, (_, n) in enumerate(sizes) if not admitted[i] and i not in orphans
        )
        mine = [i for i, ok in enumerate(admitted) if ok]
        self._fit(ns_id, None, self._lifetime.limits.of_namespace(ns_id), total, mine, sizes, admitted, keep)
        refused = [size for size, ok in zip(sizes, admitted, strict=True) if not ok]
        if refused:
            self.count(ns_id, refused, -1)
        if (replies[0] == 1 and self._is_lost(ns_id)) or (refused and self._clock() - counted_at > FULL_RECOUNT_S):
            self.recount_soon(ns_id)
        return admitted

    def _is_lost(self, ns_id: bytes) -> bool:
        """Return whether there are rows that nobody has counted. Rows are read first: they are counted before they are
        there, so that what others store meanwhile is not taken for lost, and then counted twice.
        """
        num_rows = sum(self._index.lengths([ns_id]))
        return num_rows > 0 and num_rows > sum(u.num_entries for u in self._read_usage(ns_id)[0].values())

    def _is_over(self, ns_id: bytes, usage: dict[bytes, Usage], tenants: Iterable[bytes]) -> bool:
        """Return whether a quota that these tenants' stores count in is exceeded."""
        limits = self._lifetime.limits
        whole = limits.of_namespace(ns_id)
        if whole is not None and sum(u.nbytes for u in usage.values()) > whole:
            return True
        quotas = [(limits.of_tenant(tenant), usage.get(tenant, Usage()).nbytes) for tenant in tenants]
        return any(quota is not None and nbytes > quota for quota, nbytes in quotas)

    def _orphans(self, ns_id: bytes, headers: Sequence[Header]) -> set[int]:
        """Return which of the records have no stored parent, nor one among them: room for those helps nobody.

        A parent with another anchor is taken to be there: its name is not known.
        """
        mine = {header.key for header in headers}
        asked = [
            i for i, h in enumerate(headers) if h.position % ANCHOR_SPAN and h.parent not in mine and h.position > 0
        ]
        names = [self._names.record(ns_id, Ref(headers[i].parent, headers[i].anchor)) for i in asked]
        replies = self._link.ask([("EXISTS", name) for name in names], OnError.IGNORE) or []
        found = {i for i, reply in zip(asked, replies, strict=False) if reply == 0}
        lost = {headers[i].key for i in found}
        for i in sorted(range(len(headers)), key=lambda i: headers[i].position):
            if headers[i].parent in lost:
                found.add(i)
                lost.add(headers[i].key)
        return found

    def _fit(
        self,
        ns_id: bytes,
        tenant: bytes | None,
        quota: int | None,
        used: int,
        mine: Sequence[int],
        sizes: Sequence[tuple[bytes, int]],
        admitted: list[bool],
        keep: set[bytes],
    ) -> None:
        """Make room for the records ``mine``, counted in ``used`` already, and refuse the last ones that find none."""
        if quota is None:
            return
        waiting = list(mine)
        held = sum(sizes[i][1] for i in waiting)
        while waiting and held > quota:  # no room that could be made is enough
            held -= sizes[waiting[-1]][1]
            used -= sizes[waiting[-1]][1]
            admitted[waiting.pop()] = False
        if waiting and used > quota:
            used -= self._make_room(ns_id, tenant, used - quota, keep)
        while waiting and used > quota:
            used -= sizes[waiting[-1]][1]
            admitted[waiting.pop()] = False

    def _make_room(self, ns_id: bytes, tenant: bytes | None, nbytes: int, keep: set[bytes]) -> int:
        """Remove least recently used leaves of a tenant (None: of any) and return how many bytes went."""
        now = self._clock()
        marks = self._lifetime.marks(ns_id, fresh=True)
        rows: dict[bytes, LiveRow] = {}
        gone: list[Row] = []
        pages = self._index.live_pages(ns_id, start=random.randrange(256), on_gone=gone.extend)
        for page, _ in zip(pages, range(_SAMPLE_PAGES), strict=False):
            rows |= {live.key: live for live in page if tenant in (None, live.row.tenant)}
        self.count(ns_id, [(row.tenant, row.nbytes) for row in gone], -1)
        victims: list[Ref] = []
        expired = room = sum(row.nbytes for row in gone if tenant in (None, row.tenant))
        for live in _leaves_first(rows, now, keep):
            if room >= nbytes or len(victims) >= _MAX_VICTIMS:
                break
            if not marks.pins_of(live.key, now):
                victims.append(Ref(live.key, live.row.anchor))
                room += live.row.nbytes
        return expired + (self._evict(ns_id, victims) if victims else 0)


def _leaves_first(rows: dict[bytes, LiveRow], now: float, keep: set[bytes]) -> list[LiveRow]:
    """Return rows, least recently used first and never one before its descendants; none that ``keep`` leads to.

    ``keep`` are the parents of what is being stored: without its ancestors that would be worth nothing.
    """
    last = {key: live.row.created if live.idle_s is None else now - live.idle_s for key, live in rows.items()}
    held: set[bytes] = set()
    for key in keep:
        while key in rows and key not in held:
            held.add(key)
            key = rows[key].row.parent
    by_depth = sorted(rows.values(), key=lambda live: -live.row.position)
    for live in by_depth:
        parent = live.row.parent
        if parent in last:
            last[parent] = max(last[parent], last[live.key])
    return sorted((live for live in by_depth if live.key not in held), key=lambda live: last[live.key])  # stable


def _parse_usage(reply: Value) -> tuple[dict[bytes, Usage], float]:
    """Return usage by tenant, and when it was counted last."""
    found: dict[bytes, Usage] = {}
    counted_at = 0.0
    for field, value in pairs(reply):
        if field == b"at":
            counted_at = float(value)
        elif len(field) == _TENANT_NBYTES + 1:
            tenant, kind = field[:_TENANT_NBYTES], field[_TENANT_NBYTES:]
            amount = max(0, int(value))
            found[tenant] = found.get(tenant, Usage()) + (Usage(amount) if kind == b"n" else Usage(0, amount))
    return found, counted_at

"""Prometheus metrics, made of the statistics when they are scraped: nothing is counted twice.

``docs/metrics.md`` lists every one with its use. The tests hold the tables here against what the statistics contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from tierkv_server.admin.stats import SOURCES, Snapshot, Stats


class Column(NamedTuple):
    """A value of a row of the statistics: its name there, its metric's name (without ``tierkv_``), and what it is."""

    field: str
    metric: str
    what: str


SERVER_GAUGES = (
    Column("num_engines", "engines", "Engines that are connected"),
    Column("num_silent_engines", "silent_engines", "Engines that did not answer within 2 s"),
    Column("uptime_s", "uptime_seconds", "Seconds since the server started"),
)
SERVER_COUNTERS = (
    Column("num_stale", "stores_stale", "Stores given up because the engine had reused the slot, in chunks"),
    Column("num_unstaged", "stores_unstaged", "Stores dropped because staging memory was full, in chunks"),
    Column("num_declined", "stores_declined", "Stores that no tier's spill policy wanted, in chunks"),
    Column("num_brought", "prefetched", "Chunks brought from the shared tier to the disk for a session"),
    Column("num_joined", "fetches_joined", "Chunks of a fetch that joined another's fetch of the same chunk"),
)
#: Of ``network``.
CONNECTIONS = ("unix", "tcp", "strangers")
NETWORK_COUNTERS = (
    Column("refused", "connections_refused", "Connections refused: no room, or another user"),
    Column("cut_off", "connections_cut_off", "Connections ended: too slow, or not authenticated in time"),
    Column("garbage", "connections_garbage", "Connections ended: what came was no command"),
    Column("wrong_tokens", "wrong_tokens", "Tries to authenticate with a wrong token"),
)
#: Of ``fleet``; without a shared tier there are none.
FLEET_GAUGES = (Column("num_waiting", "fleet_evictions_waiting", "Evictions that Redis has still to hear of"),)
FLEET_COUNTERS = (
    Column("num_published", "fleet_evictions_published", "Evictions announced to the fleet, in entries"),
    Column("num_applied", "fleet_evictions_applied", "Evictions of the fleet carried out here, in entries"),
    Column("num_again", "fleet_evictions_again", "Evictions announced once more, as Redis had lost them, in entries"),
    Column("num_gaps", "fleet_gaps", "Times that unknown evictions were missed, and the disk was emptied"),
    Column("num_late", "fleet_evictions_late", "Chunks evicted once more, as this node had just written them"),
    Column("num_refused", "fleet_writes_refused", "Batches not written to Redis, as the stream could not be followed"),
)
TIER_GAUGES = (
    Column("num_entries", "tier_chunks", "Chunks stored"),
    Column("nbytes", "tier_bytes", "Bytes stored"),
    Column("budget", "tier_budget_bytes", "Bytes that may be stored; 0: somebody else's limit"),
    Column("pinned_nbytes", "tier_pinned_bytes", "Bytes that pins hold"),
    Column("queued_nbytes", "tier_queued_bytes", "Bytes that wait to be written"),
)
#: Of the disk and shared tiers; the host pool's are the engines'.
TIER_COUNTERS = (
    Column("num_hits", "tier_hits", "Chunks that fetches got here, verified"),
    Column("num_misses", "tier_misses", "Chunks that fetches asked for and that were not here, or damaged"),
    Column("num_stored", "tier_stored", "Chunks written"),
    Column("num_evicted", "tier_evicted", "Chunks removed to make room"),
    Column("num_expired", "tier_expired", "Chunks removed because their time was over"),
    Column("num_removed", "tier_removed", "Chunks removed by order"),
    Column("num_dropped", "tier_dropped", "Chunks not written: the queue was full, or there was no room"),
    Column("num_declined", "tier_declined", "Chunks not written: to the tier's policy they were not worth their room"),
    Column("num_bad", "tier_bad", "Records that failed verification; deleted"),
    Column("num_errors", "tier_errors", "Chunks whose read or write the tier failed"),
)
#: Engines' counters beside :data:`SOURCES`. One that is not here is exported under its own name.
ENGINE_COUNTERS = (
    Column("load_nbytes", "engine_load_bytes", "Bytes loaded to the GPU"),
    Column("load_failures", "engine_load_failures", "Loads that failed, in loads"),
    Column("spilled", "engine_spilled", "Chunks copied from the GPU"),
    Column("spill_nbytes", "engine_spill_bytes", "Bytes copied from the GPU"),
    Column("not_spilled", "engine_not_spilled", "Chunks computed and not copied: every slot was in use"),
    Column("not_admitted", "engine_not_admitted", "Chunks not copied: neither the host pool nor the disk wants them"),
    Column("not_sent", "engine_not_sent", "Chunks not sent to the server: none, or too much waited"),
    Column("not_saved", "engine_not_saved", "Chunks that left host pools before they were sent on (on-evict)"),
    Column("plans", "engine_plans", "Prefetches started, in plans"),
    Column("handed_off", "engine_handed_off", "Chunks promised to other engines"),
    Column("awaited_late", "engine_awaited_late", "Chunks that other engines promised and that were not there in time"),
    Column("asked_again", "engine_asked_again", "Questions for chunks that other engines promised, in questions"),
    Column("cut", "engine_cut", "Chunks left out of plans because computing them is faster, in chunks"),
    Column("filtered", "engine_filtered", "Requests whose miss was known without a question, in requests"),
    Column("fetched_bad", "engine_fetched_bad", "Chunks that arrived damaged over a connection, and were misses"),
    Column("replans", "engine_replans", "Waiting requests planned again, in plans"),
    Column("stored", "engine_stored", "Chunks whose store the server confirmed"),
    Column("stores_stale", "engine_stores_stale", "Chunks whose slot changed before the server had copied it"),
    Column("stores_dropped", "engine_stores_dropped", "Chunks the disk had no room for"),
    Column("stores_failed", "engine_stores_failed", "Chunks whose store failed"),
    Column("stores_declined", "engine_stores_declined", "Chunks that no tier wanted then"),
    Column("stores_evicted", "engine_stores_evicted", "Chunks not sent because an operator evicted them"),
    Column("stores_lost", "engine_stores_lost", "Chunks whose store was never answered"),
    Column("evicted", "engine_evicted", "Chunks removed from host pools to make room"),
)
ENGINE_GAUGES = (
    Column("num_slots", "engine_slots", "Slots of the host pools"),
    Column("num_quarantined", "engine_quarantined_slots", "Slots whose chunk is gone but that somebody may use"),
    Column("store_queue_nbytes", "engine_store_queue_bytes", "Bytes of stores sent or queued and not answered"),
)
STATES = ("up", "read-only", "out")
#: Of each tier's ``state`` and ``since``.
TIER_UP = Column("state", "tier_up", "1 while the tier can be read, 0 while it is out")
TIER_SINCE = Column("since", "tier_out_since_seconds", "When the tier's fault began, in seconds since 1970; 0: none")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Engines' counters that are not in the table, at most.
_MAX_OTHERS = 64


def make_registry(stats: Stats) -> CollectorRegistry:
    """Return the registry of everything that is scraped: the statistics, and the process's own figures."""
    registry = CollectorRegistry()
    ProcessCollector(namespace="tierkv", registry=registry)
    registry.register(StatsCollector(stats))
    return registry


class StatsCollector(Collector):
    """Gives the newest statistics as metrics.

    Args:
        stats: whoever scrapes has them renewed before.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Return nothing: what there is, is only known when it is asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot = self._stats.newest
        if snapshot is not None:
            yield from _server(snapshot)
            yield from _tiers(snapshot)
            yield from _engines(snapshot)


def _gauge(column: Column, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tierkv_{column.metric}", column.what, labels=labels)


def _counter(column: Column, labels: tuple[str, ...] = ()) -> CounterMetricFamily:
    return CounterMetricFamily(f"tierkv_{column.metric}", column.what, labels=labels)


def _server(snapshot: Snapshot) -> Iterator[Metric]:
    server = snapshot.stat["server"]
    build = GaugeMetricFamily("tierkv_build_info", "The server's version", labels=("version",))
    build.add_metric((server["version"],), 1)
    yield build
    for column in SERVER_GAUGES:
        gauge = _gauge(column)
        gauge.add_metric((), server[column.field])
        yield gauge
    for column in SERVER_COUNTERS:
        counter = _counter(column)
        counter.add_metric((), server[column.field])
        yield counter
    yield from _network(server["network"])
    yield from _fleet(server["fleet"])
    info = GaugeMetricFamily("tierkv_namespace_info", "The namespaces' models", labels=("namespace", "model"))
    for row in snapshot.stat["namespaces"]:
        info.add_metric((row["id"], row["model"]), 1)
    yield info


def _network(network: Mapping[str, int]) -> Iterator[Metric]:
    connections = GaugeMetricFamily("tierkv_connections", "Connections that are open", labels=("kind",))
    for kind in CONNECTIONS:
        connections.add_metric((kind,), network.get(kind, 0))
    yield connections
    for column in NETWORK_COUNTERS:
        counter = _counter(column)
        counter.add_metric((), network.get(column.field, 0))
        yield counter


def _fleet(fleet: Mapping[str, int]) -> Iterator[Metric]:
    for make, columns in ((_gauge, FLEET_GAUGES), (_counter, FLEET_COUNTERS)):
        for column in columns if fleet else ():
            metric = make(column)
            metric.add_metric((), fleet[column.field])
            yield metric


def _tiers(snapshot: Snapshot) -> Iterator[Metric]:
    rows = snapshot.stat["tiers"]
    state = GaugeMetricFamily("tierkv_tier_state", "1 for the state that a tier is in", labels=("tier", "state"))
    for row in rows:
        for name in STATES:
            state.add_metric((row["name"], name), float(row["state"] == name))
    yield state
    up, since = _gauge(TIER_UP, ("tier",)), _gauge(TIER_SINCE, ("tier",))
    for row in rows:
        up.add_metric((row["name"],), float(row["state"] in ("up", "read-only")))
        since.add_metric((row["name"],), row["since"])
    yield from (up, since)
    for column in TIER_GAUGES:
        gauge = _gauge(column, ("tier",))
        for row in rows:
            gauge.add_metric((row["name"],), row.get(column.field, 0))
        yield gauge
    for column in TIER_COUNTERS:
        counter = _counter(column, ("tier",))
        for row in rows:
            if row["name"] != "host":
                counter.add_metric((row["name"],), row.get(column.field, 0))
        yield counter


def _engines(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    asked = CounterMetricFamily(
        "tierkv_chunks", "Chunks that engines asked for, by what gave them", labels=("namespace", "source")
    )
    for ns, counters in totals.items():
        for source, name in SOURCES.items():
            asked.add_metric((ns, source), counters[name])
    yield asked
    known = {*SOURCES.values(), *(column.field for column in ENGINE_COUNTERS)}
    others = sorted({name for counters in totals.values() for name in counters if _NAME.fullmatch(name)} - known)
    columns = [*ENGINE_COUNTERS, *(_other(name) for name in others[:_MAX_OTHERS])]
    for column in columns:
        counter = _counter(column, ("namespace",))
        for ns, counters in totals.items():
            counter.add_metric((ns,), counters[column.field])
        yield counter
    for column in ENGINE_GAUGES:
        gauge = _gauge(column, ("engine", "pid"))
        for engine in snapshot.stat["engines"]:
            gauge.add_metric((engine["engine_id"], str(engine["pid"])), _now(engine, column.field))
        yield gauge


def _other(name: str) -> Column:
    return Column(
        name, f"engine_other_{name.replace('_nbytes', '_bytes')}", "Counted by engines, unknown to this server"
    )


def _now(engine: dict[str, Any], field: str) -> int:
    return int(engine.get(field, engine["counters"].get(field, 0)))

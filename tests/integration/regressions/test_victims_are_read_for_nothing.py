"""Records that the disk evicts are read only where they go on to the shared tier."""

from pathlib import Path

import pytest

from memory_tier import MemoryTier
from records import make_chain, make_namespace
from tierkv.config import Spill
from tierkv.tiers.base import Limits
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.environment import Environment
from tierkv_server.service import Service


@pytest.mark.parametrize(
    ("policy", "reads"), [(Spill.SECOND_USE, False), (Spill.THROUGH, False), (Spill.ON_EVICT, True)]
)
def test_victims_are_read_where_somebody_wants_them(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, policy: Spill, reads: bool
) -> None:
    num = []
    record = Environment.record

    def counted(self, key):
        num.append(key)
        return record(self, key)

    monkeypatch.setattr(Environment, "record", counted)
    more = {"wants_evicted": lambda *item: service.wants_evicted(*item)} if hasattr(Service, "wants_evicted") else {}
    disk = DiskTier(short_dir, Limits(budget=16 << 20), on_evict=lambda record: service.disk_evicts(record), **more)
    shared = MemoryTier()
    shared.name = "shared"
    service = Service(disk, shared, {"disk": Spill.THROUGH, "shared": policy})
    try:
        namespace = make_namespace(payload_nbytes=1 << 20)
        service.add_namespace(namespace)
        for seed in range(3):
            disk.store(namespace.ns_id(), make_chain(namespace, 8, seed)[1])
        evicted = disk.stat().num_evicted
        assert evicted
        assert len(num) == (evicted if reads else 0)
        assert sum(1 for e in service.events.since(0)["events"] if e["kind"] == "expel") == evicted
    finally:
        service.close()

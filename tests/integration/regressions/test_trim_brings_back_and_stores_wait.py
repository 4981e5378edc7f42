"""An eviction of another node: what the disk trims meanwhile does not bring it back, and no store waits for Redis."""

import threading

from memory_tier import MemoryTier
from records import make_chain, make_namespace
from tierkv.config import Spill
from tierkv.tiers.base import Ref
from tierkv_server.service import Service


class TrimmingTier(MemoryTier):
    """A disk whose own thread trims an entry while an eviction waits for its write lock."""

    on_evict = staticmethod(lambda record: None)
    trims: tuple = ()

    def evict(self, ns_id, refs, *, force=False):
        for record in self.trims:
            self.on_evict(record)
        return super().evict(ns_id, refs, force=force)

    def drop_namespace(self, ns_id):
        for record in self.trims:
            self.on_evict(record)
        return super().drop_namespace(ns_id)


def make():
    disk, shared = TrimmingTier(), MemoryTier()
    disk.name, shared.name = "disk", "shared"
    service = Service(disk, shared, {"disk": Spill.THROUGH, "shared": Spill.ON_EVICT})
    disk.on_evict = service.disk_evicts
    namespace = make_namespace()
    service.add_namespace(namespace)
    (ref,), (record,) = make_chain(namespace, 1)
    return disk, shared, service, namespace.ns_id(), ref, record


def test_what_is_trimmed_while_it_is_evicted_elsewhere_goes_nowhere() -> None:
    disk, shared, service, ns_id, ref, record = make()
    try:
        disk.store(ns_id, [record])
        disk.trims = [record]
        service.evicted_elsewhere(ns_id, [ref.key])
        assert service.moves.shared_writer.drain(10)
        assert shared.match(ns_id, [ref]) == [False]
    finally:
        service.close()


def test_what_is_trimmed_while_a_gap_empties_the_disk_goes_nowhere() -> None:
    disk, shared, service, ns_id, ref, record = make()
    try:
        disk.store(ns_id, [record])
        disk.trims = [record]
        service.drop_disk()
        assert service.moves.shared_writer.drain(10)
        assert shared.match(ns_id, [ref]) == [False]
    finally:
        service.close()


def test_stores_on_disk_go_on_while_the_shared_writer_waits_for_redis() -> None:
    _disk, _shared, service, ns_id, _ref, _record = make()
    applied, stored = threading.Event(), threading.Event()

    def apply() -> None:
        service.evicted_elsewhere(ns_id, [Ref(bytes(32), bytes(32))])
        applied.set()

    def store() -> None:
        with service.moves.disk_writer._writing:
            stored.set()

    try:
        with service.moves.shared_writer._writing:  # in the middle of a batch, for as long as Redis is frozen
            evicting = threading.Thread(target=apply)
            evicting.start()
            assert not applied.wait(0.5)  # it does wait for that batch
            storing = threading.Thread(target=store)
            storing.start()
            in_time = stored.wait(2)
        evicting.join()
        storing.join()
        assert in_time
    finally:
        service.close()

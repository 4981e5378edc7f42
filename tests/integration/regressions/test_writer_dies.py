"""A writer's thread outlives what goes wrong in those that it tells."""

import threading

from memory_tier import MemoryTier
from records import make_chain, make_namespace
from tierkv_server.service import Service
from tierkv_server.writer import Job


def test_the_writer_goes_on_when_what_hears_of_a_store_fails(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    disk = MemoryTier()
    disk.name = "disk"
    service = Service(disk, None)
    namespace = make_namespace()
    service.add_namespace(namespace)
    refs, records = make_chain(namespace, 2)
    faults = [MemoryError()]

    def on_stored(tier, ns_id, keys) -> None:
        if faults:
            raise faults.pop()

    service.on_stored = on_stored
    writer = service.moves.disk_writer
    try:
        for ref, record in zip(refs, records, strict=False):
            staged = service.moves.stage(
                __import__("numpy").frombuffer(record.data, dtype="u1")[512 : 512 + namespace.payload_nbytes].copy(),
                record.header,
            )
            writer.put(Job(namespace.ns_id(), ref, len(record.data), service.moves.evictions.number, staged))
            staged.buffer.release()
            assert writer.drain(5)
        assert disk.match(namespace.ns_id(), refs) == [True, True]
    finally:
        service.close()

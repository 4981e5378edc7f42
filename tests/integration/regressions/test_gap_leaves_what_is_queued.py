"""What is queued when evictions were missed may be what was evicted, in whatever namespace it is."""

from pathlib import Path

import numpy as np

from records import make_chain, make_namespace, payload_of
from tierkv.config import Spill
from tierkv.payload import record_nbytes
from tierkv.tiers.disk import DiskTier
from tierkv_server.service import Service
from tierkv_server.writer import Job


def test_what_waits_for_an_empty_disk_goes_too_when_evictions_were_missed(short_dir: Path) -> None:
    disk = DiskTier(short_dir, 64 << 20)
    service = Service(disk, None, {"disk": Spill.THROUGH})
    try:
        namespace = make_namespace()
        service.add_namespace(namespace)
        (ref,), (record,) = make_chain(namespace, 1)
        moves = service.moves
        payload = np.frombuffer(payload_of(ref.key, namespace.payload_nbytes), dtype=np.uint8)
        staged = moves.stage(payload, record.header)
        assert staged
        with moves.loads:  # a load is under way: the writer makes way, and what it brought waits in the queue
            since = moves.evictions.number
            assert moves.disk_writer.put(Job(namespace.ns_id(), ref, record_nbytes(len(payload)), since, staged))
            staged.buffer.release()
            service.drop_disk()
        assert moves.disk_writer.drain(10)
        assert disk.match(namespace.ns_id(), [ref]) == [False]
    finally:
        service.close()

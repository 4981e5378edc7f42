"""An order to evict that a disk which takes no writes does not carry out is not taken for carried out."""

import threading
from pathlib import Path

import lmdb
import msgspec
import pytest

from fake_engine import FakeEngine
from records import make_chain, make_namespace
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.errors import UnavailableError
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Limits
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.environment import Environment
from tierkv_server.server import Server
from tierkv_server.service import Service


def fails(*args):
    raise lmdb.DiskError("No space left on device")


def test_an_eviction_elsewhere_that_the_disk_does_not_carry_out_is_not_taken_for_done(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed empties the disk then (its files are deleted, which a full disk allows), in place of serving on."""
    namespace = make_namespace()
    tier = DiskTier(short_dir, Limits(budget=64 << 20))
    service = Service(tier, None)
    try:
        service.add_namespace(namespace)
        ns_id = namespace.ns_id()
        refs, records = make_chain(namespace, 3)
        tier.store(ns_id, records)
        monkeypatch.setattr(Environment, "delete", fails)
        with pytest.raises(UnavailableError):
            service.evicted_elsewhere(ns_id, [ref.key for ref in refs[1:]])
        assert service.drop_disk() == 3
        assert tier.match(ns_id, refs) == [False] * 3
    finally:
        monkeypatch.undo()
        service.close()


def test_the_reply_says_that_the_disk_takes_no_writes(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig.make(short_dir / "store", 64 << 20, None, spill={"disk": Spill.THROUGH})
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(config.socket) as engine, AdminClient(config.socket) as admin:
            keys = engine.put(list(range(64)))
            engine.put(list(range(1000, 1064)))
            monkeypatch.setattr(Environment, "delete", fails)
            reply = admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in keys]}})
            assert reply["incomplete"]
    finally:
        monkeypatch.undo()
        server.leave()
        server.leave()
        thread.join(20)

"""An engine that loads a chunk between its own invalidation and the tiers' eviction does not keep it."""

import threading
from pathlib import Path

import msgspec
import pytest

from fake_engine import FakeEngine
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.keys import anchor_index
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Ref
from tierkv.tiers.control import Event
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 4 * 32))


@pytest.mark.parametrize("how", ["here", "elsewhere", "gap"])
def test_a_load_in_the_middle_of_an_eviction_is_not_kept(short_dir: Path, how: str) -> None:
    config = ServerConfig.make(short_dir / "store", 64 << 20, None, spill={"disk": Spill.THROUGH})
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(config.socket) as engine:
            keys = engine.put(PROMPT)
            name = {"here": "evict", "elsewhere": "evicted_elsewhere", "gap": "drop_disk"}[how]
            remove, found = getattr(server.service, name), []

            def loads_first(*args, **more):
                found.append(len(engine.get(PROMPT)))
                return remove(*args, **more)

            setattr(server.service, name, loads_first)
            if how == "here":
                with AdminClient(config.socket) as admin:
                    admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in keys]}})
            elif how == "elsewhere":
                refs = [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)]
                server.node.apply(Event(engine.namespace.ns_id(), refs))
            else:
                server.node.on_gap("a test")
            assert found[0] == 4, "it was loaded meanwhile"
            engine.index.apply_drops()
            assert engine.match(PROMPT) == b""
            assert [key for key in keys if engine._has(key)] == []
    finally:
        server.leave()
        server.leave()
        thread.join(20)

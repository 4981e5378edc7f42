"""An engine whose connection was broken while chunks were evicted does not bring them back, or the reply names it."""

import threading
import time
from pathlib import Path

import msgspec
import pytest

from fake_engine import FakeEngine, wait_until
from tierkv.client import AdminClient
from tierkv.config import Spill
from tierkv.server_config import ServerConfig
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 4 * 32))


@pytest.mark.parametrize("how", ["here", "elsewhere"])
def test_an_engine_that_was_away_drops_what_was_evicted_when_it_is_back(short_dir: Path, how: str) -> None:
    config = ServerConfig.make(short_dir / "store", 64 << 20, None, spill={"disk": Spill.THROUGH})
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(config.socket) as engine:
            keys = engine.put(PROMPT)
            session = next(iter(server.service.sessions.values()))
            for connection in list(server._connections):
                connection.stream.shutdown()  # it comes back after its back-off, 0.4 s at least
            wait_until(lambda: not server.service.sessions)
            if how == "here":
                with AdminClient(config.socket) as admin:
                    reply = admin.ask("TKV.EVICT", {"keys": {engine.ns: [key.hex() for key in keys]}})
                assert reply["removed"]["disk"] == 4
            else:
                server.service.evicted_elsewhere(engine.namespace.ns_id(), keys)
            assert session.id not in server.service.sessions
            wait_until(lambda: any(s.subscribed for s in server.service.sessions.values()))
            time.sleep(0.5)
            engine.index.apply_drops()
            assert [key for key in keys if engine._has(key)] == []
    finally:
        server.leave()
        server.leave()
        thread.join(20)

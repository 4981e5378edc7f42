"""A stopped engine costs the fleet's feed, and statistics, one wait and not one each time."""

import threading
import time
from pathlib import Path

import msgspec

from fake_engine import FakeEngine
from tierkv.config import Spill
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Ref
from tierkv.tiers.control import Event
from tierkv_server.server import Server
from tierkv_server.session import _Ask


def test_a_stopped_engine_is_waited_for_once(short_dir: Path, monkeypatch) -> None:
    config = ServerConfig.make(short_dir / "store", 64 << 20, None, spill={"disk": Spill.THROUGH})
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    waits, result = [], _Ask.result

    def counted(self, timeout_s):
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout_s)
        return result(self, timeout_s)

    monkeypatch.setattr(_Ask, "result", counted)
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(config.socket) as engine:
            engine.mute = True
            for i in range(5):
                server.node.apply(Event(engine.namespace.ns_id(), [Ref(bytes([i]) * 32, bytes([i]) * 32)]))
            assert sum(w > 1 for w in waits) <= 1, f"waited up to {waits} s"
            assert server.node._inspector.stat()["server"]["num_silent_engines"] == 1
            engine.mute = False
            time.sleep(0.5)
            assert server.node._inspector.stat()["server"]["num_silent_engines"] == 0, "it is heard again"
    finally:
        server.leave()
        server.leave()
        thread.join(20)

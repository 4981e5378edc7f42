"""When evictions were missed, engines are told before the disk is emptied: their queued stores come first."""

import threading
from pathlib import Path

import msgspec

from fake_engine import FakeEngine
from tierkv.config import Spill
from tierkv.server_config import ServerConfig
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 4 * 32))


def test_what_an_engine_had_queued_is_gone_after_a_gap(short_dir: Path) -> None:
    config = ServerConfig.make(short_dir / "store", 64 << 20, None, spill={"disk": Spill.THROUGH})
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, reserve_bytes=0))
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(config.socket) as engine:
            keys = engine.put(PROMPT)
            entries = [engine.index.get(key) for key in keys]
            items = [engine._item(entry, keys, "") for entry in entries if entry]
            ask = server.node._inspector.host_keys

            def ask_engines(ns_id: bytes) -> list[bytes]:
                engine.result(engine.store(items))  # what was in its queue, before its answer (docs/protocol.md)
                return ask(ns_id)

            server.node._inspector.host_keys = ask_engines  # type: ignore[method-assign]
            server.node.on_gap("a test")
            assert list(server.service.disk.entries(engine.namespace.ns_id())) == []
    finally:
        server.leave()
        server.leave()
        thread.join(20)

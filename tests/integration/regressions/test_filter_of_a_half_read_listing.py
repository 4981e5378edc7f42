"""A filter is built from a whole listing or not at all: one that Redis broke off denies nothing that is stored."""

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest

from fake_engine import FakeEngine, wait_until
from servers import start_redis
from serving import patient
from tierkv.config import Spill
from tierkv.keys import anchor_index
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Ref
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 4 * 32))


@contextlib.contextmanager
def node(directory: Path, url: str):
    config = ServerConfig.make(directory, 64 << 20, url, spill={"shared": Spill.THROUGH})
    server = Server(msgspec.structs.replace(patient(config), drain_s=1.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.leave()
        server.leave()
        thread.join()


@pytest.mark.parametrize("command", ["HLEN", "HGETALL"])
def test_a_listing_that_redis_broke_off_denies_nothing(short_dir: Path, tmp_path: Path, command: str) -> None:
    redis = start_redis(tmp_path)
    try:
        with node(short_dir / "a", redis.url) as server, FakeEngine(server.config.socket) as engine:
            keys = engine.put(PROMPT)
            assert server.service.drain(20)
            service, ns_id = server.service, engine.namespace.ns_id()
            service.disk.evict(ns_id, [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)])
            assert engine.match(PROMPT) == b"ssss", "the shared tier alone has them"
            wait_until(lambda: server.node._is_live())
            ask, faults = service.shared._link.ask, [None]

            def failing(commands, *args, **more):
                if faults and threading.current_thread().name == "tierkv-filter" and commands[0][0] == command:
                    return faults.pop()  # one time-out
                return ask(commands, *args, **more)

            service.shared._link.ask = failing
            service.filters.rebuild()
            assert service.filters.flush(20)
            assert not faults
            assert not any(engine.client.denies(key) for key in keys)
    finally:
        redis.kill()

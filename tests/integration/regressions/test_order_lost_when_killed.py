"""An order is in the journal before anything is done about it: a server killed in the middle carries it out later."""

import threading
from pathlib import Path

import msgspec
import pytest

from fake_engine import FakeEngine
from servers import start_redis
from serving import patient
from tierkv.config import Spill
from tierkv.keys import anchor_index
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Ref
from tierkv.tiers.control_memory import Journal
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 4 * 32))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("tier", ["disk", "shared"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_server_that_is_killed_while_it_evicts_has_written_the_order_down(
    short_dir: Path, tmp_path: Path, tier: str, whole: bool
) -> None:
    redis = start_redis(tmp_path)
    config = ServerConfig.make(short_dir / "a", 64 << 20, redis.url, spill={"shared": Spill.THROUGH})
    server = Server(msgspec.structs.replace(patient(config), drain_s=1.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with FakeEngine(server.config.socket) as engine:
            keys = engine.put(PROMPT)
            assert server.service.drain(20)
            refs = [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)]

            def kill(*args, **more):
                raise Killed

            target = server.service.disk if tier == "disk" else server.service.shared
            name = "drop_namespace" if whole else "evict"
            original = getattr(target, name)

            def removes_and_dies(*args, **more):
                original(*args, **more)
                raise Killed

            setattr(target, name, removes_and_dies)
            with pytest.raises(Killed):
                server.service.evict(engine.namespace.ns_id(), refs, ["disk", "shared"], whole=whole)
            setattr(target, name, original)
            written = Journal(server.config.disk_dir / "control.journal")
            assert written._owed, "nobody will ever tell the other nodes"
    finally:
        server.leave()
        server.leave()
        thread.join()
        redis.kill()

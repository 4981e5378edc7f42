"""A load that joins another's, begun before an eviction, does not bring what was evicted."""

import threading
from pathlib import Path

import msgspec

from fake_engine import FakeEngine, wait_until
from servers import start_redis
from serving import patient
from tierkv.config import Spill
from tierkv.keys import anchor_index
from tierkv.server_config import ServerConfig
from tierkv.tiers.base import Ref
from tierkv_server.server import Server

PROMPT = list(range(1000, 1000 + 1 * 32))


def test_what_was_evicted_after_a_fetch_began_is_given_to_nobody_who_asks_later(
    short_dir: Path, tmp_path: Path
) -> None:
    redis = start_redis(tmp_path)
    config = ServerConfig.make(
        short_dir / "a", 64 << 20, redis.url, spill={"shared": Spill.THROUGH, "disk": Spill.NEVER}
    )
    server = Server(msgspec.structs.replace(patient(config), drain_s=1.0))
    thread = threading.Thread(target=server.run)
    thread.start()
    go_on = threading.Event()
    try:
        with FakeEngine(config.socket, engine_id="a") as first, FakeEngine(config.socket, engine_id="b") as second:
            keys = first.put(PROMPT)
            assert server.service.drain(20)
            first.forget()
            shared, read = server.service.shared, threading.Event()
            fetch = shared.fetch

            def slow_fetch(ns_id, refs, sink, **more):
                found = fetch(ns_id, refs, sink, **more)
                read.set()
                go_on.wait(20)  # read from Redis, and not yet said so
                return found

            shared.fetch = slow_fetch
            got: list = []
            loading = threading.Thread(target=lambda: got.append(first.get(PROMPT)))
            loading.start()
            assert read.wait(10)
            shared.fetch = fetch
            refs = [Ref(key, keys[anchor_index(i)]) for i, key in enumerate(keys)]
            server.service.evict(first.namespace.ns_id(), refs, ["disk", "shared"])
            # Only now, with everything removed, another engine asks for it.
            session = next(s for s in server.service.sessions.values() if s.hello.engine_id == "b")
            letters: list = []
            second._reserve(keys, 0, "")
            asking = threading.Thread(target=lambda: letters.append(server.service.fetch(session, refs, [0])))
            asking.start()
            wait_until(lambda: server.service.fetcher.moves.loads._count == 2)
            threading.Event().wait(0.2)
            go_on.set()
            asking.join(20)
            loading.join(20)
            assert letters == [b"-"]
    finally:
        go_on.set()
        server.leave()
        server.leave()
        thread.join()
        redis.kill()

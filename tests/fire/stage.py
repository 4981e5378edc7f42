"""What the kinds strike: a real Redis, a store server under supervision, real engines, and relays between them.

::

    engine "local"  ──unix socket, shared memory──▶  store server ──▶ meddler ──▶ Redis
    engine "inline" ──TCP──▶ network (a proxy) ──▶   (own volume)
    engine "plain": without connector, for references
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_process import BLOCK_TOKENS, CHUNK_TOKENS, Engine
from fake_engine import wait_until
from fire.kind import BACKOFF_MAX_S
from fire.meddler import Meddler
from fire.supervised import Store, tier_states
from network import make_tokens
from proxy import Proxy
from seeded_model import write_seeded_llama
from servers import RedisServer, free_port, start_redis
from tierkv.client import REPLY_TIMEOUT_S
from tierkv.config import Spill
from tierkv.server_config import ServerConfig

ENGINES = ("local", "inline")
#: A payload: 64 tokens of K and V, 2 layers of 2 heads of 32 floats.
PAYLOAD_NBYTES = 64 << 10
#: Slots of an engine's host pool: a few prompts more than are in flight, so that slots change hands all the time.
NUM_SLOTS = 64
DEADLINE_S = 1.0
VOLUME_NBYTES = 96 << 20
_MODEL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}


def draw_outage(rng: random.Random) -> float:
    """Return for how many seconds something says nothing: until it is no longer waited for, or until all gave it up.

    One in four is longer than an engine waits for an answer before it ends its session: what comes then is late, and
    finds slots that its engine has not used again.
    """
    return REPLY_TIMEOUT_S + 1.5 if rng.random() < 0.25 else 0.0


class Stage:
    """Everything that runs, for as long as the faults last; use it as a context.

    Args:
        directory: where it all goes; its path is to be short, for the sockets in it.
        names: of the engines with connector.
        settings: of every engine, as ``vllm.LLM`` takes them.
        tight: further ones, of the engines with connector.

    Attributes:
        redis, meddler: Redis, and the relay through which the server reaches it.
        store: the server (:class:`fire.supervised.Store`).
        network: the proxy between the inline engine and the server.
        engines: ``"local"`` and ``"inline"``.
        plain: the engine without connector.
        volume: the filesystem of its own that the disk tier is on; None where none may be mounted.
        disk: the disk tier's directory.
    """

    #: An engine that lost its server is back within this time (back-off, and the server's start).
    RECONNECT_S = 60.0

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = ENGINES,
        settings: Mapping[str, Any] = {},
        tight: Mapping[str, Any] = {},
    ) -> None:
        self.directory = directory
        self._names, self._settings, self._tight = names, settings, tight
        self.engines: dict[str, Engine] = {}
        self.volume: Path | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as undo:
            self._begin(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _begin(self, undo: contextlib.ExitStack) -> None:
        self.model = write_seeded_llama(self.directory / "model", **_MODEL)
        self.plain = Engine(self.model, self.directory, **self._settings)  # starts in the background
        undo.callback(self.plain.kill)
        (self.directory / "redis").mkdir()
        self.redis: RedisServer = start_redis(
            self.directory / "redis", "--maxmemory", "128mb", "--maxmemory-policy", "allkeys-lru",
            "--enable-debug-command", "local",
        )  # fmt: skip
        undo.callback(self.redis.kill)
        self.meddler = undo.enter_context(Meddler(self.redis.port))
        self.disk = undo.enter_context(self._own_volume()) / "store"
        self.tokens = make_tokens(self.directory)
        self.tcp_port = free_port()
        self.config = self._server_config()
        self.store = Store(self.config, self.directory / "server.err")
        undo.callback(self.store.close)
        self.store.start()
        self.network = undo.enter_context(Proxy(("127.0.0.1", self.tcp_port)))
        for name in self._names:
            self.start_engine(name)
            undo.callback(lambda name=name: self.engines[name].kill())
        for engine in (self.plain, *self.engines.values()):
            engine.ready()

    def _server_config(self) -> ServerConfig:
        config = ServerConfig.make(
            self.disk, 64 << 20, self.meddler.url, socket=self.directory / "tierkv.sock",
            spill={"shared": Spill.THROUGH},
        )  # fmt: skip
        replace = msgspec.structs.replace
        assert config.shared is not None
        return replace(
            config,
            disk=replace(config.disk, reserve_bytes=0),
            shared=replace(config.shared, timeout_s=0.5, connect_timeout_s=0.5),
            listen=replace(
                config.listen,
                tcp=f"127.0.0.1:{self.tcp_port}",
                insecure=True,
                engine_token_file=self.tokens["engine"],
            ),
        )

    @contextlib.contextmanager
    def _own_volume(self) -> Iterator[Path]:
        """A filesystem of the disk tier's own where one may be mounted, so that it can be full."""
        path = self.directory / "volume"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_NBYTES}", "tierkv-fire", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            yield path
            return
        self.volume = path
        try:
            yield path
        finally:
            for log in (path / "store").glob("server.log*"):  # they go with the volume
                shutil.copy(log, self.directory)
            subprocess.run(["umount", "-l", str(path)], check=True)

    # -- engines

    def start_engine(self, name: str, **settings: Any) -> Engine:
        """Start the engine ``name``, in the background; what was there before must have ended."""
        server: dict[str, Any] = {"server": f"unix://{self.config.socket}"}
        if name == "inline":
            server = {
                "server": f"tkv://127.0.0.1:{self.network.port}",
                "server_token_file": self.tokens["engine"],
            }
        options = server | {
            "host_bytes": NUM_SLOTS * PAYLOAD_NBYTES + (16 << 10),
            "deadline_s": DEADLINE_S,
            "cost_gate": False,  # the model computes a chunk in a millisecond
        }
        settings = {**self._settings, **self._tight, **settings}
        env = {"TIERKV_TEST_BACKOFF_MAX_S": str(BACKOFF_MAX_S)} | settings.pop("env", {})
        self.engines[name] = Engine(self.model, self.directory, options, env=env, **settings)
        return self.engines[name]

    def restart_engine(self, name: str) -> Engine:
        """Put a new engine in the place of one that has ended, or kill it first; returns when it serves."""
        self.engines[name].kill()
        engine = self.start_engine(name).ready()
        wait_until(lambda: engine.call("connected"), self.RECONNECT_S, f"the new {name} engine does not connect")
        return engine

    # -- health

    def is_healthy(self) -> bool:
        """Return whether the server answers, every tier is up, and both engines have a session."""
        states = tier_states(self.store)
        return (
            states.keys() >= {"disk", "shared"}
            and set(states.values()) == {"up"}
            and all(engine.call("connected") for engine in self.engines.values())
        )

    def evict(self, *tiers: str) -> None:
        """Empty tiers of the server; other servers are not told of it."""
        self.store.ask("TKV.EVICT", {"tiers": list(tiers), "everything": True})

    def wait_healthy(self, poke: Any, timeout_s: float = 90.0) -> float:
        """Wait until everything works again; returns how many seconds that took.

        Args:
            poke: called between looks: serves a request, so that what is out is tried again.

        Raises:
            TimeoutError: it does not.
        """
        started = time.monotonic()
        while not self.is_healthy():
            if time.monotonic() - started > timeout_s:
                connected = {name: engine.call("connected") for name, engine in self.engines.items()}
                raise TimeoutError(
                    f"not healthy {timeout_s:g} s after the fault: tiers {tier_states(self.store)}, engines {connected}"
                )
            poke()
            time.sleep(0.05)
        return time.monotonic() - started


assert CHUNK_TOKENS % BLOCK_TOKENS == 0

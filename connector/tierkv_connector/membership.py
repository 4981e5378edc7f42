"""Membership: who this engine is to others. The identity of its model, its namespace, the store server it has joined.

The weights of a model that is new on a machine are hashed at the start. That is done in a thread, and so is joining
the server: an engine whose start would wait too long for it serves from GPU and host meanwhile, under an identity that
nobody else has.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from tierkv import __version__
from tierkv.asked import AskedLog
from tierkv.client import StoreClient
from tierkv.config import LINGER_S, PROTOCOL_VERSION, EngineConfig, shared_digest
from tierkv.errors import ConfigError
from tierkv.launcher import Launcher
from tierkv.layout import Layout, Namespace, Shard
from tierkv.messages import Hello, Welcome
from tierkv.policy import DEFAULT_POLICY
from tierkv.pool import HostPool
from tierkv.server_config import ServerConfig
from tierkv.threads import leave_compute_core
from tierkv_connector.model import UnknownIdentityError, resolve_identity

logger = logging.getLogger("tierkv")

#: An engine's start waits this long for the hash of its model; after that it serves from GPU and host meanwhile.
IDENTITY_WAIT_S = 15.0


class Membership:
    """What makes an engine's KV of use to others.

    Args:
        config: the engine's configuration.
        engine_id: its name.
        layout, shard: what its payloads mean, and which part of a model's KV they are.
        pool: the host pool, into which the server writes.
        on_push: answers what the server asks; called on the client's reader thread.
        asked: what the server is told about asked chunks.

    Attributes:
        identity: of the model; until that is known one that nobody else has.
        client: of the store server, once the identity is in use; None where there is no server.
        shareable: the identity is the model's.
        found: the identity and the client that are to be in use from the next :meth:`adopt` on.
        model: the model's name, for listings.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        layout: Layout,
        shard: Shard,
        pool: HostPool,
        on_push: Callable[[str, bytes], bytes],
        asked: AskedLog,
    ) -> None:
        self.identity = secrets.token_bytes(32)
        self.client: StoreClient | None = None
        self.shareable = False
        self.found: tuple[bytes, StoreClient | None] | None = None
        self.model = ""
        self._config = config
        self._engine_id = engine_id
        self._layout = layout
        self._shard = shard
        self._pool = pool
        self._on_push = on_push
        self._asked = asked
        self._named = b"", b""  # an identity, and the namespace that it has

    def start(self, vllm_config: Any) -> None:
        """Find the model's identity and join the server, in a thread; wait for it as long as a start may take.

        Raises:
            ConfigError: the store server refuses this engine or cannot run as configured.
        """
        names = vllm_config.model_config.served_model_name or vllm_config.model_config.model
        self.model = names if isinstance(names, str) else str(names[0])
        failure: list[ConfigError] = []
        done = threading.Event()
        late = threading.Event()

        def work() -> None:
            leave_compute_core()
            try:
                identity = resolve_identity(vllm_config, self._config.weights_version is not None)
                self.found = (identity, self._connect(identity))
            except UnknownIdentityError as error:
                logger.warning("%s: KV is kept on GPU and host only", error)
            except ConfigError as error:
                failure.append(error)
                if late.is_set():
                    logger.error("%s KV is kept on GPU and host only", error)
            except Exception:
                logger.exception("the model's identity could not be found: KV is kept on GPU and host only")
            done.set()

        threading.Thread(target=work, name="tierkv-identity", daemon=True).start()
        if not done.wait(IDENTITY_WAIT_S):
            late.set()
            logger.warning("the model's weights are still being hashed: until then KV is kept on GPU and host only")
        if failure:
            raise failure[0]
        self.adopt()

    def adopt(self) -> None:
        """From now on new requests have keys that others understand, where those are known."""
        if self.found and not self.shareable:
            self.identity, self.client = self.found
            self.shareable = True

    @property
    def any_client(self) -> StoreClient | None:
        """The client, also where it is not in use yet."""
        return self.client or (self.found[1] if self.found else None)

    @property
    def ns_id(self) -> bytes:
        """The namespace of what this engine stores."""
        if self._named[0] != self.identity:  # digests of a layout of many layers are not for every request
            self._named = self.identity, self._namespace(self.identity).ns_id()
        return self._named[1]

    def close(self) -> None:
        """Leave the store server. Idempotent."""
        for client in {c for c in (self.client, self.found and self.found[1]) if c}:
            client.close()

    def _namespace(self, identity: bytes) -> Namespace:
        return Namespace(identity.hex(), self.model, self._layout, self._shard)

    def _connect(self, identity: bytes) -> StoreClient | None:
        if self._config.server == "off":
            return None
        config, launcher = self._config, None
        if config.server == "auto":
            launcher = Launcher(
                ServerConfig.make(
                    config.disk_dir,
                    config.disk_bytes,
                    config.shared_url,
                    config.socket,
                    LINGER_S,
                    config.spill,
                    config.policy.get("disk", DEFAULT_POLICY),
                )
            )
        hello = Hello(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            pid=os.getpid(),
            namespace=self._namespace(identity),
            shape=self._pool.shape,
            shared=shared_digest(config.shared_url) if launcher else None,
            disk_bytes=config.disk_bytes if launcher else None,
        )
        client = StoreClient(config.address, hello, self._pool, launcher, self._on_push, self._asked)
        welcome = client.start()
        if welcome:
            self._tell(welcome)
        return client

    def _tell(self, welcome: Welcome) -> None:
        """Log which server it is, and what of it is not as this engine wanted it."""
        config = self._config
        shared = f", shared {welcome.shared}" if welcome.shared else ""
        logger.info("joined the store server of %s (pid %d)%s", welcome.disk_dir, welcome.pid, shared)
        if any(welcome.spill.get(tier, policy) != policy for tier, policy in config.spill.items()):
            held = ", ".join(f"{tier} {policy}" for tier, policy in welcome.spill.items())
            logger.warning("that store server's spill policies hold: %s; this engine asked for others", held)
        if welcome.policy != (wanted := config.policy.get("disk", welcome.policy)):
            logger.warning(
                "that store server's disk has the policy %s; this engine asked for %s", welcome.policy, wanted
            )

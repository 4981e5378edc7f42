"""Configuration of the store server: typed, frozen, from a TOML file, a command line or an engine.

A file has one table a part, each documented at its struct here and in ``docs/configuration.md``::

    [disk]
    dir = "/var/lib/tierkv"
    bytes = "200GiB"

    [shared]
    url = "rediss://tierkv@cache.example:6380/0"
    password_file = "/etc/tierkv/redis-password"
    spill = "second-use"
    ttl = "7d"

Sizes are written ``"8GiB"`` or in bytes, durations ``"12h"`` or in seconds. Secrets are never in the file itself where
a file of their own can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tierkv.config import (
    DEFAULT_DISK_BYTES,
    LINGER_S,
    Spill,
    check_names,
    check_shared_url,
    default_disk_dir,
    parse_bytes,
    parse_directory,
    parse_seconds,
    socket_path,
)
from tierkv.tiers.base import Limits

#: Free space of the volume that the disk tier leaves to others.
DEFAULT_RESERVE_NBYTES = 1 << 30
DEFAULT_SYNC_S = 5.0
#: What the shared tier holds expires this long after its last use, unless configured.
DEFAULT_SHARED_IDLE_S = 7 * 86400.0
DEFAULT_REDIS_PREFIX = "tierkv"


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier.

    Attributes:
        dir: directory of the LMDB files, on a local disk; its lock elects the one server that owns it.
        bytes: budget of live records over all namespaces.
        reserve_bytes: free space of the volume that is left to others: stores stop short of it.
        sync_s: seconds between background syncs.
        spill: when a chunk goes here.
        ttl_s, idle_s: seconds after its store, after its last read, that an entry expires; None: never.
    """

    dir: Path = msgspec.field(default_factory=default_disk_dir)
    bytes: int = DEFAULT_DISK_BYTES
    reserve_bytes: int = DEFAULT_RESERVE_NBYTES
    sync_s: float = DEFAULT_SYNC_S
    spill: Spill = Spill.THROUGH
    ttl_s: float | None = None
    idle_s: float | None = None


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared tier.

    Attributes:
        url: ``redis://``, ``rediss://``, ``unix://``; ``redis+sentinel://host:port,host:port/service/db``,
            ``rediss+sentinel://...``; ``redis+cluster://host:port,host:port``, ``rediss+cluster://...``.
        username: ACL user, where it is not in the URL.
        password_file: file that holds the password; None: in the URL, or none.
        ca_file, cert_file, key_file: of TLS; the client certificate only where Redis asks for one.
        prefix: start of the names of all keys; nothing else is touched.
        spill: when a chunk goes there.
        ttl_s, idle_s: seconds after its store, after its last read, that an entry expires; None: never.
        compression: ``"off"``, or ``"zstd"`` (byte-shuffle and zstd 1; slower, a third smaller on real KV).
        timeout_s: seconds that one read or write of Redis's socket may take.
        connect_timeout_s: seconds that connecting may take.
    """

    url: str
    username: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    prefix: str = DEFAULT_REDIS_PREFIX
    spill: Spill = Spill.SECOND_USE
    ttl_s: float | None = None
    idle_s: float | None = DEFAULT_SHARED_IDLE_S
    compression: str = "off"
    timeout_s: float = 1.0
    connect_timeout_s: float = 0.5


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, and whom it lets in.

    Attributes:
        socket: the unix socket; its peers are of the server's user, or root.
        socket_mode: its permissions.
        tcp: ``host:port`` to listen on too, for engines of other machines; None: not.
        tls_cert, tls_key: the server's certificate and key for TCP.
        tls_client_ca: who signs clients' certificates; None: none is asked for.
        engine_token_file, reader_token_file, admin_token_file: files that hold the tokens of the roles (AUTH over TCP,
            bearer tokens over HTTP). A role without one cannot be had over TCP.
        insecure: TCP without TLS or token, on loopback only.
        max_connections: connections at a time, all together.
    """

    socket: Path
    socket_mode: int = 0o600
    tcp: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    engine_token_file: Path | None = None
    reader_token_file: Path | None = None
    admin_token_file: Path | None = None
    insecure: bool = False
    max_connections: int = 512


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The admin HTTP server: health, metrics, JSON API, dashboard.

    Attributes:
        listen: ``host:port``.
    """

    listen: str = "127.0.0.1:9109"


class QuotaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas, for the disk and the shared tier each.

    Attributes:
        namespace_bytes, tenant_bytes: for those not named below; None: no quota.
        pinned_bytes: what pins may hold; None: no quota.
        namespaces: quota by namespace id (32 hex digits).
        tenants: quota by tenant digest (32 hex digits), within each namespace.
    """

    namespace_bytes: int | None = None
    tenant_bytes: int | None = None
    pinned_bytes: int | None = None
    namespaces: dict[str, int] = {}
    tenants: dict[str, int] = {}


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store server runs with.

    Attributes:
        disk, shared, listen, http, quota: its parts; ``shared`` and ``http`` are None where there is none.
        linger_s: seconds after which the server leaves when its last engine has gone; None to stay.
    """

    listen: ListenConfig
    disk: DiskConfig = DiskConfig()
    shared: SharedConfig | None = None
    http: HttpConfig | None = None
    quota: QuotaConfig = QuotaConfig()
    linger_s: float | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ServerConfig:
        """Return the configuration that the options of ``tierkv serve`` describe, with defaults for the rest.

        Raises:
            ConfigError: an option is unknown or its value impossible.
        """
        check_names(
            options, ("disk_dir", "disk_bytes", "shared_url", "socket", "linger_s"), "the store server's options"
        )
        disk_dir = parse_directory(options, "disk_dir")
        linger_s = options.get("linger_s")
        return cls.make(
            disk_dir,
            parse_bytes(options, "disk_bytes", DEFAULT_DISK_BYTES),
            check_shared_url(options.get("shared_url")),
            None if options.get("socket") is None else parse_directory(options, "socket"),
            None if linger_s is None else parse_seconds(options, "linger_s", LINGER_S),
        )

    @classmethod
    def make(
        cls,
        disk_dir: Path,
        disk_bytes: int = DEFAULT_DISK_BYTES,
        shared_url: str | None = None,
        socket: Path | None = None,
        linger_s: float | None = None,
        spill: Mapping[str, Spill] | None = None,
    ) -> ServerConfig:
        """Return the configuration of the server that an engine launches, or a test: the rest is defaults."""
        spill = spill or {}
        return cls(
            listen=ListenConfig(socket=socket or socket_path(disk_dir)),
            disk=DiskConfig(dir=disk_dir, bytes=disk_bytes, spill=spill.get("disk", Spill.THROUGH)),
            shared=SharedConfig(url=shared_url, spill=spill.get("shared", Spill.SECOND_USE)) if shared_url else None,
            linger_s=linger_s,
        )

    @property
    def disk_dir(self) -> Path:
        return self.disk.dir

    @property
    def disk_bytes(self) -> int:
        return self.disk.bytes

    @property
    def socket(self) -> Path:
        return self.listen.socket

    @property
    def shared_url(self) -> str | None:
        return self.shared.url if self.shared else None

    def disk_limits(self) -> Limits:
        """Return the limits of the disk tier."""
        d = self.disk
        return self._limits(budget=d.bytes, reserve_nbytes=d.reserve_bytes, ttl_s=d.ttl_s, idle_s=d.idle_s)

    def shared_limits(self) -> Limits:
        """Return the limits of the shared tier, whose budget is Redis's own."""
        return self._limits(ttl_s=self.shared.ttl_s, idle_s=self.shared.idle_s) if self.shared else Limits()

    def _limits(self, **own: Any) -> Limits:
        q = self.quota
        namespaces = {bytes.fromhex(name): nbytes for name, nbytes in q.namespaces.items()}
        tenants = {bytes.fromhex(name): nbytes for name, nbytes in q.tenants.items()}
        return Limits(
            namespace_nbytes=namespaces | ({b"": q.namespace_bytes} if q.namespace_bytes is not None else {}),
            tenant_nbytes=tenants | ({b"": q.tenant_bytes} if q.tenant_bytes is not None else {}),
            pinned_nbytes=q.pinned_bytes,
            **own,
        )

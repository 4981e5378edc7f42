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

Sizes are written ``"8GiB"`` or in bytes, durations ``"12h"`` or in seconds; a field that ends in ``_s`` here is written
without in a file, where a duration says its unit itself. Secrets are in files of their own. :mod:`tierkv.toml_config`
reads a file, :mod:`tierkv.config_checks` says what of it cannot work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

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
from tierkv.policy import DEFAULT_POLICY, POLICIES
from tierkv.sizes import MAX_DURATION_S, MAX_SIZE, format_duration, format_size
from tierkv.tiers.base import Limits
from tierkv.urls import redact_url

#: Free space of the volume that the disk tier leaves to others.
DEFAULT_RESERVE_NBYTES = 1 << 30
#: The disk tier holds nothing with less (:data:`tierkv.tiers.disk.MIN_BUDGET`).
MIN_DISK_NBYTES = 16 << 20
DEFAULT_SYNC_S = 5.0
#: What the shared tier holds expires this long after its last use, unless configured.
DEFAULT_SHARED_IDLE_S = 7 * 86400.0
DEFAULT_REDIS_PREFIX = "tierkv"
#: How long a server that was told to leave goes on writing what is queued.
DEFAULT_DRAIN_S = 10.0


class Kind(StrEnum):
    """What a field's value is, and so how it is written in a file."""

    TEXT = "text"
    WORD = "one of some words"
    FLAG = "true or false"
    COUNT = "number"
    SIZE = "size"
    DURATION = "duration"
    MODE = "file mode"
    ADDRESS = "host:port"
    URL = "URL"
    DIRECTORY = "directory"
    SOCKET = "path of a socket"
    FILE = "file"
    SECRET = "file with a secret"
    SIZES = "table of sizes"


class About(NamedTuple):
    """What is known of a field beside its type.

    Attributes:
        kind: how it is written.
        what: what it does, in words.
        reload: whether a running server takes a new value.
        least, most: bounds of a number, in bytes or seconds where it is a size or a duration.
        words: what a word may be.
        example: a value for the example file, where there is no default.
    """

    kind: Kind
    what: str
    reload: bool = False
    least: float = 0
    most: float = math.inf
    words: tuple[str, ...] = ()
    example: str = ""


class Field(NamedTuple):
    """A field of a part: its name here and in a file, and what is known of it."""

    name: str
    file_name: str
    about: About
    optional: bool
    default: Any


_SPILL = tuple(policy.value for policy in Spill)
_TTL = "how long after its store an entry expires"
_IDLE = "how long after its last read (or its store) an entry expires"
_Ttl = Annotated[float | None, About(Kind.DURATION, _TTL, reload=True, least=1, most=MAX_DURATION_S)]
_Idle = Annotated[float | None, About(Kind.DURATION, _IDLE, reload=True, least=1, most=MAX_DURATION_S)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Each field's annotation says what it is (:class:`About`)."""

    @classmethod
    def fields(cls) -> Iterator[Field]:
        """Yield the fields that are values, in order; those that are parts themselves are not among them."""
        hints = get_type_hints(cls, include_extras=True)
        for info in msgspec.structs.fields(cls):
            about = next((m for m in getattr(hints[info.name], "__metadata__", ()) if isinstance(m, About)), None)
            if about is None:
                continue
            default = info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
            file_name = info.name.removesuffix("_s") if about.kind is Kind.DURATION else info.name
            optional = type(None) in getattr(hints[info.name].__origin__, "__args__", ())
            yield Field(info.name, file_name, about, optional, default)


class DiskConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier."""

    dir: Annotated[
        Path,
        About(
            Kind.DIRECTORY,
            "directory of the LMDB files, on a local disk; its lock elects the one server that owns it",
            example="/var/lib/tierkv",
        ),
    ] = msgspec.field(default_factory=default_disk_dir)
    bytes: Annotated[
        int,
        About(
            Kind.SIZE, "budget of live records over all namespaces", reload=True, least=MIN_DISK_NBYTES, most=MAX_SIZE
        ),
    ] = DEFAULT_DISK_BYTES
    reserve_bytes: Annotated[
        int,
        About(
            Kind.SIZE,
            "free space of the volume that is left to others: stores stop short of it",
            reload=True,
            most=MAX_SIZE,
        ),
    ] = DEFAULT_RESERVE_NBYTES
    sync_s: Annotated[float, About(Kind.DURATION, "time between background syncs", least=0.1, most=3600)] = (
        DEFAULT_SYNC_S
    )
    spill: Annotated[Spill, About(Kind.WORD, "when a chunk goes here", reload=True, words=_SPILL)] = Spill.THROUGH
    policy: Annotated[
        str, About(Kind.WORD, "what is worth a write once it is full, and what goes for it", words=tuple(POLICIES))
    ] = DEFAULT_POLICY
    ttl_s: _Ttl = None
    idle_s: _Idle = None


class SharedConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared tier: a Redis or Valkey. Without this table there is none."""

    url: Annotated[
        str,
        About(
            Kind.URL,
            "`redis://[user@]host:port/db`, `rediss://...` (TLS), `unix:///path`; "
            "`redis+sentinel://host:port,host:port/service/db`; `redis+cluster://host:port,host:port`",
            example="rediss://tierkv@cache.example:6380/0",
        ),
    ]
    username: Annotated[str | None, About(Kind.TEXT, "ACL user, where it is not in the URL", example="tierkv")] = None
    password_file: Annotated[
        Path | None,
        About(Kind.SECRET, "file that holds the password, where it is not in the URL", example="redis-password"),
    ] = None
    ca_file: Annotated[
        Path | None, About(Kind.FILE, "certificates that Redis's own is checked against (TLS)", example="redis-ca.pem")
    ] = None
    cert_file: Annotated[
        Path | None, About(Kind.FILE, "client certificate, where Redis asks for one (TLS)", example="redis-client.pem")
    ] = None
    key_file: Annotated[
        Path | None, About(Kind.SECRET, "key of the client certificate", example="redis-client.key")
    ] = None
    prefix: Annotated[str, About(Kind.TEXT, "start of the names of all keys; nothing else is touched")] = (
        DEFAULT_REDIS_PREFIX
    )
    spill: Annotated[Spill, About(Kind.WORD, "when a chunk goes there", reload=True, words=_SPILL)] = Spill.SECOND_USE
    ttl_s: _Ttl = None
    idle_s: _Idle = DEFAULT_SHARED_IDLE_S
    compression: Annotated[
        str,
        About(
            Kind.WORD,
            "`zstd`: byte-shuffle and zstd 1; slower, a third smaller on real KV",
            words=("off", "zstd"),
        ),
    ] = "off"
    timeout_s: Annotated[
        float, About(Kind.DURATION, "how long one read or write of Redis's socket may take", least=0.01, most=60)
    ] = 1.0
    connect_timeout_s: Annotated[
        float, About(Kind.DURATION, "how long connecting to Redis may take", least=0.01, most=60)
    ] = 0.5


class ListenConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, and whom it lets in."""

    socket: Annotated[
        Path,
        About(
            Kind.SOCKET,
            "the unix socket; its peers are of the server's user, or root; by default `tierkv.sock` in `disk.dir`",
            example="/run/tierkv/tierkv.sock",
        ),
    ]
    socket_mode: Annotated[int, About(Kind.MODE, "permissions of the unix socket", most=0o777)] = 0o600
    tcp: Annotated[
        str | None,
        About(Kind.ADDRESS, "address to listen on too, for engines of other machines", example="0.0.0.0:6390"),
    ] = None
    tls_cert: Annotated[
        Path | None, About(Kind.FILE, "certificate (chain) of the server, for TCP", reload=True, example="server.pem")
    ] = None
    tls_key: Annotated[Path | None, About(Kind.SECRET, "key of `tls_cert`", reload=True, example="server.key")] = None
    tls_client_ca: Annotated[
        Path | None,
        About(
            Kind.FILE,
            "who signs clients' certificates; without it none is asked for",
            reload=True,
            example="clients-ca.pem",
        ),
    ] = None
    engine_token_file: Annotated[
        Path | None,
        About(
            Kind.SECRET,
            "token of engines (AUTH over TCP); without it no engine comes over TCP",
            reload=True,
            example="engine-token",
        ),
    ] = None
    reader_token_file: Annotated[
        Path | None,
        About(
            Kind.SECRET,
            "token of readers (AUTH over TCP, bearer token over HTTP): listing and statistics",
            reload=True,
            example="reader-token",
        ),
    ] = None
    admin_token_file: Annotated[
        Path | None,
        About(
            Kind.SECRET,
            "token of admins (AUTH over TCP, bearer token over HTTP): everything",
            reload=True,
            example="admin-token",
        ),
    ] = None
    insecure: Annotated[bool, About(Kind.FLAG, "TCP without TLS or token, on the loopback only")] = False
    max_connections: Annotated[
        int, About(Kind.COUNT, "connections at a time, all together", reload=True, least=8, most=65536)
    ] = 512


class HttpConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The admin HTTP server: health, metrics, JSON API, dashboard. Without this table there is none."""

    listen: Annotated[str, About(Kind.ADDRESS, "address to listen on; another than the loopback needs tokens")] = (
        "127.0.0.1:9109"
    )


class QuotaConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas, for the disk and the shared tier each. One that is not set does not hold."""

    namespace_bytes: Annotated[
        int | None,
        About(
            Kind.SIZE,
            "quota of each namespace that `namespaces` does not name",
            reload=True,
            least=1,
            most=MAX_SIZE,
            example="500GiB",
        ),
    ] = None
    tenant_bytes: Annotated[
        int | None,
        About(
            Kind.SIZE,
            "quota of each tenant within a namespace, for those that `tenants` does not name",
            reload=True,
            least=1,
            most=MAX_SIZE,
            example="50GiB",
        ),
    ] = None
    pinned_bytes: Annotated[
        int | None,
        About(Kind.SIZE, "what all pins of a tier may hold", reload=True, most=MAX_SIZE, example="20GiB"),
    ] = None
    namespaces: Annotated[
        dict[str, int],
        About(
            Kind.SIZES,
            "quota by namespace id (32 hex digits, as `tierkv stat --json` shows)",
            reload=True,
            most=MAX_SIZE,
        ),
    ] = {}
    tenants: Annotated[
        dict[str, int],
        About(Kind.SIZES, "quota by tenant digest (32 hex digits), within each namespace", reload=True, most=MAX_SIZE),
    ] = {}


class SessionsConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sessions that requests name may hold on the disk."""

    percent: Annotated[
        int, About(Kind.COUNT, "percent of `disk.bytes` that all sessions together may hold", reload=True, most=100)
    ] = 50
    tenant_percent: Annotated[
        int,
        About(Kind.COUNT, "percent of `disk.bytes` that the sessions of one tenant may hold", reload=True, most=100),
    ] = 25
    tenant_sessions: Annotated[
        int, About(Kind.COUNT, "sessions of one tenant that are remembered", reload=True, least=1, most=16384)
    ] = 1024
    retain_s: Annotated[
        float, About(Kind.DURATION, "the longest that a session is held for after a request", reload=True, most=604800)
    ] = 3600.0


class ServerConfig(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server itself: fields before the first table."""

    listen: ListenConfig
    disk: DiskConfig = DiskConfig()
    shared: SharedConfig | None = None
    http: HttpConfig | None = None
    quota: QuotaConfig = QuotaConfig()
    sessions: SessionsConfig = SessionsConfig()
    linger_s: Annotated[
        float | None,
        About(
            Kind.DURATION,
            "after its last engine has gone the server leaves after so long; `never`: it stays",
            reload=True,
            most=MAX_DURATION_S,
        ),
    ] = None
    drain_s: Annotated[
        float,
        About(
            Kind.DURATION,
            "how long a server that was told to leave goes on writing what is queued for its tiers",
            reload=True,
            most=600,
        ),
    ] = DEFAULT_DRAIN_S
    log_level: Annotated[
        str, About(Kind.WORD, "least severity that is logged", reload=True, words=("debug", "info", "warning", "error"))
    ] = "info"

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
        policy: str = DEFAULT_POLICY,
    ) -> ServerConfig:
        """Return the configuration of the server that an engine launches, or a test: the rest is defaults."""
        spill = spill or {}
        return cls(
            listen=ListenConfig(socket=socket or socket_path(disk_dir)),
            disk=DiskConfig(dir=disk_dir, bytes=disk_bytes, spill=spill.get("disk", Spill.THROUGH), policy=policy),
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

    def describe(self) -> str:
        """Return the effective configuration in one line, without secrets: the main things, then what is no default."""
        shared = f"shared {redact_url(self.shared_url)}" if self.shared_url else "no shared tier"
        stay = "stays" if self.linger_s is None else f"leaves {self.linger_s:g} s after its last engine"
        http = [f"http on {self.http.listen}"] if self.http else []
        said = {"disk.dir", "disk.bytes", "shared.url", "listen.socket", "http.listen", "linger_s"}
        rest = [
            f"{part}{field.file_name}={show(field, value)}"
            for part, field, value in self.values()
            if f"{part}{field.name}" not in said and value != field.default
        ]
        disk = f"disk {format_size(self.disk_bytes)} in {self.disk_dir}"
        return "; ".join([f"serving on {self.socket}: {disk}, {shared}", stay, *http, *rest])

    def values(self) -> Iterator[tuple[str, Field, Any]]:
        """Yield every value: the part it is in (``"disk."``; empty at the top), its field, the value."""
        for field in self.fields():
            yield "", field, getattr(self, field.name)
        for part in PARTS:
            struct = getattr(self, part)
            if struct is not None:
                for field in struct.fields():
                    yield f"{part}.", field, getattr(struct, field.name)

    def spill(self) -> dict[str, Spill]:
        """Return when chunks go to each tier that is there."""
        shared = {"shared": self.shared.spill} if self.shared else {}
        return {"disk": self.disk.spill} | shared

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


#: The tables of a file, in order.
PARTS: dict[str, type[Part]] = {
    "disk": DiskConfig,
    "shared": SharedConfig,
    "listen": ListenConfig,
    "http": HttpConfig,
    "quota": QuotaConfig,
    "sessions": SessionsConfig,
}


def show(field: Field, value: Any) -> str:
    """Return a value for people, on one line and without secrets."""
    kind = field.about.kind
    if value is None:
        return "never" if kind is Kind.DURATION else "none"
    if kind is Kind.SIZE:
        return format_size(value)
    if kind is Kind.DURATION:
        return format_duration(value)
    if kind is Kind.MODE:
        return f"{value:04o}"
    if kind is Kind.URL:
        return redact_url(value)
    if kind is Kind.SIZES:
        return ",".join(f"{name[:8]}:{format_size(nbytes)}" for name, nbytes in value.items()) or "none"
    return str(value).lower() if kind is Kind.FLAG else str(value)

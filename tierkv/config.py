"""Configuration of engines and of the store server: checked at start, with a sentence for every mistake."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.memory import total_memory
from tierkv.sizes import format_size, parse_size
from tierkv.urls import redact_url

DEFAULT_DISK_BYTES = 20 << 30
MAX_DEFAULT_HOST_BYTES = 8 << 30
DEFAULT_DEADLINE_S = 2.0
#: Bytes that all plans of an engine may have leased at a time.
PLAN_NBYTES = 256 << 20
#: Started plans an engine may have at a time.
MAX_PLANS = 32
#: Bytes of payloads that may wait to be stored, in an engine and for the shared tier.
STORE_NBYTES = 256 << 20
#: Bytes of one FETCH or STORE command.
COMMAND_NBYTES = 8 << 20
LINGER_S = 10.0
PROTOCOL_VERSION = 1


def default_disk_dir() -> Path:
    """Return the LMDB directory used where none is configured: in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv"


def default_host_bytes() -> int:
    """Return the size of the host pool where none is configured: a tenth of memory, at most 8 GiB."""
    return min(MAX_DEFAULT_HOST_BYTES, total_memory() // 10)


class Spill(StrEnum):
    """When a chunk goes to a tier."""

    THROUGH = "through"  #: when it was computed
    ON_EVICT = "on-evict"  #: when the tier above lets it go
    SECOND_USE = "second-use"  #: when it was used once after it was computed
    NEVER = "never"  #: not at all; what is there is read


class EngineConfig(msgspec.Struct, frozen=True):
    """What ``kv_connector_extra_config`` may hold.

    Attributes:
        host_bytes: bytes of the host pool over all ranks of the engine on this host.
        server: ``"auto"`` (launch a store server for ``disk_dir``, or join the one that owns it),
            ``"unix:///path"`` (a server that somebody else runs), or ``"off"`` (GPU and host only).
        disk_dir: directory of the disk tier (``server="auto"`` only).
        disk_bytes: budget of the disk tier (``server="auto"`` only).
        shared_url: URL of the Redis or Valkey that a fleet shares (``server="auto"`` only), or None.
        chunk_tokens: tokens a chunk, a whole number of blocks; None for about 4 MiB a chunk.
        deadline_s: seconds after which a request stops waiting for its plan and computes the rest.
        spill: when chunks go to ``disk`` and ``shared`` (``server="auto"`` only): ``through``, ``on-evict``,
            ``second-use`` or ``never``; by default ``through`` to disk and ``second-use`` to the shared tier.
    """

    host_bytes: int
    server: str
    disk_dir: Path
    disk_bytes: int
    shared_url: str | None
    chunk_tokens: int | None
    deadline_s: float
    spill: Mapping[str, Spill] = {}

    @property
    def socket(self) -> Path:
        """The store server's socket."""
        if self.server.startswith("unix://"):
            return Path(self.server.removeprefix("unix://"))
        return socket_path(self.disk_dir)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration that ``options`` describe, with defaults for what they leave out.

        Raises:
            ConfigError: an option is unknown or its value impossible.
        """
        check_names(options, cls.__struct_fields__, "kv_connector_extra_config")
        server = _server(options.get("server", "auto"))
        owned = [name for name in ("disk_dir", "disk_bytes", "shared_url", "spill") if options.get(name) is not None]
        if server != "auto" and owned:
            name = owned[0]
            value = redact_url(str(options[name]))
            raise ConfigError(
                f"{name}={value!r} has no effect with server={server!r}: it belongs to the store server; "
                f"leave it out, or set server='auto'"
            )
        return cls(
            host_bytes=parse_bytes(options, "host_bytes", default_host_bytes()),
            server=server,
            disk_dir=parse_directory(options, "disk_dir"),
            disk_bytes=parse_bytes(options, "disk_bytes", DEFAULT_DISK_BYTES),
            shared_url=check_shared_url(options.get("shared_url")),
            chunk_tokens=_chunk_tokens(options.get("chunk_tokens")),
            deadline_s=parse_seconds(options, "deadline_s", DEFAULT_DEADLINE_S),
            spill=parse_spill(options.get("spill")),
        )

    def describe(self) -> str:
        """Return the effective configuration in one line, without secrets."""
        host = f"host {format_size(self.host_bytes)}"
        if self.server == "off":
            return f"{host}, no store server"
        if self.server != "auto":
            return f"{host}, store server {self.server}, deadline {self.deadline_s:g} s"
        shared = f"shared {redact_url(self.shared_url)}" if self.shared_url else "no shared tier"
        return (
            f"{host}, disk {format_size(self.disk_bytes)} in {self.disk_dir}, {shared}, deadline {self.deadline_s:g} s"
        )


def socket_path(disk_dir: Path) -> Path:
    """Return the socket of the server that owns ``disk_dir``."""
    return disk_dir / "tierkv.sock"


def shared_digest(shared_url: str | None) -> str:
    """Return a digest that tells whether two sides mean the same shared tier, without showing its URL."""
    return hashlib.sha256(b"tierkv-shared:" + (shared_url or "").encode()).hexdigest()[:16]


def check_names(options: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Check that every option is known.

    Raises:
        ConfigError: one is not; the sentence names the nearest known one.
    """
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(sorted(known))
            raise ConfigError(f"{name!r} in {where} is no option of TierKV {__version__}; {fix}")


def check_shared_url(url: Any) -> str | None:
    """Return ``url`` if it has the form of a single Redis's URL, None for None.

    Raises:
        ConfigError: it has another form.
    """
    if url is None:
        return None
    forms = "redis://[user:password@]host:port/db or unix:///path/to/redis.sock"
    if not isinstance(url, str) or not url.startswith(("redis://", "rediss://", "unix://")):
        shown = redact_url(url) if isinstance(url, str) else url
        raise ConfigError(f"shared_url={shown!r} is not a Redis URL; write it as {forms}")
    rest = url.split("://", 1)[1].rsplit("@", 1)[-1]
    host = re.split(r"[/?]", rest, maxsplit=1)[0]
    if not (rest.strip("/") if url.startswith("unix://") else host.split(":", 1)[0]):
        raise ConfigError(f"shared_url={redact_url(url)!r} names no host; write it as {forms}")
    port = host.rsplit(":", 1)[1] if ":" in host and not host.endswith("]") else ""
    if not url.startswith("unix://") and port and (not port.isdigit() or not 0 < int(port) < 65536):
        raise ConfigError(f"shared_url={redact_url(url)!r} has port {port!r}; a port is a number from 1 to 65535")
    return url


def parse_spill(value: Any) -> dict[str, Spill]:
    """Return the spill policy of each tier that ``value`` names.

    Raises:
        ConfigError: not an object, a tier that stores do not go to, or no such policy.
    """
    example = '{"disk": "through", "shared": "second-use"}'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"spill={value!r} is not possible; set an object such as {example}")
    check_names(value, ("disk", "shared"), "spill")
    try:
        return {str(tier): Spill(policy) for tier, policy in value.items()}
    except ValueError:
        known = ", ".join(policy.value for policy in Spill)
        raise ConfigError(f"spill={value!r} names a policy that is none of {known}; set one, as in {example}") from None


def _server(value: Any) -> str:
    if value in ("auto", "off"):
        return str(value)
    if isinstance(value, str) and value.startswith("unix:///") and len(value) > len("unix:///"):
        return value
    raise ConfigError(f"server={value!r} is not possible; set 'auto', 'off' or 'unix:///path/to/socket'")


def parse_bytes(options: Mapping[str, Any], name: str, default: int) -> int:
    """Return the size that an option says, or the default.

    Raises:
        ConfigError: it is no size, or zero.
    """
    value = options.get(name)
    if value is None:
        return default
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}") from None
    if size == 0:
        raise ConfigError(f"{name}={value!r} is no room at all; set a size such as '8GiB', or leave it out")
    return size


def parse_seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    """Return the seconds that an option says, or the default.

    Raises:
        ConfigError: not a number from 0 to 3600.
    """
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise ConfigError(f"{name}={value!r} is not possible; set seconds from 0 to 3600, such as {default:g}")
    return float(value)


def _chunk_tokens(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"chunk_tokens={value!r} is not possible; set a multiple of the block size, or leave it out")
    return value


def parse_directory(options: Mapping[str, Any], name: str) -> Path:
    """Return the absolute path that an option says, or the default directory.

    Raises:
        ConfigError: not a path, or a relative one.
    """
    value = options.get(name)
    if value is None:
        return default_disk_dir()
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise ConfigError(f"{name}={value!r} is not a directory's path; set a path on a local disk")
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name}={str(value)!r} names a user who has no home here; set an absolute path") from None
    if not path.is_absolute():
        raise ConfigError(
            f"{name}={str(value)!r} is a relative path, and engines start in different places; set {path.resolve()}"
        )
    return path

"""Configuration of engines and of the store server: checked at start, with a sentence for every mistake."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tierkv import __version__
from tierkv.errors import ConfigError
from tierkv.memory import total_memory
from tierkv.policy import DEFAULT_POLICY, POLICIES
from tierkv.sizes import format_size, parse_size
from tierkv.transport import Address, parse_address
from tierkv.urls import SHARED_FORMS, parse_shared_url, redact_url

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
_SERVER_FILES = ("server_token_file", "server_ca_file", "server_cert_file", "server_key_file")


class HintLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What requests' hints may ask of an engine (``docs/hints.md``). Shares are of the host pool.

    Attributes:
        enabled: False: every hint is ignored, and the answer says so.
        max_priority: priorities are cut to this range, either way.
        max_retain_s: the longest time that a session is held for.
        share: what all sessions together may hold.
        tenant_share: what the sessions of one tenant may hold.
        tenant_sessions: sessions of one tenant that are remembered.
    """

    enabled: bool = True
    max_priority: Annotated[int, Meta(ge=0, le=2)] = 2
    max_retain_s: Annotated[float, Meta(ge=0, le=86400)] = 3600.0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    tenant_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    tenant_sessions: Annotated[int, Meta(ge=1, le=16384)] = 1024


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
            ``"unix:///path"`` (a server that somebody else runs), ``"tkvs://host:port"`` (one on another machine, over
            TLS), ``"tkv://127.0.0.1:port"`` (without TLS), or ``"off"`` (GPU and host only).
        disk_dir: directory of the disk tier (``server="auto"`` only).
        disk_bytes: budget of the disk tier (``server="auto"`` only).
        shared_url: URL of the Redis or Valkey that a fleet shares (``server="auto"`` only), or None.
        chunk_tokens: tokens a chunk, a whole number of blocks; None for about 4 MiB a chunk.
        deadline_s: seconds after which a request stops waiting for its plan and computes the rest.
        cost_gate: fetch only what is not much slower than computing it, by what was measured; else whatever is stored.
        sync_load_bytes: loads of at most so many bytes are part of the step that needs them; None: as many as take
            about 2 ms, measured; 0: no load is. Larger ones go on beside other requests' steps.
        spill: when chunks go to ``disk`` and ``shared`` (``server="auto"`` only): ``through``, ``on-evict``,
            ``second-use`` or ``never``; by default ``through`` to disk and ``second-use`` to the shared tier.
        decode_blocks: store whole chunks of generated tokens too, as the hint ``store="all"`` does for one request.
        policy: what the ``host`` pool and the ``disk`` (``server="auto"`` only) keep: a policy's name each
            (:mod:`tierkv.policy`).
        hints: what requests' hints may ask for (:class:`HintLimits`).
        weights_version: what the engine's weights are called at its start, where others than its files say: engines
            share chunks with those of the same version.
        portable_ranks: store what engines of other tensor parallel sizes load, too.
        server_token_file: file that holds the engine's token (``tkvs://``, ``tkv://``).
        server_ca_file: who signed the server's certificate; None: an authority that this machine trusts (``tkvs://``).
        server_cert_file, server_key_file: the engine's certificate, where the server asks for one (``tkvs://``).
    """

    host_bytes: int
    server: str
    disk_dir: Path
    disk_bytes: int
    shared_url: str | None
    chunk_tokens: int | None
    deadline_s: float
    cost_gate: bool = True
    sync_load_bytes: int | None = None
    spill: Mapping[str, Spill] = {}
    policy: Mapping[str, str] = {}
    decode_blocks: bool = False
    hints: HintLimits = HintLimits()
    server_token_file: Path | None = None
    server_ca_file: Path | None = None
    server_cert_file: Path | None = None
    server_key_file: Path | None = None
    portable_ranks: bool = False
    weights_version: str | None = None

    @property
    def socket(self) -> Path:
        """The store server's unix socket; of ``"auto"``, where it is over TCP."""
        return self.address.path or socket_path(self.disk_dir)

    @property
    def address(self) -> Address:
        """Where the store server is."""
        if self.server in ("auto", "off"):
            return Address(path=socket_path(self.disk_dir))
        return parse_address(
            self.server,
            token_file=self.server_token_file,
            ca_file=self.server_ca_file,
            cert_file=self.server_cert_file,
            key_file=self.server_key_file,
        )

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
        files = {name: _file(options, name) for name in _SERVER_FILES}
        if server in ("auto", "off"):
            for name, path in files.items():
                if path is not None:
                    raise ConfigError(
                        f"{name}={str(path)!r} has no effect with server={server!r}; leave it out, or set "
                        f"server='tkvs://host:port'"
                    )
        config = cls(
            host_bytes=parse_bytes(options, "host_bytes", default_host_bytes()),
            server=server,
            disk_dir=parse_directory(options, "disk_dir"),
            disk_bytes=parse_bytes(options, "disk_bytes", DEFAULT_DISK_BYTES),
            shared_url=check_shared_url(options.get("shared_url")),
            chunk_tokens=_chunk_tokens(options.get("chunk_tokens")),
            deadline_s=parse_seconds(options, "deadline_s", DEFAULT_DEADLINE_S),
            cost_gate=_flag(options, "cost_gate", default=True),
            sync_load_bytes=_sync_load_bytes(options.get("sync_load_bytes")),
            spill=parse_spill(options.get("spill")),
            policy=parse_policy(options.get("policy"), server),
            decode_blocks=_flag(options, "decode_blocks", default=False),
            hints=parse_hint_limits(options.get("hints")),
            weights_version=_weights_version(options.get("weights_version")),
            portable_ranks=_flag(options, "portable_ranks", default=False),
            **files,
        )
        config.address  # noqa: B018  raises where it and the files beside it make no sense
        return config

    def describe(self) -> str:
        """Return the effective configuration in one line, without secrets."""
        host = f"host {format_size(self.host_bytes)}"
        if self.server == "off":
            return f"{host}, no store server"
        if self.server != "auto":
            return f"{host}, store server {self.server}, deadline {self.deadline_s:g} s"
        shared = f"shared {redact_url(self.shared_url)}" if self.shared_url else "no shared tier"
        spill = "".join(f", {tier} spills {policy}" for tier, policy in self.spill.items())
        spill += "".join(f", {tier} policy {name}" for tier, name in self.policy.items())
        disk = f"disk {format_size(self.disk_bytes)} in {self.disk_dir}"
        return f"{host}, {disk}, {shared}{spill}, deadline {self.deadline_s:g} s"


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
    """Return ``url`` if it has one of the forms of the shared tier's URLs, None for None.

    Raises:
        ConfigError: it has another form.
    """
    if url is None:
        return None
    try:
        if not isinstance(url, str):
            raise ValueError("it is no text")
        parse_shared_url(url)
    except ValueError as error:
        shown = redact_url(url) if isinstance(url, str) else url
        raise ConfigError(f"shared_url={shown!r} is not a Redis URL ({error}); write it as {SHARED_FORMS}") from None
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


def parse_policy(value: Any, server: str) -> dict[str, str]:
    """Return the policy of each tier that ``value`` names.

    Raises:
        ConfigError: not an object, a tier that has none, no such policy, or a disk that is somebody else's.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f'policy={value!r} is not possible; set an object such as {{"host": "{DEFAULT_POLICY}"}}')
    check_names(value, ("host", "disk"), "policy")
    if "disk" in value and server != "auto":
        raise ConfigError(
            f"policy.disk={value['disk']!r} has no effect with server={server!r}: it belongs to the store server; "
            f"leave it out, or set server='auto'"
        )
    for tier, name in value.items():
        if name not in POLICIES:
            raise ConfigError(f"policy.{tier}={name!r} is unknown; use one of {', '.join(POLICIES)}")
    return dict(value)


def parse_hint_limits(value: Any) -> HintLimits:
    """Return the limits of hints that ``value`` names, with defaults for the rest.

    Raises:
        ConfigError: not an object, an unknown name, or an impossible value.
    """
    if value is None:
        return HintLimits()
    if not isinstance(value, Mapping):
        raise ConfigError(f'hints={value!r} is not possible; set an object such as {{"tenant_share": 0.25}}')
    check_names(value, HintLimits.__struct_fields__, "hints")
    try:
        return msgspec.convert(dict(value), HintLimits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"hints={dict(value)!r} is not possible: {error}; see docs/hints.md") from None


def _server(value: Any) -> str:
    if value in ("auto", "off"):
        return str(value)
    if isinstance(value, str) and value.startswith(("tkv://", "tkvs://")):
        return value  # looked at with the files beside it
    if isinstance(value, str) and value.startswith("unix:///") and len(value) > len("unix:///"):
        return value
    raise ConfigError(
        f"server={value!r} is not possible; set 'auto', 'off' or 'unix:///path/to/socket', or 'tkvs://host:port' for "
        f"one on another machine"
    )


def _file(options: Mapping[str, Any], name: str) -> Path | None:
    """Return the absolute path of a file that an option says, or None.

    Raises:
        ConfigError: not a path, or a relative one.
    """
    return None if options.get(name) is None else parse_directory(options, name)


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


def _sync_load_bytes(value: Any) -> int | None:
    if value is None or (value == 0 and not isinstance(value, bool)):
        return value
    return parse_bytes({"sync_load_bytes": value}, "sync_load_bytes", 0)


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is neither true nor false; set it to one of them, or leave it out")
    return value


def _weights_version(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= 256):
        raise ConfigError(
            f"weights_version={value!r} is not possible; set a name of 1 to 256 characters, such as 'step-100', or "
            f"leave it out"
        )
    return value


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

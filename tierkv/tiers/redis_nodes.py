"""Where the shared tier's Redis is: one process, what Sentinels name, or the primaries of a Cluster.

redis-py makes connections (pool, AUTH, TLS), asks Sentinels and reads a Cluster's map; nothing else of it is used.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import redis
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, MovedError
from redis.retry import Retry

from tierkv.errors import ConfigError
from tierkv.health import Health
from tierkv.server_config import SharedConfig
from tierkv.urls import SHARED_FORMS, SharedUrl, parse_shared_url, redact_url

#: A pool gives every thread a connection: those of the server are bounded elsewhere.
_MAX_CONNECTIONS = 1 << 16
#: A Cluster's map is not read again sooner than this.
_REFRESH_S = 0.5
_MAX_PASSWORD_NBYTES = 4096
#: Options of a URL that are passed on to connections; what else there is, this module decides.
_OPTIONS = (
    "client_name", "socket_keepalive", "socket_read_size", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs",
    "ssl_certfile", "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password",
)  # fmt: skip
#: Options that have no effect: time limits, retries and the protocol are ours.
_IGNORED = (
    "socket_timeout", "socket_connect_timeout", "retry_on_timeout", "protocol", "decode_responses",
    "health_check_interval", "max_connections", "timeout",
)  # fmt: skip


# Parts of redis-py that have no types.
_sentinels: Any = redis.sentinel
_clusters: Any = redis.cluster


class Node(NamedTuple):
    """A Redis that may be asked: its name for people, its connections, and its health."""

    name: str
    pool: redis.ConnectionPool
    health: Health


class Topology(Protocol):
    """Which node has which key. Methods raise redis.RedisError or OSError where that cannot be known now.

    Attributes:
        is_cluster: whether keys lie on several nodes, which send askers to each other.
    """

    is_cluster: bool

    def nodes(self) -> list[Node]:
        """Return all nodes that have keys of ours."""

    def known(self) -> list[Node]:
        """Return the nodes that were asked so far and still have keys of ours, without asking anybody."""

    def node_of(self, name: bytes) -> Node:
        """Return the node that has the key called ``name``."""

    def redirected(self, error: str) -> Node | None:
        """Return the node that a MOVED or ASK reply names, and take note of a MOVED. None: this is no Cluster."""

    def look_again(self, node: Node) -> None:
        """Find out who does the work of ``node``, which failed, refuses writes or does not serve its keys."""

    def close(self) -> None:
        """Close every connection."""


class PasswordFile(CredentialProvider):
    """The ACL user and password of every connection; the file is read for each, so that a new password is used.

    Args:
        path: holds the password, and a newline at its end or not.
        username: ACL user, None for the default one.
    """

    def __init__(self, path: Path, username: str | None) -> None:
        self._path, self._username = path, username
        self.seen: set[str] = set()  #: passwords that were read, so that no message shows them

    def read(self) -> str:
        """Return the password.

        Raises:
            ConfigError: the file cannot be read, is empty, or is not the owner's alone.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(_MAX_PASSWORD_NBYTES + 1)
        except OSError as error:
            raise ConfigError(f"password_file={str(self._path)!r} cannot be read ({error.strerror})") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"password_file={str(self._path)!r} can be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 it"
            )
        try:
            password = data.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(f"password_file={str(self._path)!r} is not text") from None
        if not password or len(data) > _MAX_PASSWORD_NBYTES:
            raise ConfigError(f"password_file={str(self._path)!r} holds {len(data)} bytes, which is no password")
        self.seen.add(password)
        return password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what AUTH takes."""
        try:
            password = self.read()
        except ConfigError as error:
            raise AuthenticationError(str(error)) from None
        return (self._username, password) if self._username else (password,)


class Access(NamedTuple):
    """How to reach Redis: the URL, the arguments of connections, and where a password comes from."""

    url: SharedUrl
    kwargs: dict[str, Any]
    password_file: PasswordFile | None


def check_access(config: SharedConfig) -> Access:
    """Return how to reach Redis, everything about it checked but whether Redis is there.

    Raises:
        ConfigError: the URL, an option, or a file is wrong.
    """
    try:
        url = parse_shared_url(config.url)
        kwargs = _options(url)
    except ValueError as error:
        raise ConfigError(f"shared_url={redact_url(config.url)} is not usable ({error}); write it as {SHARED_FORMS}") \
            from None  # fmt: skip
    if url.password and config.password_file:
        raise ConfigError("there is a password in the URL and a password_file; keep one of them")
    if url.username and config.username and url.username != config.username:
        raise ConfigError(f"the URL has user {url.username!r} and username={config.username!r}; keep one of them")
    username = config.username or url.username
    provider = None
    if config.password_file:
        provider = PasswordFile(config.password_file, username)
        provider.read()
        kwargs["credential_provider"] = provider
    elif url.password:
        kwargs |= {"username": username, "password": url.password}
    elif username:
        raise ConfigError(f"there is user {username!r} and no password; put it into a password_file, or into the URL")
    kwargs |= _tls(url, config) | {
        "protocol": 2,
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.tls:
        # Two round trips less, and CLIENT need not be allowed. Under TLS the replies bring the session tickets along,
        # which redis-py otherwise takes for a reply that nobody asked for.
        kwargs["driver_info"] = None
    return Access(url, kwargs, provider)


def open_topology(access: Access, health: Health) -> Topology:
    """Return where Redis is. Does not connect.

    Args:
        access: what :func:`check_access` returned.
        health: of Redis as a whole.
    """
    if access.url.kind == "cluster":
        return Cluster(access)
    if access.url.kind == "sentinel":
        return Single(Node("the primary", _sentinel_pool(access), health))
    kwargs = dict(access.kwargs)
    connection_class: type[Any] = SSLConnection if access.url.tls else Connection
    if access.url.kind == "unix":
        connection_class = UnixDomainSocketConnection
        kwargs["path"] = access.url.path
    else:
        kwargs["host"], kwargs["port"] = access.url.hosts[0]
    pool = redis.ConnectionPool(connection_class, max_connections=_MAX_CONNECTIONS, db=access.url.db, **kwargs)
    return Single(Node(access.url.kind, pool, health))


class Single:
    """One Redis, or the one that Sentinels name: the pool asks them for every connection that it makes."""

    is_cluster = False

    def __init__(self, node: Node) -> None:
        self._node = node

    def nodes(self) -> list[Node]:
        return [self._node]

    known = nodes

    def node_of(self, name: bytes) -> Node:
        return self._node

    def redirected(self, error: str) -> Node | None:
        return None

    def look_again(self, node: Node) -> None:
        # Idle connections are closed: new ones go to whom the Sentinels name then.
        self._node.pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self._node.pool.disconnect()


class Cluster:
    """The primaries of a Cluster, as its map says. The map is read first when something is asked."""

    is_cluster = True

    def __init__(self, access: Access) -> None:
        self._access = access
        self._manager: Any = None
        self._known_nodes: dict[str, Node] = {}
        self._lock = threading.Lock()
        self._read_at = float("-inf")

    def nodes(self) -> list[Node]:
        return [self._known(node) for node in self._map().get_nodes_by_server_type("primary")]

    def known(self) -> list[Node]:
        return list(self._known_nodes.values())

    def node_of(self, name: bytes) -> Node:
        return self._known(self._map().get_node_from_slot(key_slot(name)))

    def redirected(self, error: str) -> Node:
        code, _, rest = error.partition(" ")
        moved = MovedError(rest)  # reads "slot host:port", as in ASK
        manager = self._map()
        if code == "MOVED":
            manager.move_slot(moved)
        found = manager.get_node(moved.host, moved.port) or _clusters.ClusterNode(moved.host, moved.port)
        return self._known(found)

    def look_again(self, node: Node) -> None:
        with self._lock:
            if self._manager is None or time.monotonic() - self._read_at < _REFRESH_S:
                return
            known = [(n.host, n.port) for n in self._manager.nodes_cache.values()]
            self._manager.initialize(additional_startup_nodes_info=known, last_failed_node_name=node.name)
            self._read_at = time.monotonic()
            primaries = {n.name for n in self._manager.get_nodes_by_server_type("primary")}
            for name in set(self._known_nodes) - primaries:
                self._known_nodes.pop(name).pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        for node in list(self._known_nodes.values()):
            node.pool.disconnect()

    def _map(self) -> Any:
        with self._lock:
            if self._manager is None:
                kwargs = {"connection_class": SSLConnection} if self._access.url.tls else {}
                self._manager = _clusters.NodesManager(
                    [_clusters.ClusterNode(host, port) for host, port in self._access.url.hosts],
                    from_url=True,  # connections take the arguments as they are
                    require_full_coverage=False,
                    dynamic_startup_nodes=False,  # addresses may all change; the configured names stay
                    max_connections=_MAX_CONNECTIONS,
                    **kwargs,
                    **self._access.kwargs,
                )
                self._read_at = time.monotonic()
            return self._manager

    def _known(self, node: Any) -> Node:
        if node.redis_connection is None:
            self._manager.create_redis_connections([node])
        pool = node.redis_connection.connection_pool
        known = self._known_nodes.get(node.name)
        if known is None or known.pool is not pool:
            health = known.health if known else Health(f"Node {node.name} of the shared tier")
            known = self._known_nodes[node.name] = Node(node.name, pool, health)
        return known


def _sentinel_pool(access: Access) -> redis.ConnectionPool:
    common = {k: v for k, v in access.kwargs.items() if k.startswith(("socket_", "ssl_")) or k in ("protocol", "retry")}
    options = dict(access.url.options)
    own = {"username": options.get("sentinel_username"), "password": options.get("sentinel_password")}
    sentinel = _sentinels.Sentinel(access.url.hosts, sentinel_kwargs={"ssl": access.url.tls, **common, **own})
    name = "SentinelManagedSSLConnection" if access.url.tls else "SentinelManagedConnection"
    pool: redis.ConnectionPool = _sentinels.SentinelConnectionPool(
        access.url.service,
        sentinel,
        connection_class=getattr(_sentinels, name),
        max_connections=_MAX_CONNECTIONS,
        db=access.url.db,
        **access.kwargs,
    )
    return pool


def _options(url: SharedUrl) -> dict[str, Any]:
    """Return the options of the URL that connections take.

    Raises:
        ValueError: one is unknown, or its value impossible.
    """
    found: dict[str, Any] = {}
    sentinel = ("sentinel_username", "sentinel_password") if url.kind == "sentinel" else ()
    for name, value in url.options:
        if name not in (*_OPTIONS, *_IGNORED, *sentinel) or (name.startswith("ssl_") and not url.tls):
            raise ValueError(f"the option {name!r} is unknown, or of no use here")
        try:
            parsers: dict[str, Callable[[str], Any]] = dict(URL_QUERY_ARGUMENT_PARSERS)  # type: ignore[arg-type]
            parsed = parsers.get(name, str)(value)
        except (TypeError, ValueError):
            raise ValueError(f"the option {name!r} has an impossible value") from None
        if name in _OPTIONS:
            found[name] = parsed
    return found


def _tls(url: SharedUrl, config: SharedConfig) -> dict[str, Any]:
    """Return the arguments of TLS connections. The files are loaded once here; connections load them again.

    Raises:
        ConfigError: a file cannot be loaded, or there is one and no TLS.
    """
    files = {"ca_file": config.ca_file, "cert_file": config.cert_file, "key_file": config.key_file}
    named = [name for name, path in files.items() if path]
    if not url.tls:
        if named:
            raise ConfigError(f"{named[0]} is of TLS, which this URL does not use; write rediss:// for redis://")
        return {}
    if bool(config.cert_file) != bool(config.key_file):
        raise ConfigError("cert_file and key_file belong together; set both, or none")
    context = ssl.create_default_context()
    found: dict[str, Any] = {}
    try:
        if config.ca_file:
            context.load_verify_locations(cafile=config.ca_file)
            found["ssl_ca_certs"] = str(config.ca_file)
        if config.cert_file and config.key_file:
            context.load_cert_chain(config.cert_file, config.key_file, password=lambda: b"")
            found |= {"ssl_certfile": str(config.cert_file), "ssl_keyfile": str(config.key_file)}
    except OSError as error:  # SSLError among them
        shown = ", ".join(f"{name}={str(files[name])!r}" for name in named)
        reason = error.strerror or str(error)
        raise ConfigError(f"{shown} cannot be loaded ({reason}); TLS wants readable PEM files") from None
    return found

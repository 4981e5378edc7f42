"""URLs of the shared tier, and how URLs that hold secrets are shown."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

#: The forms that :func:`parse_shared_url` reads.
SHARED_FORMS = (
    "redis://[user:password@]host:port/db (rediss:// for TLS), unix:///path/to/redis.sock, "
    "redis+sentinel://host:port,host:port/service/db or redis+cluster://host:port,host:port"
)
DEFAULT_REDIS_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

_SCHEMES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}


class SharedUrl(NamedTuple):
    """Where the shared tier is.

    Attributes:
        kind: ``"single"``, ``"unix"``, ``"sentinel"`` or ``"cluster"``.
        tls: whether connections use TLS.
        hosts: host and port of Redis, of the Sentinels, or of some of the Cluster's nodes; empty for ``"unix"``.
        path: the socket's path for ``"unix"``.
        service: what the Sentinels call the primary.
        db: number of the database; 0 on a Cluster.
        username, password: for AUTH; None where the URL has none.
        options: the rest of the query, one value a name.
    """

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    options: tuple[tuple[str, str], ...] = ()


def parse_shared_url(url: str) -> SharedUrl:
    """Return what ``url`` says.

    >>> parse_shared_url("redis+sentinel://:pw@a:26379,b/cache/2").hosts
    (('a', 26379), ('b', 26379))

    Raises:
        ValueError: it is no URL of the shared tier; the text says why, without secrets.
    """
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        shown = scheme if re.fullmatch(r"[\w+.-]*", scheme) and colon else ""
        raise ValueError(f"the scheme {shown!r} is none of {known}")
    kind, tls = _SCHEMES[scheme]
    parts = urlsplit(url)
    user, _, where = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    username, password = options.pop("username", unquote(username)), options.pop("password", unquote(password))
    if kind != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise ValueError("in a user, a password or an option '/' is written %2F, '?' %3F, '#' %23 and '@' %40")
    path = unquote(parts.path)
    database = options.pop("db", "")
    hosts: tuple[tuple[str, int], ...] = ()
    service = ""
    if kind == "unix":
        if not path.strip("/"):
            raise ValueError("it names no host, and it names no socket")
    else:
        default = DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_REDIS_PORT
        hosts = tuple(_host(item, default) for item in where.split(","))
        if kind == "single" and len(hosts) > 1:
            raise ValueError("it names several hosts; write redis+sentinel:// or redis+cluster:// for that")
        if kind == "sentinel":
            service, _, rest = path.strip("/").partition("/")
            if not service:
                raise ValueError("it names no service: what the Sentinels call the primary stands after the hosts")
            database = database or rest
        else:
            database = database or path.strip("/")
    if database and not database.isdigit():
        raise ValueError(f"the database {database!r} is not a number")
    if kind == "cluster" and int(database or 0):
        raise ValueError(f"the database is {database}, and a Cluster has 0 only")
    return SharedUrl(
        kind, tls, hosts, path if kind == "unix" else "", service, int(database or 0), username or None,
        password or None, tuple(options.items()),
    )  # fmt: skip


def _host(item: str, default_port: int) -> tuple[str, int]:
    found = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(.*))?|([^:\[\]]*)(?::(.*))?", item)
    if not found:
        raise ValueError("it names no host that can be read; an IPv6 address stands in brackets")
    host, port = found[1] or found[3], found[2] if found[1] else found[4]
    if not host:
        raise ValueError("it names no host")
    if port is not None and (not port.isdigit() or not 0 < int(port) < 65536):
        raise ValueError(f"it has port {port!r}; a port is a number from 1 to 65535")
    return unquote(host), int(port) if port else default_port


def redact_url(url: str | None) -> str:
    """Return ``url`` without what may be secret in it: passwords, and a user name that stands alone.

    >>> redact_url("redis://me:secret@cache:6379/0")
    'redis://me:***@cache:6379/0'
    """
    if not url:
        return ""
    url = re.sub(r"^((?:[\w+.-]+://)?[^/@:]*):(?!//).*@", r"\1:***@", url, flags=re.DOTALL)
    url = re.sub(r"://[^/@:]+@", "://***@", url)
    return re.sub(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", r"\1***", url, flags=re.IGNORECASE)


def url_secrets(url: str) -> list[str]:
    """Return what in ``url`` is secret, as written and as meant, longest first."""
    try:
        parts = urlsplit(url)
        query = [v for name, values in parse_qs(parts.query).items() if "password" in name.lower() for v in values]
        found = [parts.password or "", *query]
    except ValueError:
        return []
    return sorted({s for raw in found for s in (raw, unquote(raw)) if s}, key=len, reverse=True)

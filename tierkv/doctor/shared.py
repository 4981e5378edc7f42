"""The shared tier: whether Redis answers, what it does when it is full, what it writes to its own disk."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tierkv.doctor import Finding, fail, ok, skip, warn
from tierkv.errors import ConfigError
from tierkv.resp import Value
from tierkv.server_config import SharedConfig
from tierkv.sizes import format_size
from tierkv.tiers.redis_link import OnError, RedisLink
from tierkv.urls import redact_url

_PINGS = 20
#: Longer than this a match of a long prompt (a few round trips) is felt in the time to the first token.
_SLOW_PING_S = 0.005
_LEAST_MAJOR = 6


def check(config: SharedConfig) -> Iterator[Finding]:
    """Look at a Redis or Valkey: every node that has keys."""
    shown = redact_url(config.url)
    try:
        link = RedisLink(config)
    except ConfigError as error:
        yield fail("shared", str(error), "mend the URL, or what stands beside it")
        return
    try:
        if link.ask([("PING",)]) is None:
            reason = link.state.reason if link.state else "no answer"
            yield fail("shared", f"{shown} does not answer ({reason})", "start it, or look at its address and access")
            return
        nodes = link.nodes()
        yield ok("shared", f"{shown} answers" + (f", {len(nodes)} primaries" if len(nodes) > 1 else ""))
        for i, node in enumerate(nodes):
            about = "shared" if len(nodes) == 1 else f"shared {i + 1}/{len(nodes)}"
            replies = link.ask([("INFO", section) for section in _SECTIONS], OnError.IGNORE, node=node)
            fields = _fields(replies or [])
            if not fields:
                yield skip(about, "INFO is not allowed for this user: memory and persistence could not be looked at")
            else:
                yield from _node(about, fields)
            yield _latency(about, link, node)
    finally:
        link.close()


_SECTIONS = ("server", "memory", "persistence")


def _fields(replies: list[Value]) -> dict[str, str]:
    """Return the fields of the texts that ``INFO`` gave."""
    lines = (
        line for reply in replies if isinstance(reply, bytes) for line in reply.decode("utf-8", "replace").split("\n")
    )
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def _node(about: str, fields: dict[str, str]) -> Iterator[Finding]:
    yield _version(about, fields)
    yield _policy(about, fields)
    yield _persistence(about, fields)


def _version(about: str, fields: dict[str, str]) -> Finding:
    name = "Valkey" if "valkey_version" in fields else "Redis"
    version = fields.get("valkey_version") or fields.get("redis_version", "?")
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < _LEAST_MAJOR:
        return fail(about, f"{name} {version} is too old", "Redis 7 or later, or Valkey, is tested")
    return ok(about, f"{name} {version}")


def _policy(about: str, fields: dict[str, str]) -> Finding:
    limit = int(fields.get("maxmemory", "0") or 0)
    policy = fields.get("maxmemory_policy", "?")
    used = format_size(int(fields.get("used_memory", "0") or 0))
    if not limit:
        return warn(
            f"{about} memory",
            f"{used} used, no maxmemory: it grows until the machine has no memory left",
            "set maxmemory, and maxmemory-policy allkeys-lru",
        )
    found = f"{used} used of {format_size(limit)}, policy {policy}"
    if policy == "noeviction":
        return warn(
            f"{about} memory",
            f"{found}: when it is full nothing more is stored, until something expires",
            "set maxmemory-policy allkeys-lru (chunks are read leaf to root, so that leaves go first)",
        )
    if policy.endswith("-random"):
        return warn(
            f"{about} memory",
            f"{found}: roots of prompts go as soon as their ends, and what hangs on them is lost with them",
            "set maxmemory-policy allkeys-lru",
        )
    return ok(f"{about} memory", found)


def _persistence(about: str, fields: dict[str, str]) -> Finding:
    if fields.get("aof_enabled") == "1":
        return warn(
            f"{about} persistence",
            "appendonly is on: every payload is written to Redis's own disk too",
            "a cache can be lost: CONFIG SET appendonly no, unless others need it",
        )
    if fields.get("rdb_last_bgsave_status") == "err":
        return warn(
            f"{about} persistence",
            "the last snapshot failed, which makes Redis refuse writes (stop-writes-on-bgsave-error)",
            "CONFIG SET save '', or mend its disk",
        )
    return ok(f"{about} persistence", "no append-only file")


def _latency(about: str, link: RedisLink, node: object) -> Finding:
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        if link.ask([("PING",)], node=node) is None:  # type: ignore[arg-type]
            return fail(f"{about} latency", "it stopped answering", "look at its log and the network")
        times.append(time.perf_counter() - begin)
    median = sorted(times)[_PINGS // 2]
    found = f"median round trip {median * 1000:.2f} ms"
    if median > _SLOW_PING_S:
        return warn(f"{about} latency", found, "put the Redis nearer to the engines: in their rack, or their zone")
    return ok(f"{about} latency", found)

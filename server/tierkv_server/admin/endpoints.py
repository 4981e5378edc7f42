"""The table of endpoints, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tierkv_server.access import Role
from tierkv_server.admin import schema
from tierkv_server.admin.api import Api, Reply


class Caller(NamedTuple):
    """Who asks: the parameters in the path, the Accept header, and what he may do."""

    path: dict[str, str]
    accept: str
    may_read: bool
    may_change: bool
    asks_token: bool


@dataclass(frozen=True)
class Endpoint:
    """One thing that the API does.

    Attributes:
        path: of the route; ``{id}`` in it is a parameter.
        summary: for the document.
        reply: struct of the JSON reply; None where ``media`` is not JSON.
        call: does it: ``call(api, parameters, caller)``. Returns what is sent as JSON, or a :class:`Reply`.
        takes: struct of the query's parameters (GET) or of the JSON body (POST).
        role: who may.
        method: of HTTP.
        errors: statuses of errors beside those that all of its method have.
        also: other statuses of ``reply``.
        media: media type of the reply.
        inline: it never waits, so it runs on the event loop, and answers however busy the threads are.
    """

    path: str
    summary: str
    reply: type[msgspec.Struct] | None
    call: Callable[[Api, Any, Caller], Any]
    takes: type[msgspec.Struct] = schema.Nothing
    role: Role = Role.READER
    method: str = "GET"
    errors: tuple[int, ...] = ()
    also: tuple[int, ...] = ()
    media: str = "application/json"
    inline: bool = False


def _change(path: str, summary: str, reply: type[msgspec.Struct], takes: type[msgspec.Struct], call: Any) -> Endpoint:
    return Endpoint(path, summary, reply, call, takes, Role.ADMIN, "POST", errors=(404, 409))


def _probe(path: str, summary: str, reply: type[msgspec.Struct], call: Any, also: tuple[int, ...] = ()) -> Endpoint:
    return Endpoint(path, summary, reply, call, role=Role.NOBODY, also=also, inline=True)


ENDPOINTS: Sequence[Endpoint] = (
    _probe("/healthz", "The process lives", schema.Health, lambda api, _, who: api.healthz()),
    _probe(
        "/readyz",
        "Whether anything stored can be served",
        schema.Ready,
        lambda api, _, who: api.readyz(who.may_read),
        also=(503,),
    ),
    _probe(
        "/v1/access",
        "What the caller may do",
        schema.Access,
        lambda api, _, who: {"may_read": who.may_read, "may_change": who.may_change, "asks_token": who.asks_token},
    ),
    Endpoint(
        "/metrics",
        "Metrics for Prometheus",
        None,
        lambda api, _, who: api.metrics(who.accept),
        media="text/plain",
    ),
    Endpoint("/v1/stat", "Server, tiers, engines, namespaces", schema.Stat, lambda api, _, who: api.stat()),
    Endpoint(
        "/v1/history",
        "Samples of the last hour",
        schema.History,
        lambda api, query, who: api.history(query),
        schema.HistoryQuery,
        inline=True,
    ),
    Endpoint(
        "/v1/namespaces",
        "Every namespace that a tier or an engine has",
        schema.Namespaces,
        lambda api, query, who: api.namespaces(query),
        schema.NamespaceQuery,
    ),
    Endpoint(
        "/v1/usage",
        "What each tenant has in each namespace of each tier",
        schema.Usages,
        lambda api, query, who: api.usage(query),
        schema.UsageQuery,
        errors=(409,),
    ),
    Endpoint(
        "/v1/reuse",
        "What tiers of other sizes would have hit",
        schema.Reuse,
        lambda api, _, who: api.reuse(),
    ),
    Endpoint(
        "/v1/prefixes",
        "The stored prefixes",
        schema.Prefixes,
        lambda api, query, who: api.prefixes(query),
        schema.ListQuery,
        errors=(409,),
    ),
    Endpoint(
        "/v1/prefixes/{id}",
        "One stored prefix, by its id or the start of its key",
        schema.Prefix,
        lambda api, query, who: api.prefix(query, who.path["id"]),
        schema.NamespaceQuery,
        errors=(404, 409),
    ),
    Endpoint(
        "/v1/tree",
        "The largest, most used or latest prefixes as a tree",
        schema.Tree,
        lambda api, query, who: api.tree(query),
        schema.TreeQuery,
    ),
    Endpoint(
        "/v1/locate",
        "How much of a prompt is stored, and where",
        schema.Locations,
        lambda api, body, who: api.locate(body),
        schema.LocateBody,
        method="POST",
    ),
    _change(
        "/v1/evict",
        "Remove a prefix, a prompt, a tenant's chunks or a namespace",
        schema.Evicted,
        schema.EvictBody,
        lambda api, body, who: api.evict(body),
    ),
    _change(
        "/v1/pin",
        "Keep a prefix for an owner and a time",
        schema.Pinned,
        schema.PinBody,
        lambda api, body, who: api.pin(body),
    ),
    _change(
        "/v1/unpin",
        "Take pins off a prefix",
        schema.Lifetime,
        schema.UnpinBody,
        lambda api, body, who: api.unpin(body),
    ),
    _change(
        "/v1/ttl",
        "Let a prefix expire at a time",
        schema.Expiry,
        schema.TtlBody,
        lambda api, body, who: api.ttl(body),
    ),
    Endpoint(
        "/v1/sessions",
        "The sessions that requests named",
        schema.Sessions,
        lambda api, query, who: api.sessions(query),
        schema.SessionQuery,
    ),
    _change(
        "/v1/sessions/release",
        "Let go of a session",
        schema.SessionReleased,
        schema.SessionBody,
        lambda api, body, who: api.release_session(body),
    ),
    _change(
        "/v1/sessions/prefetch",
        "Bring a session to this node's disk",
        schema.SessionPrefetched,
        schema.SessionBody,
        lambda api, body, who: api.prefetch_session(body),
    ),
)

__all__ = ["ENDPOINTS", "Caller", "Endpoint", "Reply"]

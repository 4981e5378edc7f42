"""What the API does: the questions and orders of :class:`tierkv_server.inspect.Inspector`, in terms of HTTP.

Knows nothing of sockets and the event loop; every method may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from tierkv.cli.prompt import token_prompt
from tierkv.messages import Select
from tierkv.prefixes import sum_by_tier
from tierkv.sessions import SessionSelect
from tierkv_server.admin.guard import ApiError
from tierkv_server.admin.metrics import make_registry
from tierkv_server.admin.schema import (
    EvictBody,
    HistoryQuery,
    ListQuery,
    LocateBody,
    NamespaceQuery,
    PinBody,
    PrefixBody,
    SessionBody,
    SessionQuery,
    TreeQuery,
    TtlBody,
    UnpinBody,
    UsageQuery,
)
from tierkv_server.admin.stats import STALE_S, Stats
from tierkv_server.admin.tree import make_tree
from tierkv_server.inspect import Inspector


class Reply(NamedTuple):
    """A reply that is not just JSON with status 200."""

    body: Any
    status: int = 200
    media: str = "application/json"


class Api:
    """The endpoints' work.

    Args:
        inspector: answers the questions.
        stats: the statistics, shared by all who ask.
    """

    def __init__(self, inspector: Inspector, stats: Stats) -> None:
        self._inspector = inspector
        self._stats = stats
        self._registry: CollectorRegistry = make_registry(stats)

    # -- health

    def healthz(self) -> dict[str, str]:
        """Say that this process lives."""
        return {"status": "ok"}

    def readyz(self, explain: bool) -> Reply:
        """Say whether anything stored can be served: a tier answers, and statistics are renewed. Never waits.

        Args:
            explain: say reasons, which may name hosts and paths.
        """
        newest, age_s = self._stats.newest, self._stats.age_s()
        if newest is None:
            return Reply({"ready": False, "degraded": True, "reasons": ["the server is starting"], "tiers": {}}, 503)
        rows = [row for row in newest.stat["tiers"] if row["name"] != "host"]
        reasons = [_trouble(row, explain) for row in rows if row["reason"] or row["state"] != "up"]
        hangs = age_s > STALE_S
        if hangs:
            reasons.insert(0, f"the statistics are {age_s:.0f} s old: a tier does not answer")
        ready = not hangs and any(row["state"] != "out" for row in rows)
        tiers = {row["name"]: {"state": row["state"]} | _reason(row, explain) for row in rows}
        body = {"ready": ready, "degraded": bool(reasons), "reasons": reasons, "tiers": tiers}
        return Reply(body, 200 if ready else 503)

    # -- statistics

    def metrics(self, accept: str) -> Reply:
        """Return the metrics in the text format that the client accepts."""
        self._stats.get()
        encode, media = choose_encoder(accept)
        return Reply(encode(self._registry), media=media)

    def stat(self) -> Mapping[str, Any]:
        """Return the statistics."""
        return self._stats.get().stat

    def history(self, query: HistoryQuery) -> dict[str, Any]:
        """Return the last hour's samples, or those since a time. Never waits."""
        return self._stats.history(query.since)

    # -- what is stored

    def namespaces(self, query: NamespaceQuery) -> dict[str, Any]:
        """Return the namespaces."""
        found = {i: n for i, n in self._inspector.namespaces().items() if i.hex().startswith(query.ns)}
        return {
            "namespaces": [
                {"id": i.hex(), "model": n.model, "layout": n.layout.describe(), "payload_nbytes": n.payload_nbytes}
                for i, n in found.items()
            ]
        }

    def usage(self, query: UsageQuery) -> dict[str, Any]:
        """Return what tenants have."""
        return {"usage": self._inspector.usage(Select(ns=query.ns, tenant=query.tenant, tiers=list(query.tier)))}

    def reuse(self) -> dict[str, Any]:
        """Return what tiers of other sizes would have hit."""
        return self._inspector.reuse()

    def prefixes(self, query: ListQuery) -> dict[str, Any]:
        """Return the stored prefixes that fit, a page of them."""
        select = Select(
            ns=query.ns,
            prefix=query.prefix,
            tenant=query.tenant,
            tiers=list(query.tier),
            sort=query.sort,
            limit=query.limit,
        )
        return self._inspector.page(select, query.offset) | {"offset": query.offset}

    def prefix(self, query: NamespaceQuery, start: str) -> dict[str, Any]:
        """Return the one stored prefix whose key starts with ``start``."""
        if not start or len(start) > 64 or set(start) - set("0123456789abcdef"):
            raise ApiError(400, f"{start[:80]!r} is not an id: those are hexadecimal digits, at most 64")
        page = self._inspector.page(Select(ns=query.ns, prefix=start, limit=1))
        if not page["total"]:
            raise ApiError(404, f"no stored prefix has the id {start!r}; /v1/prefixes lists them")
        if page["total"] > 1:
            raise ApiError(409, f"{page['total']} stored prefixes start with {start!r}; give more digits, or ns")
        row: dict[str, Any] = page["prefixes"][0]
        return row

    def tree(self, query: TreeQuery) -> dict[str, Any]:
        """Return the stored prefixes as trees."""
        rows: list[dict[str, Any]] = []
        for ns_id, namespace, forest in self._inspector.forests(Select(ns=query.ns)):
            roots, num_hidden = make_tree(forest, query.sort, query.limit)
            about = {"id": ns_id.hex(), "model": namespace.model, "chunk_tokens": namespace.layout.chunk_tokens}
            nbytes = sum_by_tier(forest.nodes.values())
            counts = {"nbytes": nbytes, "num_chunks": len(forest.nodes), "num_hidden": num_hidden}
            rows.append(about | counts | {"roots": roots})
        rows.sort(key=lambda row: -_rank(row, "nbytes"))
        return {"namespaces": rows}

    def locate(self, body: LocateBody) -> dict[str, Any]:
        """Return how much of a prompt is stored."""
        keys = self._keys(body)
        if keys is None:
            raise ApiError(400, "no prompt is given; give its token ids as 'tokens', or 'keys'")
        rows = self._inspector.locate(Select(keys=keys)) if keys else []
        rows.sort(key=lambda row: (-row["tokens_stored"], row["namespace"]))
        return {"namespaces": rows}

    # -- changes

    def evict(self, body: EvictBody) -> dict[str, Any]:
        """Remove what is named, and say what was removed."""
        select = msgspec.structs.replace(
            self._select(body), tenant=body.tenant, everything=body.everything, force=body.force
        )
        if not (select.prefix or any(select.keys.values())):
            if body.tokens:
                raise ApiError(404, "the prompt has no whole chunk in any namespace, so nothing of it is stored")
            if not (body.everything or body.tenant):
                raise ApiError(400, "nothing is named to evict; give prefix, tokens, tenant, or ns with everything")
        result = self._inspector.evict(select)
        if result["num_removed"] or result["incomplete"]:
            return self._changed(result)
        if result["num_pinned"]:
            raise ApiError(409, f"all {result['num_pinned']} chunks that fit are pinned; unpin them, or use force")
        raise ApiError(404, "nothing stored fits; /v1/prefixes lists what is stored")

    def pin(self, body: PinBody) -> dict[str, Any]:
        """Keep a prefix."""
        if not body.seconds:
            raise ApiError(400, "seconds is 0, and a pin of no time holds nothing; to end one use /v1/unpin")
        select = msgspec.structs.replace(self._one(body), owner=body.owner, seconds=body.seconds)
        return self._changed(self._inspector.pin(select))

    def unpin(self, body: UnpinBody) -> dict[str, Any]:
        """Take pins off a prefix."""
        return self._changed(self._inspector.unpin(msgspec.structs.replace(self._one(body), owner=body.owner)))

    def ttl(self, body: TtlBody) -> dict[str, Any]:
        """Let a prefix expire."""
        return self._changed(self._inspector.ttl(msgspec.structs.replace(self._one(body), seconds=body.seconds)))

    # -- sessions

    def sessions(self, query: SessionQuery) -> dict[str, Any]:
        """Return the sessions that engines told of, a page of them."""
        rows = self._inspector.sessions(SessionSelect(ns=query.ns, tenant=query.tenant))
        return {
            "total": len(rows),
            "offset": query.offset,
            "sessions": rows[query.offset : query.offset + query.limit],
        }

    def release_session(self, body: SessionBody) -> dict[str, Any]:
        """Let go of a session."""
        return self._inspector.release_session(SessionSelect(session=body.session))

    def prefetch_session(self, body: SessionBody) -> dict[str, Any]:
        """Bring a session to this node's disk."""
        return self._inspector.prefetch_session(SessionSelect(session=body.session))

    # -- helpers

    def _changed(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return what an order did, which everybody sees from now on."""
        self._stats.expire()
        return _complete(result)

    def _keys(self, body: LocateBody) -> dict[str, list[str]] | None:
        """Return the keys of the prompt in the namespaces that are meant; None where no prompt is given."""
        if body.tokens and body.keys:
            raise ApiError(400, "tokens and keys are both given; give one of them")
        if body.salt and not body.tokens:
            raise ApiError(400, "a salt is given without tokens; the salt is a part of their keys only")
        if body.keys:
            return {ns: keys for ns, keys in body.keys.items() if ns.startswith(body.ns)}
        if not body.tokens:
            return None
        known = {i.hex(): n for i, n in self._inspector.namespaces().items() if i.hex().startswith(body.ns)}
        return token_prompt(body.tokens, body.salt.encode()).keys(known)

    def _select(self, body: PrefixBody) -> Select:
        keys = self._keys(body)
        if body.prefix and keys is not None:
            raise ApiError(400, "a prefix and a prompt are both given; give one of them")
        return Select(ns=body.ns, prefix=body.prefix, keys=keys or {}, tiers=list(body.tiers), dry_run=body.dry_run)

    def _one(self, body: PrefixBody) -> Select:
        """Return the selection of one prefix."""
        select = self._select(body)
        if not (select.prefix or select.keys):
            raise ApiError(400, "no prefix is named; give its id as 'prefix', or its token ids as 'tokens'")
        return select


def _complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return ``result`` if it says that everything was reached, or was not meant to be.

    Raises:
        ApiError: 503, with the result: some copies may be there still.
    """
    if result["incomplete"] and not result["dry_run"]:
        error = ApiError(503, "not everything was reached: " + "; ".join(result["incomplete"]) + "; do it again later")
        error.result = result
        raise error
    return result


def _rank(row: Mapping[str, Any], sort: str) -> float:
    value = row[sort]
    return float(sum(value.values()) if isinstance(value, dict) else value)


def _trouble(row: Mapping[str, Any], explain: bool) -> str:
    sentence = f"the {row['name']} tier is {row['state']}"
    return f"{sentence}: {row['reason']}" if explain and row["reason"] else sentence


def _reason(row: Mapping[str, Any], explain: bool) -> dict[str, str]:
    return {"reason": row["reason"]} if explain and row["reason"] else {}

"""What people ask of the store: list, locate, evict, statistics, over all tiers and the engines' host pools.

The host pools live in the engines; the server asks them over their push connections, which idle engines answer too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tierkv import __version__
from tierkv.errors import RefusedError
from tierkv.layout import Namespace
from tierkv.messages import HostEntry, HostStat, Select
from tierkv.prefixes import ID_DIGITS, Forest, Node, sum_by_tier
from tierkv.tiers.base import Ref
from tierkv_server.service import Service, make_refs
from tierkv_server.session import Session

logger = logging.getLogger("tierkv")

HOST = "host"
#: An engine answers from a thread of its own; one that is stopped must not hold a listing up for long.
ASK_TIMEOUT_S = 2.0


class Inspector:
    """Answers people's questions about a service."""

    def __init__(self, service: Service, about: dict[str, Any]) -> None:
        self._service = service
        self._about = about
        self._started = time.time()

    # -- namespaces and forests

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return every namespace that a tier or an engine has, by id."""
        service = self._service
        found = dict(service.shared.namespaces()) if service.shared else {}
        found |= service.disk.namespaces()
        found |= {s.ns_id: s.hello.namespace for s in list(service.sessions.values())}
        return found

    def _chosen(self, select: Select) -> dict[bytes, Namespace]:
        return {i: n for i, n in self.namespaces().items() if i.hex().startswith(select.ns)}

    def _tiers(self, select: Select) -> list[str]:
        known = [HOST, "disk"] + (["shared"] if self._service.shared else [])
        for name in select.tiers:
            if name not in known:
                raise RefusedError(f"tier {name!r} is not here; this server has " + ", ".join(known))
        return select.tiers or known

    def _forest(self, ns_id: bytes) -> tuple[Forest, dict[bytes, bytes]]:
        """Return the stored chunks of a namespace over all tiers, and the anchors that the tiers know."""
        forest, anchors = Forest(), {}
        for tier in self._service.tiers():
            for e in tier.entries(ns_id):
                forest.add(tier.name, e.key, e.parent, e.position, e.num_tokens, e.nbytes, e.num_hits, e.last_used)
                anchors[e.key] = e.anchor
        for session, body in self._ask("list", b"", ns_id):
            nbytes = session.pool.shape.payload_nbytes
            for h in msgspec.msgpack.decode(body, type=list[HostEntry]):
                forest.add(HOST, h.key, h.parent, h.position, h.num_tokens, nbytes, h.num_hits, h.last_used)
        forest.link()
        return forest, anchors

    def _ask(self, what: str, body: bytes, ns_id: bytes | None = None) -> list[tuple[Session, bytes]]:
        """Ask the engines (of a namespace) and return the answers that came in time."""
        sessions = [s for s in list(self._service.sessions.values()) if ns_id in (None, s.ns_id)]
        asks = [(s, s.ask(what, body)) for s in sessions]
        deadline = time.monotonic() + ASK_TIMEOUT_S
        answers = []
        for session, ask in asks:
            answer = ask.result(max(0.0, deadline - time.monotonic())) if ask else None
            if answer is None:
                logger.warning("engine %s did not answer %r in time", session.hello.engine_id, what)
            else:
                answers.append((session, answer))
        return answers

    # -- list

    def ls(self, select: Select) -> list[dict[str, Any]]:
        """Return the stored prefixes, one row a last chunk, most recently used first."""
        tiers = set(self._tiers(select))
        rows = []
        for ns_id, namespace in self._chosen(select).items():
            forest, _ = self._forest(ns_id)
            for leaf in forest.leaves():
                if not leaf.key.hex().startswith(select.prefix):
                    continue
                row = _row(forest, leaf, ns_id, namespace)
                if tiers & set(row["tiers"]):
                    rows.append(row)
        return sorted(rows, key=lambda row: -row["last_used"])

    def locate(self, select: Select) -> list[dict[str, Any]]:
        """Return for each chunk of the prompt ``select.keys``, in each namespace, the tiers that have it."""
        rows = []
        namespaces = self.namespaces()
        for ns_hex, hex_keys in select.keys.items():
            namespace = namespaces.get(bytes.fromhex(ns_hex))
            if namespace is None:
                continue
            keys = [bytes.fromhex(k) for k in hex_keys]
            chunks = self._locate(bytes.fromhex(ns_hex), keys)
            run = next((i for i, tiers in enumerate(chunks) if not tiers), len(chunks))
            rows.append(
                {
                    "namespace": ns_hex,
                    "model": namespace.model,
                    "chunk_tokens": namespace.layout.chunk_tokens,
                    "num_chunks": len(keys),
                    "num_stored": run,
                    "tokens_stored": run * namespace.layout.chunk_tokens,
                    "chunks": [
                        {"id": key.hex()[:ID_DIGITS], "tiers": tiers} for key, tiers in zip(keys, chunks, strict=True)
                    ],
                }
            )
        return rows

    def _locate(self, ns_id: bytes, keys: Sequence[bytes]) -> list[list[str]]:
        refs = make_refs(keys, 0, b"")
        where: list[list[str]] = [[] for _ in keys]
        for _, answer in self._ask("has", b"".join(keys), ns_id):
            for i, there in enumerate(answer):
                if there and HOST not in where[i]:
                    where[i].append(HOST)
        for tier in self._service.tiers():
            for i, there in enumerate(tier.match(ns_id, refs)):
                if there:
                    where[i].append(tier.name)
        return where

    # -- evict

    def evict(self, select: Select) -> dict[str, Any]:
        """Remove a prefix, a prompt or a namespace, and say what was removed where.

        Raises:
            RefusedError: the selection names nothing in particular, or several things.
        """
        if not (select.prefix or select.keys or select.everything):
            raise RefusedError("nothing was named to evict; name a prefix, token ids or a namespace")
        if select.everything and len(self._chosen(select)) > 1:
            raise RefusedError(f"namespace {select.ns!r} fits {len(self._chosen(select))}; write more digits of its id")
        tiers = self._tiers(select)
        total: dict[str, int] = dict.fromkeys(tiers, 0)
        prefixes: list[str] = []
        nbytes, silent = dict.fromkeys(tiers, 0), set[str]()
        whole = select.everything and set(tiers) == set(self._tiers(Select()))
        for ns_id, keys, forest, anchors in self._doomed(select):
            nodes = [forest.nodes[key] for key in keys]
            if select.dry_run:
                removed = {tier: sum(n.num_copies.get(tier, 0) for n in nodes) for tier in tiers}
            else:
                removed, mute = self._evict(ns_id, nodes, tiers, whole, anchors)
                silent |= mute
            for tier in tiers:
                total[tier] += removed.get(tier, 0)
                nbytes[tier] += sum(n.nbytes.get(tier, 0) for n in nodes)
            prefixes += [n.key.hex()[:ID_DIGITS] for n in nodes if not n.children]
        return {
            "dry_run": select.dry_run,
            "prefixes": prefixes,
            "removed": total,
            "nbytes": nbytes,
            "num_removed": sum(total.values()),
            "incomplete": [f"engine {name} did not answer" for name in sorted(silent)] + self._tiers_out(tiers),
        }

    def _tiers_out(self, tiers: Sequence[str]) -> list[str]:
        """Return a sentence for each of ``tiers`` that does not answer now."""
        stats = [tier.stat() for tier in self._service.tiers() if tier.name in tiers]
        return [f"the {s.name} tier is out ({s.reason})" for s in stats if s.state != "up"]

    def _doomed(self, select: Select) -> list[tuple[bytes, list[bytes], Forest, dict[bytes, bytes]]]:
        """Return what a selection means: for each namespace, the keys to remove, parents first."""
        found = []
        for ns_id in self._chosen(select):
            forest, anchors = self._forest(ns_id)
            if select.everything:
                keys = sorted(forest.nodes, key=lambda k: forest.nodes[k].position)
            elif select.prefix:
                key = forest.resolve(select.prefix)
                keys = forest.own_part(key) if key else []
            else:
                keys = forest.prompt_part([bytes.fromhex(k) for k in select.keys.get(ns_id.hex(), [])])
            if keys:
                found.append((ns_id, keys, forest, anchors))
        if select.prefix and len(found) > 1:
            raise RefusedError(f"prefix {select.prefix!r} is in {len(found)} namespaces; name one of them too")
        return found

    def _evict(
        self, ns_id: bytes, nodes: Sequence[Node], tiers: Sequence[str], whole: bool, anchors: dict[bytes, bytes]
    ) -> tuple[dict[str, int], set[str]]:
        """Remove chunks and return how many each tier had, and the engines that did not answer."""
        removed: dict[str, int] = {}
        silent: set[str] = set()
        if HOST in tiers:  # first: an engine that has answered sends no more stores of these keys
            engines = [s for s in list(self._service.sessions.values()) if s.ns_id == ns_id]
            answers = self._ask("invalidate", b"".join(n.key for n in nodes), ns_id)
            removed[HOST] = sum(int(answer) for _, answer in answers)
            heard = {s.id for s, _ in answers}
            silent = {s.hello.engine_id for s in engines if s.id not in heard and s.id in self._service.sessions}
        refs = [Ref(n.key, anchors.get(n.key, n.key)) for n in nodes]
        return removed | self._service.evict(ns_id, refs, tiers, whole), silent

    # -- statistics

    def stat(self) -> dict[str, Any]:
        """Return the state of the server, its tiers and its engines."""
        service = self._service
        num_sessions = len(service.sessions)
        engines = [msgspec.json.decode(body, type=HostStat) for _, body in self._ask("stat", b"")]
        silent = max(0, num_sessions - len(engines))
        tiers = [_host_row(engines)]
        queued, dropped = service.queued_nbytes(), service.num_dropped()
        for tier in service.tiers():
            row = tier.stat()._asdict()
            row["queued_nbytes"] = queued[tier.name]
            row["num_dropped"] += dropped[tier.name]
            tiers.append(row)
        return {
            "server": self._about
            | {
                "version": __version__,
                "pid": os.getpid(),
                "uptime_s": round(time.time() - self._started, 3),
                "num_engines": len(service.sessions),
                "num_silent_engines": silent,
                "num_stale": service.num_stale,
                "num_unstaged": service.num_unstaged,
            },
            "tiers": tiers,
            "engines": [msgspec.to_builtins(e) for e in engines],
            "namespaces": [
                {"id": i.hex(), "model": n.model, "layout": n.layout.describe(), "payload_nbytes": n.payload_nbytes}
                for i, n in self.namespaces().items()
            ],
        }


def _row(forest: Forest, leaf: Node, ns_id: bytes, namespace: Namespace) -> dict[str, Any]:
    """Return the row of one prefix. Hits and last use are those of its own part: a neighbour's hit is not its hit."""
    chain = forest.chain(leaf.key)
    own = [forest.nodes[key] for key in forest.own_part(leaf.key)]
    layout = namespace.layout
    return {
        "id": leaf.key.hex()[:ID_DIGITS],
        "key": leaf.key.hex(),
        "namespace": ns_id.hex(),
        "model": namespace.model,
        "depth_chunks": leaf.position + 1,
        "depth_blocks": (leaf.position + 1) * layout.blocks_per_chunk,
        "tokens": leaf.position * layout.chunk_tokens + leaf.num_tokens,
        "num_stored": len(chain),
        "branch": next((n.key.hex()[:ID_DIGITS] for n in reversed(chain) if len(n.children) > 1), ""),
        "nbytes": sum_by_tier(chain),
        "tiers": [t for t in (HOST, "disk", "shared") if any(t in n.nbytes for n in chain)],
        "hits": max(n.num_hits for n in own),
        "last_used": max(n.last_used for n in own),
    }


def _host_row(engines: Sequence[HostStat]) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(e.counters.get(name, 0) for e in engines)

    return {
        "name": HOST,
        "state": "up" if engines else "none",
        "reason": "" if engines else "no engine is connected",
        "since": 0.0,
        "num_entries": sum(e.num_entries for e in engines),
        "nbytes": sum(e.num_entries * e.payload_nbytes for e in engines),
        "budget": sum(e.budget for e in engines),
        "num_hits": total("host_hits"),
        "num_misses": total("disk_hits") + total("shared_hits") + total("missed"),
        "num_stored": total("spilled"),
        "num_evicted": sum(e.num_evicted for e in engines),
        "num_dropped": total("not_spilled") + total("not_sent"),
        "num_bad": 0,
        "num_errors": total("load_failures"),
        "queued_nbytes": 0,
    }

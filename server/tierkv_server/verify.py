"""Reads records back and checks them, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tierkv.messages import Select
from tierkv.prefixes import ID_DIGITS
from tierkv.tiers.base import Ref, Status
from tierkv_server.lister import Lister
from tierkv_server.scans import Scans, Segment, segment


class Verifier:
    """Verifies what the disk and shared tiers hold. Reads are quiet: they renew nothing and count no hit.

    Args:
        lister: says what is stored.
        wait: called before each step; returns when nobody waits for a load, soon in any case.
    """

    def __init__(self, lister: Lister, wait: Callable[[], None] = lambda: None) -> None:
        self._lister = lister
        self._wait = wait
        self._scans = Scans()

    def step(self, select: Select) -> dict[str, Any]:
        """Verify one step of what is meant: of a prefix, of namespaces, or of everything.

        Damaged records are deleted where ``select.repair`` says so. In the reply ``num_ok`` are sound, ``num_gone`` are
        not there any more, ``num_failed`` could not be read; ``cursor`` is empty after the last step.

        Raises:
            NotFoundError: the prefix is not stored, or the cursor is not known any more.
        """
        step = self._scans.step(select.cursor or self._scans.open(self._segments(select)))
        reply: dict[str, Any] = {
            "cursor": step.cursor,
            "num_done": step.num_done,
            "num_total": step.num_total,
            "num_ok": 0,
            "num_gone": 0,
            "num_failed": 0,
            "nbytes": 0,
            "bad": [],
        }
        part = step.segment
        tier = next((t for t in self._lister.readable() if part and t.name == part.tier), None)
        if part is None or tier is None:
            return reply
        self._wait()
        buffers = np.empty((len(step.refs), part.payload_nbytes), dtype=np.uint8)
        found = tier.fetch(part.ns_id, step.refs, lambda i: [buffers[i].data], quiet=True, keep=not select.repair)
        statuses = [fetched.status for fetched in found]
        reply["num_ok"] = statuses.count(Status.OK)
        reply["num_gone"] = statuses.count(Status.MISS)
        reply["num_failed"] = statuses.count(Status.ERROR)
        reply["nbytes"] = (reply["num_ok"] + statuses.count(Status.BAD)) * part.payload_nbytes
        reply["bad"] = [
            {
                "id": ref.key.hex()[:ID_DIGITS],
                "key": ref.key.hex(),
                "namespace": part.ns_id.hex(),
                "tier": part.tier,
                "deleted": select.repair,
            }
            for ref, status in zip(step.refs, statuses, strict=True)
            if status is Status.BAD
        ]
        return reply

    def _segments(self, select: Select) -> list[Segment]:
        wanted = self._lister.tier_names(select)
        tiers = [tier for tier in self._lister.readable() if tier.name in wanted]
        if select.prefix or select.keys:
            ns_id, namespace, chain = self._lister.chain(select)
            size = namespace.payload_nbytes
            return [
                segment(t.name, ns_id, size, (Ref(n.key, n.anchor or n.key) for n in chain if t.name in n.nbytes))
                for t in tiers
            ]
        return [
            segment(tier.name, ns_id, namespace.payload_nbytes, (Ref(e.key, e.anchor) for e in tier.entries(ns_id)))
            for ns_id, namespace in self._lister.chosen(select).items()
            for tier in tiers
        ]

"""Brings a prefix from the shared tier to this node's disk, a step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierkv.errors import RefusedError
from tierkv.messages import Select
from tierkv.payload import record_nbytes
from tierkv.tiers.base import Ref, Status
from tierkv_server.lister import Lister
from tierkv_server.scans import Scans, Segment, segment
from tierkv_server.service import Service
from tierkv_server.writer import Job

#: Loads go first, but work that is asked for goes on.
MAX_YIELD_S = 0.25


class Warmer:
    """Copies chunks from the shared tier to the disk, as a load of them would.

    Args:
        service: whose tiers.
        lister: says what is stored.
    """

    def __init__(self, service: Service, lister: Lister) -> None:
        self._service = service
        self._lister = lister
        self._scans = Scans()

    def step(self, select: Select) -> dict[str, Any]:
        """Copy one step of the prefix that is meant.

        In the reply ``num_there`` were on the disk already, ``num_warmed`` were copied, ``num_missing`` are in neither
        tier (any more), ``num_dropped`` the disk had no room for or failed to store; ``cursor`` is empty after the
        last step. With ``select.dry_run`` nothing is copied: ``num_warmed`` would be.

        Raises:
            RefusedError: there is no shared tier.
            NotFoundError: the prefix is not stored, or the cursor is not known any more.
        """
        if self._service.shared is None:
            raise RefusedError("this server has no shared tier to bring anything from; set shared.url")
        step = self._scans.step(select.cursor or self._scans.open([self._segment(select)]))
        counts = dict.fromkeys(("num_warmed", "num_there", "num_missing", "num_dropped", "nbytes"), 0)
        if step.segment is not None:
            ns_id = step.segment.ns_id
            on_disk = self._service.disk.match(ns_id, step.refs)
            wanted = [ref for ref, there in zip(step.refs, on_disk, strict=True) if not there]
            counts["num_there"] = len(step.refs) - len(wanted)
            if select.dry_run:
                counts["num_warmed"] = sum(self._service.shared.match(ns_id, [ref])[0] for ref in wanted)
                counts["num_missing"] = len(wanted) - counts["num_warmed"]
                counts["nbytes"] = counts["num_warmed"] * step.segment.payload_nbytes
            elif wanted:
                self._service.moves.loads.wait_for_none(MAX_YIELD_S)
                self._copy(step.segment, wanted, counts)
        about = {"cursor": step.cursor, "num_done": step.num_done, "num_total": step.num_total}
        return about | {"dry_run": select.dry_run} | counts

    def _segment(self, select: Select) -> Segment:
        ns_id, namespace, chain = self._lister.chain(select)
        self._service.disk.add_namespace(namespace)
        refs = (Ref(node.key, node.anchor or node.key) for node in chain)
        return segment("shared", ns_id, namespace.payload_nbytes, refs)

    def _copy(self, part: Segment, refs: list[Ref], counts: dict[str, int]) -> None:
        moves, shared = self._service.moves, self._service.shared
        assert shared is not None
        since = moves.evictions.number
        jobs: list[Job] = []
        buffers = np.empty((len(refs), part.payload_nbytes), dtype=np.uint8)
        found = shared.fetch(part.ns_id, refs, lambda i: [buffers[i].data], quiet=True)
        try:
            for i, (ref, fetched) in enumerate(zip(refs, found, strict=True)):
                if fetched.header is None:
                    counts["num_missing"] += 1
                    continue
                staged = moves.stage(buffers[i], fetched.header, shared.tokens(part.ns_id, ref))
                if staged is None:
                    counts["num_dropped"] += 1
                    continue
                jobs.append(Job(part.ns_id, ref, record_nbytes(part.payload_nbytes), since, staged))
            statuses = moves.disk_writer.write_now(jobs) if jobs else []
        finally:
            for job in jobs:
                if job.staged:
                    job.staged.buffer.release()
        counts["num_warmed"] += statuses.count(Status.OK)
        counts["num_there"] += statuses.count(Status.EXISTS)
        counts["num_dropped"] += len(statuses) - statuses.count(Status.OK) - statuses.count(Status.EXISTS)
        counts["nbytes"] += statuses.count(Status.OK) * part.payload_nbytes

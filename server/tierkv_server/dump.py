"""Single records out of a store and into it, for export, import and copies: header, payload, token ids, as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.errors import BusyError, DamagedError, NotFoundError, RefusedError
from tierkv.layout import Namespace
from tierkv.messages import FROM_DISK, FROM_SHARED, MISSING
from tierkv.payload import HEADER_NBYTES, BadRecordError, Header, checksum, open_record, record_nbytes
from tierkv.tiers.base import Ref, Status, Tier
from tierkv.tiers.shared import SharedTier
from tierkv_server.service import Service
from tierkv_server.writer import Job


def dump(service: Service, ns_id: bytes, ref: Ref) -> bytes:
    """Return a record, verified, from the nearest tier that has it: 256 bytes of header, the payload, its token ids.

    A read of our own: it renews nothing and counts no hit.

    Raises:
        NotFoundError: no tier has it.
        DamagedError: what there was of it was damaged.
    """
    damaged = []
    for tier in service.tiers():
        namespace = tier.namespaces().get(ns_id)
        if namespace is None:
            continue
        payload = bytearray(namespace.payload_nbytes)
        status, header = tier.fetch(ns_id, [ref], lambda _: [memoryview(payload)], quiet=True)[0]  # noqa: B023
        if header is not None:
            return b"".join((header.pack(), payload, tier.tokens(ns_id, ref)))
        if status is Status.BAD:
            damaged.append(tier.name)
    if damaged:
        raise DamagedError(f"chunk {ref.key.hex()[:12]} was damaged ({', '.join(damaged)}), and is deleted")
    raise NotFoundError(f"chunk {ref.key.hex()[:12]} is neither on the disk nor in the shared tier")


def restore(service: Service, namespace: Namespace, data: bytes, until: float = 0.0) -> bytes:
    """Store a record, as :func:`dump` returns it, on the disk; returns ``OK`` or ``EXISTS``.

    Args:
        until: when it expires, if it was not there (seconds since 1970; 0: as the limits say).

    Raises:
        RefusedError: it is not a sound record of the namespace, or the disk has no room for it or fails.
        BusyError: there is no memory for it now.
    """
    ns_id, end = namespace.ns_id(), HEADER_NBYTES + namespace.payload_nbytes
    try:
        head = Header.unpack(data)
        header = open_record(data, key=head.key, ns_id=ns_id, payload_nbytes=namespace.payload_nbytes)
        if header.layout_id != namespace.layout.layout_id():
            raise BadRecordError("the record's layout is another than its namespace's")
        if checksum(memoryview(data)[HEADER_NBYTES:end]) != header.checksum:
            raise BadRecordError(f"the payload of key {header.key.hex()[:16]} does not match its checksum")
    except BadRecordError as error:
        raise RefusedError(f"this record does not fit: {error}") from None
    payload = np.frombuffer(data, dtype=np.uint8, count=namespace.payload_nbytes, offset=HEADER_NBYTES)
    service.add_namespace(namespace)
    since = service.moves.evictions.number
    staged = service.moves.stage(payload, header, data[end:])
    if staged is None:
        raise BusyError("the server has no memory to stage a record in now; try again later")
    try:
        job = Job(ns_id, Ref(header.key, header.anchor), record_nbytes(namespace.payload_nbytes), since, staged)
        (status,) = service.moves.disk_writer.write_now([job])
    finally:
        staged.buffer.release()
    if status not in (Status.OK, Status.EXISTS):
        raise RefusedError(f"the disk does not take chunk {header.key.hex()[:12]} ({status.name}); see 'tierkv stat'")
    if until and status is Status.OK:
        service.disk.expire_at(ns_id, [Ref(header.key, header.anchor)], until)
    return b"EXISTS" if status is Status.EXISTS else b"OK"


def stored(service: Service, ns_id: bytes, refs: Sequence[Ref]) -> bytes:
    """Return a letter for each chunk: the nearest tier that has it, or that none has. They need not be a chain."""
    letters = [FROM_DISK if there else MISSING for there in service.disk.match(ns_id, refs)]
    holes = [i for i, letter in enumerate(letters) if letter == MISSING]
    if holes and service.shared is not None:
        for i, there in zip(holes, _each(service.shared, ns_id, [refs[i] for i in holes]), strict=True):
            letters[i] = FROM_SHARED if there else MISSING
    return b"".join(letters)


def _each(tier: Tier, ns_id: bytes, refs: Sequence[Ref]) -> list[bool]:
    """Return for each ref whether it is stored; a match may end at the first hole."""
    if isinstance(tier, SharedTier):
        return tier.stored(ns_id, refs)
    return [tier.match(ns_id, [ref])[0] for ref in refs]

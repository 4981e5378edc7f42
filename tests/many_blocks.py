"""A store of a hundred thousand chunks, made in seconds: tiny payloads, written past the engines' path."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fake_engine import make_namespace, payload_bytes
from tierkv.keys import anchor_index, chain_keys, root_key
from tierkv.layout import Namespace
from tierkv.payload import HEADER_NBYTES, Header, checksum, record_nbytes
from tierkv.tiers.base import Record, Status
from tierkv_server.server import Server

CHUNK = 32
SYSTEM_CHUNKS, OWN_CHUNKS, NUM_PROMPTS = 10, 30, 3333
NUM_CHUNKS = SYSTEM_CHUNKS + OWN_CHUNKS * NUM_PROMPTS
#: Prompts whose chunks are in the shared tier too.
NUM_SHARED = 20
NAMESPACE = make_namespace("many/tiny-model", block_nbytes=64)


def prompt(number: int) -> list[int]:
    """Return the token ids of a prompt; all begin with the same ones."""
    own = OWN_CHUNKS * CHUNK
    return [*range(SYSTEM_CHUNKS * CHUNK), *range(10_000 + number * own, 10_000 + (number + 1) * own)]


def keys(number: int) -> list[bytes]:
    return chain_keys(root_key(bytes.fromhex(NAMESPACE.identity), b"", b""), prompt(number), CHUNK)


def fill(server: Server) -> None:
    """Store :data:`NUM_CHUNKS` chunks on the disk, and those of the first prompts in a shared tier if there is one."""
    service = server.service
    service.add_namespace(NAMESPACE)
    batch: list[Record] = []
    for number in range(NUM_PROMPTS):
        records = list(_records(NAMESPACE, keys(number), 0 if not number else SYSTEM_CHUNKS))
        batch += records
        if service.shared is not None and number < NUM_SHARED:
            assert set(service.shared.store(NAMESPACE.ns_id(), records)) == {Status.OK}
        if len(batch) >= 3000 or number == NUM_PROMPTS - 1:
            assert set(service.disk.store(NAMESPACE.ns_id(), batch)) == {Status.OK}
            batch = []


def _records(namespace: Namespace, chain: list[bytes], start: int) -> Iterator[Record]:
    root = root_key(bytes.fromhex(namespace.identity), b"", b"")
    layout_id, ns_id, now = namespace.layout.layout_id(), namespace.ns_id(), time.time()
    nbytes = namespace.payload_nbytes
    for i in range(start, len(chain)):
        payload = payload_bytes(chain[i], 0, nbytes)
        header = Header(
            layout_id=layout_id,
            ns_id=ns_id,
            key=chain[i],
            parent=chain[i - 1] if i else root,
            anchor=chain[anchor_index(i)],
            position=i,
            num_tokens=CHUNK,
            tenant=bytes(16),
            created=now,
            raw_nbytes=nbytes,
            checksum=checksum(memoryview(payload)),
        )
        data = bytearray(record_nbytes(nbytes))
        data[:HEADER_NBYTES] = header.pack()
        data[HEADER_NBYTES : HEADER_NBYTES + nbytes] = payload
        yield Record(header, memoryview(data))

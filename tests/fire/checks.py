"""What is looked at after a fault: payloads in every tier, and what processes hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from fire.references import TOLERANCE, References
from fire.stage import Stage
from leaks import pool_files
from tierkv.keys import anchor_index
from tierkv.payload import HEADER_NBYTES, BadRecordError, checksum, open_record
from tierkv.tiers.base import Ref
from tierkv.tiers.redis_names import Names

#: A server's connections to Redis, and threads of admin connections that are about to end.
SERVER_SLACK = 8


class Holding(NamedTuple):
    """What a process has: open descriptors, threads, pool segments, files of /dev/shm, and processes of its group."""

    fds: int
    threads: int
    segments: int
    shm_files: int
    processes: int


def holding(pid: int) -> Holding:
    """Look at a process."""
    proc = Path(f"/proc/{pid}")
    return Holding(
        fds=sum(1 for _ in (proc / "fd").iterdir()),
        threads=sum(1 for _ in (proc / "task").iterdir()),
        segments=len(pool_files(pid)),
        shm_files=sum("/dev/shm/" in line for line in (proc / "maps").read_text().splitlines()),
        processes=num_in_group(pid),
    )


def num_in_group(pid: int) -> int:
    """Return how many processes that run are of the process group ``pid``."""
    num = 0
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            num += fields[0] != "Z" and int(fields[2]) == pid
    return num


def wrong_payloads(stage: Stage, references: References, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return a sentence for each payload of ``prompts`` in a tier, or of anything in a host pool, that is wrong."""
    found = []
    for where, key, payload in _payloads(stage, references, prompts):
        error = references.payload_error(key, payload)
        if error is not None and error > TOLERANCE:
            found.append(f"the payload of chunk {key[:12]} in {where} is off by {error:g} from what a run computes")
    return found


def _payloads(
    stage: Stage, references: References, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield where, key, and payload; of a record that is not sound the payload is empty: wrong, whatever was meant."""
    for name, engine in stage.engines.items():
        file = stage.directory / f"{name}.npz"
        engine.call("save_host", path=str(file))
        with np.load(file) as payloads:
            for key in payloads.files:
                yield f"the host pool of the {name} engine", key, payloads[key].tobytes()
    refs = {key: Ref(bytes.fromhex(key), bytes.fromhex(keys[anchor_index(i)]))
            for prompt in prompts for keys in [references.keys(prompt)] for i, key in enumerate(keys)}  # fmt: skip
    ns_id = bytes.fromhex(stage.engines["local"].call("stat")["namespace"])
    nbytes = len(next(iter(references.payloads.values())))
    for key, record in _disk_records(stage.disk, list(refs)):
        yield "the disk tier", key, _payload(record, refs[key], ns_id, nbytes)
    names = Names()
    with stage.redis.client() as client:
        values = client.mget([names.record(ns_id, ref) for ref in refs.values()])
    for (key, ref), value in zip(refs.items(), values, strict=True):  # type: ignore[arg-type]
        if value is not None:
            yield "the shared tier", key, _payload(value, ref, ns_id, nbytes)


def _disk_records(disk: Path, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Read records with nothing but LMDB."""
    for path in disk.glob("ns/*/"):
        with lmdb.open(str(path), readonly=True, max_dbs=8) as env, env.begin(db=env.open_db(b"records")) as txn:
            for key in keys:
                if (record := txn.get(bytes.fromhex(key))) is not None:
                    yield key, record


def _payload(record: bytes, ref: Ref, ns_id: bytes, nbytes: int) -> bytes:
    """Return the payload of a record whose header and checksum are right; nothing for another."""
    try:
        header = open_record(record, key=ref.key, ns_id=ns_id, payload_nbytes=nbytes)
    except BadRecordError:
        return b""
    payload = record[HEADER_NBYTES : HEADER_NBYTES + nbytes]
    return payload if checksum(payload) == header.checksum else b""

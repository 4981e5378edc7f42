"""The namespaces in which measurements store: making one, emptying it, and removing what killed runs left."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierkv.admin_client import AdminClient
from tierkv.layout import LayerGroup, Layout, Namespace, Shard
from tierkv.selection import Select

#: Names of the namespaces' models: host, process and start follow.
MODEL = "tierkv-bench/"
#: A run on another host is over by then: what is left of it may go.
MAX_RUN_S = 7200.0
_CHUNK_TOKENS = 16


def make_namespace(payload_nbytes: int) -> Namespace:
    """Return a new namespace that nobody else has, with payloads of that size."""
    group = LayerGroup(
        kind="tierkv bench",
        layers=("bench",),
        num_kv_heads=1,
        head_size=1,
        block_nbytes=(payload_nbytes,),
        shape=(payload_nbytes,),
        order=(0,),
    )
    layout = Layout(
        group=group,
        dtype="uint8",
        block_tokens=_CHUNK_TOKENS,
        chunk_tokens=_CHUNK_TOKENS,
        backend="none",
        isa="none",
    )
    model = f"{MODEL}{socket.gethostname()}-{os.getpid()}-{int(time.time())}"
    return Namespace(secrets.token_hex(32), model, layout, Shard())


def remove_left(admin: AdminClient, stat: Mapping[str, Any]) -> int:
    """Remove what runs that were killed have left, and return how many namespaces that were."""
    connected = {engine["namespace"] for engine in stat["engines"]}
    num = 0
    for row in stat["namespaces"]:
        if row["model"].startswith(MODEL) and row["id"] not in connected and _is_over(row["model"]):
            evict(admin, row["id"], [])
            num += 1
    return num


def _is_over(model: str) -> bool:
    """Return whether the run that made a namespace of this name is over."""
    host, pid, started = [*model.removeprefix(MODEL).rsplit("-", 2), "", ""][:3]
    if not (pid.isdigit() and started.isdigit()):
        return False
    here = host == socket.gethostname() and not Path(f"/proc/{pid}").exists()
    return here or time.time() - int(started) > MAX_RUN_S


def evict(admin: AdminClient, ns: str, tiers: Sequence[str]) -> None:
    admin.ask("TKV.EVICT", Select(ns=ns, everything=True, force=True, tiers=list(tiers)))

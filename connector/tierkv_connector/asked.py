"""What a new request asks for, as the store server is to know it for its miss-ratio curves."""

from __future__ import annotations

from tierkv.asked import AskedLog
from tierkv.client import StoreClient
from tierkv_connector.requests import RequestState


def note_asked(log: AskedLog, state: RequestState, client: StoreClient | None) -> None:
    """Note a request that was just planned. What of it stays in this engine goes to no tier below the host pool.

    A request that stores nothing teaches nothing about what a larger tier would have kept of it.
    """
    plan = state.plan
    if plan is None or not state.keys or state.store == "none" or client is None or not client.connected():
        return
    found = plan.start if state.shareable and plan.start < plan.stop else len(state.keys)
    log.note(state.keys, min(plan.gpu_run, plan.stop), found)

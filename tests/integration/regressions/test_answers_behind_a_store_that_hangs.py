"""An engine's answers travelled behind its stores: while the disk hung in one, the engine passed for silent.

Operators could then neither list its host pool nor see its counters. Only ``invalidate`` has to come behind stores.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, wait_until
from serving import make_config, serving
from tierkv.tiers import environment

A, B = list(range(64)), list(range(100, 164))


def test_an_engine_whose_store_hangs_is_asked_and_answers(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, hanging, put = threading.Event(), threading.Event(), environment.Environment.put

    def hang(*args: Any) -> Any:
        hanging.set()
        go_on.wait(60)
        return put(*args)

    with serving(make_config(short_dir)) as server, FakeEngine(server.config.socket) as engine:
        engine.put(A)
        monkeypatch.setattr(environment.Environment, "put", hang)
        engine.put(B, wait=False)
        wait_until(hanging.is_set)
        try:
            stat = server.commands.inspector.stat()
            assert stat["server"]["num_silent_engines"] == 0
            assert [row["num_entries"] for row in stat["engines"]] == [4]
        finally:
            go_on.set()

"""What a real engine tells the store server of its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_process import CHUNK_TOKENS, Lab, Prompts, admin, drain
from fake_engine import wait_until

pytestmark = pytest.mark.engine

PROMPTS = Prompts(seed=31)


def test_every_source_is_told_of(lab: Lab, model: Path) -> None:
    """Cold, on the GPU, in the host pool, on disk: by chunks of 64 tokens, three whole ones a prompt."""
    disk = lab.disk()
    engine = lab.engine(model, {"disk_dir": disk}).ready()
    prompt = PROMPTS.new(3 * CHUNK_TOKENS + 5)

    def reuse(num_asked: int) -> dict[str, Any]:
        def ask() -> dict[str, Any] | None:
            engine.call("connected")
            with admin(disk) as client:
                found: dict[str, Any] = client.ask("TKV.REUSE")
            return found if found["tiers"][0]["asked"] == num_asked else None

        return wait_until(ask, what="the server was not told of all requests")  # type: ignore[no-any-return]

    def sources(found: dict[str, Any]) -> dict[str, int]:
        return {name: sum(column) for name, column in found["history"]["chunks"].items()}

    engine.one(prompt)
    engine.one(prompt)
    drain(disk)
    found = reuse(6)
    host, below = found["tiers"]
    assert host["num_sampled"] == 6 and below["asked"] == 3, "the second time all were on the GPU"
    assert host["hit_rates"][-1] == 0.5 and below["hit_rates"][-1] == 0
    assert host["namespaces"][0]["id"] == below["namespaces"][0]["id"] and host["namespaces"][0]["model"]
    engine.reset_gpu()
    engine.one(prompt)
    engine.one(PROMPTS.new(CHUNK_TOKENS + 1))
    found = reuse(10)
    chunks = sources(found)
    assert chunks.pop("missed") in (3, 4), (
        "the last request's are counted when it is scheduled, and told of with the next"
    )
    assert chunks == {"gpu": 3, "host": 3, "disk": 0, "shared": 0}
    assert found["tiers"][1]["asked"] == 4, "three of the first request, one of the last"

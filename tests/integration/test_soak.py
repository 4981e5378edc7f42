"""Two minutes of ``scripts/soak``, with a kill every five seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import start_redis
from soak import REDIS_ARGS, Soak


@pytest.mark.timeout(400)
def test_two_minutes_with_a_kill_every_five_seconds(short_dir: Path) -> None:
    budget = 256 << 20  # small enough to be full all the time
    redis = start_redis(short_dir, *REDIS_ARGS)
    try:
        report = Soak(short_dir, seconds=120, kill_every_s=5, budget=budget, redis=redis).run()
    finally:
        redis.kill()
    assert report.problems == []
    assert report.kills >= 12
    assert report.counts["payloads"] > 500
    assert budget * 0.8 < report.max_live_nbytes <= budget

"""A minute of ``scripts/soak`` (two with ``TIERKV_FULL``), with a kill every five seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servers import start_redis
from soak import REDIS_ARGS, Soak


@pytest.mark.timeout(400)
def test_a_kill_every_five_seconds(short_dir: Path) -> None:
    seconds = 120 if os.environ.get("TIERKV_FULL") else 60
    budget = 256 << 20  # small enough to be full all the time
    redis = start_redis(short_dir, *REDIS_ARGS)
    try:
        report = Soak(short_dir, seconds=seconds, kill_every_s=5, budget=budget, redis=redis).run()
    finally:
        redis.kill()
    assert report.problems == []
    assert report.kills >= seconds / 10
    assert report.counts["payloads"] > 4 * seconds
    assert budget * 0.8 < report.max_live_nbytes <= budget

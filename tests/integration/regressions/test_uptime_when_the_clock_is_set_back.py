"""The uptime was the difference of two wall-clock times: a clock that was set back made it negative."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from serving import make_config, serving


def test_uptime_does_not_follow_the_wall_clock(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_config(short_dir)) as server:
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 86400)
        assert 0 <= server.commands.inspector.stat()["server"]["uptime_s"] < 60

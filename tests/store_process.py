"""A store server in a process of its own, configured as an engine configures the one that it launches."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tierkv.client import AdminClient
from tierkv.errors import TierKVError
from tierkv.server_config import ServerConfig

START_TIMEOUT_S = 20.0


def start_store(config: ServerConfig, log: Path) -> subprocess.Popen[bytes]:
    """Start a server; it may take a moment until it answers (:func:`answers`)."""
    with open(log, "ab") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierkv_server"], stdin=subprocess.PIPE, stderr=err, stdout=err
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config, enc_hook=str))
    process.stdin.close()
    return process


def answers(config: ServerConfig) -> bool:
    """Return whether the server answers now."""
    try:
        with AdminClient(config.socket) as admin:
            admin.call("PING")
    except (TierKVError, OSError):
        return False
    return True


@contextlib.contextmanager
def store_server(config: ServerConfig, log: Path) -> Iterator[int]:
    """A server that answers; yields its pid, and ends it with SIGTERM.

    Raises:
        TimeoutError: it does not answer in time.
    """
    process = start_store(config, log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(config):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the store server did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()

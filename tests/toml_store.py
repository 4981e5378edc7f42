"""Store servers that listen on TCP, for real engines: ``tierkv serve``, a process of its own, with a TOML file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from network import make_tokens
from servers import RedisServer, TlsFiles, free_port
from tierkv.client import AdminClient
from tierkv.errors import TierKVError

START_TIMEOUT_S = 30.0


class TomlStore:
    """A server on a free port of the loopback. ``kill`` and ``start`` bring it back on the same port, with its disk.

    Args:
        directory: where its file, its tokens, its log and its disk tier go; made.
        redis: the shared tier.
        files: for TLS; None: without, and with the same tokens.

    Attributes:
        tokens: the token files by role.
        log: what the server printed.
    """

    def __init__(self, directory: Path, redis: RedisServer | None = None, files: TlsFiles | None = None) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.port = free_port()
        self.tokens = make_tokens(directory)
        self.log = directory / "serve.log"
        self._files = files
        self._file = directory / "tierkv.toml"
        self._process: subprocess.Popen[bytes] | None = None
        protection = f'tls_cert = "{files.cert}"\ntls_key = "{files.key}"' if files else "insecure = true"
        shared = f'[shared]\nurl = "{redis.url}"\nspill = "through"\n' if redis else ""
        self._file.write_text(
            f'[disk]\ndir = "disk"\nbytes = "256MiB"\nreserve_bytes = 0\n'
            f'{shared}[listen]\ntcp = "127.0.0.1:{self.port}"\n{protection}\n'
            + "".join(f'{role}_token_file = "{path.name}"\n' for role, path in self.tokens.items())
        )

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def socket(self) -> Path:
        """Its unix socket, for the test's own questions."""
        return self.directory / "disk" / "tierkv.sock"

    def secret(self, role: str) -> str:
        """Return a role's token."""
        return self.tokens[role].read_text().strip()

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Return what an engine is configured with; ``port`` of a proxy before the server."""
        scheme = "tkvs" if self._files else "tkv"
        options: dict[str, Any] = {
            "server": f"{scheme}://127.0.0.1:{port or self.port}",
            "server_token_file": self.tokens["engine"],
        }
        return options | ({"server_ca_file": self._files.ca} if self._files else {})

    def start(self) -> TomlStore:
        """Start it and wait until it answers.

        Raises:
            TimeoutError: it does not; the message holds the end of its log.
        """
        command = [sys.executable, "-m", "tierkv.cli", "serve", "--config", str(self._file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(TierKVError), self.admin() as admin:
                admin.call("PING")
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the store server did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL it and reap it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def admin(self) -> AdminClient:
        """Return a client over its unix socket."""
        return AdminClient(self.socket)

    def drain(self) -> None:
        """Wait until it has written everything it has taken, and its engines know what is stored."""
        with self.admin() as admin:
            assert admin.call("TKV.DRAIN") == b"1"

    def evict(self, *tiers: str) -> None:
        """Empty tiers of it."""
        with self.admin() as admin:
            admin.ask("TKV.EVICT", {"tiers": list(tiers), "everything": True})

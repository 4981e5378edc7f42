"""The processes of a measurement: its clients, and the server's CPU time."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from tierkv.admin_client import AdminClient
from tierkv.bench.client import Job, Joined, Order
from tierkv.bench.figures import Round
from tierkv.errors import RefusedError, TierKVError
from tierkv.transport import Address, connect

_LEAVE_S = 5.0
_PEERCRED = struct.Struct("3i")
T = TypeVar("T")


class Process:
    """A client's process."""

    def __init__(self, job: Job) -> None:
        self._number = job.number
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierkv.bench.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for who steers
        )
        self._send(job)

    def joined(self) -> Joined:
        return self._read(Joined)

    def order(self, order: Order) -> None:
        self._send(order)

    def round(self) -> Round:
        return self._read(Round)

    def leave(self) -> None:
        """Let it end; :meth:`wait` waits for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it now: what it has under way does not matter any more."""
        self._process.kill()

    def wait(self) -> None:
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _send(self, value: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(value) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def _read(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return msgspec.json.decode(line, type=kind)

    def _gone(self) -> TierKVError:
        code = self._process.wait(_LEAVE_S)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return RefusedError(f"client {self._number} {how} before it was done; what was stored is removed")


def local_pid(address: Address, admin: AdminClient) -> int:
    """Return the server's process if it is one of this machine that can be seen, else 0."""
    if address.path is not None:
        with contextlib.suppress(TierKVError, OSError), connect(address, _LEAVE_S) as sock:
            data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            return int(_PEERCRED.unpack(data)[0])
        return 0
    if address.host not in ("localhost", "::1") and not address.host.startswith("127."):
        return 0
    pid = int(admin.ask("TKV.STAT")["server"]["pid"])
    with contextlib.suppress(OSError):
        return pid if b"tierkv" in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
    return 0


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that a process has used (to a hundredth of a second); None where it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

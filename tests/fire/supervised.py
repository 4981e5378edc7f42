"""The harness's side of the store server under test: starts it, arms it, hears what struck, brings it back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from fake_engine import wait_until
from leaks import stop_process
from store_process import answers
from tierkv.admin_client import AdminClient
from tierkv.errors import TierKVError
from tierkv.server_config import ServerConfig

START_TIMEOUT_S = 30.0
#: How long a signal that the server sends itself may take.
_SIGNAL_S = 20.0


class Store:
    """A server process with points (:mod:`fire.store`), which whoever supervises it starts again when it has died.

    Args:
        config: what it runs with.
        log: its standard error.

    Attributes:
        num_starts: how often it was started.
    """

    def __init__(self, config: ServerConfig, log: Path) -> None:
        self.config = config
        self.log = log
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._heard = threading.Condition()
        self._num_struck = self._num_taken = 0
        self._do = ""  # what was ordered last

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    def start(self, *orders: tuple[Any, ...], wait: bool = True) -> None:
        """Start it with orders that hold from its first moment; wait until it answers, unless it may never."""
        mine, theirs = socket.socketpair()
        self.num_starts += 1
        with open(self.log, "ab") as err, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fire.store", str(theirs.fileno()), json.dumps(orders)],
                stdin=subprocess.PIPE,
                stdout=err,
                stderr=err,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_python_path()])},
            )
        self._control = mine
        self._num_struck = self._num_taken = 0
        self._do = orders[-1][1] if orders else ""
        threading.Thread(target=self._listen, args=(mine,), name="struck", daemon=True).start()
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self.config, enc_hook=str))
        self._process.stdin.close()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            TimeoutError: it does not; the message holds the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(self.config):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the store server did not start:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)

    def arm(self, point: str, do: str, first: int = 1, once: bool = True, arg: float = 0.0) -> None:
        """Give an order (:class:`fire.store.Order`) and wait until it holds; strikes are counted from here."""
        self._do = do
        self._order([point, do, first, once, arg])

    def disarm(self) -> None:
        """Take back what was ordered; who hangs at a point goes on."""
        if self.running():
            self._order(None)

    def num_struck(self, wait_s: float = 0.0) -> int:
        """Return how often an order was carried out since the last one was given; wait so long for the first."""
        with self._heard:
            self._heard.wait_for(lambda: self._num_struck, wait_s)
            return self._num_struck

    def running(self) -> bool:
        """Return whether the process is there, though it may stand still."""
        return self._process is not None and self._process.poll() is None

    def stop_now(self) -> None:
        """SIGSTOP it, between operations."""
        stop_process(self.pid)

    def kill(self) -> None:
        """SIGKILL it and reap it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()
            self._control = None

    def restart(self, *orders: tuple[Any, ...]) -> None:
        """Kill it and start it again; with orders it may not live until it answers."""
        self.kill()
        self.start(*orders, wait=not orders)

    def revive(self) -> None:
        """Let it go on if it stands still, start it again if it has died, and take back what was ordered."""
        if self.running() and not self._num_struck:
            self.disarm()
        if self._num_struck:  # it says so before it does it
            self._await_signal()
        if self.running():
            os.kill(self.pid, signal.SIGCONT)
            self.disarm()
        else:
            self.restart()
        self.wait()

    def _await_signal(self) -> None:
        assert self._process is not None
        if self._do == "kill":
            self._process.wait(_SIGNAL_S)
        elif self._do == "stop":
            wait_until(lambda: is_stopped(self.pid), _SIGNAL_S, "the store server does not stand still")

    def ask(self, command: str, body: Any = None) -> Any:
        """Return the answer of an admin command."""
        with AdminClient(self.config.socket) as admin:
            return admin.ask(command, body) if body is not None else admin.ask(command)

    def drain(self) -> bool:
        """Wait until everything taken is written; returns whether that was so in time."""
        with AdminClient(self.config.socket) as admin:
            return admin.call("TKV.DRAIN") == b"1"

    def close(self) -> None:
        """End it."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        self.kill()

    def _order(self, order: list[Any] | None) -> None:
        assert self._control is not None
        with self._heard:
            number = self._num_taken + 1
        self._control.sendall(json.dumps(order).encode() + b"\n")
        with self._heard:
            num_struck = self._num_struck  # who strikes meanwhile may not live to take another order
            if not self._heard.wait_for(lambda: self._num_taken >= number or self._num_struck > num_struck, 10):
                raise TimeoutError("the store server takes no orders")

    def _listen(self, control: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), control.makefile("r") as lines:
            for line in lines:
                said = json.loads(line)
                with self._heard:
                    if control is not self._control:
                        return
                    if "taken" in said:
                        self._num_taken += 1
                        if said["taken"] is not None:
                            self._num_struck = 0
                    else:
                        self._num_struck += 1
                    self._heard.notify_all()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def is_stopped(pid: int) -> bool:
    """Return whether every thread of a process stands still."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] in "TZ" for task in tasks)


def tier_states(store: Store) -> dict[str, str]:
    """Return the state of each tier, and why, as the server says it; empty where it does not answer."""
    try:
        return {tier["name"]: f"{tier['state']} {tier['reason']}".strip() for tier in store.ask("TKV.STAT")["tiers"]}
    except (TierKVError, OSError):
        return {}

"""Signals: SIGTERM and SIGINT end a server, SIGHUP makes it read its configuration again.

A thread of its own takes them, woken by the kernel through a socket: the main thread may be deep in a tier's library
when the second SIGTERM comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv_server.malloc import keep_freed_memory
from tierkv_server.reload import Reloader
from tierkv_server.systemd import notify

if TYPE_CHECKING:
    from tierkv_server.server import Server

logger = logging.getLogger("tierkv")

#: Closing the tiers, the disk's last sync included, may take this long after ``drain_s``; then the process ends.
CLOSE_S = 15.0
#: Exit status of a server that was cut short, by a second signal or by time. Nothing is damaged: it is a cache.
EXIT_CUT_SHORT = 4


def run_until_signal(server: Server, reloader: Reloader) -> None:
    """Run a server in this process, whose main thread this is, until SIGTERM, SIGINT or the end of its linger.

    The first signal lets it write what is queued, within ``drain_s``; the second ends the process at once.
    """
    keep_freed_memory()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signals = Signals(server, reloader)
    server.commands.reload = reloader.reload
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # the wake-up below is what counts
    signal.set_wakeup_fd(writer.fileno())
    threading.Thread(target=signals.watch, args=(reader,), name="tierkv-signals", daemon=True).start()
    notify("READY=1", f"STATUS={server.describe()}")
    server.run()
    notify("STOPPING=1")
    signal.set_wakeup_fd(-1)
    writer.close()


class Signals:
    """What each signal does.

    Args:
        server: what they are for.
        reloader: reads its configuration again.
        end: ends the process with an exit status, whatever its threads do.
    """

    def __init__(self, server: Server, reloader: Reloader, end: Callable[[int], None] = os._exit) -> None:
        self._server = server
        self._reloader = reloader
        self._end = end
        self._terminal = _has_terminal()

    def watch(self, reader: socket.socket) -> None:
        """Take the signals whose numbers arrive on a socket, a byte each, until it ends; owns it."""
        reloads: list[threading.Thread] = []
        while data := reader.recv(64):
            for number in data:
                if number == signal.SIGHUP:
                    # On a thread of its own: it reads files and waits for the tiers' locks, and SIGTERM for neither.
                    reloads = [thread for thread in reloads if thread.is_alive()]
                    reloads.append(
                        threading.Thread(target=self._take, args=(number,), name="tierkv-reload", daemon=True)
                    )
                    reloads[-1].start()
                else:
                    self._take(number)
        for thread in reloads:
            thread.join(1.0)
        reader.close()

    def _take(self, number: int) -> None:
        try:
            self.take(number)
        except Exception:  # a reload that fails must not take SIGTERM with it
            logger.exception("signal %d could not be followed", number)

    def take(self, number: int) -> None:
        """Do what a signal asks for."""
        if number == signal.SIGHUP and not self._hung_up():
            self._reload()
        elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._leave(number)

    def _hung_up(self) -> bool:
        """Return whether the signal says that the terminal is gone, from which a person started this server."""
        return self._terminal and not _has_terminal()

    def _reload(self) -> None:
        if not self._reloader.can:
            logger.info("SIGHUP: there is no configuration file to read again, so nothing changes; SIGTERM ends")
            return
        notify("RELOADING=1")
        self._reloader.try_reload()
        notify("READY=1", f"STATUS={self._server.describe()}")

    def _leave(self, number: int) -> None:
        if self._server.leaving:
            self._cut_short("told twice to leave")
            return
        logger.info("%s: leaving", signal.Signals(number).name)
        bound_s = self._server.config.drain_s + CLOSE_S
        notify("STOPPING=1")
        timer = threading.Timer(bound_s, self._cut_short, (f"not done {bound_s:g} s after the signal",))
        timer.daemon = True
        timer.start()
        self._server.leave()

    def _cut_short(self, why: str) -> None:
        with contextlib.suppress(Exception):
            logger.warning("leaving at once: %s", why)
        self._end(EXIT_CUT_SHORT)


def _has_terminal() -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(2) or os.isatty(0)
    return False

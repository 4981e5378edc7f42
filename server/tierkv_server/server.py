"""The process: takes the directory's lock, opens the tiers, listens, and leaves when it is told or not needed.

Theory of operation. One thread a connection reads commands and answers them in order (:mod:`tierkv_server.front`);
clients that want several things at a time use several connections. Threads rather than an event loop: descriptors
travel with messages, which event-loop transports do not support; LMDB and Redis block; and measured latencies are equal
(docs/decisions).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError
from tierkv.server_config import ServerConfig
from tierkv.sizes import format_size
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.shared import SharedTier
from tierkv_server.access import Access
from tierkv_server.commands import Commands
from tierkv_server.connection import Connection
from tierkv_server.front import Front
from tierkv_server.listener import check_tcp, listen, listen_tcp
from tierkv_server.node import Node
from tierkv_server.reload import Reloader
from tierkv_server.service import Service, make_refs
from tierkv_server.sessions_table import SessionTable

if TYPE_CHECKING:
    from tierkv_server.admin.http import AdminServer
    from tierkv_server.inspect import Inspector

logger = logging.getLogger("tierkv")

#: A server that was launched for an engine waits this long for it to say hello.
STARTUP_GRACE_S = 60.0


class DirectoryInUseError(ConfigError):
    """Another server owns the directory."""


class Server:
    """A store server.

    Args:
        config: what to run with.
        on_owned: called when the directory is this server's, before anything in it is opened.
        listener: a unix socket that listens already, where a service manager made it; owned. It keeps its name.

    Raises:
        DirectoryInUseError: another server owns ``disk_dir``.
        ConfigError: the directory, the socket or the URL is not usable.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_owned: Callable[[], None] = lambda: None,
        listener: socket.socket | None = None,
    ) -> None:
        self.config = config
        self._lock_fd = lock_directory(config.disk_dir)
        on_owned()
        self._leave = threading.Event()
        self._at_once = threading.Event()
        self._made_socket = listener is None
        self._had_engine = False
        self._idle_since = time.monotonic()
        self._listener: Front | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            disk = DiskTier(
                config.disk_dir,
                config.disk_limits(),
                sync_interval_s=config.disk.sync_s,
                on_evict=lambda record: self.service.disk_evicts(record),  # made below
                wants_evicted=lambda ns_id, key: self.service.wants_evicted(ns_id, key),
                policy=config.disk.policy,
            )
            undo.callback(disk.close)
            shared = SharedTier(config.shared, config.shared_limits()) if config.shared else None
            self.service = Service(disk, shared, config.spill())
            self.service.session_table = SessionTable(self.service.moves, make_refs, config)
            undo.callback(self.service.close)
            check_tcp(config)  # before its files are read: whoever wrote them down wants all mistakes at once
            self.access = Access(config.listen)
            self.commands = Commands(self.service, config, self._leave.set, self.access)
            self.node = Node(self.service, self.commands.inspector, config.disk_dir)
            undo.callback(self.node.close)
            self.commands.inspector.network = self.network
            if self.node.feed is not None:
                self.commands.inspector.fleet = lambda feed=self.node.feed: feed.stat()._asdict()  # type: ignore[misc]
            self.commands.reload = Reloader(self).reload  # refuses; whoever read a file puts another in its place
            sockets = [undo.enter_context(listener or listen(config.socket, config.listen.socket_mode))]
            if self._made_socket:
                undo.callback(config.socket.unlink, missing_ok=True)
            sockets += [undo.enter_context(sock) for sock in listen_tcp(config)]
            self._listener = Front(config.listen, self.access, self.commands, sockets, self._gone, listener)
            self.admin = make_admin(config, self.commands.inspector, self.access)
            undo.pop_all()

    def run(self) -> None:
        """Serve until a signal, SHUTDOWN, or the end of the linger; then give everything back."""
        logger.info("%s", self.describe())
        self.node.start()
        if self._listener is not None:
            self._listener.start()
        if self.admin is not None:
            self.admin.start()
        try:
            while not self._leave.wait(0.2):
                if self._not_needed():
                    logger.info("the last engine has gone; leaving")
                    break
        finally:
            self._drain()
            self.close()
            logger.info("stopped")

    def leave(self) -> None:
        """Make :meth:`run` return when what is queued is written; the second time, at once."""
        if self._leave.is_set():
            self._at_once.set()
        self._leave.set()

    @property
    def leaving(self) -> bool:
        """Whether the server was told to leave: it stores nothing more."""
        return self._leave.is_set()

    def reconfigure(self, config: ServerConfig) -> None:
        """Go on with what may change while a server runs; :class:`tierkv_server.reload.Reloader` sees to the rest."""
        if self.admin is not None:
            self.admin.reload(config.listen)
        if self._listener is not None:
            self._listener.reload(config.listen)
        self.config = config
        self.commands.reconfigure(config)
        self.service.moves.spill.policies = config.spill()
        if self.service.session_table:
            self.service.session_table.reconfigure(config)
        self.service.disk.set_limits(config.disk_limits())
        if self.service.shared:
            self.service.shared.set_limits(config.shared_limits())
        logger.setLevel(config.log_level.upper())

    def _drain(self) -> None:
        """Take no more stores and write what is queued, for ``drain_s`` at most."""
        self._leave.set()
        self.service.refuse_stores()
        deadline = time.monotonic() + self.config.drain_s
        if any(self.service.queued_nbytes().values()):
            logger.info("writing what is queued before leaving, for %g s at most", self.config.drain_s)
        while not self._at_once.is_set() and (left := deadline - time.monotonic()) > 0:
            if self.service.drain(min(left, 0.1)):
                return
        queued = {tier: format_size(n) for tier, n in self.service.queued_nbytes().items() if n}
        if queued:
            logger.warning("leaving although not everything was written: %s", queued)

    def describe(self) -> str:
        """Return the effective configuration in one line, without secrets."""
        return self.config.describe()

    def close(self) -> None:
        """Stop listening, end every session, close the tiers. Idempotent."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self.admin is not None:
            self.admin.close()
        if self._made_socket:
            with contextlib.suppress(FileNotFoundError):
                self.config.socket.unlink()
        self.node.close()
        self.service.close()
        os.close(self._lock_fd)

    # -- life

    def _not_needed(self) -> bool:
        if self.config.linger_s is None:
            return False
        if self.service.sessions:
            self._had_engine, self._idle_since = True, time.monotonic()
            return False
        grace = self.config.linger_s if self._had_engine else max(STARTUP_GRACE_S, self.config.linger_s)
        return time.monotonic() - self._idle_since > grace

    # -- connections

    @property
    def _connections(self) -> set[Connection]:
        return self._listener.connections if self._listener else set()

    def network(self) -> dict[str, int]:
        """Return the connections there are, and counters since start (:meth:`tierkv_server.front.Front.stat`)."""
        return self._listener.stat() if self._listener else {}

    @property
    def tcp_addresses(self) -> list[tuple[str, int]]:
        """Host and port of every TCP socket that is listened on."""
        return self._listener.tcp_addresses if self._listener else []

    def _gone(self, connection: Connection) -> None:
        if connection.owns_session and connection.session:
            self.service.close_session(connection.session)
            self._had_engine, self._idle_since = True, time.monotonic()  # it may have come and gone between two looks
            logger.info("engine %s left", connection.session.hello.engine_id)


def make_admin(config: ServerConfig, inspector: Inspector, access: Access) -> AdminServer | None:
    """Return the admin HTTP server, which listens and does not serve yet; None where none is configured.

    Raises:
        ConfigError: its address cannot be had.
    """
    if config.http is None:
        return None
    from tierkv_server.admin.http import AdminServer  # an event loop and a web framework: only where they are used

    return AdminServer(config.http, config.listen, inspector, access)


def lock_directory(directory: Path) -> int:
    """Make ``directory`` if need be, take its lock and return the descriptor that holds it.

    Raises:
        DirectoryInUseError: another server has it.
        ConfigError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"disk_dir={str(directory)!r} cannot be used: {error.strerror}; set disk_dir to a directory on a local "
            f"disk that this user can write"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise DirectoryInUseError(
            f"disk_dir={str(directory)!r} belongs to a store server that is running (pid {owner or 'unknown'}); "
            f"use that server, stop it, or set another disk_dir"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd

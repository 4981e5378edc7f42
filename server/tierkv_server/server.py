"""The process: takes the directory's lock, opens the tiers, listens, and leaves when it is told or not needed.

Theory of operation. One thread a connection reads commands and answers them in order; clients that want several
things at a time use several connections. Threads rather than an event loop: descriptors travel with messages, which
event-loop transports do not support; LMDB and Redis block; and measured latencies are equal (docs/decisions).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tierkv.errors import ConfigError, ProtocolError
from tierkv.resp import Error, Parser, Value, encode
from tierkv.server_config import ServerConfig
from tierkv.sizes import format_size
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.shared import SharedTier
from tierkv.unix import short_path
from tierkv.urls import redact_url
from tierkv_server.commands import Commands, Connection, Reply
from tierkv_server.malloc import keep_freed_memory
from tierkv_server.service import Service

logger = logging.getLogger("tierkv")

MAX_CONNECTIONS = 512
MAX_FDS = 64
_RECV_NBYTES = 1 << 18
#: A client that takes nothing for this long (struct timeval: seconds, microseconds) is cut off.
_SEND_TIMEOUT = struct.pack("ll", 5, 0)
#: A server that was launched for an engine waits this long for it to say hello.
STARTUP_GRACE_S = 60.0


class DirectoryInUseError(ConfigError):
    """Another server owns the directory."""


class Server:
    """A store server.

    Args:
        config: what to run with.
        on_owned: called when the directory is this server's, before anything in it is opened.

    Raises:
        DirectoryInUseError: another server owns ``disk_dir``.
        ConfigError: the directory, the socket or the URL is not usable.
    """

    def __init__(self, config: ServerConfig, on_owned: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self._lock_fd = lock_directory(config.disk_dir)
        on_owned()
        self._leave = threading.Event()
        self._connections: set[Connection] = set()
        self._guard = threading.Lock()
        self._had_engine = False
        self._idle_since = time.monotonic()
        self._listener: socket.socket | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            disk = DiskTier(config.disk_dir, config.disk_bytes)
            undo.callback(disk.close)
            shared = SharedTier(config.shared_url) if config.shared_url else None
            self.service = Service(disk, shared)
            undo.callback(self.service.close)
            self.commands = Commands(self.service, config, self._leave.set)
            self._listener = listen(config.socket)
            undo.pop_all()

    def run(self) -> None:
        """Serve until a signal, SHUTDOWN, or the end of the linger; then give everything back."""
        logger.info("%s", self.describe())
        accepting = threading.Thread(target=self._accept, name="tierkv-accept", daemon=True)
        accepting.start()
        try:
            while not self._leave.wait(0.2):
                if self._not_needed():
                    logger.info("the last engine has gone; leaving")
                    break
        finally:
            self.close()

    def leave(self) -> None:
        """Make :meth:`run` return soon. Safe in a signal handler."""
        self._leave.set()

    def describe(self) -> str:
        """Return the effective configuration in one line, without secrets."""
        c = self.config
        shared = f"shared {redact_url(c.shared_url)}" if c.shared_url else "no shared tier"
        stay = "stays" if c.linger_s is None else f"leaves {c.linger_s:g} s after its last engine"
        return f"serving on {c.socket}: disk {format_size(c.disk_bytes)} in {c.disk_dir}, {shared}; {stay}"

    def close(self) -> None:
        """Stop listening, end every session, close the tiers. Idempotent."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            self.config.socket.unlink()
        with self._guard:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
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

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and not self._leave.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._listener is None:
                    return
                time.sleep(0.05)  # out of descriptors: those who are here go on
                continue
            if not self._admit(sock):
                sock.close()
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            connection = Connection(sock)
            with self._guard:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="tierkv-client", daemon=True).start()

    def _admit(self, sock: socket.socket) -> bool:
        """Return whether the peer may use this server: it has our user id (or is root), and there is room."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            logger.warning("a connection of user %d was refused: this server serves user %d", uid, os.getuid())
            return False
        return len(self._connections) < MAX_CONNECTIONS

    def _serve(self, connection: Connection) -> None:
        parser = Parser(inline=True)
        try:
            while not connection.closing:
                data, fds, _, _ = socket.recv_fds(connection.sock, _RECV_NBYTES, MAX_FDS)
                connection.fds += fds
                if not data:
                    break
                for value in parser.feed(data):
                    if value == []:
                        continue  # as Redis does
                    reply = self._answer(connection, value)
                    try:
                        connection.sock.sendall(encode(reply))
                    finally:
                        connection.replied()
        except ProtocolError as error:
            with contextlib.suppress(OSError):
                connection.sock.sendall(encode(Error(f"ERR protocol: {error}")))
        except OSError:
            pass
        finally:
            self._gone(connection)

    def _answer(self, connection: Connection, value: Value) -> Reply:
        if not isinstance(value, list) or not value or not all(isinstance(w, bytes) for w in value):
            raise ProtocolError("a command is an array of bulk strings")
        return self.commands.run(connection, [word for word in value if isinstance(word, bytes)])

    def _gone(self, connection: Connection) -> None:
        with self._guard:
            self._connections.discard(connection)
        connection.sock.close()
        for fd in connection.take_fds():
            os.close(fd)
        if connection.owns_session and connection.session:
            self.service.close_session(connection.session)
            self._had_engine, self._idle_since = True, time.monotonic()  # it may have come and gone between two looks
            logger.info("engine %s left", connection.session.hello.engine_id)


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


def listen(path: Path) -> socket.socket:
    """Return a unix socket that listens on ``path``, mode 0600. The caller has the directory's lock.

    A path longer than the kernel takes (107 bytes) is reached through the descriptor of its directory.

    Raises:
        ConfigError: the path is not usable, or something that is no socket stands there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_socket():
            _check_stale(path)
            path.unlink()
        elif path.exists():
            raise ConfigError(f"socket={str(path)!r} is something that is no socket; remove it or set another path")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as name:
            old = os.umask(0o177)
            try:
                listener.bind(name)
            finally:
                os.umask(old)
        listener.listen(128)
    except OSError as error:
        raise ConfigError(f"socket={str(path)!r} cannot be used: {error.strerror or error}; set another path") from None
    return listener


def _check_stale(path: Path) -> None:
    """Refuse to take a socket on which somebody answers."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe, short_path(path) as name:
        try:
            probe.connect(name)
        except OSError:
            return
    raise ConfigError(f"socket={str(path)!r} belongs to a server that is running; set another path")


def run_until_signal(server: Server) -> None:
    """Run a server in this process until SIGTERM, SIGINT, SIGHUP or the end of its linger."""
    keep_freed_memory()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: server.leave())
    server.run()

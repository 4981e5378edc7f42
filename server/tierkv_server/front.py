"""The front: lets connections in, reads commands, sends replies, and cuts off who costs more than it may.

Theory of operation. A thread for each listening socket accepts; a thread for each connection does the rest, a TLS
handshake included, so that nobody waits for another. What a peer may cost grows with what is known of it: one over TCP
that has not authenticated has one small command and a few seconds, and there are few of its kind. Everybody's commands
are bounded in bytes (:data:`tierkv_server.access.BOUNDS`) and have to arrive, and replies have to be taken, at some
rate. Replies go out in order, one before the next command is looked at: a client that does not read stops itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tierkv.errors import ProtocolError
from tierkv.health import Repeated
from tierkv.resp import Error, Placed, Value, encode
from tierkv.server_config import ListenConfig
from tierkv.transport import tune_tcp
from tierkv_server.access import AUTH_DEADLINE_S, Access, Role
from tierkv_server.commands import Commands
from tierkv_server.connection import Connection
from tierkv_server.inline import Payloads
from tierkv_server.stream import MIN_RATE, PlainStream, Stream, TlsStream

logger = logging.getLogger("tierkv")

#: Connections over TCP that have not authenticated: all together, and from one address.
MAX_STRANGERS = 64
MAX_STRANGERS_OF_HOST = 16
#: Of all connections, those that are kept for the unix socket (a quarter at most).
RESERVED = 64
#: A command that has begun to arrive has this long, and then its bytes have to come at ``MIN_RATE``.
COMMAND_GRACE_S = 10.0
#: Bytes that are received in one go: of strangers, over TCP, over the unix socket.
_RECV_STRANGER, _RECV_TCP, _RECV_UNIX = 4 << 10, 64 << 10, 256 << 10
#: A listener that is not shut down does not wake the thread that accepts on it: it looks up this often.
_KEPT_POLL_S = 0.2
#: First words of HTTP: a browser that was led here must not have what follows taken for commands.
_HTTP = (b"POST", b"HOST:")


class Front:
    """Serves connections.

    Args:
        config: its limits; read again by :meth:`reload`.
        access: who may come in.
        commands: what they may ask.
        listeners: the sockets to accept on; owned.
        on_gone: called with every connection that has ended.
        kept: the one of the listeners that a service manager goes on listening on: it is let go of, not shut down.
    """

    def __init__(
        self,
        config: ListenConfig,
        access: Access,
        commands: Commands,
        listeners: Sequence[socket.socket],
        on_gone: Callable[[Connection], None],
        kept: socket.socket | None = None,
    ) -> None:
        self.connections: set[Connection] = set()
        self.counters: Counter[str] = Counter()
        self._config = config
        self._access = access
        self._commands = commands
        self._listeners = list(listeners)
        self._kept = kept
        if kept is not None:
            kept.settimeout(_KEPT_POLL_S)
        self._on_gone = on_gone
        self._guard = threading.Lock()
        self._closed = False
        self._unforeseen = Repeated()
        self._others = Repeated()

    @property
    def tcp_addresses(self) -> list[tuple[str, int]]:
        """Host and port of every TCP socket that is listened on."""
        return [s.getsockname()[:2] for s in self._listeners if s.family != socket.AF_UNIX]

    def start(self) -> None:
        """Begin to accept."""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="tierkv-accept", daemon=True).start()

    def reload(self, config: ListenConfig) -> None:
        """Read tokens and certificates again. Connections whose token is not valid any more are ended.

        Raises:
            ConfigError: a file is not usable; nothing has changed.
        """
        self._access.load(config)
        self._config = config
        with self._guard:
            connections = list(self.connections)
        for connection in connections:
            if connection.credential and not self._access.tokens.holds(connection.role, connection.credential):
                logger.info(
                    "the %s at %s is cut off: its token is not valid any more", connection.role, connection.peer
                )
                connection.stream.shutdown()

    def stat(self) -> dict[str, int]:
        """Return the connections there are, and counters since start.

        ``refused``: those there was no room for, or of another user. ``cut_off``: too slow, or not authenticated in
        time. ``garbage``: those that sent what is no command. ``wrong_tokens``: tries to authenticate.
        """
        with self._guard:
            local = sum(connection.local for connection in self.connections)
            strangers = sum(connection.role is Role.NOBODY for connection in self.connections)
            total = len(self.connections)
            counted = {name: self.counters[name] for name in ("refused", "cut_off", "garbage")}
        now = {"unix": local, "tcp": total - local, "strangers": strangers}
        return now | counted | {"wrong_tokens": self._access.failures.num}

    def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        self._closed = True
        for listener in self._listeners:
            if listener is not self._kept:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
        with self._guard:
            connections = list(self.connections)
        for connection in connections:
            connection.stream.shutdown()

    # -- letting in

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # out of descriptors: those who are here go on
                continue
            try:
                self._admit(sock)
            except Exception:  # no thread, no memory, or it has gone already
                sock.close()
                self._count("refused")
                logger.debug("a connection could not be served", exc_info=True)
        if listener is self._kept:
            listener.close()

    def _admit(self, sock: socket.socket) -> None:
        connection = self._admit_unix(sock) if sock.family == socket.AF_UNIX else self._admit_tcp(sock)
        if connection is None:
            self._count("refused")
            return
        with self._guard:
            self.connections.add(connection)
        if self._closed:
            connection.stream.shutdown()
        try:
            threading.Thread(target=self._serve, args=(connection,), name="tierkv-client", daemon=True).start()
        except BaseException:
            self._gone(connection)
            raise

    def _admit_unix(self, sock: socket.socket) -> Connection | None:
        """Let a peer in that has our user id (or is root), if there is room."""
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            self._others.note("a connection of user %d was refused: this server serves user %d", uid, os.getuid())
            sock.close()
            return None
        if len(self.connections) >= self._config.max_connections:
            _turn_away(sock)
            return None
        return Connection(PlainStream(sock), f"process {pid}", "", Role.ADMIN)

    def _admit_tcp(self, sock: socket.socket) -> Connection | None:
        host, port = sock.getpeername()[:2]
        role = Role.ADMIN if self._config.insecure and not self._access.tokens else Role.NOBODY
        most = self._config.max_connections - min(RESERVED, self._config.max_connections // 4)
        with self._guard:
            over_tcp = [connection for connection in self.connections if not connection.local]
        strangers = [connection.host for connection in over_tcp if connection.role is Role.NOBODY]
        too_strange = len(strangers) >= MAX_STRANGERS or strangers.count(host) >= MAX_STRANGERS_OF_HOST
        if len(over_tcp) >= most or (role is Role.NOBODY and too_strange):
            _turn_away(sock, plain=self._access.tls is None)
            return None
        tune_tcp(sock)
        stream: Stream = PlainStream(sock) if self._access.tls is None else TlsStream(sock, self._access.tls)
        return Connection(stream, f"{host} port {port}", host, role)

    # -- serving

    def _serve(self, connection: Connection) -> None:
        try:
            connection.stream.handshake(connection.since + AUTH_DEADLINE_S)
            self._talk(connection)
            if connection.closing:
                connection.stream.finish()
        except ProtocolError as error:
            self._count("garbage")
            with contextlib.suppress(OSError):
                connection.stream.send(encode(Error(f"ERR protocol: {error}")))
                connection.stream.finish()
        except TimeoutError:
            self._count("cut_off")
        except OSError as error:  # it has gone, or never wanted TLS
            logger.debug("the connection of %s ended: %s", connection.peer, error)
        except Exception:
            self._unforeseen.note("the connection of %s failed in an unforeseen way", connection.peer, exc_info=True)
        finally:
            self._gone(connection)

    def _talk(self, connection: Connection) -> None:
        """Answer commands until the other side has gone, or is to go.

        Raises:
            ProtocolError: what came is no command.
            TimeoutError: it is too slow.
            OSError: the connection is of no use any more.
        """
        parser, stream = connection.parser, connection.stream
        begun: float | None = None  # when the rest of the command that has begun was first waited for
        while not connection.closing:
            begun = (begun or time.monotonic()) if parser.mid_value else None
            deadline = self._deadline(connection, begun)
            space = parser.space()
            if space is not None:
                nbytes = stream.recv_into(space, deadline)
                values = parser.filled(nbytes)
            else:
                data = stream.recv(_recv_nbytes(connection), deadline)
                nbytes, values = len(data), parser.feed(data)
            if not nbytes:
                return
            for value in values:
                begun = None
                if value != []:  # which is nothing, as with Redis
                    self._answer(connection, value)
                if connection.closing:
                    return

    @staticmethod
    def _deadline(connection: Connection, begun: float | None) -> float | None:
        if connection.role is Role.NOBODY:
            return connection.since + AUTH_DEADLINE_S
        return None if begun is None else begun + COMMAND_GRACE_S + connection.parser.num_taken / MIN_RATE

    def _answer(self, connection: Connection, value: Value) -> None:
        if not isinstance(value, list) or not all(isinstance(word, bytes | Placed) for word in value):
            raise ProtocolError("a command is an array of bulk strings")
        words = [word for word in value if isinstance(word, bytes)]
        if not words or words[0].upper() in _HTTP:
            raise ProtocolError("this is no HTTP server; it speaks RESP, as Redis does")
        connection.num_placed = len(value) - len(words)
        reply = self._commands.run(connection, words)
        try:
            if isinstance(reply, Payloads):
                connection.stream.send(*reply.views())
            else:
                connection.stream.send(encode(reply))
        finally:
            connection.replied()

    def _gone(self, connection: Connection) -> None:
        with self._guard:
            self.connections.discard(connection)
        connection.stream.close()
        connection.give_back()
        self._on_gone(connection)

    def _count(self, name: str) -> None:
        with self._guard:
            self.counters[name] += 1


def _recv_nbytes(connection: Connection) -> int:
    if connection.role is Role.NOBODY:
        return _RECV_STRANGER
    return _RECV_UNIX if connection.local else _RECV_TCP


def _turn_away(sock: socket.socket, plain: bool = True) -> None:
    """Close a connection that there is no room for; over TLS without a word, which would need a handshake."""
    with sock, contextlib.suppress(OSError):
        if plain:
            sock.setblocking(False)
            sock.send(encode(Error("BUSY this server has as many connections as it takes; close some, or come later")))

"""The HTTP server: a thread with an event loop, sockets, TLS, and what clients may not do to them.

Connections are bounded in number before anything is read of them. One that does not say what it wants in time, or does
not take its reply, is cut.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tierkv.errors import ConfigError
from tierkv.server_config import HttpConfig, ListenConfig
from tierkv_server.access import Access, Role, Tokens, tls_context
from tierkv_server.admin.api import Api
from tierkv_server.admin.app import App
from tierkv_server.admin.guard import Guard, is_loopback_address
from tierkv_server.admin.stats import Stats
from tierkv_server.inspect import Inspector

logger = logging.getLogger("tierkv")

#: Connections at a time; more wait in the kernel.
MAX_CONNECTIONS = 128
BACKLOG = 64
#: A request's head is not larger.
MAX_HEAD_NBYTES = 16 << 10
#: A client may take this long for a TLS handshake, for a request's head, and between two looks to take some of a reply.
PATIENCE_S = 10.0
KEEP_ALIVE_S = 5.0
_LOOK_S = 1.0
#: Requests and calls under way when the server stops have this long.
STOP_S = 2.0


class AdminServer:
    """The admin HTTP server of a store server.

    Args:
        config: where to listen. Port 0 takes a free one (:attr:`address`).
        listen: the certificate for other addresses than the loopback's.
        inspector: answers the questions.
        access: the tokens of the roles, as they are now.

    Raises:
        ConfigError: the address cannot be had, or may not be used without a token and TLS.
    """

    def __init__(self, config: HttpConfig, listen: ListenConfig, inspector: Inspector, access: Access) -> None:
        host, port = _split(config.listen)
        family, address = _resolve(config.listen, host, port)
        loopback = is_loopback_address(address)
        self._tls = None if loopback else _make_tls(config.listen, listen, access.tokens)
        self._socket = _bind(config.listen, family, address, port)
        self.stats = Stats(inspector.stat, farewells=inspector.take_farewells)
        self._app = App(Api(inspector, self.stats), Guard(access, loopback))
        settings = uvicorn.Config(
            self._app.asgi(),
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(STOP_S),
            h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
        )
        self._server = _Server(settings, self._tls)
        self._thread = threading.Thread(target=self._run, name="tierkv-admin", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """The address that it listens on."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    @property
    def url(self) -> str:
        """Where to point a browser."""
        host, port = self.address
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"

    def start(self) -> None:
        """Serve from now on, in a thread."""
        self._url = self.url  # the socket is gone when the thread closes it
        logger.info("admin HTTP on %s", self._url)
        self.stats.start()
        self._thread.start()

    def reload(self, listen: ListenConfig) -> None:
        """Use the certificate that ``listen`` names, as its files are now, for new connections.

        Raises:
            ConfigError: they cannot be used; the old one stays.
        """
        if self._tls is not None:
            self._tls = self._server.tls = _context(listen)

    def close(self) -> None:
        """Stop serving; requests under way have ``STOP_S`` seconds to end. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * STOP_S + 1.0)
        self._socket.close()
        self._app.close(STOP_S)
        self.stats.close()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except Exception:  # the store server goes on without it
            logger.exception("the admin HTTP server ended")


class _Protocol(H11Protocol):
    """A connection that is cut when its client is too slow: to say what it wants, or to take what it gets.

    What a request's own work takes is not its fault; a body that does not come is the application's to cut.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.lost = asyncio.Event()
        self._moved = self.loop.time()
        self._seen: tuple[int, int] = (0, 0)
        self._look_again = self.loop.call_later(_LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_again.cancel()
        super().connection_lost(exc)
        self.lost.set()

    def _look(self) -> None:
        """Cut the connection if nothing has moved for ``PATIENCE_S`` and that is the client's doing."""
        unsent = self.transport.get_write_buffer_size()
        seen = (id(self.cycle), unsent)
        ours = self.cycle is not None and not self.cycle.response_complete and not unsent
        if ours or seen != self._seen:
            self._moved = self.loop.time()
        self._seen = seen
        if self.loop.time() - self._moved > PATIENCE_S:
            self.transport.abort()
        else:
            self._look_again = self.loop.call_later(_LOOK_S, self._look)


class _Server(uvicorn.Server):
    """Accepts at most ``MAX_CONNECTIONS`` at a time, handshakes included, which uvicorn's own way does not bound."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers: list[Any] = []
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors: those who are here go on
                self._room.release()
                await asyncio.sleep(0.1)
                continue
            except asyncio.CancelledError:
                self._room.release()
                raise
            task = asyncio.create_task(self._hold(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hold(self, sock: socket.socket) -> None:
        """Serve a connection until it is lost."""
        protocol = _Protocol(self.config, self.server_state, {})
        limit = PATIENCE_S if self.tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, sock, ssl=self.tls, ssl_handshake_timeout=limit
            )
            await protocol.lost.wait()
        except OSError:  # the handshake failed, or did not come
            sock.close()
        finally:
            self._room.release()


# -- addresses and certificates


def _split(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"http.listen={listen!r} is not an address; write host:port, such as '127.0.0.1:9109'")
    return host.strip("[]"), int(port)


def _resolve(listen: str, host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the family and the IP address of a host; an empty host is every address."""
    if not host:
        return socket.AF_INET, "0.0.0.0"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"http.listen={listen!r} cannot be used: {error.strerror or error}") from None
    return family, str(address[0])


def _bind(listen: str, family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"http.listen={listen!r} cannot be used: {error.strerror or error}; choose another port or stop its owner"
        ) from None
    return sock


def _make_tls(where: str, listen: ListenConfig, tokens: Tokens) -> ssl.SSLContext:
    """Return the TLS that is a must off the loopback, as a token is.

    Raises:
        ConfigError: one of them is missing, or the certificate cannot be used.
    """
    if not (tokens.has(Role.READER) or tokens.has(Role.ADMIN)):
        raise ConfigError(
            f"http.listen={where!r} is not on the loopback, and no token is configured: anybody could look; set "
            f"listen.reader_token_file or listen.admin_token_file, or listen on 127.0.0.1"
        )
    return _context(listen)


def _context(listen: ListenConfig) -> ssl.SSLContext:
    """Return TLS without clients' certificates: probes and browsers have none, they send tokens.

    Raises:
        ConfigError: there is no certificate, or it cannot be used.
    """
    context = tls_context(msgspec.structs.replace(listen, tls_client_ca=None))
    if context is None:
        raise ConfigError(
            "http.listen is not on the loopback, and there is no certificate: tokens would travel in clear; set "
            "listen.tls_cert and listen.tls_key, or listen on 127.0.0.1"
        )
    return context

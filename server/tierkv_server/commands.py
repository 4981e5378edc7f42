"""The commands: RESP words in, a RESP value out. ``docs/protocol.md`` describes each of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tierkv import __version__
from tierkv.config import PROTOCOL_VERSION, shared_digest
from tierkv.errors import RefusedError, TierKVError
from tierkv.keys import KEY_NBYTES
from tierkv.messages import Hello, Select, StoreItem, Welcome
from tierkv.pool import HostPool
from tierkv.resp import Error, Simple, Value
from tierkv.server_config import ServerConfig
from tierkv.urls import redact_url
from tierkv_server.inspect import Inspector
from tierkv_server.service import Service, make_refs
from tierkv_server.session import Session

logger = logging.getLogger("tierkv")

#: What a command answers; a dict is for clients that asked for RESP3.
Reply = Value | str | dict[str, Value | str]

MAX_KEYS = 1 << 17
_MAX_DRAIN_S = 60.0


class Connection:
    """What the commands know of a connection: its socket, the descriptors that came last, its session.

    Thread-safety: belongs to the thread that serves the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self.session: Session | None = None
        self.owns_session = False
        self.after_reply: Callable[[], None] | None = None
        self.closing = False

    def take_fds(self) -> list[int]:
        """Return the descriptors that have arrived, which the caller owns from now on."""
        fds, self.fds = self.fds, []
        return fds

    def replied(self) -> None:
        """Do what the last command left for the time after its reply."""
        todo, self.after_reply = self.after_reply, None
        if todo:
            todo()

    def need_session(self) -> Session:
        if self.session is None:
            raise RefusedError("this connection has no session; send TKV.HELLO or TKV.ATTACH first")
        return self.session


class Commands:
    """Dispatches commands to the service.

    Args:
        service: the tiers.
        config: what this server runs with.
        leave: called by SHUTDOWN.
    """

    def __init__(self, service: Service, config: ServerConfig, leave: Callable[[], None]) -> None:
        self.boot = secrets.token_hex(8)
        self._service = service
        self._config = config
        self._leave = leave
        about = {
            "disk_dir": str(config.disk_dir),
            "socket": str(config.socket),
            "shared_url": redact_url(config.shared_url),
            "boot": self.boot,
        }
        self._inspector = Inspector(service, about)
        self._table: dict[bytes, Callable[[Connection, Sequence[bytes]], Reply]] = {
            b"PING": lambda c, args: args[0] if args else Simple("PONG"),
            b"ECHO": lambda c, args: args[0],
            b"HELLO": self._resp_hello,
            b"QUIT": self._quit,
            b"COMMAND": lambda c, args: [],
            b"CLIENT": lambda c, args: Simple("OK"),
            b"SELECT": lambda c, args: Simple("OK"),
            b"SHUTDOWN": self._shutdown,
            b"TKV.HELLO": self._hello,
            b"TKV.ATTACH": self._attach,
            b"TKV.SUBSCRIBE": self._subscribe,
            b"TKV.ANSWER": self._answer,
            b"TKV.MATCH": self._match,
            b"TKV.FETCH": self._fetch,
            b"TKV.STORE": self._store,
            b"TKV.DRAIN": self._drain,
            b"TKV.STAT": lambda c, args: _json(self._inspector.stat()),
            b"TKV.NS": lambda c, args: _json({i.hex(): n for i, n in self._inspector.namespaces().items()}),
            b"TKV.LS": lambda c, args: _json(self._inspector.ls(_select(args))),
            b"TKV.LOCATE": lambda c, args: _json(self._inspector.locate(_select(args))),
            b"TKV.EVICT": lambda c, args: _json(self._inspector.evict(_select(args))),
        }

    def run(self, connection: Connection, words: Sequence[bytes]) -> Reply:
        """Execute one command and return its reply; faults are error replies, never exceptions."""
        name = words[0].upper()
        command = self._table.get(name)
        if command is None:
            return Error(f"ERR unknown command {name[:64].decode('utf-8', 'replace')!r}")
        try:
            return command(connection, words[1:])
        except RefusedError as error:
            return Error(f"REFUSED {error}")
        except (IndexError, ValueError, ArithmeticError, struct.error, msgspec.MsgspecError) as error:
            return Error(f"ERR bad arguments for {name.decode()}: {error}")
        except TierKVError as error:
            return Error(f"ERR {error}")
        except Exception as error:  # a fault here must not take the server down
            logger.exception("%s failed", name.decode())
            return Error(f"ERR {name.decode()} failed: {error!r}")
        finally:
            for fd in connection.take_fds():  # nobody wanted them
                os.close(fd)

    # -- engines

    def _hello(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        _check_version(args[0])
        hello = msgspec.json.decode(args[0], type=Hello)
        self._check_shared(hello)
        num_fds = len(connection.fds)
        if connection.session is not None or num_fds != hello.shape.num_parts + 1 or not _is_socket(connection.fds[-1]):
            raise RefusedError(
                f"TKV.HELLO opens a session once, with {hello.shape.num_parts} pool segments and a lease socket; "
                f"{num_fds} descriptors came"
            )
        if hello.shape.payload_nbytes != hello.namespace.payload_nbytes:
            raise RefusedError("the pool's slots and the namespace's payloads differ in size")
        fds = connection.take_fds()
        lease = socket.socket(fileno=fds[-1])
        try:
            pool = HostPool.from_fds(hello.shape, fds[:-1])
        except BaseException:
            lease.close()
            raise
        session = Session(hello, pool, lease)
        connection.session, connection.owns_session = session, True
        self._service.open_session(session)
        logger.info("engine %s (pid %d) joined with %s", hello.engine_id, hello.pid, hello.namespace.layout.describe())
        return msgspec.json.encode(
            Welcome(
                version=__version__,
                protocol=PROTOCOL_VERSION,
                boot=self.boot,
                session=session.id,
                pid=os.getpid(),
                disk_dir=str(self._config.disk_dir),
                disk_bytes=self._config.disk_bytes,
                shared=redact_url(self._config.shared_url),
            )
        )

    def _check_shared(self, hello: Hello) -> None:
        if hello.shared is not None and hello.shared != shared_digest(self._config.shared_url):
            mine = f"the shared tier {redact_url(self._config.shared_url)}" if self._config.shared_url else "none"
            raise RefusedError(
                f"the store server of {self._config.disk_dir} (pid {os.getpid()}) runs with {mine}, and this engine "
                f"asks for another; give both the same shared_url, or give this engine a disk_dir of its own"
            )

    def _attach(self, connection: Connection, args: Sequence[bytes]) -> Value:
        session = self._service.sessions.get(args[0].decode())
        if session is None:
            raise RefusedError("this session is not known here; say TKV.HELLO again")
        if connection.session is not None:
            raise RefusedError("this connection has a session already")
        connection.session = session
        return Simple("OK")

    def _subscribe(self, connection: Connection, args: Sequence[bytes]) -> Value:
        session = connection.need_session()
        connection.after_reply = lambda: session.subscribe(connection.sock)  # no push before the reply
        return Simple("OK")

    def _answer(self, connection: Connection, args: Sequence[bytes]) -> Value:
        connection.need_session().answer(int(args[0]), args[1])
        return Simple("OK")

    # -- payloads

    def _match(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        ns_id, start, anchor, packed = args
        return self._service.match(ns_id, make_refs(_keys(packed), int(start), anchor))

    def _fetch(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        start, anchor, packed, packed_slots = args
        keys = _keys(packed)
        slots = struct.unpack(f"<{len(keys)}I", packed_slots)
        return self._service.fetch(connection.need_session(), make_refs(keys, int(start), anchor), slots)

    def _store(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        items = msgspec.msgpack.decode(args[0], type=list[StoreItem])
        for i in items:
            if not len(i.key) == len(i.parent) == len(i.anchor) == KEY_NBYTES or len(i.tenant) != 16:
                raise ValueError(f"a key has {KEY_NBYTES} bytes, a tenant digest 16")
            if not (0 <= i.position < 1 << 32 and 0 <= i.num_tokens < 1 << 32):
                raise ValueError("a position and a number of tokens have 32 bits")
        return self._service.store(connection.need_session(), items)

    def _drain(self, connection: Connection, args: Sequence[bytes]) -> int:
        timeout_s = float(args[0]) if args else _MAX_DRAIN_S
        return int(self._service.drain(min(timeout_s, _MAX_DRAIN_S)))

    # -- the connection and the server

    def _resp_hello(self, connection: Connection, args: Sequence[bytes]) -> Reply:
        """Agree to RESP2 or RESP3: what else this server sends means the same in both."""
        version = int(args[0]) if args else 2
        if version not in (2, 3):
            return Error("NOPROTO this server speaks RESP2 and RESP3")
        about: dict[str, Value | str] = {
            "server": "tierkv",
            "version": __version__,
            "proto": version,
            "mode": "standalone",
        }
        return about if version == 3 else [v.encode() if isinstance(v, str) else v for kv in about.items() for v in kv]

    def _quit(self, connection: Connection, args: Sequence[bytes]) -> Value:
        connection.closing = True
        return Simple("OK")

    def _shutdown(self, connection: Connection, args: Sequence[bytes]) -> Value:
        connection.closing = True
        connection.after_reply = self._leave
        return Simple("OK")


def _check_version(body: bytes) -> None:
    """Refuse another version before the rest of its message is looked at: its fields may differ."""
    about = msgspec.json.decode(body, type=dict[str, Any])
    if about.get("version") != __version__ or about.get("protocol") != PROTOCOL_VERSION:
        raise RefusedError(
            f"this store server (pid {os.getpid()}) is TierKV {__version__}, protocol {PROTOCOL_VERSION}, and the "
            f"engine is TierKV {about.get('version')}, protocol {about.get('protocol')}; use one version for both, "
            f"or give the engine a disk_dir of its own"
        )


def _is_socket(fd: int) -> bool:
    return stat.S_ISSOCK(os.fstat(fd).st_mode)


def _keys(packed: bytes) -> list[bytes]:
    if len(packed) % KEY_NBYTES or len(packed) > MAX_KEYS * KEY_NBYTES:
        raise ValueError(f"keys are {KEY_NBYTES} bytes each, at most {MAX_KEYS}; {len(packed)} bytes came")
    return [packed[i : i + KEY_NBYTES] for i in range(0, len(packed), KEY_NBYTES)]


def _select(args: Sequence[bytes]) -> Select:
    return msgspec.json.decode(args[0], type=Select) if args else Select()


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)

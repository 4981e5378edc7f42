"""The commands: RESP words in, a RESP value out. ``docs/protocol.md`` describes each of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tierkv import __version__
from tierkv.config import PROTOCOL_VERSION, shared_digest
from tierkv.errors import BusyError, DamagedError, NotFoundError, RefusedError, TierKVError
from tierkv.health import Repeated
from tierkv.keys import KEY_NBYTES
from tierkv.layout import Namespace
from tierkv.messages import (
    FAREWELL,
    HANDOFF,
    USED,
    AskedReport,
    Hello,
    HostStat,
    RequestNote,
    Select,
    StoreItem,
    Welcome,
)
from tierkv.pool import HostPool
from tierkv.resp import Error, Simple, Value
from tierkv.server_config import ServerConfig
from tierkv.sessions import SESSION_NBYTES, SessionSelect, SessionTurn
from tierkv.sizes import MAX_DURATION_S
from tierkv.tiers.base import Ref
from tierkv.tiers.disk import DiskTier
from tierkv.urls import redact_url
from tierkv_server.access import AUTH_DELAY_S, MAX_AUTH_TRIES, Access, Role, may
from tierkv_server.chunks import Chunks
from tierkv_server.compact import Compactor
from tierkv_server.connection import Connection
from tierkv_server.dump import dump, restore, stored
from tierkv_server.inline import InlineMemory, Payloads
from tierkv_server.inspect import Inspector
from tierkv_server.service import Service, make_refs
from tierkv_server.session import Session
from tierkv_server.verify import Verifier
from tierkv_server.warm import MAX_YIELD_S, Warmer

logger = logging.getLogger("tierkv")

#: What a command answers; a dict is for clients that asked for RESP3.
Reply = Value | str | dict[str, Value | str] | Payloads

MAX_KEYS = 1 << 17
MAX_FAREWELL_NBYTES = 64 << 10
_MAX_DRAIN_S = 60.0
#: Times in commands are before this, in the year 5138.
MAX_TIME_S = 1e11


class Commands:
    """Dispatches commands to the service.

    Args:
        service: the tiers.
        config: what this server runs with.
        leave: called by SHUTDOWN.
        access: who may do what.
    """

    def __init__(self, service: Service, config: ServerConfig, leave: Callable[[], None], access: Access) -> None:
        self.boot = secrets.token_hex(8)
        self._service = service
        self._config = config
        self._leave = leave
        self._unforeseen = Repeated()
        self._access = access
        self._inline = InlineMemory()
        self.reload: Callable[[], list[str]] = lambda: []  #: reads the configuration again (TKV.RELOAD)
        about = {
            "disk_dir": str(config.disk_dir),
            "socket": str(config.socket),
            "shared_url": redact_url(config.shared_url),
            "boot": self.boot,
        }
        self.inspector = Inspector(service, about)
        self._verifier = Verifier(self.inspector, lambda: service.moves.loads.wait_for_none(MAX_YIELD_S))
        self._warmer = Warmer(service, self.inspector)
        self._chunks = Chunks(self.inspector)
        self._compactor: Compactor | None = None
        if isinstance(service.disk, DiskTier):
            yielding = lambda: service.moves.loads.wait_for_none(MAX_YIELD_S)  # noqa: E731
            self._compactor = Compactor(service.disk, self.inspector.chosen, yielding)
        self._table: dict[bytes, Callable[[Connection, Sequence[bytes]], Reply]] = {
            b"PING": lambda c, args: args[0] if args else Simple("PONG"),
            b"ECHO": lambda c, args: args[0],
            b"AUTH": self._auth,
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
            b"TKV.USE": self._use,
            b"TKV.NOTE": self._note,
            b"TKV.HOLD": self._hold,
            b"TKV.TURN": self._turn,
            b"TKV.ASKED": self._asked,
            b"TKV.DRAIN": self._drain,
            b"TKV.RELOAD": lambda c, args: _json(self.reload()),
            b"TKV.STAT": lambda c, args: _json(self.inspector.stat()),
            b"TKV.ROOM": lambda c, args: _json(self.inspector.room()),
            b"TKV.NS": lambda c, args: _json({i.hex(): n for i, n in self.inspector.namespaces().items()}),
            b"TKV.LS": lambda c, args: _json(self.inspector.ls(_select(args))),
            b"TKV.PAGE": lambda c, args: _json(self.inspector.page(_select(args))),
            b"TKV.SHOW": lambda c, args: _json(self.inspector.show(_select(args))),
            b"TKV.TREE": lambda c, args: _json(self.inspector.tree(_select(args))),
            b"TKV.DU": lambda c, args: _json(self.inspector.du(_select(args))),
            b"TKV.VERIFY": lambda c, args: _json(self._verifier.step(_select(args))),
            b"TKV.WARM": lambda c, args: _json(self._warmer.step(_select(args))),
            b"TKV.COMPACT": lambda c, args: _json(self._compact(_select(args))),
            b"TKV.EVENTS": lambda c, args: _json(self._events(_select(args))),
            b"TKV.SLOW": lambda c, args: _json(self._service.events.slow(_select(args).limit)),
            b"TKV.DUMP": lambda c, args: dump(self._service, args[0], _ref(args[1:])),
            b"TKV.RESTORE": lambda c, args: restore(
                self._service, Namespace.from_json(args[0]), args[1], _time(args[2]) if len(args) > 2 else 0.0
            ),
            b"TKV.CHUNKS": lambda c, args: _json(self._chunks.step(_select(args))),
            b"TKV.STORED": lambda c, args: stored(self._service, args[0], _refs(args[1])),
            b"TKV.LOCATE": lambda c, args: _json(self.inspector.locate(_select(args))),
            b"TKV.EVICT": lambda c, args: _json(self.inspector.evict(_select(args))),
            b"TKV.PIN": lambda c, args: _json(self.inspector.pin(_select(args))),
            b"TKV.UNPIN": lambda c, args: _json(self.inspector.unpin(_select(args))),
            b"TKV.TTL": lambda c, args: _json(self.inspector.ttl(_select(args))),
            b"TKV.REUSE": lambda c, args: _json(self.inspector.reuse()),
            b"TKV.USAGE": lambda c, args: _json(self.inspector.usage(_select(args))),
            b"TKV.SESSIONS": lambda c, args: _json(self.inspector.sessions(_session_select(args))),
            b"TKV.SESSION": self._session_order,
        }

    def reconfigure(self, config: ServerConfig) -> None:
        """Go on with a configuration that was read again."""
        self._config = config

    def run(self, connection: Connection, words: Sequence[bytes]) -> Reply:
        """Execute one command and return its reply; faults are error replies, never exceptions."""
        name = words[0].upper()
        if not may(connection.role, name):
            return self._refuse(connection.role, name)
        command = self._table.get(name)
        if command is None:
            return _unknown(name)
        try:
            return command(connection, words[1:])
        except NotFoundError as error:
            return Error(f"NOTFOUND {error}")
        except BusyError as error:
            return Error(f"BUSY {error}")
        except DamagedError as error:
            return Error(f"DAMAGED {error}")
        except RefusedError as error:
            return Error(f"REFUSED {error}")
        except (IndexError, ValueError, ArithmeticError, struct.error, msgspec.MsgspecError) as error:
            return Error(f"ERR bad arguments for {name.decode()}: {error}")
        except TierKVError as error:
            return Error(f"ERR {error}")
        except Exception as error:  # a fault here must not take the server down
            self._unforeseen.note("%s failed", name.decode(), exc_info=True)
            return Error(f"ERR {name.decode()} failed: {error!r}")
        finally:
            for fd in connection.take_fds():  # nobody wanted them
                os.close(fd)

    def _refuse(self, role: Role, name: bytes) -> Error:
        if role is Role.NOBODY:
            return Error("NOAUTH authentication is required; send AUTH with the token first")
        if name not in self._table:
            return _unknown(name)
        return Error(f"NOPERM the {role}'s token does not allow {name.decode()}; use {self._who_may(name)}")

    def _who_may(self, name: bytes) -> str:
        others = [role for role in (Role.ENGINE, Role.READER) if may(role, name)]
        return " or ".join([*(f"the {role}'s" for role in others), "the admin's"])

    # -- who it is

    def _auth(self, connection: Connection, args: Sequence[bytes]) -> Value:
        if len(args) not in (1, 2):
            raise ValueError("AUTH takes a token, or a role and its token")
        return self._authenticate(connection, args[0] if len(args) == 2 else b"default", args[-1]) or Simple("OK")

    def _authenticate(self, connection: Connection, name: bytes, token: bytes) -> Error | None:
        """Give the connection the role of a token, or return why not: late, and not often.

        Args:
            name: the role, or ``default``: whichever has this token.
        """
        tokens = self._access.tokens
        if not tokens:
            return Error("ERR this server has no tokens to authenticate with; leave AUTH out")
        wanted = next((role for role in Role if role.value.encode() == name), None)
        role = tokens.role_of(token, wanted)
        if role is not None and (wanted is not None or name == b"default"):
            connection.become(role, tokens.credential(role))
            return None
        self._access.failures.note(connection.peer)
        connection.num_wrong_tokens += 1
        connection.closing = connection.num_wrong_tokens >= MAX_AUTH_TRIES
        time.sleep(AUTH_DELAY_S)
        return Error("WRONGPASS this token is not valid here, or not for this role")

    # -- engines

    def _hello(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        _check_version(args[0])
        hello = msgspec.json.decode(args[0], type=Hello)
        self._check_shared(hello)
        if hello.shape.payload_nbytes != hello.namespace.payload_nbytes:
            raise RefusedError("the pool's slots and the namespace's payloads differ in size")
        if hello.inline:
            return self._join(connection, self._inline_session(connection, hello))
        if not connection.local:
            raise RefusedError("over TCP no memory is shared; the engine's hello has to say inline")
        num_fds = len(connection.fds)
        if connection.session is not None or num_fds != hello.shape.num_parts + 1 or not _is_socket(connection.fds[-1]):
            raise RefusedError(
                f"TKV.HELLO opens a session once, with {hello.shape.num_parts} pool segments and a lease socket; "
                f"{num_fds} descriptors came"
            )
        fds = connection.take_fds()
        lease = socket.socket(fileno=fds[-1])
        try:
            pool = HostPool.from_fds(hello.shape, fds[:-1])
        except BaseException:
            lease.close()
            raise
        return self._join(connection, Session(hello, pool, lease))

    def _inline_session(self, connection: Connection, hello: Hello) -> Session:
        if connection.session is not None or connection.fds:
            raise RefusedError("an inline TKV.HELLO opens a session once, and no descriptors come with it")
        return Session(hello, self._inline.make_pool(hello.shape.payload_nbytes), None)

    def _join(self, connection: Connection, session: Session) -> bytes:
        connection.session, connection.owns_session = session, True
        self._service.open_session(session)
        hello = session.hello
        how = "over the connection" if hello.inline else "over shared memory"
        logger.info(
            "engine %s (pid %d) joined %s with %s",
            hello.engine_id,
            hello.pid,
            how,
            hello.namespace.layout.describe(),
        )
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
                spill={tier: policy.value for tier, policy in self._service.moves.spill.policies.items()},
                policy=self._service.disk.stat().policy,
                holds=self._service.weighs_above(),
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
        if not (connection.local or session.hello.inline):
            raise RefusedError("this session shares memory with its engine: its connections come over the unix socket")
        connection.session = session
        return Simple("OK")

    def _subscribe(self, connection: Connection, args: Sequence[bytes]) -> Value:
        session = connection.need_session()

        def subscribe() -> None:  # no push before the reply
            session.subscribe(connection.stream)
            self._service.subscribed(session)

        connection.after_reply = subscribe
        return Simple("OK")

    def _answer(self, connection: Connection, args: Sequence[bytes]) -> Value:
        session, number, body = connection.need_session(), int(args[0]), args[1]
        if number == FAREWELL and len(body) <= MAX_FAREWELL_NBYTES:
            session.farewell = msgspec.json.decode(body, type=HostStat)
        session.answer(number, body)
        return Simple("OK")

    # -- payloads

    def _match(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        ns_id, start, anchor, packed = args
        return self._service.match(ns_id, make_refs(_keys(packed), int(start), anchor))

    def _fetch(self, connection: Connection, args: Sequence[bytes]) -> bytes | Payloads:
        if connection.need_session().hello.inline:
            start, anchor, packed = args
            return connection.mover().fetch(self._service, make_refs(_keys(packed), int(start), anchor))
        start, anchor, packed, packed_slots = args
        keys = _keys(packed)
        slots = struct.unpack(f"<{len(keys)}I", packed_slots)
        return self._service.fetch(connection.need_session(), make_refs(keys, int(start), anchor), slots)

    def _store(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        session = connection.need_session()
        items = msgspec.msgpack.decode(args[0], type=list[StoreItem])
        for i in items:
            if not len(i.key) == len(i.parent) == len(i.anchor) == KEY_NBYTES or len(i.tenant) != 16:
                raise ValueError(f"a key has {KEY_NBYTES} bytes, a tenant digest 16")
            if not (0 <= i.position < 1 << 32 and 0 <= i.num_tokens < 1 << 32):
                raise ValueError("a position and a number of tokens have 32 bits")
        if session.hello.inline:
            _, checksums = args
            return connection.mover().store(self._service, items, checksums, connection.num_placed)
        return self._service.store(session, items)

    def _use(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        start, anchor, packed = args[:3]
        reason = int(args[3]) if len(args) > 3 else USED
        if reason not in (USED, HANDOFF):
            raise ValueError(f"a use is told for reason {USED} or {HANDOFF}; {reason} came")
        return self._service.use(connection.need_session(), make_refs(_keys(packed), int(start), anchor), reason)

    def _note(self, connection: Connection, args: Sequence[bytes]) -> Value:
        session = connection.need_session()
        note = msgspec.msgpack.decode(args[0], type=RequestNote)
        if len(note.session) not in (0, SESSION_NBYTES) or len(note.tenant) != 16:
            raise ValueError(f"a session's digest has {SESSION_NBYTES} bytes, or none, and a tenant's 16")
        if note.retain_s is not None and not 0 <= note.retain_s <= MAX_DURATION_S:
            raise ValueError(f"a session is held from 0 to {MAX_DURATION_S:.0f} seconds")
        self._service.note(session, note, _keys(note.chain))
        return Simple("OK")

    def _hold(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        took, gone = args
        return b"%d" % self._service.hold(connection.need_session(), _keys(took), _keys(gone))

    def _turn(self, connection: Connection, args: Sequence[bytes]) -> Value:
        namespace = connection.need_session().hello.namespace
        turn = msgspec.msgpack.decode(args[0], type=SessionTurn)
        if len(turn.session) not in (0, SESSION_NBYTES) or len(turn.tenant) != 16:
            raise ValueError(f"a session's digest has {SESSION_NBYTES} bytes, or none, and a tenant's 16")
        if not 0 <= turn.retain_s <= MAX_DURATION_S:
            raise ValueError(f"a session is held from 0 to {MAX_DURATION_S:.0f} seconds")
        _keys(turn.chain)
        if self._service.session_table:
            self._service.session_table.turn(namespace, turn)
        return Simple("OK")

    def _asked(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        session = connection.need_session()
        return self._service.reuse.note(session, msgspec.msgpack.decode(args[0], type=AskedReport))

    def _session_order(self, connection: Connection, args: Sequence[bytes]) -> bytes:
        order, select = args[0].lower(), _session_select(args[1:])
        if order == b"release":
            return _json(self.inspector.release_session(select))
        if order == b"prefetch":
            return _json(self.inspector.prefetch_session(select))
        raise ValueError("TKV.SESSION takes 'release' or 'prefetch', and which session")

    def _drain(self, connection: Connection, args: Sequence[bytes]) -> int:
        timeout_s = float(args[0]) if args else _MAX_DRAIN_S
        return int(self._service.drain(min(timeout_s, _MAX_DRAIN_S)))

    def _compact(self, select: Select) -> dict[str, Any]:
        if self._compactor is None:
            raise RefusedError("this server's disk tier keeps no files that could be compacted")
        return self._compactor.step(select)

    def _events(self, select: Select) -> dict[str, Any]:
        return {"boot": self.boot} | self._service.events.since(select.since, select.limit)

    # -- the connection and the server

    def _resp_hello(self, connection: Connection, args: Sequence[bytes]) -> Reply:
        """Agree to RESP2 or RESP3: what else this server sends means the same in both. With AUTH, authenticate."""
        version = int(args[0]) if args else 2
        if version not in (2, 3):
            return Error("NOPROTO this server speaks RESP2 and RESP3")
        options = list(args[1:])
        while options:
            option = options.pop(0).upper()
            if option == b"AUTH" and len(options) >= 2:
                failure = self._authenticate(connection, options.pop(0), options.pop(0))
                if failure is not None:
                    return failure
            elif option == b"SETNAME" and options:
                options.pop(0)
            else:
                raise ValueError("HELLO takes a version, AUTH with a role and its token, and SETNAME with a name")
        if connection.role is Role.NOBODY:
            return Error("NOAUTH authentication is required; send HELLO with AUTH, a role (or default) and its token")
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


def _unknown(name: bytes) -> Error:
    return Error(f"ERR unknown command {name[:64].decode('utf-8', 'replace')!r}")


def _is_socket(fd: int) -> bool:
    return stat.S_ISSOCK(os.fstat(fd).st_mode)


def _keys(packed: bytes) -> list[bytes]:
    if len(packed) % KEY_NBYTES or len(packed) > MAX_KEYS * KEY_NBYTES:
        raise ValueError(f"keys are {KEY_NBYTES} bytes each, at most {MAX_KEYS}; {len(packed)} bytes came")
    return [packed[i : i + KEY_NBYTES] for i in range(0, len(packed), KEY_NBYTES)]


def _ref(args: Sequence[bytes]) -> Ref:
    key, anchor = args
    if not len(key) == len(anchor) == KEY_NBYTES:
        raise ValueError(f"a key and its anchor have {KEY_NBYTES} bytes each")
    return Ref(key, anchor)


def _refs(packed: bytes) -> list[Ref]:
    """Return refs whose keys and anchors are packed one after the other."""
    words = _keys(packed)
    if len(words) % 2:
        raise ValueError("each key is followed by its anchor")
    return [Ref(key, anchor) for key, anchor in zip(words[::2], words[1::2], strict=True)]


def _time(word: bytes) -> float:
    """Return a time in seconds since 1970; 0: none."""
    seconds = float(word)
    if not 0 <= seconds < MAX_TIME_S:
        raise ValueError(f"a time is in seconds since 1970, or 0; {seconds!r} came")
    return seconds


def _select(args: Sequence[bytes]) -> Select:
    return msgspec.json.decode(args[0], type=Select) if args else Select()


def _session_select(args: Sequence[bytes]) -> SessionSelect:
    return msgspec.json.decode(args[0], type=SessionSelect) if args else SessionSelect()


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)

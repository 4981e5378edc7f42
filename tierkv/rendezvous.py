"""How an engine's processes find its pool: local rank 0 hands out the segments' descriptors on a socket.

The socket has an abstract name made of the engine's id and the user's, so that no file can be left behind; peers of
another user are refused. Ranks hand their segment in, the scheduler takes all of them out. The workers exist before the
scheduler's half, in other processes or in the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time

import msgspec

from tierkv.errors import ConfigError, UnavailableError
from tierkv.layout import Layout, Shard
from tierkv.pool import PoolShape

_MAX_NBYTES = 1 << 20
_MAX_FDS = 128
_TIMEOUT_S = 60.0


class Offer(msgspec.Struct, frozen=True):
    """What the workers know of the pool.

    Attributes:
        shape: its shape.
        layout: what its payloads mean.
        shard: how they are cut over ranks.
        portable: a payload does not say how it was cut: engines of other shapes share it.
    """

    shape: PoolShape
    layout: Layout
    shard: Shard = Shard()
    portable: bool = False

    @property
    def namespace_shard(self) -> Shard:
        """The shard by which payloads are found."""
        return Shard(portable=True) if self.portable else self.shard


class _Message(msgspec.Struct, frozen=True):
    """``op`` is ``"put"`` (with the descriptor of ``rank``'s segment), ``"get"`` (everything, once it is complete) or
    ``"ask"`` (the offer alone, at once)."""

    op: str
    rank: int = 0


def address(engine_id: str) -> str:
    """Return the abstract address of an engine's rendezvous."""
    return f"\0tierkv/{os.getuid()}/{hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"


class PoolHost:
    """Local rank 0's side: keeps the segments' descriptors and hands them out.

    Args:
        engine_id: names the engine on this host.
        offer: what the pool is.
        fd: rank 0's own segment; not owned.

    Raises:
        ConfigError: another engine on this host has the same id.
    """

    def __init__(self, engine_id: str, offer: Offer, fd: int) -> None:
        self._offer = offer
        self._fds: dict[int, int] = {0: fd}
        self._given: list[int] = []
        self._complete = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._bind(engine_id)
        self._thread = threading.Thread(target=self._accept, name="tierkv-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop handing out. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for fd in self._given:
            os.close(fd)
        self._given = []

    def _bind(self, engine_id: str) -> None:
        deadline = time.monotonic() + 5.0
        while True:
            try:
                self._listener.bind(address(engine_id))
                self._listener.listen(64)
                return
            except OSError:
                if time.monotonic() > deadline:  # an engine that is leaving may still have it
                    raise ConfigError(
                        f"engine_id={engine_id!r} is in use by another engine on this machine; give each engine's "
                        f"KVTransferConfig an engine_id of its own, or leave it out"
                    ) from None
                time.sleep(0.1)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="tierkv-pool", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, msgspec.MsgspecError):
            sock.settimeout(_TIMEOUT_S)
            _check_peer(sock)
            data, fds, _, _ = socket.recv_fds(sock, _MAX_NBYTES, _MAX_FDS)
            message = msgspec.json.decode(data, type=_Message)
            if message.op == "put" and len(fds) == 1:
                with self._complete:
                    self._fds[message.rank] = fds[0]
                    self._given += fds
                    self._complete.notify_all()
                sock.sendall(b"{}")
            elif message.op == "ask":
                sock.sendall(msgspec.json.encode(self._offer))
            elif message.op == "get":
                num_parts = self._offer.shape.num_parts
                with self._complete:
                    self._complete.wait_for(lambda: len(self._fds) == num_parts, _TIMEOUT_S)
                    if len(self._fds) == num_parts:
                        ordered = [self._fds[rank] for rank in range(num_parts)]
                        socket.send_fds(sock, [msgspec.json.encode(self._offer)], ordered)


def ask_offer(engine_id: str) -> Offer:
    """Return what local rank 0 says the pool is: another rank's segment follows from it.

    Raises:
        UnavailableError: it does not answer in time.
    """
    with _connect(engine_id) as sock:
        sock.sendall(msgspec.json.encode(_Message("ask")))
        data = sock.recv(_MAX_NBYTES)
        if not data:
            raise UnavailableError("local rank 0 did not say what the host pool is")
        return msgspec.json.decode(data, type=Offer)


def put_segment(engine_id: str, rank: int, fd: int) -> None:
    """Hand a rank's segment to local rank 0.

    Raises:
        UnavailableError: it does not answer in time.
    """
    with _connect(engine_id) as sock:
        socket.send_fds(sock, [msgspec.json.encode(_Message("put", rank))], [fd])
        if not sock.recv(16):
            raise UnavailableError("local rank 0 did not take this rank's pool segment")


def get_pool(engine_id: str) -> tuple[Offer, list[int]]:
    """Return what the pool is, and its segments' descriptors in rank order, which the caller owns.

    Raises:
        UnavailableError: the workers do not answer in time.
    """
    with _connect(engine_id) as sock:
        sock.sendall(msgspec.json.encode(_Message("get")))
        data, fds, _, _ = socket.recv_fds(sock, _MAX_NBYTES, _MAX_FDS)
        if not data:
            raise UnavailableError("the workers made no host pool in time")
        return msgspec.json.decode(data, type=Offer), list(fds)


def _connect(engine_id: str) -> socket.socket:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_TIMEOUT_S)
        try:
            sock.connect(address(engine_id))
            _check_peer(sock)
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the engine's local rank 0 does not answer on this host: {error} (the ranks of an engine on "
                    f"several hosts are not served)"
                ) from None
            time.sleep(0.05)


def _check_peer(sock: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"a process of user {uid} is at the other end")

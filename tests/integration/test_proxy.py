"""The proxy that other tests put between a client and a server does what it says, and nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from leaks import num_fds
from proxy import Proxy
from records import wait_until


def echo(listener: socket.socket) -> None:
    """Send back what comes, until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            link, _ = listener.accept()
            threading.Thread(target=_echo_one, args=(link,), daemon=True).start()


def _echo_one(link: socket.socket) -> None:
    with link, contextlib.suppress(OSError):
        while data := link.recv(65536):
            link.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=echo, args=(listener,))
        thread.start()
        with Proxy(("127.0.0.1", listener.getsockname()[1])) as proxy:
            yield proxy
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def connect(proxy: Proxy, timeout_s: float = 10.0) -> socket.socket:
    address = proxy.address
    assert isinstance(address, tuple)
    return socket.create_connection(address, timeout=timeout_s)


def receive(link: socket.socket, num: int) -> bytes:
    """Return ``num`` bytes, or what came before the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < num and (more := link.recv(num - len(data))):
            data += more
    return data


def test_without_faults_everything_passes_and_is_counted(proxy: Proxy) -> None:
    data = os.urandom(1 << 20)
    with connect(proxy) as link:
        writer = threading.Thread(target=link.sendall, args=(data,))
        writer.start()
        assert receive(link, len(data)) == data
        writer.join()
    assert proxy.requests.nbytes == proxy.replies.nbytes == len(data)
    with connect(proxy) as link:
        before = proxy.num_round_trips
        for i in range(5):
            link.sendall(bytes([i]) * 3)
            assert receive(link, 3) == bytes([i]) * 3
        assert proxy.num_round_trips == before + 5
    assert proxy.num_connections == 2
    wait_until(lambda: proxy.num_open == 0)


def test_a_flip_is_one_bit_once(proxy: Proxy) -> None:
    with connect(proxy) as link:
        proxy.replies.flip(3, 0x10)
        link.sendall(bytes(8))
        assert receive(link, 8) == bytes([0, 0, 0, 0x10, 0, 0, 0, 0])
        link.sendall(bytes(8))
        assert receive(link, 8) == bytes(8)
        proxy.requests.flip(0)
        link.sendall(bytes(2))
        assert receive(link, 2) == b"\x01\x00"
    assert (proxy.requests.num_faults, proxy.replies.num_faults) == (1, 1)


@pytest.mark.parametrize("at", [0, 5])
def test_a_cut_passes_so_many_bytes(proxy: Proxy, at: int) -> None:
    with connect(proxy) as link:
        proxy.replies.cut(at)
        link.sendall(bytes(100))
        assert receive(link, 100) == bytes(at)
    assert proxy.replies.num_faults == 1
    with connect(proxy) as link:
        link.sendall(bytes(100))
        assert receive(link, 100) == bytes(100)


def test_an_edit_sees_each_piece(proxy: Proxy) -> None:
    proxy.replies.edit = bytes.upper
    with connect(proxy) as link:
        link.sendall(b"abc")
        assert receive(link, 3) == b"ABC"
        proxy.restore()
        link.sendall(b"abc")
        assert receive(link, 3) == b"abc"


def test_a_black_hole_swallows_and_what_it_swallowed_is_dead(proxy: Proxy) -> None:
    with connect(proxy, timeout_s=0.2) as old:
        old.sendall(b"a")
        assert receive(old, 1) == b"a"
        proxy.black_hole()
        with connect(proxy, timeout_s=0.2) as new:
            for link in (old, new):
                link.sendall(b"b")
                with pytest.raises(TimeoutError):
                    link.recv(1)
        proxy.restore()
        old.sendall(b"c")
        with pytest.raises(TimeoutError):
            old.recv(1)
    with connect(proxy) as link:
        link.sendall(b"d")
        assert receive(link, 1) == b"d"
    wait_until(lambda: proxy.num_open == 0)


def test_a_freeze_holds_back_and_loses_nothing(proxy: Proxy) -> None:
    with connect(proxy, timeout_s=0.2) as link:
        proxy.freeze()
        link.sendall(b"abc")
        with pytest.raises(TimeoutError):
            link.recv(1)
        proxy.restore()
        link.settimeout(10)
        assert receive(link, 3) == b"abc"


def test_a_throttle_and_a_delay_let_everything_pass_in_the_end(proxy: Proxy) -> None:
    proxy.replies.nbytes_per_s = 2e6
    proxy.requests.delay_s = 0.01
    data = os.urandom(100_000)
    with connect(proxy) as link:
        writer = threading.Thread(target=link.sendall, args=(data,))
        writer.start()
        assert receive(link, len(data)) == data
        writer.join()


def test_an_upstream_that_is_gone_closes_and_may_be_replaced(proxy: Proxy) -> None:
    upstream = proxy.upstream
    proxy.upstream = ("127.0.0.1", 1)
    with connect(proxy) as link:
        assert receive(link, 1) == b""
    proxy.upstream = upstream
    with connect(proxy) as link:
        link.sendall(b"x")
        assert receive(link, 1) == b"x"


def test_descriptors_pass_between_unix_sockets(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "server"))
        listener.listen()
        with Proxy(short_dir / "server", listen=short_dir / "proxy"), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(short_dir / "proxy"))
            server, _ = listener.accept()
            read, write = os.pipe()
            socket.send_fds(client, [b"hello"], [write])
            data, fds, _, _ = socket.recv_fds(server, 100, 10)
            assert data == b"hello"
            os.write(fds[0], b"through")
            assert os.read(read, 10) == b"through"
            for fd in (read, write, *fds):
                os.close(fd)
            server.close()
    assert not (short_dir / "proxy").exists()


def test_nothing_is_left_after_close(proxy: Proxy) -> None:
    threads, fds = threading.active_count(), num_fds()
    with Proxy(proxy.upstream) as other:
        links = [connect(other) for _ in range(5)]
        wait_until(lambda: other.num_open == 5)
        other.black_hole()
        links[0].sendall(b"x")
    for link in links:
        link.close()
    wait_until(lambda: (threading.active_count(), num_fds()) == (threads, fds))

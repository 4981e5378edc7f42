"""Descriptors that come with no command, or with one that does not end, do not pile up."""

import os
import socket
import struct
import time
from pathlib import Path

import pytest

from serving import make_config, serving


def num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("data", [b"*0\r\n", b"\r\n", b"$"], ids=["nothing", "blank line", "command without end"])
def test_descriptors_that_nobody_takes_do_not_pile_up(short_dir: Path, data: bytes) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    with serving(make_config(short_dir)) as server, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(server.config.socket))
        sock.sendall(b"PING\r\n")
        assert sock.recv(64) == b"+PONG\r\n"
        before = num_fds()
        if data == b"$":
            sock.sendall(b"*2\r\n$4\r\nECHO\r\n$5000\r\n")
        for _ in range(20):
            fds = struct.pack("50i", *[null] * 50)
            try:
                sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            except OSError:
                break  # it was cut off, which is right too
            time.sleep(0.02)
        time.sleep(0.3)
        assert num_fds() - before <= 64
    os.close(null)

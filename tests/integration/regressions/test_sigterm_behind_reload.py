"""A reload that hangs (on the disk's write lock, on a file) does not keep SIGTERM waiting."""

import signal
import socket
import threading

from tierkv_server.signals import EXIT_CUT_SHORT, Signals


class Config:
    drain_s = 10.0


class FakeServer:
    config = Config()
    leaving = False

    def __init__(self) -> None:
        self.left = threading.Event()

    def leave(self) -> None:
        self.leaving = True
        self.left.set()

    def describe(self) -> str:
        return ""


class HangingReloader:
    can = True

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Event()

    def try_reload(self) -> None:
        self.begun.set()
        self.go_on.wait(20)


def test_sigterm_and_a_second_one_are_followed_while_a_reload_hangs() -> None:
    server, reloader, ends = FakeServer(), HangingReloader(), []
    ended = threading.Event()

    def end(status: int) -> None:
        ends.append(status)
        ended.set()

    signals = Signals(server, reloader, end)  # type: ignore[arg-type]
    reader, writer = socket.socketpair()
    thread = threading.Thread(target=signals.watch, args=(reader,))
    thread.start()
    try:
        writer.send(bytes([signal.SIGHUP]))
        assert reloader.begun.wait(5)
        writer.send(bytes([signal.SIGTERM]))
        assert server.left.wait(3)
        writer.send(bytes([signal.SIGTERM]))
        assert ended.wait(3)
        assert ends == [EXIT_CUT_SHORT]
    finally:
        reloader.go_on.set()
        writer.close()
        thread.join()

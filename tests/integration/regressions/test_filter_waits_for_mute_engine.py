"""An engine that is stopped holds up nobody else's filter."""

import threading

import msgspec

from tierkv.messages import WHOLE_FILTER
from tierkv_server.filters import FilterPublisher


class Engine:
    """A session that gets pushes; a stopped one takes them and never answers."""

    subscribed = True

    def __init__(self, name: str, answers: bool) -> None:
        self.id, self.ns_id, self.answers = name, bytes(16), answers
        self.got: list = []
        self.waits: list[float] = []

    def ask(self, what: str, body: bytes) -> "Engine":
        self.got.append(msgspec.msgpack.decode(body))
        return self

    def result(self, timeout_s: float) -> bytes | None:
        if self.answers:
            return b"1"
        self.waits.append(timeout_s)
        threading.Event().wait(timeout_s)
        return None


def test_a_stopped_engine_is_not_waited_for_when_nobody_asked_for_it() -> None:
    quick, stopped = Engine("quick", True), Engine("stopped", False)
    publisher = FilterPublisher(lambda: [stopped, quick], lambda ns_id: [])
    try:
        publisher.joined()
        for round_ in range(3):
            heard = len(quick.got)
            key = bytes([round_]) * 32
            publisher.add(bytes(16), [key])
            publisher.joined()
            deadline = threading.Event()
            for _ in range(1000):
                if len(quick.got) > heard:
                    break
                deadline.wait(0.02)
            assert len(quick.got) > heard
        assert sum(stopped.waits) < 1.0, f"the filters' thread waited {stopped.waits} s for the stopped engine"
        whole = [kind for kind, _ in stopped.got if kind == WHOLE_FILTER]
        assert len(whole) == 1, "and it is not sent the whole filter again and again"
    finally:
        publisher.close()

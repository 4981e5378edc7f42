"""Health: when what is out is tried again, and what is logged of it."""

from __future__ import annotations

import logging
import threading

import pytest

from tierkv.health import BACKOFF_MAX_S, BACKOFF_MIN_S, REPEAT_S, Health, Repeated


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, **options: float) -> Health:
    return Health("It", clock, rng=lambda: 0.5, **options)  # type: ignore[arg-type]  # without jitter


def test_the_back_off_doubles_with_each_try_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    health = make(clock)
    waits = []
    for _ in range(9):
        assert health.available()
        health.failed("no answer.")
        assert not health.available() and not health.up
        waits.append(health.retry_in_s())
        clock.now += waits[-1]
    assert waits == [min(BACKOFF_MIN_S * 2**i, BACKOFF_MAX_S) for i in range(9)]
    health.worked(health.now())
    assert health.up and health.available() and health.reason == "" and health.out_since == 0
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["It is out: no answer. Serving goes on without it.", f"It is back after {sum(waits):.1f} s."]
    health.failed("again")
    assert health.retry_in_s() == BACKOFF_MIN_S, "a fault begins with the shortest"


def test_many_that_were_under_way_fail_as_one_try() -> None:
    """All calls that were waiting when a server stopped end within moments of each other."""
    clock = Clock()
    health = make(clock)
    for _ in range(16):
        health.failed("timeout")
        clock.now += 0.01
    assert health.num_faults == 16
    assert health.retry_in_s() == pytest.approx(BACKOFF_MIN_S - 0.16)


def test_what_began_before_a_failure_ends_nothing_however_late_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    health = make(clock)
    began = health.now()
    clock.now += 0.01
    health.failed("error")
    for _ in range(2):
        health.worked(began)
        assert not health.up
        clock.now += BACKOFF_MIN_S
        assert health.available()
    again = health.now()
    clock.now += 0.01
    health.failed("error")
    health.worked(again)
    assert not health.up, "the last failure counts"
    health.worked(health.now())
    assert health.up and not health.retry_in_s(), "one call may fail at first and then find who takes it"
    assert len(caplog.records) == 2


def test_what_fails_as_soon_as_it_is_used_is_not_back_in_between(caplog: pytest.LogCaptureFixture) -> None:
    """A server that takes engines in and then does not answer: one fault, with a back-off that grows."""
    clock = Clock()
    health = make(clock, settle_s=10.0)
    waits = []
    for _ in range(8):
        health.failed("it closed the connection")
        waits.append(health.retry_in_s())
        clock.now += waits[-1]
        for _ in range(9):
            health.worked(health.now())
            assert health.available() and not health.up
            clock.now += 1.0
    assert waits[:3] == [0.5, 1.0, 2.0] and waits[-1] == BACKOFF_MAX_S
    assert len(caplog.records) == 1
    began = clock.now
    for _ in range(2):
        health.worked(health.now())
        clock.now += 10.0
    assert health.up
    assert caplog.records[-1].getMessage() == f"It is back after {began - 9.0 - 100.0:.1f} s."


def test_threads_that_fail_together_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        caplog.clear()
        health, barrier = Health("It"), threading.Barrier(8)

        def fail(health: Health = health, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            health.failed("timeout")

        threads = [threading.Thread(target=fail) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(caplog.records) == 1


def test_what_repeats_is_logged_once_a_minute_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    repeated = Repeated(clock)
    for number in range(1000):
        repeated.note("record %d is damaged", number)
    clock.now += REPEAT_S
    repeated.note("record %d is damaged", 1000)
    try:
        raise ValueError("x")
    except ValueError:
        clock.now += REPEAT_S
        repeated.note("it failed", exc_info=True)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert lines == [
        (logging.WARNING, "record 0 is damaged"),
        (logging.WARNING, "record 1000 is damaged (and 999 times more in the last minutes)"),
        (logging.ERROR, "it failed"),
    ]
    assert caplog.records[-1].exc_info

"""Giving up one's own flights ends no flight that another has begun since. (Written for the patched interface.)"""

import inspect

from tierkv_server.flights import MAX_WAIT_S, Flights, Landed


def test_giving_up_does_not_end_the_flight_of_another() -> None:
    flights, name = Flights(), (bytes(16), bytes(32))
    landed = Landed(None, 0, 0, None)  # type: ignore[arg-type]
    if "since" not in inspect.signature(flights.claim).parameters:  # as it was
        flights.claim([name])
        flights.land(name, landed)
        flights.claim([name])  # by another engine
        _, waiting = flights.claim([name])  # and a third one waits for it
        flights.give_up([name])  # the first one's 'finally'
    else:
        mine, _ = flights.claim([name], 0)
        flights.land(name, mine[0], landed)
        flights.claim([name], 0)
        _, waiting = flights.claim([name], 0)
        flights.give_up([(name, mine[0])])
    assert not waiting[0].over.is_set()


def test_a_waiter_gives_up_before_its_engine_takes_the_lane_for_dead() -> None:
    assert MAX_WAIT_S <= 2.5  # a lane without a byte for 5 s is dead (docs/protocol.md), and the tier is asked after

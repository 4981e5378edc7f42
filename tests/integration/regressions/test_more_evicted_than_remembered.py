"""One eviction may name more chunks than are remembered: what was read before is stored by none of them."""

from tierkv_server.guard import MAX_EVICTED, Evictions


def test_an_eviction_of_more_than_is_remembered_forbids_all_the_same() -> None:
    evictions, ns_id = Evictions(), bytes(16)
    since = evictions.number
    keys = [i.to_bytes(32, "big") for i in range(MAX_EVICTED + 1)]
    evictions.note(ns_id, keys)
    assert not any(evictions.allows(ns_id, key, since) for key in keys)
    assert evictions.allows(ns_id, keys[0], evictions.number), "what is read from now on is another matter"

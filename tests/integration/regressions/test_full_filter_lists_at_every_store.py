"""A filter that cannot grow any more lets more pass: it is not built anew with every store."""

import pytest

from tierkv import filter as filter_module
from tierkv_server.filters import FilterPublisher


class Engine:
    subscribed, id, ns_id = True, "one", bytes(16)

    def ask(self, what: str, body: bytes) -> "Engine":
        return self

    def result(self, timeout_s: float) -> bytes:
        return b"1"


def test_more_keys_than_it_takes_cost_no_listing_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "MAX_BITS", 1 << 13)  # 512 keys
    listings = []

    def stored(ns_id: bytes) -> list[bytes]:
        listings.append(ns_id)
        return [i.to_bytes(4, "little") * 8 for i in range(2000)]

    engine = Engine()
    publisher = FilterPublisher(lambda: [engine], stored)
    try:
        publisher.joined()
        assert publisher.flush(10)
        for i in range(5):
            publisher.add(bytes(16), [bytes([i]) * 32])
            assert publisher.flush(10)
        assert len(listings) == 1
    finally:
        publisher.close()

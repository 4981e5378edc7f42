"""Payloads of the shared tier: from Redis's socket into the ranks' parts, verified while they are hot.

Theory of operation. A batch is asked leaf to root, several MiB of replies in flight: new GETs go out when half of what
was asked has come. A reply is read in pieces: its length, the header of 256 bytes, and only if that is the header of
the record that was asked for, the payload, straight to where it belongs. What is not there or not sound is left out in
step. A value that is larger than any record of its namespace is not read at all: its connection is closed, and what is
missing is asked over another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import xxhash

from tierkv.layout import Namespace
from tierkv.payload import CODEC_RAW, HEADER_NBYTES, BadRecordError, ForeignRecordError, Header, unpack_stored
from tierkv.resp import Error
from tierkv.tiers.base import Fetched, Ref, Sink, Status
from tierkv.tiers.compression import Codec, element_nbytes
from tierkv.tiers.redis_errors import REDIRECTS, RefusedError, code_of
from tierkv.tiers.redis_link import RedisLink, Target
from tierkv.tiers.redis_names import Names
from tierkv.tiers.redis_wire import Wire, pack

#: Bytes of replies that are asked for before they are read.
IN_FLIGHT_NBYTES = 8 << 20
#: GETs that are asked for before they are read, where payloads are small.
_IN_FLIGHT_KEYS = 512


def codec_of(namespace: Namespace) -> Codec:
    """Return the codec of a namespace's compressed payloads."""
    return Codec(namespace.payload_nbytes, element_nbytes(namespace.layout, namespace.layout.part_nbytes))


class Fetch:
    """One fetch: what was asked, and what came.

    Args:
        link, names: of the tier.
        ns_id, namespace: of the payloads.
        refs: what is asked for, ancestors first.
        sink: where payloads go.

    Attributes:
        results: one a ref.
    """

    def __init__(
        self, link: RedisLink, names: Names, ns_id: bytes, namespace: Namespace, refs: Sequence[Ref], sink: Sink
    ) -> None:
        self.results = [Fetched(Status.ERROR)] * len(refs)
        self._link, self._names, self._refs, self._sink = link, names, refs, sink
        self._ns_id = ns_id
        self._payload_nbytes = namespace.payload_nbytes
        self._namespace = namespace
        self._codec: Codec | None = None
        self._last = False  # whether what is asked now is asked a second time
        self._head = memoryview(bytearray(HEADER_NBYTES))
        self._window = max(2, min(_IN_FLIGHT_KEYS, IN_FLIGHT_NBYTES // (HEADER_NBYTES + namespace.payload_nbytes)))

    def run(self) -> list[Fetched]:
        """Fetch, and return the results."""
        if self._link.closed or not self._link.health.available():
            return self.results
        wanted: dict[int, Target | None] = dict.fromkeys(reversed(range(len(self._refs))))
        for self._last in (False, True):
            if not wanted:
                break
            routes = self._link.route(((i, self._name(i)) for i in wanted), wanted)
            if routes is None:
                break
            again: dict[int, Target | None] = {}
            for target, places in routes.items():
                self._read(target, deque(places), again)
            wanted = again
        return self.results

    def _name(self, i: int) -> bytes:
        return self._names.record(self._ns_id, self._refs[i]).encode()

    def _read(self, target: Target, places: deque[int], again: dict[int, Target | None]) -> None:
        """Read from one node until all is there, or the node fails."""
        until = self._link.until(len(places) * (HEADER_NBYTES + self._payload_nbytes))
        in_step: bool | None = False
        while in_step is False and places:
            with self._link.call(target.node, until) as call:
                in_step = call.do(lambda wire: self._stream(wire, places, target.asking, again))
                if not in_step:
                    call.replace()
        if in_step is None:
            self._link.look_again(target.node)
            again.update(dict.fromkeys(places))

    def _stream(self, wire: Wire, places: deque[int], asking: bool, again: dict[int, Target | None]) -> bool:
        """Ask and read over one connection; returns whether that is in step at the end."""
        waiting = deque(places)
        num_asked = 0
        while places:
            if num_asked <= self._window // 2 and waiting:
                now = [waiting.popleft() for _ in range(min(len(waiting), self._window - num_asked))]
                asking_too = [("ASKING",)] if asking else []
                wire.send(pack([c for i in now for c in (*asking_too, ("GET", self._name(i)))]))
                num_asked += len(now)
            if asking:
                wire.status()
            in_step = self._take(wire, places[0], again)
            places.popleft()
            num_asked -= 1
            if not in_step:
                return False
        return wire.clean

    def _take(self, wire: Wire, i: int, again: dict[int, Target | None]) -> bool:
        """Read the reply for one ref; returns whether the connection is in step."""
        length = wire.bulk()
        if length is None:
            self.results[i] = Fetched(Status.MISS)
            return True
        if isinstance(length, Error):
            self._refused(i, length, again)
            return True
        if length < HEADER_NBYTES:
            wire.skip(length)
            result = self._bad(f"a record of {length} bytes is shorter than its header")
        else:
            wire.into(self._head)
            if length > HEADER_NBYTES + self._payload_nbytes:
                self.results[i] = self._judge(i, length)
                return False
            result = self._payload(wire, i, length)
        wire.end()  # a reply that does not end here proves nothing about the record
        self.results[i] = result
        return True

    def _refused(self, i: int, error: Error, again: dict[int, Target | None]) -> None:
        code = code_of(error)
        if code in self._link.tolerated(self._last):
            again[i] = self._link.redirect(error) if code in REDIRECTS else None
        elif code == "WRONGTYPE":
            self.results[i] = Fetched(Status.MISS)  # somebody else's key under a name of ours
        else:
            raise RefusedError(error)

    def _judge(self, i: int, length: int) -> Fetched:
        """Return the result for a record whose length is not sound."""
        try:
            header, _, _ = self._open(i)
        except ForeignRecordError:
            return Fetched(Status.MISS)
        except BadRecordError as error:
            return self._bad(error)
        return self._bad(f"the record of key {header.key.hex()[:16]} has {length} bytes")

    def _payload(self, wire: Wire, i: int, length: int) -> Fetched:
        """Read the payload of one record; whatever it is, its bytes are taken."""
        stored_nbytes = length - HEADER_NBYTES
        try:
            header, codec, said_nbytes = self._open(i)
            if said_nbytes != stored_nbytes:
                raise BadRecordError(f"the record of key {header.key.hex()[:16]} has {length} bytes")
        except (BadRecordError, ForeignRecordError) as error:
            wire.skip(stored_nbytes)
            return self._bad(error) if isinstance(error, BadRecordError) else Fetched(Status.MISS)
        parts = self._sink(i)
        digest = xxhash.xxh3_128()
        if codec == CODEC_RAW:
            for part in parts:
                wire.into(part, digest.update)
        else:
            data = memoryview(bytearray(stored_nbytes))
            wire.into(data)
            try:
                self._codec = self._codec or codec_of(self._namespace)
                self._codec.restore(data, parts)
            except BadRecordError as error:
                return self._bad(error)
            for part in parts:
                digest.update(part)
        if digest.digest() != header.checksum:
            return self._bad(f"the payload of key {header.key.hex()[:16]} does not match its checksum")
        return Fetched(Status.OK, header)

    def _open(self, i: int) -> tuple[Header, int, int]:
        header, codec, stored_nbytes = unpack_stored(self._head)
        if header.key != self._refs[i].key or header.ns_id != self._ns_id:
            raise BadRecordError(
                f"a record under key {self._refs[i].key.hex()[:16]} belongs to key {header.key.hex()[:16]}"
            )
        if header.raw_nbytes != self._payload_nbytes:
            raise BadRecordError(f"a record holds {header.raw_nbytes} bytes; expected {self._payload_nbytes}")
        return header, codec, stored_nbytes

    def _bad(self, error: object) -> Fetched:
        self._link.damage.note("The shared tier has a damaged record: %s", str(error))
        return Fetched(Status.BAD)

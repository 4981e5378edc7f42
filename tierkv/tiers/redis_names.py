"""Names of keys in Redis: made here and nowhere else, all of them under one prefix.

``<p>`` is the configured prefix and a version, ``<ns>`` the namespace id; numbers are in hex. ``docs/formats.md`` has
them, and what the keys hold, in words::

    <p>:<ns>:{<anchor[:8]>}:<key>      string: a record without LMDB's padding (header and payload)
    <p>:<ns>:idx:{<anchor[:1]>}        hash: the index; key (32 raw bytes) -> row
    <p>:ns                             hash: <ns> -> the namespace as JSON
    <p>:<ns>:pins, :until              sorted sets: who pinned what, what expires at a time of its own
    <p>:<ns>:usage                     hash: entries and bytes by tenant
    <p>:<ns>:lock                      string: a node is sweeping
    <p>:{fleet}:control                stream: evictions that every node applies
    <p>:{fleet}:news                   stream: keys that were stored lately

Braces are hash tags: on a Cluster a run of 64 chunks lies on one node.
"""

from __future__ import annotations

import re

from tierkv.errors import ConfigError
from tierkv.keys import KEY_NBYTES
from tierkv.tiers.base import Ref

FORMAT = 1
DEFAULT_PREFIX = "tierkv"
#: The 256 buckets of a namespace's index: the first byte of the anchor.
BUCKETS = tuple(f"{i:02x}" for i in range(256))


def bucket_of(anchor: bytes) -> str:
    """Return the index bucket of the chunks with this anchor."""
    return BUCKETS[anchor[0]]


class Names:
    """The names under one prefix.

    Args:
        prefix: what every name starts with, before the format's number.

    Raises:
        ConfigError: the prefix has characters that mean something to Redis (``*``, ``{``, spaces), or is empty.
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-][A-Za-z0-9_.:-]{0,63}", prefix):
            raise ConfigError(
                f"prefix={prefix!r} cannot start the names of keys in Redis; use up to 64 letters, digits, '_', '-', "
                f"'.' and ':', such as 'tierkv'"
            )
        self.start = f"{prefix}:{FORMAT}:"
        self.namespaces = f"{self.start}ns"
        self.control = f"{self.start}{{fleet}}:control"
        self.news = f"{self.start}{{fleet}}:news"

    def records_of(self, ns_id: bytes) -> str:
        """Return what every record of a namespace starts with, up to its hash tag."""
        return f"{self.start}{ns_id.hex()}:{{"

    def run(self, ns_id: bytes, anchor: bytes) -> str:
        """Return what the records of one anchor start with: the key in hex follows."""
        return f"{self.start}{ns_id.hex()}:{{{anchor[:8].hex()}}}:"

    def record(self, ns_id: bytes, ref: Ref) -> str:
        """Return the name of a record."""
        return self.run(ns_id, ref.anchor) + ref.key.hex()

    def pins(self, ns_id: bytes) -> str:
        """Return the name of the pins of a namespace."""
        return f"{self.start}{ns_id.hex()}:pins"

    def until(self, ns_id: bytes) -> str:
        """Return the name of the times of entries that expire at one of their own."""
        return f"{self.start}{ns_id.hex()}:until"

    def usage(self, ns_id: bytes) -> str:
        """Return the name of what the tenants of a namespace use."""
        return f"{self.start}{ns_id.hex()}:usage"

    def lock(self, ns_id: bytes) -> str:
        """Return the name of the lock of whoever sweeps a namespace."""
        return f"{self.start}{ns_id.hex()}:lock"

    def index(self, ns_id: bytes, bucket: str) -> str:
        """Return the name of one bucket of a namespace's index."""
        return f"{self.start}{ns_id.hex()}:idx:{{{bucket}}}"


assert KEY_NBYTES == 32, "the names of records hold keys in 64 hex digits"

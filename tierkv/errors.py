"""Errors that a user can act on. Each message says what was wrong, the value seen and what to do."""

from __future__ import annotations


class TierKVError(Exception):
    """Base of every error TierKV raises on purpose."""


class ConfigError(TierKVError):
    """A setting is unknown, impossible or does not fit this machine. Raised at start, never later."""


class RefusedError(TierKVError):
    """The other side understood the request and will not do it (other version, other shared store, not ours)."""


class NotAdmittedError(RefusedError):
    """A token or a certificate is not taken. It may be once it was changed, on either side."""


class BusyError(RefusedError):
    """The server has no room for another connection or engine now. It may have later."""


class NotFoundError(RefusedError):
    """What was named is not stored."""


class DamagedError(RefusedError):
    """What was stored under the name that was given failed verification."""


class ProtocolError(TierKVError):
    """Bytes that are not the protocol. The connection they came from is closed; it cannot be trusted again."""


class UnavailableError(TierKVError):
    """A server or tier does not answer now. Whoever asked goes on without it."""

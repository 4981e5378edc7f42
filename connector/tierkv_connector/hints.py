"""Hints: what an application says about one request, checked, and what it is answered.

They come as ``kv_transfer_params={"tierkv": {...}}``, or as an action of type ``tierkv`` in vLLM's own ``kv_hints``.
Whatever is wrong with a hint, the request goes on without it, and the answer says so. ``docs/hints.md`` is the page for
users. Pure, but for a log line a minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.config import HintLimits
from tierkv.sessions import session_digest
from tierkv_connector.awaited import Awaited, read_awaited, without_answer

logger = logging.getLogger("tierkv")

NAME = "tierkv"
#: Tiers that a request may load from; all, unless it says otherwise.
TIERS = frozenset({"host", "disk", "shared"})
STORES = ("none", "prompt", "all")
PREFETCHES = ("disk", "host")
MAX_SESSION_CHARS = 256
#: Names that nobody knows are repeated in an answer up to this many, cut to so many characters.
_MAX_IGNORED, _MAX_SHOWN = 16, 48
_LOG_INTERVAL_S = 60.0


class Hints:
    """What was said about one request, as far as it holds.

    Attributes:
        session: digest of its session; empty for none.
        priority: from -2 to 2.
        retain_s: the application expects to be back within so many seconds; None: it did not say.
        release: this is the session's last request.
        store: what of it is stored below the GPU: ``"none"``, ``"prompt"`` or ``"all"``, generated tokens too.
        tiers: what it may load from.
        prefetch: ``"disk"``, ``"host"``, or empty.
        handoff: another engine will wait for its chunks; None: it did not say.
        awaits: another engine's chunks that it is to wait for, or None.
        ignored: for each hint that does not hold, why.
        limited: for each hint that holds in part, what of it.
    """

    __slots__ = (
        "awaits",
        "handoff",
        "ignored",
        "limited",
        "prefetch",
        "priority",
        "release",
        "retain_s",
        "session",
        "store",
        "tiers",
    )

    def __init__(self, store: str = "prompt") -> None:
        self.session = b""
        self.priority = 0
        self.retain_s: float | None = None
        self.release = False
        self.store = store
        self.tiers = TIERS
        self.prefetch = ""
        self.handoff: bool | None = None
        self.awaits: Awaited | None = None
        self.ignored: dict[str, str] = {}
        self.limited: dict[str, str] = {}

    def keep_to_gpu(self) -> None:
        """Take note that the request is of a kind whose KV is neither stored nor loaded."""
        self.store, self.tiers, self.prefetch = "none", frozenset(), ""
        self.handoff = self.awaits = None
        self.ignored["request"] = "its KV keeps to vLLM's own cache: what decides it is not known by its content"


class Outcome:
    """What became of a request that brought hints: for its answer.

    Attributes:
        hints: its hints.
        gpu_tokens: tokens that were on the GPU when it ran first.
        loaded: tokens that it loaded, by the tier that gave them.
        num_stored: chunks of it that were copied below the GPU.
    """

    __slots__ = ("gpu_tokens", "hints", "loaded", "num_stored")

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self.gpu_tokens: int | None = None
        self.loaded: Counter[str] = Counter()
        self.num_stored = 0

    def loads(self, source: str, num_tokens: int) -> None:
        """Note a load before the request runs. What another request had fetched is in the host pool for this one."""
        if self.gpu_tokens is None:
            self.loaded[source if source in self.hints.tiers else "host"] += num_tokens

    def load_failed(self) -> None:
        """Note that what was to be loaded is computed."""
        if self.gpu_tokens is None:
            self.loaded.clear()

    def begins(self, num_computed: int) -> None:
        """Note that it runs now, for the first time, with its first ``num_computed`` tokens there."""
        if self.gpu_tokens is None:
            self.gpu_tokens = max(0, num_computed - self.loaded.total())

    def answer(self, num_prompt_tokens: int, chunk_tokens: int) -> dict[str, Any]:
        """Return what goes into the response's ``kv_transfer_params``."""
        hints = self.hints
        ran = self.gpu_tokens is not None
        told: dict[str, Any] = {
            "hit_tokens": {"gpu": self.gpu_tokens or 0}
            | {tier: self.loaded[tier] if ran else 0 for tier in ("host", "disk", "shared")},
            "prompt_tokens": num_prompt_tokens,
            "stored_tokens": self.num_stored * chunk_tokens,
        }
        if hints.session:
            told["session"] = hints.session.hex()
        if hints.limited:
            told["limited"] = hints.limited
        if hints.ignored:
            told["ignored"] = hints.ignored
        return {NAME: told}


class HintReader:
    """Reads the hints of requests.

    Args:
        limits: what they may ask for.
        clock: monotonic seconds, for the rate of log lines.
        store: what of a request is stored where it does not say.
    """

    def __init__(self, limits: HintLimits, clock: Callable[[], float] = time.monotonic, store: str = "prompt") -> None:
        self._limits = limits
        self._store = store
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def read(self, request: Any, tenant: bytes) -> Hints | None:
        """Return a request's hints, None where it has none. Never raises because of what they say.

        Args:
            request: vLLM's.
            tenant: 16-byte digest of its tenant.
        """
        params = getattr(request, "kv_transfer_params", None)
        own = params[NAME] if isinstance(params, Mapping) and NAME in params else None
        given = isinstance(params, Mapping) and NAME in params
        actions = _actions(getattr(request, "kv_hints", None))
        if not given and not actions:
            return None
        hints = Hints(self._store)
        said: dict[str, Any] = {}
        for payload in (*actions, without_answer(own) if given else {}):
            if isinstance(payload, Mapping):
                said |= {str(name): value for name, value in payload.items()}
            else:
                hints.ignored[NAME] = f"{_shown(payload)} is not an object of hints"
        if not self._limits.enabled:
            hints.ignored = {NAME: "this engine takes no hints (hints.enabled is false)"}
            return hints
        if "session" not in said and isinstance(name := getattr(request, "session_id", None), str):
            said["session"] = name
        for name, value in said.items():
            reason = self._take(hints, name, value, tenant) if name in _TAKERS else _unknown(name)
            if reason and len(hints.ignored) < _MAX_IGNORED:
                hints.ignored[name[:_MAX_SHOWN]] = reason
        if not hints.session:
            for name in ("retain_s", "release"):
                if said.get(name) is not None and name not in hints.ignored:
                    hints.ignored[name] = "it needs a session"
            hints.retain_s, hints.release = None, False
        if hints.release and hints.retain_s is not None:
            hints.retain_s = None
            hints.ignored["retain_s"] = "the session is released"
        for name in hints.ignored:
            self._warn(name if name in _TAKERS else "of an unknown name")
        return hints

    def _take(self, hints: Hints, name: str, value: Any, tenant: bytes) -> str:
        """Set one hint and return an empty text, or why it does not hold."""
        if value is None:
            return ""
        return _TAKERS[name](hints, value, self._limits, tenant)

    def _warn(self, kind: str) -> None:
        self._counts[kind] += 1
        now = self._clock()
        if now - self._logged.get(kind, float("-inf")) < _LOG_INTERVAL_S:
            return
        num, self._counts[kind], self._logged[kind] = self._counts[kind], 0, now
        logger.warning(
            "hint %s was ignored (%d since the last such line); the responses say why, docs/hints.md what is possible",
            kind,
            num,
        )


def _actions(envelope: Any) -> list[Any]:
    """Return the payloads of our actions in vLLM's ``kv_hints``; none where the version has no such thing."""
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, Sequence):
        return []
    return [getattr(action, "payload", None) for action in actions if getattr(action, "action_type", None) == NAME]


def _session(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SESSION_CHARS:
        return f"{_shown(value)} is not a text of 1 to {MAX_SESSION_CHARS} characters"
    hints.session = session_digest(tenant, value)
    return ""


def _priority(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{_shown(value)} is not a whole number"
    most = limits.max_priority
    hints.priority = max(-most, min(most, value))
    if hints.priority != value:
        hints.limited["priority"] = f"{hints.priority}: priorities here are from {-most} to {most}"
    return ""


def _retain_s(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return f"{_shown(value)} is not a positive number of seconds"
    hints.retain_s = float(min(value, limits.max_retain_s))
    if hints.retain_s != value:
        hints.limited["retain_s"] = f"{hints.retain_s:g}: no session is held for longer here"
    return ""


def _release(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if not isinstance(value, bool):
        return f"{_shown(value)} is neither true nor false"
    hints.release = value
    return ""


def _store(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if not isinstance(value, str) or value not in STORES:
        return f"{_shown(value)} is none of {', '.join(STORES)}"
    hints.store = value
    return ""


def _load(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    names = [] if value == "none" else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name in TIERS for name in names):
        return f"{_shown(value)} is not a list of tiers (host, disk, shared), or 'none'"
    hints.tiers = frozenset(names) | ({"host"} if names else set())  # the others load through the host pool
    return ""


def _prefetch(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if not isinstance(value, str) or value not in PREFETCHES:
        return f"{_shown(value)} is none of {', '.join(PREFETCHES)}"
    hints.prefetch = value
    return ""


def _handoff(hints: Hints, value: Any, limits: HintLimits, tenant: bytes) -> str:
    if isinstance(value, bool):
        hints.handoff = value
        return ""
    hints.awaits = read_awaited(value)
    if hints.awaits is None:
        return f"{_shown(value)} is neither true, nor false, nor what an engine answered under this name"
    return ""


_TAKERS: dict[str, Callable[[Hints, Any, HintLimits, bytes], str]] = {
    "session": _session,
    "priority": _priority,
    "retain_s": _retain_s,
    "release": _release,
    "store": _store,
    "load": _load,
    "prefetch": _prefetch,
    "handoff": _handoff,
}


def _unknown(name: str) -> str:
    return f"no such hint; there are {', '.join(_TAKERS)}"


def _shown(value: Any) -> str:
    """Return a value as it may stand in an answer: simple and short, whatever it is."""
    if isinstance(value, str | int | float | None):
        text = repr(value) if not isinstance(value, int) or -(10**20) < value < 10**20 else "a huge number"
        return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return f"a value of type {type(value).__name__}"

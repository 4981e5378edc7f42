"""How vLLM says that the weights of a running engine change: its interface has no call for a connector to be told.

Theory of operation. Trainers replace weights through the engine core, in whose process the scheduler half lives: by
name through ``collective_rpc`` (``update_weights``, ``reload_weights``, or a method of the user's own), and from 0.27
on they say what the weights are called (``set_weight_version``, which ``LLM.update_weight_version``,
``LLM.finish_weight_update(weight_version=...)`` and ``POST /update_weight_version`` come down to). Both methods of the
class are wrapped, once a process, and tell the connectors of ours that their core has. A function that is sent to the
workers in place of a name says nothing of what it does: after it the user resets the cache, as vLLM wants it anyway.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("tierkv")

#: Names of workers' methods after which weights may be others: vLLM's own, and those that trainers give theirs.
_CHANGES = re.compile(
    r"_*(apply|batch|broadcast|collect|copy|finish|load|process|receive|recv|refit|reload|replace|reset|set|start|sync"
    r"|update|wait)_.*(weight|param|state_dict|model|tensor)"
)
_MARK = "_tierkv_watched"


def may_change_weights(method: Any) -> bool:
    """Return whether what is called on the workers is named like something that changes weights."""
    return isinstance(method, str) and _CHANGES.match(method) is not None


def watch(core: Any = None) -> None:
    """Have every engine core of this process tell its connectors of ours about its weights. Idempotent.

    Args:
        core: the class to watch; vLLM's unless a test has its own.
    """
    if core is None:
        from vllm.v1.engine.core import EngineCore

        core = EngineCore
    _wrap(core, "collective_rpc", _before_rpc, before=True)
    _wrap(core, "set_weight_version", _after_version, before=False)


def _before_rpc(connector: Any, method: Any = None, *_: Any, **__: Any) -> None:
    if may_change_weights(method):
        connector.weights_change()


def _after_version(connector: Any, weight_version: Any = None, *_: Any, **__: Any) -> None:
    connector.weights_version(str(weight_version))


def _wrap(core: Any, name: str, tell: Any, *, before: bool) -> None:
    original = getattr(core, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            _tell(self, tell, args, kwargs)
        result = original(self, *args, **kwargs)
        if not before:
            _tell(self, tell, args, kwargs)
        return result

    setattr(call, _MARK, True)
    setattr(core, name, call)


def _tell(core: Any, tell: Any, args: Any, kwargs: Any) -> None:
    try:
        for connector in _ours(core):
            tell(connector, *args, **kwargs)
    except Exception:
        logger.exception("TierKV could not take note of a change of weights: reset the prefix cache and the connector")


def _ours(core: Any) -> Iterator[Any]:
    """Yield the connectors of ours, also those beside others in a MultiConnector."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    for each in getattr(connector, "_connectors", None) or [connector]:
        if hasattr(each, "weights_change"):
            yield each

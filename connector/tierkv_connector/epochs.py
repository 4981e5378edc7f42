"""Epochs: which weights the engine has, and who may share the KV that they give.

Theory of operation. The weights of a running engine may be replaced in place, and nothing in a prompt tells KV of one
set from that of another. So everything that is stored belongs to an *epoch*, a part of every key, and a new one begins
when vLLM resets the connector's cache (as it does to sleep and to pause), when its weights are about to change, and
when it is told what they are called.

========================  =============================  ==============================================
an epoch is named by      it begins                      its chunks are shared with
========================  =============================  ==============================================
the files (empty name)    with the engine                engines that read the same files
``weights_version``       with the engine, or when vLLM  engines of the same files whose weights were
                          is told a weight version       called that, too
a nonce                   otherwise                      nobody
========================  =============================  ==============================================

What is computed behind KV of other weights belongs to no epoch. vLLM keeps blocks on its GPU until its own prefix cache
is reset, which it refuses while requests run. So an epoch that begins while anything is left there is *unclean*:
requests that come in it neither load nor store, until a reset finds the GPU empty; and a version that is told
meanwhile waits for that, too.
"""

from __future__ import annotations

import hashlib
import logging
import secrets

logger = logging.getLogger("tierkv")

#: vLLM's own name for weights as they were when the engine started.
AS_STARTED = "default"
#: The epoch of a request that belongs to none.
NO_EPOCH = -1


class Epochs:
    """The epoch that an engine is in.

    Args:
        version: what its weights are called at its start; None: what their files say.

    Attributes:
        number: how many epochs there were before.
        name: its part of every key; empty while the weights are as they are in their files.
        shared: other engines may have chunks of it.
        clean: nothing on the GPU was computed with other weights.
    """

    def __init__(self, version: str | None = None) -> None:
        self._first = b"" if version is None else version_name(version)
        self.number = 0
        self.name = self._first
        self.shared = True
        self.clean = True
        self._told: str | None = None  # a version that waits for the GPU to be emptied

    @property
    def of_new_requests(self) -> int:
        """The number of the epoch that a request which comes now belongs to; :data:`NO_EPOCH` for none."""
        return self.number if self.clean else NO_EPOCH

    def reset(self, *, gpu_is_empty: bool) -> None:
        """Begin the epoch that follows a reset: of the version that waits for one, else this engine's own."""
        told = self._told if gpu_is_empty else None
        self._begin(None if told is None else self._named(told), clean=gpu_is_empty)
        if told is not None:
            self._told = None
            logger.warning("the cache was reset: the host tier is empty; the weights are version %r now", told)
        elif gpu_is_empty:
            logger.warning(
                "the cache was reset: the host tier is empty, and what is computed from now on stays on this host"
            )
        else:
            logger.warning(
                "the cache was reset while requests held blocks on the GPU, which vLLM did not empty: nothing is kept "
                "below the GPU until a reset when none runs (or with reset_running_requests=True)"
            )

    def gpu_was_emptied(self) -> None:
        """Take note that nothing is left on the GPU: vLLM's own cache was reset, and nobody told this engine's."""
        told, self._told = self._told, None
        self.clean = True
        if told is not None:
            self._begin(self._named(told), clean=True)
        logger.warning("vLLM's prefix cache is empty: chunks are kept below the GPU again")

    def weights_change(self, *, gpu_is_empty: bool) -> bool:
        """Begin an epoch of this engine's own, because weights change in place; False: it is in a fresh one."""
        self._told = None
        if not self.shared and not gpu_is_empty and not self.clean:
            return False
        self._begin(None, clean=gpu_is_empty)
        if not gpu_is_empty:
            logger.warning(
                "the weights change and KV of the old ones is on the GPU: nothing is kept below the GPU until "
                "reset_prefix_cache(reset_connector=True)"
            )
        return True

    def tell(self, version: str, *, gpu_is_empty: bool) -> bool:
        """Begin the epoch of a version, or have the next reset do so; False where the engine is in it already."""
        name = self._named(version)
        if self.shared and self.clean and name == self.name:
            return False
        if gpu_is_empty:
            self._told = None
            self._begin(name, clean=True)
            logger.info("the weights are version %r now: KV is shared with engines that were told the same", version)
            return True
        self._begin(None, clean=False)
        self._told = version
        logger.warning(
            "the weights are said to be version %r, but KV of other weights may be on the GPU: nothing is kept below "
            "the GPU until reset_prefix_cache(reset_connector=True)",
            version,
        )
        return True

    def dump(self) -> tuple[int, bytes, bool, bool, str | None]:
        """Return the state as plain values, for tests that compare it."""
        return self.number, self.name, self.shared, self.clean, self._told

    def _named(self, version: str) -> bytes:
        return self._first if version == AS_STARTED else version_name(version)

    def _begin(self, name: bytes | None, *, clean: bool) -> None:
        self.number += 1
        self.shared = name is not None
        self.name = secrets.token_bytes(16) if name is None else name
        self.clean = clean


def version_name(version: str) -> bytes:
    """Return the name of the epoch of a version of the weights: the same bytes in every engine."""
    return b"version:" + hashlib.sha256(version.encode()).digest()

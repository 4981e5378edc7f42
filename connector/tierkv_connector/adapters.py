"""LoRA adapters by their content: two of one name never share KV, and one under two names does.

Theory of operation. vLLM names an adapter by a number and keeps its weights under it; which weights these are nothing
but the files say. An adapter's files are hashed once, on a thread, when a request first brings it; until then, and
where its weights cannot be told by its files, its requests keep to vLLM's own prefix cache. Its digest is the first
link of its requests' key chains: an adapter's KV and the model's own never meet.

vLLM may read the files again at any later time (it keeps a few adapters, and loads what it let go anew). So an adapter
whose files have changed since they were hashed, whose number comes with another path, or which is replaced in place, is
not told by its files any more, for the life of the engine. Whether they have is asked for every request anew; where the
file system does not answer at once, that request keeps to vLLM's own prefix cache, and no step waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.identity import WEIGHT_SUFFIXES, FileHashes, file_stamp
from tierkv.keys import Extra, Part, next_key
from tierkv.layout import canonical_json
from tierkv_connector.filecheck import FileChecks

logger = logging.getLogger("tierkv")

_CONFIG = "adapter_config.json"
#: Adapters that are remembered; requests of further ones keep to vLLM's own cache.
MAX_ADAPTERS = 4096
_FEW = 64


class _Adapter:
    """What is known of one number.

    Attributes:
        path: what vLLM was told to read.
        digest: of its content; None until it is hashed, and empty where that failed.
        given_up: its files do not tell what it is.
        stamps: its files as they were hashed.
    """

    __slots__ = ("digest", "given_up", "path", "stamps")

    def __init__(self, path: str) -> None:
        self.path = path
        self.digest: bytes | None = None
        self.given_up = False
        self.stamps: dict[Path, str] = {}


class Adapters:
    """The adapters of one engine.

    Args:
        hashes: remembers the digests of files.
        settings: what else decides what an adapter does to the KV (its dtype): plain values.
    """

    def __init__(self, hashes: FileHashes, settings: Mapping[str, Any]) -> None:
        self._hashes = hashes
        self._settings = settings
        self._known: dict[int, _Adapter] = {}
        self._queue: deque[_Adapter] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._checks = FileChecks()
        self._num_warned = 0
        self._said_late = False

    def root(self, root: bytes, lora: Any) -> bytes | None:
        """Return the root of a request's key chain.

        Args:
            root: that of the model and the tenant.
            lora: vLLM's request for an adapter, None for none.

        Returns:
            ``root`` itself without an adapter; None while the adapter's content is not known, or where it cannot be.
        """
        if lora is None:
            return root
        digest = self._digest(lora)
        return next_key(root, b"", [Extra(Part.LORA, digest)]) if digest else None

    def wait(self, timeout_s: float) -> bool:
        """Wait until every adapter that was asked for has been hashed, and return whether that is so. For tests."""
        with self._wake:
            return self._wake.wait_for(lambda: all(a.digest is not None for a in self._known.values()), timeout_s)

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._checks.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _digest(self, lora: Any) -> bytes | None:
        number, path = int(lora.lora_int_id), str(getattr(lora, "lora_path", "") or "")
        adapter = self._known.get(number)
        if adapter is None:
            if len(self._known) >= MAX_ADAPTERS:
                return None
            adapter = self._known[number] = _Adapter(path)
            self._hash_later(adapter)
        if adapter.given_up:
            return None
        if getattr(lora, "load_inplace", False):
            self._give_up(adapter, lora, "it is replaced in place")
        elif path != adapter.path:
            self._give_up(adapter, lora, f"its number was that of {adapter.path!r} before")
        elif adapter.digest:
            unchanged = self._checks.ask(number, lambda: _unchanged(adapter))
            if unchanged is None:
                self._say_late(path)
                return None
            if not unchanged:
                self._give_up(adapter, lora, "its files have changed since this engine first used them")
        return None if adapter.given_up else adapter.digest

    def _say_late(self, path: str) -> None:
        if not self._said_late:
            self._said_late = True
            logger.warning(
                "the file system of the adapter in %r does not say at once whether its files have changed: KV of "
                "requests that come meanwhile is cached on the GPU alone",
                path,
            )

    def _give_up(self, adapter: _Adapter, lora: Any, why: str) -> None:
        adapter.given_up = True
        self._num_warned += 1
        if self._num_warned <= _FEW:
            logger.warning(
                "KV of adapter %r is cached on the GPU alone from now on: %s. "
                "Save other weights under another path and name",
                getattr(lora, "lora_name", "?"),
                why,
            )

    def _hash_later(self, adapter: _Adapter) -> None:
        with self._wake:
            self._queue.append(adapter)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="tierkv-adapters", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                adapter = self._queue.popleft()
            digest = self._hash(adapter)
            with self._wake:
                adapter.digest = digest
                self._wake.notify_all()

    def _hash(self, adapter: _Adapter) -> bytes:
        try:
            files = _files(_directory(adapter.path))
            adapter.stamps = {path: file_stamp(path) for path in files}
            digests = {path.name: self._hashes.digest(path) for path in files}
            self._hashes.save()
            if not _unchanged(adapter):
                raise OSError("its files changed while they were read")
        except Exception as error:  # of many kinds, by what is at the path
            logger.warning("KV of the adapter in %r is cached on the GPU alone: %s", adapter.path, error)
            return b""
        body = canonical_json({"files": digests, "settings": dict(self._settings)})
        return hashlib.sha256(b"tierkv-adapter-1:" + body).digest()


def _directory(path: str) -> Path:
    """Return the adapter's directory: as given, or its snapshot in the hub's cache.

    Raises:
        ValueError: it is not on this machine.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:
        raise ValueError(f"its files are not on this machine ({error})") from None


def _files(directory: Path) -> list[Path]:
    """Return the files whose bytes decide what the adapter does.

    Raises:
        ValueError: there are no weights, or no configuration.
    """
    files = sorted(p for p in directory.iterdir() if p.is_file() and (p.suffix in WEIGHT_SUFFIXES or p.name == _CONFIG))
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files) or not any(path.name == _CONFIG for path in files):
        raise ValueError(f"{directory} holds no weights with an {_CONFIG}")
    return files


def _unchanged(adapter: _Adapter) -> bool:
    try:
        return all(file_stamp(path) == stamp for path, stamp in adapter.stamps.items())
    except OSError:
        return False

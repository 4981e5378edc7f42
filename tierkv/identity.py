"""Model identity is content: a digest of the weight files' bytes and of every setting that changes the KV they give.

Two fine-tunes may have equal headers and sizes, and new weights may be saved under an old path, so files are named by
the SHA-256 of their bytes. A file is hashed once and remembered by (device, inode, size, mtime, ctime); a blob of a hub
snapshot carries its hash as its name already. Hashing reads at 1 to 2 GB/s and releases the GIL.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tierkv.layout import canonical_json

logger = logging.getLogger("tierkv")

#: Files whose bytes decide a model's KV.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
#: Small files whose bytes do: the architecture and quantization. Tokenizers do not: keys are of token ids.
CONFIG_PATTERN = re.compile(r"(config|params|.*quant.*)\.json")
_BLOB = re.compile(r"[0-9a-f]{64}")
_READ_NBYTES = 4 << 20
_MAX_REMEMBERED = 20_000
#: A file that changed less than this ago may change again within one tick of its time stamps: it is not remembered.
_SETTLED_S = 2.0


class FileHashes:
    """SHA-256 of files, remembered in a JSON file of the user's cache folder.

    Args:
        path: the file to remember in; it is made when needed and replaced as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])["files"]
        except (OSError, KeyError, msgspec.MsgspecError):
            self._known = {}
        self.num_hashed = 0

    def digest(self, path: Path) -> str:
        """Return the hex SHA-256 of the file's bytes.

        Raises:
            OSError: it cannot be read, or changed while it was.
        """
        real = path.resolve()
        if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
            return real.name
        before = file_stamp(real)
        if before in self._known:
            return self._known[before]
        digest = _hash_file(real)
        if file_stamp(real) != before:
            raise OSError(f"{path} changed while it was read")
        if time.time() - real.stat().st_ctime > _SETTLED_S:
            self._known[before] = digest
            self.num_hashed += 1
        return digest

    def save(self) -> None:
        """Remember what was hashed. A cache folder that cannot be written only costs the next start its time."""
        if not self.num_hashed:
            return
        kept = dict(list(self._known.items())[-_MAX_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("wb", dir=self._path.parent, delete=False) as file:
                try:
                    file.write(msgspec.json.encode({"files": kept}))
                    file.flush()
                    Path(file.name).replace(self._path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise


def directory_digests(directory: Path, hashes: FileHashes) -> dict[str, str]:
    """Return the digests of a model's files by name: its weights and the configuration that goes with them.

    Raises:
        OSError: a file cannot be read.
        ValueError: the directory holds no weights.
    """
    weights, configs = [], []
    for path in sorted(directory.iterdir()):
        if path.suffix in WEIGHT_SUFFIXES and path.is_file():
            weights.append(path)
        elif CONFIG_PATTERN.fullmatch(path.name) and path.is_file():
            configs.append(path)
    if not weights:
        raise ValueError(f"{directory} holds no weight files ({', '.join(WEIGHT_SUFFIXES)})")
    return {path.name: hashes.digest(path) for path in weights + configs}


def identity_digest(files: Mapping[str, str], settings: Mapping[str, Any]) -> bytes:
    """Return the 32-byte identity of a model.

    Args:
        files: digest by name of every file of the model (and of its draft model, under a prefix).
        settings: what else decides its KV: dtype, quantization, overrides, KV dtype, ...; plain values only.
    """
    return hashlib.sha256(
        b"tierkv-identity-1:" + canonical_json({"files": dict(files), "settings": dict(settings)})
    ).digest()


def file_stamp(path: Path) -> str:
    """Return what tells a file from any other, and from itself after a change.

    Raises:
        OSError: it is not there.
    """
    s = path.stat()
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


def _hash_file(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_READ_NBYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()

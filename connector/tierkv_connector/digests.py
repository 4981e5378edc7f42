"""What an image, a clip, a sound or rows of embeddings are called: SHA-256 of what the model is given, in one spelling.

The spelling is a format (docs/formats.md): every value begins with a letter of its kind, and whatever has no fixed
length with its length, so that no two different contents are spelt alike.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tierkv.keys import pack_tokens

#: Values within values; deeper ones are no content that vLLM makes.
_MAX_DEPTH = 16


class UnknownContentError(Exception):
    """Something cannot be named by its content; the message says why."""


def content_digest(modality: str, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> bytes:
    """Return the 32-byte digest of one item as the model's encoder is given it.

    Args:
        modality: vLLM's name of its kind.
        fields: its processed inputs (pixels, grids, features): tensors, numbers, texts, lists and mappings of them.
        settings: what else decides what the encoder makes of them.

    Raises:
        UnknownContentError: a value is of a kind that has no spelling, or is not in this process's memory.
    """
    digest = hashlib.sha256(b"tierkv-content-1:")
    for piece in _spell([modality, fields, settings]):
        digest.update(piece)
    return digest.digest()


def place_digest(content: bytes, tokens: list[int], is_embed: Any) -> bytes:
    """Return the 32-byte digest of an item in its place in a prompt: the identity that goes into keys.

    What a model computes for the first of an item's places may depend on the last one (attention in both directions
    within an image), which may be in a later chunk.

    Args:
        content: what :func:`content_digest` gave.
        tokens: the prompt's token ids in the item's places.
        is_embed: vLLM's mask of those places that the encoder fills; None: all.

    Raises:
        UnknownContentError: the mask is not in this process's memory.
    """
    digest = hashlib.sha256(b"tierkv-place-1:")
    for piece in _spell([content, pack_tokens(tokens), is_embed]):
        digest.update(piece)
    return digest.digest()


def rows_digest(rows: torch.Tensor) -> bytes:
    """Return the 32-byte digest of embeddings, one row a token: of their kind, their width and their bytes.

    Raises:
        UnknownContentError: they are not in this process's memory.
    """
    digest = hashlib.sha256(f"tierkv-rows-1:{_dtype(rows)}:{rows.shape[1]}:".encode())
    digest.update(tensor_bytes(rows))
    return digest.digest()


def zero_rows(rows: torch.Tensor) -> int:
    """Return how many rows are zeros, bit for bit.

    Raises:
        UnknownContentError: they are not in this process's memory.
    """
    values = np.frombuffer(tensor_bytes(rows), dtype=np.uint8).reshape(len(rows), -1)
    return len(rows) - int(values.any(axis=1).sum())


def content_nbytes(value: Any) -> int:
    """Return about how many bytes are read to name a value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(content_nbytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(content_nbytes(each) for each in value)
    return len(value) if isinstance(value, str | bytes) else 8


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values, row after row, little endian.

    Raises:
        UnknownContentError: they are not in this process's memory, or this machine is big endian.
    """
    if tensor.device.type != "cpu":
        raise UnknownContentError(f"it is on the device {tensor.device}")
    if sys.byteorder != "little":
        raise UnknownContentError("this machine is big endian")
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spell(value: Any, depth: int = 0) -> Iterator[bytes | memoryview]:
    if depth > _MAX_DEPTH:
        raise UnknownContentError("values within values without end")
    if value is None:
        yield b"n"
    elif isinstance(value, bool | np.bool_):
        yield b"b\1" if value else b"b\0"
    elif isinstance(value, int | np.integer):
        yield from _sized(b"i", str(int(value)).encode())
    elif isinstance(value, float | np.floating):
        yield b"f" + struct.pack("<d", value)
    elif isinstance(value, str):
        yield from _sized(b"s", value.encode())
    elif isinstance(value, bytes | memoryview):
        yield from _sized(b"y", value)
    elif isinstance(value, torch.Tensor):
        yield b"t"
        yield from _spell([_dtype(value), list(value.shape)], depth + 1)
        yield from _sized(b"y", tensor_bytes(value))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield from _spell(torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)), depth)
    elif isinstance(value, list | tuple):
        yield b"l" + struct.pack("<Q", len(value))
        for each in value:
            yield from _spell(each, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        yield b"m" + struct.pack("<Q", len(value))
        for name in sorted(value):
            yield from _spell(name, depth + 1)
            yield from _spell(value[name], depth + 1)
    else:
        raise UnknownContentError(f"a value of type {type(value).__name__} has no spelling")


def _sized(kind: bytes, data: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield kind + struct.pack("<Q", len(data))
    yield data

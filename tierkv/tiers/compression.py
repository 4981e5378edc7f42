"""Codec 1 of records: the bytes of the elements shuffled into planes, then one zstd frame of level 1.

The high bytes of bfloat16 KV have little entropy and the low ones much: apart, zstd makes of real KV a third less; in
their order almost nothing. The width of an element is that of the namespace's dtype, which reader and writer know.
Nothing is allocated that a record claims: a frame whose size is not that of the namespace's payloads is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from tierkv.layout import Layout
from tierkv.payload import BadRecordError

LEVEL = 1
#: Element widths in bytes by the end of the dtype's name; 1 (no shuffle) for what is not here.
_WIDTHS = {"16": 2, "half": 2, "32": 4, "float": 4, "64": 8, "double": 8}


def element_nbytes(layout: Layout, part_nbytes: int) -> int:
    """Return the width by which payloads of a layout are shuffled: 1, 2, 4 or 8, a divisor of ``part_nbytes``."""
    width = next((width for end, width in _WIDTHS.items() if layout.dtype.lower().endswith(end)), 1)
    return width if part_nbytes % width == 0 else 1


class Codec:
    """Compresses and restores payloads of one size.

    Args:
        payload_nbytes: bytes of a payload.
        width: bytes of an element, a divisor of the bytes of every part.

    Notes:
        Thread-safe. The GIL is released while zstd works and while numpy moves bytes.
    """

    def __init__(self, payload_nbytes: int, width: int) -> None:
        self.payload_nbytes = payload_nbytes
        self.width = width
        self._local = threading.local()

    def compress(self, payload: memoryview) -> bytes | None:
        """Return the payload compressed, or None where that is not smaller."""
        planes = np.ascontiguousarray(np.frombuffer(payload, np.uint8).reshape(-1, self.width).T)
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(LEVEL, write_content_size=True)
        data: bytes = compressor.compress(planes.data)
        return data if len(data) < self.payload_nbytes else None

    def restore(self, data: bytes | memoryview, parts: Sequence[memoryview]) -> None:
        """Restore a payload into the ranks' parts.

        Raises:
            BadRecordError: the bytes are not one frame that holds a payload of this size.
        """
        try:
            nbytes = zstandard.frame_content_size(data)
            if nbytes != self.payload_nbytes:
                raise BadRecordError(
                    f"a compressed payload says that it is of {nbytes} bytes, not {self.payload_nbytes}"
                )
            decompressor = getattr(self._local, "decompressor", None)
            if decompressor is None:
                decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
            raw = decompressor.decompress(data, max_output_size=self.payload_nbytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadRecordError(f"a compressed payload cannot be restored ({error})") from None
        if len(raw) != self.payload_nbytes:
            raise BadRecordError(f"a compressed payload holds {len(raw)} bytes, not {self.payload_nbytes}")
        planes = np.frombuffer(raw, np.uint8).reshape(self.width, -1)
        at = 0
        for part in parts:
            elements = np.frombuffer(part, np.uint8).reshape(-1, self.width)
            np.copyto(elements, planes[:, at : at + len(elements)].T)
            at += len(elements)

"""Memory that LMDB writes from is kept: the allocator would give it back after every transaction."""

from __future__ import annotations

import ctypes

#: glibc's parameters (malloc.h), and what they are set to: blocks below this size come from the heap, and so much of
#: what was freed is kept for the next transaction.
_M_TRIM_THRESHOLD, _TRIM_NBYTES = -1, 64 << 20
_M_MMAP_THRESHOLD, _MMAP_NBYTES = -3, 32 << 20


def keep_freed_memory() -> bool:
    """Let this process keep up to 64 MiB of freed memory per allocator arena; False where the C library cannot.

    LMDB copies every record into memory of its own before it is written. glibc takes blocks of a record's size from the
    system and returns them, and the first touch of a fresh page costs more than the copy (0.3 to 0.5 GB/s a thread).
    It is a setting of the process, which is the store server's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_NBYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_NBYTES))

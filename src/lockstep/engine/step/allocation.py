"""What becomes of memory that was freed."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
"""`mallopt`'s number of the parameter, in glibc's malloc.h."""
_LARGE_BYTES = 1 << 20


def give_back_large() -> None:
    """Have memory of a megabyte or more go back to the system as soon as it is freed.

    Otherwise glibc keeps up to 32 MiB of each, in heaps that small allocations between them cut to
    pieces: blocks whose parameters come and go then take twice the memory. Other C libraries are
    left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)

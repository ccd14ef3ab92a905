"""How the process gets large blocks of memory, and what becomes of those that were freed.

Of the standard library only: what is set here must be before torch is imported.
"""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD = -3
"""`mallopt`'s number of the parameter, in glibc's malloc.h."""
_LARGE_BYTES = 1 << 20


def use_large_pages() -> None:
    """Have torch ask for large pages for tensors of 2 MiB or more, where the system has them.

    In pages of 4 KiB, to touch a fresh block for the first time takes longer than to fill it: a
    step in which the parameters of blocks come and go was twice as long
    (`THP_MEM_ALLOC_ENABLE=0 python benchmarks/slices.py` does without). torch looks when it makes
    its first tensor.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


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

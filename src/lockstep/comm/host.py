"""What this host gives a process: limits of its control groups, large blocks of memory, loopback.

Of the standard library only: what is set here must be before torch is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[bool, Path]]:
    """The folders with this process's limits: of its own group and of those around it.

    Args:
        controller: name of a controller of version 1, such as `cpu` or `memory`.
        root: folder in which the file systems `/proc` and `/sys` are.

    Yields:
        Whether the group is of version 2, and its folder, which need not be there.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")
        # A container often sees its own group at the mount but the host's path to it.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            yield not controllers, folder


_M_MMAP_THRESHOLD = -3
"""`mallopt`'s number of the parameter, in glibc's malloc.h."""
_LARGE_BYTES = 1 << 20
_SELDOM = 200_000
"""Objects that may come before Python looks which of them are garbage, while modules come."""
_USUAL = gc.get_threshold()


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


def forget_empty_window() -> None:
    """Drop COLUMNS and LINES where they are 0 or empty, with which `rich` would show nothing."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "unset").strip("0 "):
            del os.environ[name]


def collect_seldom() -> None:
    """Have Python look for garbage seldom until `collect_as_usual`, and not at its end.

    The modules of torch are hundreds of thousands of objects that stay to the end. As a rule Python
    goes through all of them again and again while they come, and once more before it ends: a
    quarter of the time of `import torch`.
    """
    gc.set_threshold(_SELDOM)
    skip_last_collection()


def skip_last_collection() -> None:
    """Have Python not look for garbage when it ends, when all memory goes back anyway."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Undo `collect_seldom`: from now on garbage may hold tensors. What is there stays.

    In other programs nothing changes: whether their objects are garbage is not known.
    """
    if gc.get_threshold()[0] == _SELDOM:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address says that only processes of the same host can reach it.

    What a name is resolved to does not count: many hosts know themselves by a loopback address.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False

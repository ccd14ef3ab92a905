"""The control groups of this process, in which Linux keeps limits of cores and memory."""

from __future__ import annotations

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

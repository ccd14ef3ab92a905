"""`lockstep data`: writing the data that recipes use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.recipes.ufs.synthetic.write import write_synthetic


def ufs_synthetic(
    folder: Path, num_latitudes: int, num_longitudes: int, num_times: int, seed: int
) -> Iterator[str]:
    """Write synthetic sea ice in both file formats; yields a line for each file.

    Raises:
        LockstepError: a number is not usable, or the folder cannot be written.
    """
    for path in write_synthetic(folder, num_latitudes, num_longitudes, num_times, seed):
        yield f"wrote {path}"

"""Reading a 0.25-degree grid: 721 x 1440 cells, 14 inputs and aice, 4 times; one JSON line.

`--write` makes the files; `--again` starts from what an earlier start has kept; `--raw` only reads
the bytes that the variables take, with read(2), and `--netcdf` only the variables, with the netCDF4
package. Ranks that mpirun starts share the work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import netCDF4

from lockstep.systems.ufs.fields import DEFAULT_INPUTS, VARIABLES
from lockstep.systems.ufs.fields.bands import Selection, keep_bands
from lockstep.systems.ufs.fields.rows import gather
from lockstep.systems.ufs.fields.sources import find_sources
from lockstep.systems.ufs.synthetic import write_history

SHAPE = (721, 1440)
TIMES = 4
NAMES = (*DEFAULT_INPUTS, "aice")
NUM_BYTES = SHAPE[0] * SHAPE[1] * TIMES * len(NAMES) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--netcdf", action="store_true")
    args = parser.parse_args()
    if args.write:
        args.folder.mkdir(parents=True, exist_ok=True)
        for number in range(TIMES):
            write_history(args.folder / f"iceh.{number:03}.nc", *SHAPE, number)
    paths = sorted(args.folder.glob("iceh.*.nc"))
    before = peak_mib()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cache = Path(shared(folder))
        if args.again:
            read(paths, cache)
        forget([*paths, *cache.rglob("*.safetensors")])
        shared(None)
        started = time.perf_counter()
        rows = 0
        if args.raw:
            raw(paths)
        elif args.netcdf:
            library(paths)
        elif not args.write:
            rows = read(paths, cache)
        seconds = time.perf_counter() - started
        shared(None)
    result = {
        "seconds": seconds,
        "mb_per_s": NUM_BYTES / seconds / 1e6,
        "rows": rows,
        "mib_before": before,
        "mib_peak": peak_mib(),
        "mib_of_data": NUM_BYTES / 2**20,
    }
    print(json.dumps(result), flush=True)


def shared(value: Any) -> Any:
    """The first rank's value, once all ranks that mpirun has started are here."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return value
    from mpi4py import MPI  # joins the others: not in a process that mpirun has not started

    found = MPI.COMM_WORLD.bcast(value)
    MPI.COMM_WORLD.Barrier()
    return found


def read(paths: list[Path], cache: Path) -> int:
    """As the recipe reads, masks and draws 400,000 of the rows."""
    sources = find_sources([str(path) for path in paths], [], [], None)
    return len(gather(keep_bands(sources, Selection(NAMES, "both"), cache), 400_000))


def raw(paths: list[Path]) -> None:
    """The same bytes, without looking at them: contiguous pieces of the files."""
    size = SHAPE[0] * SHAPE[1] * 4
    with netCDF4.Dataset(paths[0]) as data:
        assert all(VARIABLES[name].cice_name in data.variables for name in NAMES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            for number in range(len(NAMES)):
                file.seek(number * size)
                left = size
                while left:
                    left -= len(file.read(min(left, 1 << 20)))


def library(paths: list[Path]) -> None:
    """The variables as the library gives them, a whole field at a time."""
    for path in paths:
        with netCDF4.Dataset(path) as data:
            for name in NAMES:
                data[VARIABLES[name].cice_name][0]


def forget(paths: list[Path]) -> None:
    """Have the kernel drop the files from its cache, so that they come from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_mib() -> float:
    """Most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

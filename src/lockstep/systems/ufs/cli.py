"""The subcommands of `lockstep data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launching.rank.early import ending_at_interrupt

app = typer.Typer()


@app.command("ufs-synthetic")
def ufs_synthetic(
    folder: Annotated[Path, typer.Argument(help="Where to write; created if it is not there.")],
    latitudes: Annotated[int, typer.Option("--latitudes", help="Rows of the grid.")] = 90,
    longitudes: Annotated[int, typer.Option("--longitudes", help="Columns of the grid.")] = 180,
    times: Annotated[int, typer.Option("--times", help="A file, or a pair, for each.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the noise.")] = 0,
) -> None:
    """Write sea ice with a known law, as CICE history files and as CF pairs."""
    with ending_at_interrupt():
        from lockstep.systems.ufs.synthetic import write_synthetic
    for path in write_synthetic(folder, latitudes, longitudes, times, seed):
        print(f"wrote {path}")

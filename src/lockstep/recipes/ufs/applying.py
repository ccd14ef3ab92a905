"""What an exported emulator predicts on files, as NetCDF on their grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.bands import ranges
from lockstep.recipes.ufs.fields.netcdf.file import netcdf4
from lockstep.recipes.ufs.fields.places import filled
from lockstep.recipes.ufs.fields.rows import Rows
from lockstep.recipes.ufs.fields.sources import Source
from lockstep.recipes.ufs.fields.times import Moment
from lockstep.recipes.ufs.fields.variables import VARIABLES
from lockstep.recipes.ufs.model import SeaIceNet

_TOLERANCE = 1e-6
_MISSING = np.float32(9.969209968386869e36)
_ROWS_AT_A_TIME = 50_000


def write_predictions(
    path: Path,
    net: SeaIceNet,
    exported: Callable[[Tensor], Tensor],
    rows: Rows,
    sources: Sequence[Source],
    moments: Sequence[Moment],
) -> None:
    """Write predicted and true outputs of rows, dims (time, row, column).

    Args:
        path: path of the NetCDF file to write.
        net: network on the CPU, to compare with.
        exported: what was read back: a function from inputs [N, in] to outputs [N, out].
        rows: N rows with inputs, then outputs.
        sources: scenes that rows are of, by their number.
        moments: time of each scene.

    Raises:
        DataError: the file cannot be written, or the exported form predicts something else here.
    """
    cut = len(net.inputs)
    parts = torch.split(torch.from_numpy(rows.values[:, :cut].copy()), _ROWS_AT_A_TIME)
    with torch.no_grad():
        predicted = torch.cat([exported(part) for part in parts])
        wanted = torch.cat([net.predict(part) for part in parts])
    if not torch.allclose(predicted, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        gap = float((predicted - wanted).abs().max())
        raise DataError(f"{path}: the exported form predicts otherwise, by up to {gap:.3g}")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with closing(netcdf4().Dataset(temporary, "w")) as data:
            times = np.unique(rows.time)
            shape = _grid(data, sources[0], [moments[time].text for time in times])
            for column, name in enumerate(net.outputs):
                for kind, values in (
                    ("predicted", predicted[:, column].numpy()),
                    ("true", rows.values[:, cut + column]),
                ):
                    made = _variable(data, f"{name}_{kind}", name)
                    for number, time in enumerate(times):
                        here = rows.time == time
                        field = np.full(shape[0] * shape[1], _MISSING)
                        field[rows.cell[here]] = values[here]
                        made[number] = field.reshape(shape)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # the library's own are RuntimeErrors
        raise DataError(f"{path}: cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _grid(data: Any, source: Source, times: Sequence[str]) -> tuple[int, int]:
    """Make dims, places and times; the shape of the grid."""
    with closing(source.open()) as scene:
        for name, size in zip(("time", "row", "column"), (len(times), *scene.shape), strict=True):
            data.createDimension(name, size)
        data.createVariable("time", str, ("time",))[:] = np.array(times, object)
        places = [
            data.createVariable(name, "f8", ("row", "column"), fill_value=np.nan)
            for name in ("latitude", "longitude")
        ]
        for made, unit in zip(places, ("degrees_north", "degrees_east"), strict=True):
            made.units = unit
        for rows in ranges(scene):
            for made, axis in zip(places, scene.coordinates(rows), strict=True):
                made[rows] = filled(axis)
        return scene.shape


def _variable(data: Any, stored_name: str, name: str) -> Any:
    made = data.createVariable(
        stored_name, "f4", ("time", "row", "column"), fill_value=_MISSING, zlib=True
    )
    made.units = VARIABLES[name].unit
    made.long_name = VARIABLES[name].cf_name
    made.coordinates = "latitude longitude"
    return made

"""Exports the emulator for other programs, and writes its predictions on files."""

from __future__ import annotations

import json
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import DataError, file_errors
from lockstep.systems.ufs.fields import (
    OCEAN_MASKS,
    SIGNS,
    VARIABLES,
    accepted,
    conversion,
    spellings,
)
from lockstep.systems.ufs.fields.grids import filled
from lockstep.systems.ufs.fields.rows import Rows
from lockstep.systems.ufs.fields.scenes import Moment
from lockstep.systems.ufs.fields.sources import Source
from lockstep.systems.ufs.model import SeaIceNet
from lockstep.systems.ufs.netcdf_file import new_netcdf

TORCHSCRIPT = "emulator.ts"
EXPORTED = "emulator.pt2"
METADATA = "metadata.json"
CPP = "cpp"

SURFACE = 0
"""The number of the surface among levels."""

LOWEST = -1
"""The number that stands for the lowest level in height."""

_UPPER_AIR = ("tair", "uatm", "vatm", "qref")
_TOLERANCE = 1e-6
_TRIAL_ROWS = 64
_MISSING = np.float32(9.969209968386869e36)
_ROWS_AT_A_TIME = 50_000


class Emulator(nn.Module):
    """The exported module: inputs [N, in] to outputs [N, out], both in physical units.

    Attributes:
        input_names: CF name of each input.
        output_names: CF name of each output.
        inputs: short name of each input.
        outputs: short name of each output.
        input_units: unit in which the emulator takes each input.
        output_units: unit of each output.
        cf_units: unit in which CF files store each input.
        cice_names: name of each input in CICE history files.
        masks: for each kind of grid, the names of a history file's mask, latitudes and longitudes.
        units: for each input, the units from which it can be converted.
        spellings: for each of `units`, the spellings that a `units` attribute may have, separated
            by `|`.
        factors: for each of `units`, the factor that converts a value to `input_units`, before:
        shifts: the number that is then added.
        signs: meaning of signs in `units` attributes, see `SIGNS`.
        low: least plausible value of each input, in `input_units`.
        high: greatest plausible value of each input, in `input_units`.
        slack: distance from these limits within which values are clipped, in `input_units`.
        levels: for each input, the number of its model level, or `SURFACE` or `LOWEST`.
        metadata: JSON text with names, units, levels and versions.
    """

    def __init__(self, net: SeaIceNet, metadata: Mapping[str, Any]) -> None:
        """Wrap a network, with metadata from `describe`."""
        super().__init__()
        self.net = net
        for key in (
            "input_names", "output_names", "inputs", "outputs", "levels", "input_units",
            "output_units", "cf_units",
        ):  # fmt: skip
            setattr(self, key, list(metadata[key]))
        variables = [VARIABLES[name] for name in net.inputs]
        self.cice_names = [v.cice_name for v in variables]
        self.masks = [list(names) for names in OCEAN_MASKS]
        self.units = [list(accepted(v.unit)) for v in variables]
        self.spellings = [["|".join(spellings(unit)) for unit in units] for units in self.units]
        conversions = [[conversion(v.unit, u) for u in accepted(v.unit)] for v in variables]
        self.factors = [[c.factor for c in of_input] for of_input in conversions]
        self.shifts = [[c.shift for c in of_input] for of_input in conversions]
        self.signs = [list(pair) for pair in SIGNS]
        self.low = [float(v.low) for v in variables]
        self.high = [float(v.high) for v in variables]
        self.slack = [float(v.slack) for v in variables]
        self.metadata = json.dumps(metadata)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, out] from inputs [N, in], both float32 in physical units."""
        return self.net.predict(x)


def export_net(
    net: SeaIceNet, level: int | None, about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write a network in all forms; each is loaded again and compared.

    Args:
        net: trained network on the CPU.
        level: number of the model level that upper-air inputs are from; None is the lowest in
            height.
        about: further entries of the metadata, JSON values.
        folder: folder to write to; it exists.

    Returns:
        The paths that were written.

    Raises:
        DataError: the folder cannot be written, or a loaded form predicts other values.
    """
    net = net.eval().requires_grad_(False)
    metadata = {**describe(net, level), **about}
    emulator = Emulator(net, metadata).eval()
    trial = _trial(net)
    paths = [folder / TORCHSCRIPT, folder / EXPORTED, folder / METADATA, folder / CPP]
    text = json.dumps(metadata, indent=1) + "\n"
    with file_errors(DataError, folder):
        _write(paths[0], lambda path: _script(emulator, path))
        _write(paths[1], lambda path: _program(emulator, trial, path))
        _write(paths[2], lambda path: path.write_text(text, encoding="utf-8"))
        shutil.copytree(Path(__file__).with_name("cpp"), paths[3], dirs_exist_ok=True)
    for path, load in ((paths[0], load_script), (paths[1], load_program)):
        predicted, wanted = load(path)(trial), net.predict(trial)
        if not torch.allclose(predicted, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            gap = float((predicted - wanted).abs().max())
            raise DataError(f"{path}: predicts otherwise when read back, by up to {gap:.3g}")
    return paths


def describe(net: SeaIceNet, level: int | None) -> dict[str, Any]:
    """The metadata of a network: names, units, levels, versions."""
    number = LOWEST if level is None else level
    return {
        "inputs": list(net.inputs),
        "outputs": list(net.outputs),
        "input_names": [VARIABLES[name].cf_name for name in net.inputs],
        "output_names": [VARIABLES[name].cf_name for name in net.outputs],
        "input_units": [VARIABLES[name].unit for name in net.inputs],
        "cf_units": [VARIABLES[n].stored_unit(VARIABLES[n].cf_file) for n in net.inputs],
        "output_units": [VARIABLES[name].unit for name in net.outputs],
        "levels": [number if name in _UPPER_AIR else SURFACE for name in net.inputs],
        "squash": net.squash,
        "lockstep": version("lockstep-train"),
        "torch": torch.__version__,
    }


def load_script(path: Path) -> Callable[[Tensor], Tensor]:
    """The emulator in a TorchScript file: a function from inputs [N, in] to outputs [N, out]."""
    with _without_jit_warnings():
        loaded: Callable[[Tensor], Tensor] = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return loaded


def load_program(path: Path) -> Callable[[Tensor], Tensor]:
    """The emulator in a torch.export file: a function from inputs [N, in] to outputs [N, out]."""
    return torch.export.load(path).module()


def _script(emulator: Emulator, path: Path) -> None:
    with _without_jit_warnings():
        torch.jit.script(emulator).save(str(path))  # type: ignore[no-untyped-call]


def _program(emulator: Emulator, trial: Tensor, path: Path) -> None:
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(emulator, (trial,), dynamic_shapes=({0: rows},))
    torch.export.save(program, path, extra_files={METADATA: emulator.metadata})


def _trial(net: SeaIceNet) -> Tensor:
    """Plausible inputs [64, in], float32."""
    noise = torch.randn(_TRIAL_ROWS, len(net.inputs), generator=torch.Generator().manual_seed(0))
    return noise * net.input_deviation + net.input_mean


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then rename it."""
    # The suffix stays: torch.export.save checks it.
    temporary = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _without_jit_warnings() -> Iterator[None]:
    """TorchScript is deprecated, but LibTorch programs need it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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
        exported: the loaded export, a function from inputs [N, in] to outputs [N, out].
        rows: N rows with inputs, then outputs.
        sources: scenes of the rows, by their number.
        moments: time of each scene.

    Raises:
        DataError: the file cannot be written, or the exported form predicts other values.
    """
    cut = len(net.inputs)
    parts = torch.split(torch.from_numpy(rows.values[:, :cut].copy()), _ROWS_AT_A_TIME)
    with torch.no_grad():
        predicted = torch.cat([exported(part) for part in parts])
        wanted = torch.cat([net.predict(part) for part in parts])
    if not torch.allclose(predicted, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        gap = float((predicted - wanted).abs().max())
        raise DataError(f"{path}: the exported form predicts otherwise, by up to {gap:.3g}")
    try:
        with new_netcdf(path) as data:
            times = np.unique(rows.time)
            shape = _grid(data, sources[0], [moments[time].text for time in times])
            for column, name in enumerate(net.outputs):
                for kind, values in (
                    ("predicted", predicted[:, column].numpy()),
                    ("true", rows.values[:, cut + column]),
                ):
                    made = _variable(data, f"{name}_{kind}", name)
                    for number, time in enumerate(times):
                        at_time = rows.time == time
                        field = np.full(shape[0] * shape[1], _MISSING)
                        field[rows.cell[at_time]] = values[at_time]
                        made[number] = field.reshape(shape)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.__cause__ or error}") from error


def _grid(data: Any, source: Source, times: Sequence[str]) -> tuple[int, int]:
    """Create dims, coordinates and times; returns the shape of the grid."""
    with closing(source.open()) as scene:
        for name, size in zip(("time", "row", "column"), (len(times), *scene.shape), strict=True):
            data.createDimension(name, size)
        data.createVariable("time", str, ("time",))[:] = np.array(times, object)
        axes = [
            data.createVariable(name, "f8", ("row", "column"), fill_value=np.nan)
            for name in ("latitude", "longitude")
        ]
        for made, unit in zip(axes, ("degrees_north", "degrees_east"), strict=True):
            made.units = unit
        for rows in scene.bands():
            for made, axis in zip(axes, scene.coordinates(rows), strict=True):
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

"""Reading NetCDF files: from a grid's fields to the rows of a dataset.

Here are the variables: their names, units and plausible ranges in both file formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

KELVIN = 273.15
"""0 °C in kelvin."""

DEFAULT_INPUTS = (
    "sst", "sss", "tair", "tsfc", "hi", "hs", "sice", "uocn", "vocn", "uatm", "vatm", "qref",
    "flwdn", "fswdn",
)  # fmt: skip
"""The default inputs of the emulator."""

THICKNESS = "sea_water_cell_thickness"
"""The ocean file's variable, in m, that is 0 or missing on land."""

OCEAN_MASKS = (("umask", "ULAT", "ULON"), ("tmask", "TLAT", "TLON"))
"""The variables of history files that are 1 on the ocean, each with the latitude and longitude of
its cells: those of the U grid, or else of the T grid."""

_TABLES: Mapping[str, Any] = yaml.safe_load(
    files(__package__).joinpath("variables.yaml").read_text(encoding="utf-8")
)

SIGNS: tuple[tuple[str, str], ...] = tuple((sign, meaning) for sign, meaning in _TABLES["signs"])
"""What signs of `units` attributes are read as, in this order."""


@dataclass(frozen=True)
class Variable:
    """A physical quantity.

    Attributes:
        name: short name, in config keys and outputs.
        unit: unit of values once they are read.
        low: smallest plausible value, in `unit`.
        high: largest plausible value.
        cf_name: CF name, also in exported models.
        cf_file: file of a CF pair that has it: `atmosphere`, `ocean`, or empty for neither.
        cice_name: name in CICE history files; empty if they do not have it.
        bounds: smallest and largest possible value, in `unit`; None if it is unbounded.
        slack: distance from `low` and `high`, in `unit`, that rounding, packing and interpolation
            may cause; values within it are clipped.
    """

    name: str
    unit: str
    low: float
    high: float
    cf_name: str
    cf_file: str = ""
    cice_name: str = ""
    bounds: Sequence[float] | None = None
    slack: float = 0.0

    def stored_unit(self, kind: str) -> str:
        """The unit in files of a kind: air temperatures are in K in CF files."""
        return "K" if kind == "atmosphere" and self.unit == "degC" else self.unit


VARIABLES: Mapping[str, Variable] = {
    name: Variable(name, **entry) for name, entry in _TABLES["variables"].items()
}
"""The variables by short name."""


class Conversion(NamedTuple):
    """A conversion between units: `value * factor + shift`."""

    factor: float
    shift: float


_CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {
    "degC": {"K": Conversion(1.0, -KELVIN)},
    "m": {"cm": Conversion(1e-2, 0.0), "mm": Conversion(1e-3, 0.0)},
    "m/s": {"cm/s": Conversion(1e-2, 0.0)},
    "kg/kg": {"g/kg": Conversion(1e-3, 0.0)},
    "1": {"%": Conversion(1e-2, 0.0)},
}
"""For each unit: the units that can be converted to it."""


def accepted(unit: str) -> tuple[str, ...]:
    """The units that can be converted to `unit`, itself first."""
    return unit, *_CONVERSIONS.get(unit, ())


def conversion(unit: str, stored: str) -> Conversion:
    """The conversion to `unit` from the unit `stored`, one of `accepted(unit)`."""
    return Conversion(1.0, 0.0) if stored == unit else _CONVERSIONS[unit][stored]


def spellings(unit: str) -> tuple[str, ...]:
    """The spellings of a unit, in the form of `plain`."""
    return tuple(_TABLES["spellings"][unit])


def plain(text: str) -> str:
    """A `units` attribute in lower case, without signs, with single blanks between words."""
    for sign, meaning in SIGNS:
        text = text.replace(sign, meaning)
    return " ".join(text.lower().split())


def spelt(text: str, unit: str) -> str | None:
    """The one of `accepted(unit)` that a `units` attribute names; None if it is another unit."""
    name = plain(text)
    return next((known for known in accepted(unit) if name in spellings(known)), None)

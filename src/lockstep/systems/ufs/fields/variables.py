"""The variables of the sea-ice emulator: names, units and plausible ranges in both file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

KELVIN = 273.15
"""0 °C in kelvin."""

SIGNS = (
    ("°", "deg"), ("º", "deg"), ("˚", "deg"), ("\ufffd", "deg"), ("℃", "degc"), ("\u212a", "k"),
    ("¹", "1"), ("²", "2"), ("³", "3"), ("⁻", "-"), ("−", "-"), ("–", "-"), ("·", " "),
    ("⋅", " "), ("**", ""), ("^", ""), (".", " "), ("_", " "),
)  # fmt: skip
"""What signs of `units` attributes are read as, in this order. U+FFFD is what reading makes of the
degree sign of Latin-1."""

_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "degC": (
            "degc", "c", "celsius", "deg c", "degree c", "degrees c", "deg celsius",
            "degree celsius", "degrees celsius", "degreec", "degreesc",
        ),
        "K": ("k", "kelvin", "kelvins", "degk", "deg k", "degree k", "degrees k", "degree kelvin",
              "degrees kelvin"),
        "psu": ("psu", "ppt", "1e-3", "0 001", "g/kg", "g kg-1", "pss-78", "pss78", "pss"),
        "m": ("m", "meter", "meters", "metre", "metres"),
        "cm": ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        "mm": ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
        "m/s": ("m/s", "m s-1", "meter second-1", "meters/second", "m/sec"),
        "cm/s": ("cm/s", "cm s-1", "cm/sec"),
        "kg/kg": ("kg/kg", "kg kg-1", "1"),
        "g/kg": ("g/kg", "g kg-1"),
        "W/m^2": ("w/m2", "w m-2", "watts/m2", "watt/m2", "watts m-2", "watt m-2"),
        "N/m^2": ("n/m2", "n m-2", "newton/m2", "newtons/m2", "pa", "pascal"),
        "1": ("1", "", "none", "fraction", "0-1", "unitless", "dimensionless", "nondimensional"),
        "%": ("%", "percent", "pct"),
        "degrees_north": ("degrees north", "degree north", "degree n", "degrees n", "degreen",
                          "degreesn", "degrees", "degree", "deg"),
        "degrees_east": ("degrees east", "degree east", "degree e", "degrees e", "degreee",
                         "degreese", "degrees", "degree", "deg"),
    }
)  # fmt: skip


class Conversion(NamedTuple):
    """A value in another unit is `value * factor + shift`."""

    factor: float
    shift: float


SAME = Conversion(1.0, 0.0)
"""Of a unit to itself."""

_CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = MappingProxyType(
    {
        "degC": {"K": Conversion(1.0, -KELVIN)},
        "m": {"cm": Conversion(1e-2, 0.0), "mm": Conversion(1e-3, 0.0)},
        "m/s": {"cm/s": Conversion(1e-2, 0.0)},
        "kg/kg": {"g/kg": Conversion(1e-3, 0.0)},
        "1": {"%": Conversion(1e-2, 0.0)},
    }
)
"""By the unit that is wanted: the units whose values can be had in it."""


def accepted(unit: str) -> tuple[str, ...]:
    """The units in which a file may have what is wanted in `unit`, itself first."""
    return unit, *_CONVERSIONS.get(unit, ())


def conversion(unit: str, stored: str) -> Conversion:
    """How values in the unit `stored`, one of `accepted(unit)`, become values in `unit`."""
    return SAME if stored == unit else _CONVERSIONS[unit][stored]


def spellings(unit: str) -> tuple[str, ...]:
    """The spellings of a unit, as `plain` has them."""
    return _SPELLINGS[unit]


def plain(text: str) -> str:
    """A `units` attribute in lower case, without signs, with single blanks between words."""
    for sign, meaning in SIGNS:
        text = text.replace(sign, meaning)
    return " ".join(text.lower().split())


def spelt(text: str, unit: str) -> str | None:
    """The one of `accepted(unit)` that a `units` attribute says; None if it says another unit."""
    said = plain(text)
    return next((known for known in accepted(unit) if said in spellings(known)), None)


@dataclass(frozen=True)
class Variable:
    """One physical quantity.

    Attributes:
        name: short name, as config keys and outputs have it.
        unit: unit of values once they are read.
        low: the least plausible value, in `unit`.
        high: the greatest plausible value.
        cf_name: CF name, which exported models carry.
        cf_file: which file of the CF pair has it: `atmosphere`, `ocean`, or empty for neither.
        cice_name: name in CICE history files; empty if it is not there.
        bounds: least and greatest value that is possible at all, in `unit`; None if there are no
            such bounds.
        slack: how far outside of `low` and `high`, in `unit`, rounding, packing and interpolation
            may bring values; those are clipped.
    """

    name: str
    unit: str
    low: float
    high: float
    cf_name: str
    cf_file: str = ""
    cice_name: str = ""
    bounds: tuple[float, float] | None = None
    slack: float = 0.0

    def stored_unit(self, kind: str) -> str:
        """The unit in files of a kind: temperatures of the air are in K in CF files."""
        return "K" if kind == "atmosphere" and self.unit == "degC" else self.unit


def _table(*variables: Variable) -> Mapping[str, Variable]:
    return MappingProxyType({v.name: v for v in variables})


VARIABLES = _table(
    Variable("sst", "degC", -5, 45, "sea_water_potential_temperature", "ocean", "sst_h"),
    Variable("sss", "psu", 0, 50, "sea_water_salinity", "ocean", "sss_h", slack=1e-3),
    Variable("tair", "degC", -95, 65, "air_temperature", "atmosphere", "Tair_h"),
    Variable("tsfc", "degC", -95, 75, "skin_temperature_at_surface", "atmosphere", "Tsfc_h"),
    Variable("hi", "m", 0, 50, "sea_ice_thickness", "ocean", "hi_h", slack=1e-3),
    Variable("hs", "m", 0, 20, "sea_ice_snow_thickness", "ocean", "hs_h", slack=1e-3),
    Variable("sice", "psu", 0, 50, "sea_ice_salinity", "ocean", "sice_h", slack=1e-3),
    Variable("uocn", "m/s", -5, 5, "eastward_sea_water_velocity", "ocean", "uocn_h"),
    Variable("vocn", "m/s", -5, 5, "northward_sea_water_velocity", "ocean", "vocn_h"),
    Variable("uatm", "m/s", -150, 150, "eastward_wind", "atmosphere", "uatm_h"),
    Variable("vatm", "m/s", -150, 150, "northward_wind", "atmosphere", "vatm_h"),
    Variable(
        "qref", "kg/kg", 0, 0.08, "water_vapor_mixing_ratio_wrt_moist_air", "atmosphere",
        "Qref_h", slack=1e-6,
    ),
    Variable("flwdn", "W/m^2", 0, 800, "surface_downwelling_longwave_flux", "", "flwdn_h"),
    Variable(
        "fswdn", "W/m^2", 0, 1500, "surface_downwelling_shortwave_flux", "", "fswdn_h",
        slack=1.0,
    ),
    Variable("frzmlt", "W/m^2", -1e5, 1e5, "freezing_melting_potential", "", "frzmlt_h"),
    Variable("strocnx", "N/m^2", -20, 20, "downward_x_stress_at_sea_ice_base", "", "strocnx_h"),
    Variable("strocny", "N/m^2", -20, 20, "downward_y_stress_at_sea_ice_base", "", "strocny_h"),
    Variable("strairx", "N/m^2", -20, 20, "surface_downward_x_stress", "", "strairx_h"),
    Variable("strairy", "N/m^2", -20, 20, "surface_downward_y_stress", "", "strairy_h"),
    Variable(
        "aice", "1", 0, 1, "sea_ice_area_fraction", "ocean", "aice_h", (0.0, 1.0), slack=1e-3
    ),
)  # fmt: skip
"""The variables by short name."""

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

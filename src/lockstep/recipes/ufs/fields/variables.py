"""The variables of the sea-ice emulator: names, units and plausible ranges in both file formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KELVIN = 273.15
"""0 °C in kelvin."""

_UNITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "degC": ("degc", "c", "celsius", "degree_celsius", "degrees_celsius", "deg_c", "degree_c"),
        "K": ("k", "kelvin", "degk", "degree_kelvin", "degrees_kelvin"),
        "psu": ("psu", "ppt", "1e-3", "g/kg", "g kg-1", "pss-78", "pss"),
        "m": ("m", "meter", "meters", "metre", "metres"),
        "m/s": ("m/s", "m s-1", "m.s-1", "m s**-1", "m s^-1", "meter second-1"),
        "kg/kg": ("kg/kg", "kg kg-1", "kg kg**-1", "kg kg^-1", "1"),
        "W/m^2": ("w/m^2", "w/m2", "w m-2", "w m**-2", "w m^-2", "watts/m^2"),
        "N/m^2": ("n/m^2", "n/m2", "n m-2", "n m**-2", "n m^-2", "pa"),
        "1": ("1", "", "none", "fraction", "0-1", "unitless", "dimensionless"),
        "degrees_north": (
            "degrees_north", "degree_north", "degree_n", "degrees_n", "degreen", "degreesn",
            "degrees", "degree", "deg",
        ),
        "degrees_east": (
            "degrees_east", "degree_east", "degree_e", "degrees_e", "degreee", "degreese",
            "degrees", "degree", "deg",
        ),
    }
)  # fmt: skip


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
    """

    name: str
    unit: str
    low: float
    high: float
    cf_name: str
    cf_file: str = ""
    cice_name: str = ""
    bounds: tuple[float, float] | None = None

    def stored_unit(self, kind: str) -> str:
        """The unit in files of a kind: temperatures of the air are in K in CF files."""
        return "K" if kind == "atmosphere" and self.unit == "degC" else self.unit


def _table(*variables: Variable) -> Mapping[str, Variable]:
    return MappingProxyType({v.name: v for v in variables})


VARIABLES = _table(
    Variable("sst", "degC", -5, 45, "sea_water_potential_temperature", "ocean", "sst_h"),
    Variable("sss", "psu", 0, 50, "sea_water_salinity", "ocean", "sss_h"),
    Variable("tair", "degC", -95, 65, "air_temperature", "atmosphere", "Tair_h"),
    Variable("tsfc", "degC", -95, 75, "skin_temperature_at_surface", "atmosphere", "Tsfc_h"),
    Variable("hi", "m", 0, 50, "sea_ice_thickness", "ocean", "hi_h"),
    Variable("hs", "m", 0, 20, "sea_ice_snow_thickness", "ocean", "hs_h"),
    Variable("sice", "psu", 0, 50, "sea_ice_salinity", "ocean", "sice_h"),
    Variable("uocn", "m/s", -5, 5, "eastward_sea_water_velocity", "ocean", "uocn_h"),
    Variable("vocn", "m/s", -5, 5, "northward_sea_water_velocity", "ocean", "vocn_h"),
    Variable("uatm", "m/s", -150, 150, "eastward_wind", "atmosphere", "uatm_h"),
    Variable("vatm", "m/s", -150, 150, "northward_wind", "atmosphere", "vatm_h"),
    Variable(
        "qref", "kg/kg", -1e-6, 0.08, "water_vapor_mixing_ratio_wrt_moist_air", "atmosphere",
        "Qref_h",
    ),
    Variable("flwdn", "W/m^2", 0, 800, "surface_downwelling_longwave_flux", "", "flwdn_h"),
    Variable("fswdn", "W/m^2", 0, 1500, "surface_downwelling_shortwave_flux", "", "fswdn_h"),
    Variable("frzmlt", "W/m^2", -1e5, 1e5, "freezing_melting_potential", "", "frzmlt_h"),
    Variable("strocnx", "N/m^2", -20, 20, "downward_x_stress_at_sea_ice_base", "", "strocnx_h"),
    Variable("strocny", "N/m^2", -20, 20, "downward_y_stress_at_sea_ice_base", "", "strocny_h"),
    Variable("strairx", "N/m^2", -20, 20, "surface_downward_x_stress", "", "strairx_h"),
    Variable("strairy", "N/m^2", -20, 20, "surface_downward_y_stress", "", "strairy_h"),
    Variable(
        "aice", "1", -1e-6, 1 + 1e-6, "sea_ice_area_fraction", "ocean", "aice_h", (0.0, 1.0)
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

OCEAN_MASK = "umask"
"""The history file's variable that is 1 on the ocean."""


def spellings(unit: str) -> tuple[str, ...]:
    """The spellings of a unit in `units` attributes, in lower case."""
    return _UNITS[unit]


def known_unit(text: str, unit: str) -> bool:
    """Whether a `units` attribute is a spelling of a unit."""
    return text.strip().lower() in spellings(unit)


def to_unit(unit: str, stored: str) -> float:
    """The number to add to a value in the unit `stored` to have it in `unit`."""
    return -KELVIN if (unit, stored) == ("degC", "K") else 0.0

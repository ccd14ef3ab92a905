"""Units as files spell them, and how values in one become values in another."""

from __future__ import annotations

from collections.abc import Mapping
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

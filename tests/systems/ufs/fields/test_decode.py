"""Decoding means what the netCDF library means by it, and refuses what that one ignores."""

from __future__ import annotations

import warnings
from typing import Any

import netCDF4
import numpy as np
import pytest

from lockstep.systems.ufs.decoding import KEYS, Unusable, decoded

TYPES = ("i1", "u1", "i2", "u2", "i4", "f4", "f8")


def variable(data: Any, generator: np.random.Generator) -> Any:
    """A variable of some type with some of the attributes, filled."""
    kind = np.dtype(str(generator.choice(TYPES)))

    def sometimes(key: str, probability: float, value: Any) -> None:
        if generator.random() < probability:
            made.setncattr(key, value)

    stored = (generator.integers(0, 100, 40) + (0.1 if kind.kind == "f" else 0)).astype(kind)
    fill = stored[7] if generator.random() < 0.4 else None
    data.createDimension("x", 40)
    made = data.createVariable("v", kind, ("x",), fill_value=fill)
    made.set_auto_maskandscale(False)
    made[:] = stored
    made[5] = netCDF4.default_fillvals[kind.str[1:]]
    sometimes("missing_value", 0.4, stored[generator.integers(40, size=generator.integers(1, 4))])
    sometimes("valid_range", 0.2, np.array([10, 80]).astype(kind))
    sometimes("valid_min", 0.2, kind.type(20))
    sometimes("valid_max", 0.2, kind.type(70))
    precision = generator.choice([np.float32, np.float64])
    sometimes("scale_factor", 0.5, precision(generator.choice([1.0, 0.01])))
    sometimes("add_offset", 0.5, generator.choice([np.float32, precision])(20.3))
    return made


@pytest.mark.parametrize("seed", range(100))
def test_values_are_those_of_the_library(seed: int) -> None:
    with netCDF4.Dataset("memory.nc", "w", diskless=True) as data:
        made = variable(data, np.random.default_rng(seed))
        attributes = {key: made.getncattr(key) for key in made.ncattrs() if key in KEYS}
        found = decoded(np.asarray(made[:]), attributes)
        made.set_auto_maskandscale(True)
        expected = np.ma.asarray(made[:])
    mask = np.ma.getmaskarray(expected)
    assert np.array_equal(np.ma.getmaskarray(found), mask)
    assert found.dtype == expected.dtype
    assert np.array_equal(found.data[~mask], expected.data[~mask])


def test_missing_values_are_of_the_packed_numbers() -> None:
    stored = np.array([1, 2, 30, 60], np.int16)
    attributes = {"missing_value": np.float64(60), "scale_factor": 2.0}
    found = decoded(stored, attributes)
    assert found.mask.tolist() == [False, False, False, True]  # 30 stands for 60, which is a value
    assert found.data[:3].tolist() == [2, 4, 60]


def test_several_missing_values_of_another_precision() -> None:
    stored = np.array([1, -3.33477e38, 1e30, np.nan], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoded(stored, {"missing_value": np.array([-3.33477e38, 1e30])})
    assert found.mask.tolist() == [False, True, True, False]
    assert decoded(stored, {"missing_value": np.nan}).mask.tolist() == [False] * 3 + [True]


def test_unsigned_numbers_in_a_signed_type() -> None:
    found = decoded(
        np.array([-1, -2, 3], np.int8), {"_Unsigned": "true", "missing_value": np.int8(-2)}
    )
    assert found.mask.tolist() == [False, True, False]
    assert found[0] == 255


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("i2", {"missing_value": 1e20}, "missing_value=1e[+]20: is no value that .* int16 has"),
        ("i2", {"_FillValue": 0.5}, "_FillValue=0.5: is no value that the variable's type int16"),
        ("f4", {"missing_value": 1e300}, "missing_value=1e[+]300: is no value"),
        ("f4", {"missing_value": "x" * 1000}, "missing_value='x{79}…: must be a number"),
        ("f4", {"missing_value": np.array([])}, r"missing_value=\[\]: must be a number"),
        ("i2", {"scale_factor": np.inf}, "scale_factor=inf: must be one number, finite"),
        ("i2", {"scale_factor": 0.0}, "scale_factor=0.0: must be one number, finite and not 0"),
        ("i2", {"add_offset": [1.0, 2.0]}, r"add_offset=\[1.0, 2.0\]: must be one number"),
        ("f4", {"valid_range": 3.0}, "valid_range=3.0: must be two numbers"),
        ("f4", {"valid_max": np.nan}, "valid_max=nan: must be one number"),
    ],
)
def test_attributes_that_do_not_fit(kind: str, attributes: Any, message: str) -> None:
    with pytest.raises(Unusable, match=message):
        decoded(np.zeros(3, kind), attributes)

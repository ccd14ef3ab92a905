"""Synthetic oceans, atmospheres and sea ice on a global grid: smooth, plausible, with a known law.

Everything is a pure function of (grid, time, seed). What the law (`truth.py`) does not know of has
noise of its own, so that the law's derivatives can be learned from the fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.ufs.synthetic.truth import concentration

Fields = dict[str, npt.NDArray[np.float32]]
Floats = npt.NDArray[np.floating[Any]]

_STEFAN_BOLTZMANN = 5.670374e-8
_PRESSURE_HPA = 1013.25
_NUM_WAVES = 16


def grid(num_latitudes: int, num_longitudes: int) -> tuple[Floats, Floats]:
    """Cell centres of a regular grid.

    Args:
        num_latitudes: number of rows.
        num_longitudes: number of columns.

    Returns:
        Latitudes [num_latitudes] from south to north and longitudes [num_longitudes] from 0, both
        in degrees, float64.
    """
    latitude = -90 + (np.arange(num_latitudes) + 0.5) * 180 / num_latitudes
    longitude = (np.arange(num_longitudes) + 0.5) * 360 / num_longitudes
    return latitude, longitude


def land(latitude: Floats, longitude: Floats, seed: int) -> npt.NDArray[np.bool_]:
    """Which cells are land: the same at all times.

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        seed: seed of the continents' shapes.

    Returns:
        Bool [num_latitudes, num_longitudes].
    """
    return _waves(latitude, longitude, _generator(seed, "land", 0)) > 0.6


def fields(latitude: Floats, longitude: Floats, time: int, seed: int) -> Fields:
    """All variables by short name, in their units (temperatures in °C).

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        time: number of the time, from 0; neighbouring times share their large-scale patterns.
        seed: seed of all noise.

    Returns:
        For each variable, [num_latitudes, num_longitudes], float32.
    """

    def smooth(name: str) -> Floats:
        lasting = _waves(latitude, longitude, _generator(seed, name, 0))
        passing = _waves(latitude, longitude, _generator(seed, name, time + 1))
        return 0.8 * lasting + 0.6 * passing

    def rough(name: str) -> Floats:
        shape = (len(latitude), len(longitude))
        return _generator(seed, f"rough {name}", time + 1).uniform(-1, 1, shape)

    cosine = np.cos(np.radians(latitude))[:, None]
    by_name: dict[str, Floats] = {}
    sst = 28 * cosine**2 - 2 + 1.2 * smooth("sst") + 0.1 * rough("sst")
    by_name["sst"] = np.maximum(sst, -1.8)
    by_name["sss"] = 34 + 0.8 * np.clip(0.5 * smooth("sss") + 0.5 * rough("sss"), -1, 1)
    # Of what the file holds, to the last bit: the law is about float32 values.
    stored = {name: by_name[name].astype(np.float32).astype(np.float64) for name in ("sst", "sss")}
    aice = concentration(stored["sst"], stored["sss"])
    by_name["aice"] = aice
    by_name["hi"] = aice * (1.5 + 0.5 * rough("hi"))
    by_name["hs"] = by_name["hi"] * (0.2 + 0.08 * rough("hs"))
    by_name["sice"] = aice * (5 + 2 * rough("sice"))
    by_name["tair"] = by_name["sst"] - 15 * aice + 2 * smooth("tair") + 3 * rough("tair")
    by_name["tsfc"] = by_name["tair"] + 2 * rough("tsfc")
    by_name["qref"] = (0.8 + 0.1 * rough("qref")) * _saturation(by_name["tair"])
    by_name["flwdn"] = 0.8 * _STEFAN_BOLTZMANN * (by_name["tair"] + 273.15) ** 4 + 20 * rough(
        "flwdn"
    )
    by_name["fswdn"] = 450 * cosine * (0.7 + 0.3 * rough("fswdn"))
    by_name["frzmlt"] = 20 * smooth("frzmlt") - 10 * by_name["sst"].clip(max=5)
    for name, scale in (("atm", 6.0), ("ocn", 0.15)):
        for axis in "uv":
            by_name[f"{axis}{name}"] = scale * (smooth(axis + name) + 0.5 * rough(axis + name))
    for axis, wind, water in (("x", "uatm", "uocn"), ("y", "vatm", "vocn")):
        by_name[f"strair{axis}"] = 2e-3 * by_name[wind] * np.abs(by_name[wind])
        by_name[f"strocn{axis}"] = -5.0 * by_name[water] * np.abs(by_name[water])
    return {name: np.asarray(field, np.float32) for name, field in by_name.items()}


def _saturation(celsius: Floats) -> Floats:
    """Saturated mass of vapour by that of moist air, in kg/kg; Magnus's formula over water."""
    vapour = 6.112 * np.exp(17.62 * celsius / (243.12 + celsius))
    ratio: Floats = 0.622 * vapour / (_PRESSURE_HPA - 0.378 * vapour)
    return ratio


def _waves(latitude: Floats, longitude: Floats, generator: np.random.Generator) -> Floats:
    """Smooth noise of mean 0 and deviation about 1: a few long waves, periodic in longitude."""
    amplitude = generator.normal(size=_NUM_WAVES)
    zonal, meridional = generator.integers(0, 7, (2, _NUM_WAVES))
    phases = generator.uniform(0, 2 * np.pi, (2, _NUM_WAVES))
    east = np.cos(zonal[:, None] * np.radians(longitude) + phases[0][:, None])
    north = np.cos(meridional[:, None] * np.radians(latitude) + phases[1][:, None])
    total: Floats = np.einsum("k,ki,kj->ij", amplitude, north, east)
    total *= 2 / np.sqrt(_NUM_WAVES)
    return total


def _generator(seed: int, name: str, number: int) -> np.random.Generator:
    """Philox keyed by all three, so that no field depends on another's draws."""
    entropy = [seed, number, *name.encode()]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

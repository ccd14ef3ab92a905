"""Synthetic oceans, atmospheres and sea ice with a known law, in both file formats.

`exact`: ice forms where the sea is colder than an edge temperature, which falls with salinity as
the freezing point does: aice = s(-(sst - edge(sss)) / WIDTH), s the logistic function.

`noisy`: months of seasons. Open water freezes below the edge temperature, and ice melts at one that
is higher by `HYSTERESIS` tanh(hi), hi the thickness that the ice of the months before has left; air
above 0 °C melts too. Heat from below, which no variable shows, and weather shift the logit:

    aice = s((edge(sss) + HYSTERESIS tanh(hi) - sst) / NOISY_WIDTH - MELT max(tair, 0)
             + HIDDEN heat + WEATHER noise)
    hi of the next month = aice (KEPT hi + GROWTH)

The recorded aice has an error of `RECORDED` and is clipped to [0, 1]; the law is its mean.

Everything is a pure function of (grid, time, seed). Variables that a law does not depend on have
noise of their own, so that its derivatives can be learned from the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.workers import share_out
from lockstep.errors import DataError, file_errors
from lockstep.systems.ufs.fields.formats import Snapshot, write_cf_file, write_history_file

Floats = npt.NDArray[np.floating[Any]]
Fields = dict[str, npt.NDArray[np.float32]]
World = Literal["exact", "noisy"]

WIDTH = 0.25
"""Width of the transition from open water to ice in the exact world, in °C."""

EDGE = -0.9
"""Temperature at which half of the sea is covered at salinity `SALINITY`, 34 psu, in °C."""

SALINITY = 34.0

SALT_SLOPE = -0.0543
"""Change of the edge temperature with salinity, in °C/psu: that of the freezing point."""

NOISY_WIDTH = 0.4
"""As `WIDTH`, in the noisy world."""

HYSTERESIS = 2.0
"""How much warmer thick ice melts than open water freezes, in °C."""

MELT = 1.0
"""What a degree of air above 0 °C takes from the logit, in 1/°C."""

HIDDEN, WEATHER = 0.8, 0.6
"""Deviations, in the logit, of the heat that is not observed, smooth in space, and of noise."""

RECORDED = 0.03
"""Deviation of the errors of recorded concentrations."""

KEPT, GROWTH = 0.6, 0.6
"""Of a month: the part of the thickness that stays, and what grows, in m; 1.5 m in the end."""

_STEFAN_BOLTZMANN = 5.670374e-8
_PRESSURE_HPA = 1013.25
_NUM_WAVES = 16
_EMBEDDED = {"exact": ("synthetic-1", (90, 180), 4), "noisy": ("noisy-1", (45, 90), 48)}
"""Folder in the cache, grid and number of times of each world."""
_HOURS = {"exact": (0.0, 24.0), "noisy": (365.25, 730.5)}
"""The first time, and from one to the next."""
_SPIN_UP_MONTHS = 12


class Law(NamedTuple):
    """What aice is to be expected from observed variables.

    Attributes:
        inputs: short names of these variables.
        expected: their columns, of any shape, to the mean of the recorded aice.
        slopes: their columns to its derivatives by each.
    """

    inputs: tuple[str, ...]
    expected: Callable[..., Floats]
    slopes: Callable[..., tuple[Floats, ...]]

    def jacobian(
        self, columns: Mapping[str, Floats], inputs: tuple[str, ...]
    ) -> npt.NDArray[np.float64]:
        """∂aice/∂input in physical units.

        Args:
            columns: values [N] by short name, of the law's inputs at least.
            inputs: short names of the inputs.

        Returns:
            Derivatives [N, len(inputs)], float64; 0 for inputs that the law does not depend on.
        """
        given = [columns[name].astype(np.float64) for name in self.inputs]
        jacobian = np.zeros((len(given[0]), len(inputs)))
        for name, slope in zip(self.inputs, self.slopes(*given), strict=True):
            if name in inputs:
                jacobian[:, inputs.index(name)] = slope
        return jacobian


def concentration(sst: Floats, sss: Floats) -> Floats:
    """Aice in [0, 1] of the exact world from °C and psu, of any shape."""
    return _logistic((_edge(sss) - sst) / WIDTH)


def _slopes(sst: Floats, sss: Floats) -> tuple[Floats, ...]:
    aice = concentration(sst, sss)
    slope = -aice * (1 - aice) / WIDTH
    return slope, -slope * SALT_SLOPE


def _logit(sst: Floats, sss: Floats, tair: Floats, hi: Floats) -> Floats:
    """The logit of aice in the noisy world without heat from below and noise."""
    edge = _edge(sss) + HYSTERESIS * np.tanh(hi)
    return np.asarray((edge - sst) / NOISY_WIDTH - MELT * np.maximum(tair, 0))


def _noisy_mean(*columns: Floats) -> Floats:
    return _mean_over_noise(lambda z: _recorded(z)[0], _logit(*columns))


def _noisy_slopes(sst: Floats, sss: Floats, tair: Floats, hi: Floats) -> tuple[Floats, ...]:
    slope = _mean_over_noise(lambda z: _recorded(z)[1], _logit(sst, sss, tair, hi))
    by_edge = slope / NOISY_WIDTH
    return (
        -by_edge, by_edge * SALT_SLOPE, -slope * MELT * (tair > 0),
        by_edge * HYSTERESIS / np.cosh(hi) ** 2,
    )  # fmt: skip


def _recorded(z: Floats) -> tuple[Floats, Floats]:
    """The mean of what is recorded at a logit, by error and clipping, and its derivative."""
    aice = _logistic(z)
    ends = torch.from_numpy(np.stack([-aice, 1 - aice]) / RECORDED)
    below, above = torch.special.ndtr(ends).numpy()
    low, high = np.exp(-0.5 * np.square(ends.numpy())) / np.sqrt(2 * np.pi)
    mean = aice * (above - below) + RECORDED * (low - high) + 1 - above
    return np.asarray(mean), np.asarray((above - below) * aice * (1 - aice))


def _mean_over_noise(function: Callable[[Floats], Floats], z: Floats) -> Floats:
    """The mean of a function of the logit over heat and noise, by Gauss and Hermite's rule."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    spread = np.hypot(HIDDEN, WEATHER)
    pairs = zip(nodes, weights / weights.sum(), strict=True)
    return np.asarray(sum(weight * function(z + spread * node) for node, weight in pairs))


def _edge(sss: Floats) -> Floats:
    return np.asarray(EDGE + SALT_SLOPE * (sss - SALINITY))


def _logistic(z: Floats) -> Floats:
    # As tanh, which does not overflow.
    return np.asarray(0.5 + 0.5 * np.tanh(z / 2))


LAWS: Mapping[World, Law] = {
    "exact": Law(("sst", "sss"), concentration, _slopes),
    "noisy": Law(("sst", "sss", "tair", "hi"), _noisy_mean, _noisy_slopes),
}


def grid(num_latitudes: int, num_longitudes: int) -> tuple[Floats, Floats]:
    """Cell centres of a regular grid of so many rows and columns.

    Returns:
        Latitudes [num_latitudes] from south to north and longitudes [num_longitudes] from 0, both
        in degrees, float64.
    """
    latitude = -90 + (np.arange(num_latitudes) + 0.5) * 180 / num_latitudes
    longitude = (np.arange(num_longitudes) + 0.5) * 360 / num_longitudes
    return latitude, longitude


def land(latitude: Floats, longitude: Floats, seed: int) -> npt.NDArray[np.bool_]:
    """Which cells are land, at all times: bool [num_latitudes, num_longitudes].

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        seed: seed of the continents' shapes.
    """
    return _waves(latitude, longitude, _generator(seed, "land", 0)) > 0.6


def fields(latitude: Floats, longitude: Floats, time: int, seed: int) -> Fields:
    """All variables of the exact world by short name, each [num_latitudes, num_longitudes].

    They are float32 in their units, temperatures in °C.

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        time: number of the time, from 0; neighbouring times share their large-scale patterns.
        seed: seed of all noise.
    """
    noise = _Noise(latitude, longitude, time, seed)
    smooth, rough = noise.smooth, noise.rough
    cosine = np.cos(np.radians(latitude))[:, None]
    by_name: dict[str, Floats] = {}
    sst = 28 * cosine**2 - 2 + 1.2 * smooth("sst") + 0.1 * rough("sst")
    by_name["sst"] = np.maximum(sst, -1.8)
    by_name["sss"] = 34 + 0.8 * np.clip(0.5 * smooth("sss") + 0.5 * rough("sss"), -1, 1)
    # The law must hold for the float32 values of the file, to the last bit.
    aice = concentration(*map(_stored, (by_name["sst"], by_name["sss"])))
    by_name["aice"] = aice
    by_name["hi"] = aice * (1.5 + 0.5 * rough("hi"))
    by_name["sice"] = aice * (5 + 2 * rough("sice"))
    by_name["tair"] = by_name["sst"] - 15 * aice + 2 * smooth("tair") + 3 * rough("tair")
    return _with_the_others(by_name, noise, cosine)


def noisy_fields(latitude: Floats, longitude: Floats, month: int, seed: int) -> Fields:
    """All variables of a month of the noisy world, from the months before; see `fields`."""
    sine = np.sin(np.radians(latitude))[:, None]
    cosine = np.cos(np.radians(latitude))[:, None]
    thickness = np.zeros((len(latitude), len(longitude)))
    for time in range(month + _SPIN_UP_MONTHS + 1):
        noise = _Noise(latitude, longitude, time, seed)
        smooth, rough = noise.smooth, noise.rough
        # The sea is warmest in September, the air in the second half of July.
        warm_sea, warm_air = (sine * np.cos(2 * np.pi * (time - t) / 12) for t in (8, 6.5))
        sst = 28 * cosine**2 - 2 + 2 * warm_sea + 1.2 * smooth("sst") + 0.3 * rough("sst")
        sss = 34 + 0.8 * np.clip(0.5 * smooth("sss") + 0.5 * rough("sss"), -1, 1)
        tair = sst - 10 * sine**2 + 12 * warm_air + 2 * smooth("tair") + 2 * rough("tair")
        seen = {"sst": np.maximum(sst, -1.8), "sss": sss, "tair": tair, "hi": thickness}
        shift = HIDDEN * noise.passing("heat") + WEATHER * noise.normal("weather")
        aice = _logistic(_logit(*map(_stored, seen.values())) + shift)
        thickness = aice * (KEPT * thickness + GROWTH)
    seen["aice"] = np.clip(aice + RECORDED * noise.normal("recorded"), 0, 1)
    seen["sice"] = 5 + 2 * rough("sice")
    return _with_the_others(seen, noise, cosine)


class _Noise:
    """The fields of noise of one time, [num_latitudes, num_longitudes], by name."""

    def __init__(self, latitude: Floats, longitude: Floats, time: int, seed: int) -> None:
        self._axes = latitude, longitude
        self._shape = len(latitude), len(longitude)
        self._time = time
        self._seed = seed

    def smooth(self, name: str) -> Floats:
        """Smooth in space, of mean 0 and deviation about 1; 0.8 of it lasts."""
        lasting = _waves(*self._axes, _generator(self._seed, name, 0))
        return np.asarray(0.8 * lasting + 0.6 * self.passing(name))

    def passing(self, name: str) -> Floats:
        """Smooth in space, of mean 0 and deviation about 1, of this time alone."""
        return _waves(*self._axes, _generator(self._seed, name, self._time + 1))

    def rough(self, name: str) -> Floats:
        """Uniform from -1 to 1 in each cell."""
        return np.asarray(self._cells(f"rough {name}").uniform(-1, 1, self._shape))

    def normal(self, name: str) -> Floats:
        """Of mean 0 and deviation 1 in each cell."""
        return np.asarray(self._cells(f"normal {name}").normal(size=self._shape))

    def _cells(self, name: str) -> np.random.Generator:
        return _generator(self._seed, name, self._time + 1)


def _stored(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)


def _with_the_others(by_name: dict[str, Floats], noise: _Noise, cosine: Floats) -> Fields:
    """Completes sst, sss, aice, hi, sice and tair with variables that no law depends on."""
    smooth, rough = noise.smooth, noise.rough
    by_name["hs"] = by_name["hi"] * (0.2 + 0.08 * rough("hs"))
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
    return np.asarray(0.622 * vapour / (_PRESSURE_HPA - 0.378 * vapour))


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


def snapshot(
    num_latitudes: int, num_longitudes: int, time: int, seed: int, world: World = "exact"
) -> Snapshot:
    """The fields of one time, see `write_synthetic`; times of the noisy world are months."""
    axes = grid(num_latitudes, num_longitudes)
    made = {"exact": fields, "noisy": noisy_fields}[world]
    first, step = _HOURS[world]
    return Snapshot(*axes, land(*axes, seed), made(*axes, time, seed), first + time * step)


def write_synthetic(
    folder: Path,
    num_latitudes: int,
    num_longitudes: int,
    num_times: int,
    seed: int = 0,
) -> list[Path]:
    """Write files of all times in both formats, `iceh.000.nc`, `atm.000.nc`, `ocn.000.nc`, ….

    Args:
        folder: folder to write to; created if it is not there.
        num_latitudes: number of the grid's rows, at least 1.
        num_longitudes: number of the grid's columns, at least 1.
        num_times: number of times, at least 1; each has a history file and a CF pair.
        seed: seed of the noise, at least 0.

    Returns:
        The paths that were written.

    Raises:
        DataError: a number is too small, or the folder cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    given = {"latitudes": num_latitudes, "longitudes": num_longitudes, "times": num_times}
    for name, value in given.items():
        if value < 1:
            raise DataError(f"number of {name} {value}: must be at least 1")
    if seed < 0:
        raise DataError(f"seed {seed}: must be at least 0")
    written = []
    with file_errors(DataError, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for time in range(num_times):
            content = snapshot(num_latitudes, num_longitudes, time, seed)
            written.append(folder / f"iceh.{time:03}.nc")
            write_history_file(written[-1], content)
            for kind, stem in (("atmosphere", "atm"), ("ocean", "ocn")):
                written.append(folder / f"{stem}.{time:03}.nc")
                write_cf_file(written[-1], kind, content)
    return written


def embedded_files(cache: Path, world: World = "exact") -> list[Path]:
    """The history files of a world's data, below a folder; missing ones are written.

    Raises:
        DataError: the folder cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    folder, shape, num_times = _EMBEDDED[world]

    def make(time: int, path: Path) -> None:
        write_history(path, *shape, time, world=world)

    return share_out(cache / folder, [f"iceh.{time:03}.nc" for time in range(num_times)], make)


def write_history(
    path: Path,
    num_latitudes: int,
    num_longitudes: int,
    time: int,
    seed: int = 0,
    world: World = "exact",
) -> None:
    """Write a CICE history file of one time; see `snapshot`.

    Raises:
        OSError: it cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    write_history_file(path, snapshot(num_latitudes, num_longitudes, time, seed, world))

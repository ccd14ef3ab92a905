"""Errors of an emulation, by region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.ufs.fields.places import REGIONS
from lockstep.recipes.ufs.fields.places import inside as fields_inside

Floats = npt.NDArray[np.floating[Any]]

ICE = 0.15
"""The concentration from which on a cell counts as ice-covered."""

EDGE = (ICE, 0.85)
"""Concentrations at the ice edge."""


@dataclass(frozen=True)
class Score:
    """The errors of one variable in one region.

    Attributes:
        count: number of values compared: cells times times.
        rmse: root of the mean squared error, in the variable's unit.
        mae: mean absolute error, in the variable's unit.
        bias: mean error, in the variable's unit.
        correlation: Pearson's r; NaN where predicted or true values do not vary.
        slope: slope of the least-squares line of predicted over true values; NaN where true values
            do not vary.
        edge_error: for ice concentration, the area where prediction and truth disagree on whether
            there is ice (Goessling et al. 2016, doi:10.1002/2015GL067232, equation 1), as a part of
            the area with ice; NaN for other variables.
    """

    count: int
    rmse: float
    mae: float
    bias: float
    correlation: float
    slope: float
    edge_error: float


def score(predicted: Floats, true: Floats, area: Floats, is_ice: bool) -> Score:
    """Compare values [N], N at least 1.

    Args:
        predicted: values by the emulator, [N].
        true: values in the files, [N].
        area: area of each value's cell in any unit, [N].
        is_ice: whether the variable is ice concentration.
    """
    error = predicted - true
    covariance = np.cov(predicted, true, bias=True)
    variance = covariance[0, 0], covariance[1, 1]
    spread = float(np.sqrt(variance[0] * variance[1]))
    return Score(
        count=len(error),
        rmse=float(np.sqrt(np.mean(error**2))),
        mae=float(np.mean(np.abs(error))),
        bias=float(np.mean(error)),
        correlation=float(covariance[0, 1] / spread) if spread else float("nan"),
        slope=float(covariance[0, 1] / variance[1]) if variance[1] else float("nan"),
        edge_error=_edge_error(predicted, true, area) if is_ice else float("nan"),
    )


def inside(latitude: Floats, region: str) -> npt.NDArray[np.bool_]:
    """Which points [N] are in a region: bool [N], from latitudes in degrees."""
    return fields_inside(latitude, np.zeros_like(latitude), REGIONS[region])


def at_edge(concentration: Floats) -> npt.NDArray[np.bool_]:
    """Which points [N] are at the ice edge: bool [N], from ice concentrations."""
    is_edge: npt.NDArray[np.bool_] = (concentration > EDGE[0]) & (concentration < EDGE[1])
    return is_edge


def relative_error(learned: Floats, true: Floats) -> float:
    """The Frobenius norm of `learned` - `true`, as a part of that of `true`; both of one shape."""
    return float(np.linalg.norm(learned - true) / np.linalg.norm(true))


def _edge_error(predicted: Floats, true: Floats, area: Floats) -> float:
    ice = float(area[true >= ICE].sum())
    wrong = float(area[(predicted >= ICE) != (true >= ICE)].sum())
    return wrong / ice if ice else float("nan")

"""Errors of an emulation by region, and its Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from lockstep.systems.ufs.fields import grids
from lockstep.systems.ufs.model import SeaIceNet

Floats = npt.NDArray[np.floating[Any]]

ICE = 0.15
"""The smallest concentration of a cell that counts as ice-covered."""

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
    return grids.inside(latitude, np.zeros_like(latitude), grids.REGIONS[region])


def at_edge(concentration: Floats) -> npt.NDArray[np.bool_]:
    """Which points [N] are at the ice edge: bool [N], from ice concentrations."""
    return np.asarray((concentration > EDGE[0]) & (concentration < EDGE[1]))


def relative_error(learned: Floats, true: Floats) -> float:
    """The Frobenius norm of `learned` - `true` relative to that of `true`, of the same shape."""
    return float(np.linalg.norm(learned - true) / np.linalg.norm(true))


def _edge_error(predicted: Floats, true: Floats, area: Floats) -> float:
    ice = float(area[true >= ICE].sum())
    wrong = float(area[(predicted >= ICE) != (true >= ICE)].sum())
    return wrong / ice if ice else float("nan")


LEVELS = (0.5, 0.9)
"""Parts of the points that intervals are to have."""

_BINS = 10


class Intervals:
    """Prediction intervals from the errors of rows that were not trained on.

    Split conformal prediction, for each tenth of the predicted values by itself (Vovk et al. 2005,
    Algorithmic Learning in a Random World, section 4.5: Mondrian).
    """

    def __init__(
        self, predicted: Floats, true: Floats, bounds: Sequence[float] | None = None
    ) -> None:
        """Calibrate.

        Args:
            predicted: values by the emulator, [M], M at least 1.
            true: values in the files, [M].
            bounds: least and greatest possible value.
        """
        self._low, self._high = bounds or (-np.inf, np.inf)
        inner = np.quantile(predicted, np.arange(1, _BINS) / _BINS)
        # Many rows of open water have one value: bins with no row are not made.
        taken = np.unique(np.searchsorted(inner, predicted, "right"))
        self._starts = np.array([-np.inf, *inner])[taken]
        place, error = self._bin(predicted), true - predicted
        self._errors = [np.sort(error[place == n]) for n in range(len(taken))]

    def at(self, predicted: Floats, level: float) -> tuple[Floats, Floats]:
        """Ends [N] of the intervals about predicted values [N], at a level in (0, 1)."""
        low, high = np.array([_ends(errors, (1 - level) / 2) for errors in self._errors]).T
        place = self._bin(predicted)
        ends = predicted + low[place], predicted + high[place]
        return np.clip(ends[0], self._low, self._high), np.clip(ends[1], self._low, self._high)

    def coverage(self, predicted: Floats, true: Floats) -> dict[str, dict[str, float]]:
        """For each of `LEVELS`, as text: the part of rows [N] inside, and the mean width."""
        found = {}
        for level in LEVELS:
            low, high = self.at(predicted, level)
            is_inside = (low <= true) & (true <= high)
            width = float(np.mean(high - low))
            found[f"{level:.0%}"] = {"coverage": float(is_inside.mean()), "width": width}
        return found

    def _bin(self, predicted: Floats) -> npt.NDArray[np.intp]:
        return np.maximum(np.searchsorted(self._starts, predicted, "right") - 1, 0)


def _ends(errors: Floats, tail: float) -> tuple[float, float]:
    """Errors between which a further one lies with at least the probability 1 - 2 `tail`.

    Ranks of n + 1 values, of which the further one is any; infinite beyond those that there are.

    Args:
        errors: in ascending order, [n].
        tail: probability to lie below, and to lie above.
    """
    count = len(errors)
    below, above = math.floor((count + 1) * tail), math.ceil((count + 1) * (1 - tail))
    low = float(errors[below - 1]) if below >= 1 else -math.inf
    return low, float(errors[above - 1]) if above <= count else math.inf


CHUNK = 4096
"""Rows whose Jacobians are computed at a time, so that their activations stay in the CPU cache."""

_SMALLEST_RATIO = 1e-12


def jacobians(function: Callable[[Tensor], Tensor], x: Tensor, num_outputs: int) -> Tensor:
    """Jacobians of a function that treats each row by itself.

    One reverse pass for each output gives a row of all Jacobians, since no output depends on
    another row's inputs.

    Args:
        function: function from inputs [N, in] to outputs [N, out] that treats each row by itself.
        x: inputs, [N, in].
        num_outputs: number of outputs.

    Returns:
        Jacobians [N, out, in], without gradient.
    """
    parts = [_jacobians(function, part, num_outputs) for part in torch.split(x, CHUNK)]
    return torch.cat(parts) if parts else x.new_zeros(0, num_outputs, x.shape[-1])


def _jacobians(function: Callable[[Tensor], Tensor], x: Tensor, num_outputs: int) -> Tensor:
    with torch.no_grad():
        pull = vjp(function, x)[1]
        chosen = torch.eye(num_outputs, dtype=x.dtype, device=x.device)
        cotangents = chosen[:, None].expand(-1, len(x), -1)
        (by_output,) = vmap(pull)(cotangents)
    transposed: Tensor = by_output.transpose(0, 1)
    return transposed.contiguous()


def normalised(net: SeaIceNet, x: Tensor) -> Tensor:
    """∂output/∂input [N, out, in] in units of their deviations, at normalised x [N, in]."""
    return jacobians(net, x, len(net.outputs))


def physical(net: SeaIceNet, x: Tensor) -> Tensor:
    """∂output/∂input [N, out, in] in physical units, at x [N, in] in physical units.

    It is J σ_out / σ_in, J being the normalised one.
    """
    return jacobians(net.predict, x, len(net.outputs))


class BalanceOperator:
    """The emulator linearised about a background state, as data assimilation uses it.

    `apply` is J: it maps changes of the inputs to those of the outputs. `apply_adjoint` is its
    transpose: <J δx, δy> = <δx, Jᵀ δy>. Neither computes J itself.
    """

    def __init__(self, net: SeaIceNet, background: Tensor) -> None:
        """Linearise.

        Args:
            net: network of the dtype of `background`; float64 (`net.double()`) for tests of the
                adjoint.
            background: background state in physical units, [N, in].
        """
        self._net = net
        self._background = background

    def apply(self, change: Tensor) -> Tensor:
        """J δx: changes of the inputs [N, in] to changes of the outputs [N, out], both physical."""
        with torch.no_grad():
            value_and_change = jvp(self._net.predict, (self._background,), (change,))
        result: Tensor = value_and_change[1]
        return result

    def apply_adjoint(self, change: Tensor) -> Tensor:
        """Jᵀ δy: [N, out] to [N, in], both in physical units."""
        with torch.no_grad():
            (gradient,) = vjp(self._net.predict, self._background)[1](change)
        result: Tensor = gradient
        return result


def describe(jacobian: Tensor) -> dict[str, float]:
    """Figures of normalised Jacobians [N, out, in], N at least 1.

    Returns:
        `jacobian_norm` (mean Frobenius norm), `jacobian_mean`, `jacobian_std` and `jacobian_max`
        of the entries' magnitudes, and `jacobian_condition` (greatest by least singular value of
        the matrix that all rows make together).
    """
    entries = jacobian.double()
    magnitude = entries.abs()
    singular = torch.linalg.svdvals(entries.flatten(0, 1))
    ratio = float(singular[-1] / singular[0]) if float(singular[0]) > 0 else 0.0
    return {
        "jacobian_norm": float(entries.flatten(1).norm(dim=1).mean()),
        "jacobian_mean": float(magnitude.mean()),
        "jacobian_std": float(magnitude.std(correction=0)),
        "jacobian_max": float(magnitude.max()),
        "jacobian_condition": 1 / max(ratio, _SMALLEST_RATIO),
    }


def sensitivity(jacobian: Tensor) -> Tensor:
    """The sensitivity to each input, [in]: its mean magnitude in Jacobians [N, out, in]."""
    return jacobian.double().abs().mean(dim=(0, 1))

"""Simple models of the same inputs and outputs: means, linear and logistic laws, boosted trees."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.ufs.fields import VARIABLES

Floats = npt.NDArray[np.float64]

_LOGIT_EDGE = 1e-6
"""Distance to a bound, as a part of the range, below which a value counts as if at it."""
_LOGISTIC_STEPS = 200


def simple_models(
    train: Floats, num_inputs: int, names: Sequence[str]
) -> dict[str, Callable[[Floats], Floats]]:
    """Simple models, by their names: functions of inputs [M, in] to outputs [M, out].

    - the mean of the training rows
    - linear regression, within the bounds of the outputs
    - logistic regression: an output with bounds is a logistic function of a linear one, with the
      least squared error
    - gradient-boosted trees of scikit-learn, with its defaults

    Args:
        train: inputs, then outputs, in physical units, [N, in + out].
        num_inputs: number of inputs.
        names: short names of the outputs.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError('baselines need scikit-learn: pip install "lockstep-train[recipes]"')
    from sklearn.ensemble import HistGradientBoostingRegressor

    known, targets = train[:, :num_inputs], train[:, num_inputs:]
    mean, deviation = known.mean(0), known.std(0)
    deviation[deviation == 0] = 1

    def design(x: Floats) -> Floats:
        return np.column_stack([(x - mean) / deviation, np.ones(len(x))])

    rows = design(known)
    linear = _least_squares(rows, targets)
    trees = [HistGradientBoostingRegressor(random_state=0).fit(known, y) for y in targets.T]
    bounds = [VARIABLES[name].bounds for name in names]
    logistic = [
        partial(np.dot, b=linear[:, n]) if b is None else _logistic(rows, targets[:, n], b)
        for n, b in enumerate(bounds)
    ]
    return {
        "the mean": lambda x: np.broadcast_to(targets.mean(0), (len(x), len(names))),
        "linear regression": lambda x: _bounded(design(x) @ linear, bounds),
        "logistic regression": lambda x: np.column_stack([f(design(x)) for f in logistic]),
        "gradient-boosted trees": lambda x: _bounded(
            np.column_stack([tree.predict(x) for tree in trees]), bounds
        ),
    }


def metrics(
    predicted: Floats,
    true: Floats,
    names: Sequence[str],
    deviation: Floats,
    loss: Callable[..., Tensor],
) -> dict[str, float]:
    """What `Ufs.evaluate` measures of a model's outputs, of others.

    Args:
        predicted: outputs in physical units, [N, out].
        true: the right ones, [N, out].
        names: short names of the outputs.
        deviation: what the loss divides outputs by, [out].
        loss: of normalised outputs.
    """
    scaled = (torch.from_numpy(values / deviation) for values in (predicted, true))
    found = {"loss": float(loss(*scaled))}
    for name, error in zip(names, (predicted - true).T, strict=True):
        found[f"mse_{name}"] = float(np.square(error).mean())
        found[f"mae_{name}"] = float(np.abs(error).mean())
        found[f"bias_{name}"] = float(error.mean())
    return found


def _least_squares(design: Floats, targets: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(design, targets, rcond=None)[0], np.float64)


def _bounded(values: Floats, bounds: Sequence[Sequence[float] | None]) -> Floats:
    low, high = zip(*(b or (-np.inf, np.inf) for b in bounds), strict=True)
    return np.clip(values, low, high)


def _logistic(
    design: Floats, target: Floats, bounds: Sequence[float]
) -> Callable[[Floats], Floats]:
    """Low + (high - low) s(design @ w), with the w of the least squared error.

    The search begins at the weighted linear fit of the logit.
    """
    low, high = bounds
    share = np.clip((target - low) / (high - low), _LOGIT_EDGE, 1 - _LOGIT_EDGE)
    weight = share * (1 - share)
    start = _least_squares(design * weight[:, None], np.log(share / (1 - share)) * weight)
    w = torch.tensor(start, requires_grad=True)
    rows, y = torch.from_numpy(design), torch.from_numpy((target - low) / (high - low))
    search = torch.optim.LBFGS(
        [w], max_iter=_LOGISTIC_STEPS, tolerance_grad=0, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def error() -> Tensor:
        search.zero_grad()
        found = (torch.sigmoid(rows @ w) - y).square().mean()
        torch.autograd.backward(found)
        return found

    search.step(error)  # type: ignore[no-untyped-call]
    best = w.detach().numpy()
    return lambda there: low + (high - low) / (1 + np.exp(-(there @ best)))

"""The emulator, a perceptron for each column of the grid, and simple models to compare with.

These are means, linear and logistic laws, and boosted trees of the same inputs and outputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.rows import Scale

Array = npt.NDArray[np.float64]

_LOGIT_EDGE = 1e-6
"""Distance to a bound, as a part of the range, below which a value counts as if at it."""
_LOGISTIC_STEPS = 200
_MOST_SQUARED = 50_000
"""Rows whose squares and products are fitted, evenly spaced, and in memory at a time."""


class SeaIceNet(nn.Module):
    """(Linear, GELU) for each hidden layer, then Linear; Xavier-normal weights, zero biases.

    Attributes:
        inputs: short names of the input variables.
        outputs: short names of the output variables.
        squash: whether outputs that have bounds are kept within them.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        hidden: Sequence[int],
        scale: Scale,
        squash: bool,
    ) -> None:
        """Build the network.

        Args:
            inputs: short names of the input variables.
            outputs: short names of the output variables.
            hidden: widths of the hidden layers.
            scale: statistics of the inputs, then the outputs, [in + out].
            squash: whether to keep outputs that have bounds within them.
        """
        super().__init__()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.squash = squash
        widths = [len(inputs), *hidden]
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], len(outputs)))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)
        cut = len(inputs)
        bounds = [VARIABLES[name].bounds for name in outputs]
        before, after, physical = _squashing(scale.mean[cut:], scale.deviation[cut:], bounds)
        self.input_mean = _buffer(scale.mean[:cut])
        self.input_deviation = _buffer(scale.deviation[:cut])
        self.output_mean = _buffer(scale.mean[cut:])
        self.output_deviation = _buffer(scale.deviation[cut:])
        self.squash_in, self.squash_out = _buffer(before), _buffer(after)
        self.bounds = _buffer(physical)
        self.bounded = nn.Buffer(torch.tensor([squash and b is not None for b in bounds]))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised inputs [..., in] to normalised outputs [..., out]."""
        y: Tensor = self.layers(x)
        if not self.squash:
            return y
        bent = torch.addcmul(self.squash_out[0], self._inside(y), self.squash_out[1])
        return torch.where(self.bounded, bent, y)

    def normalise(self, x: Tensor) -> Tensor:
        """Inputs [..., in] from physical units."""
        return (x - self.input_mean) / self.input_deviation

    def predict(self, x: Tensor) -> Tensor:
        """Inputs [..., in] to outputs [..., out], both in physical units."""
        y: Tensor = self.layers(self.normalise(x))
        free = y * self.output_deviation + self.output_mean
        if not self.squash:
            return free
        # Not by way of normalised outputs, whose rounding could leave the bounds.
        return torch.where(self.bounded, self._inside(y) * self.bounds[1] + self.bounds[0], free)

    def scale(self) -> Scale:
        """The statistics it was built with: of the inputs, then the outputs, [in + out]."""
        mean = torch.cat([self.input_mean, self.output_mean])
        deviation = torch.cat([self.input_deviation, self.output_deviation])
        return Scale(*(statistic.double().cpu().numpy() for statistic in (mean, deviation)))

    def _inside(self, y: Tensor) -> Tensor:
        """The position of outputs [..., out] between their bounds, in [0, 1]."""
        return torch.sigmoid(torch.addcmul(self.squash_in[0], y, self.squash_in[1]))


def _squashing(
    mean: Array, deviation: Array, bounds: Sequence[Sequence[float] | None]
) -> tuple[Array, Array, Array]:
    """Shift and gain [2, out] of three linear maps about the logistic function.

    The first is before it, from what the layers give; the second behind it, to normalised outputs;
    the third behind it, to physical ones, where the slope is 1 in the middle of the bounds.
    """
    lower = np.array([b[0] if b else 0.0 for b in bounds])
    span = np.array([b[1] if b else 1.0 for b in bounds]) - lower
    return (
        np.stack([4 * ((mean - lower) / span - 0.5), 4 * deviation / span]),
        np.stack([(lower - mean) / deviation, span / deviation]),
        np.stack([lower, span]),
    )


def _buffer(values: Array) -> Tensor:
    return nn.Buffer(torch.tensor(values, dtype=torch.float32))


def simple_models(
    train: Array, num_inputs: int, names: Sequence[str]
) -> dict[str, Callable[[Array], Array]]:
    """Simple models, by their names: functions of inputs [M, in] to outputs [M, out].

    - the mean of the training rows
    - linear regression, within the bounds of the outputs
    - logistic regression: an output with bounds is a logistic function of a linear one, with the
      least squared error; also of the inputs, their squares and their products
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

    def design(x: Array) -> Array:
        return np.column_stack([(x - mean) / deviation, np.ones(len(x))])

    def quadratic(x: Array) -> Array:
        normal = design(x)
        first, second = np.triu_indices(normal.shape[1])
        return normal[:, first] * normal[:, second]

    rows = design(known)
    some = slice(None, None, -(-len(known) // _MOST_SQUARED))
    linear = _least_squares(rows, targets)
    trees = [HistGradientBoostingRegressor(random_state=0).fit(known, y) for y in targets.T]
    bounds = [VARIABLES[name].bounds for name in names]

    def logistic(rows: Array, targets: Array) -> Callable[[Array], Array]:
        fitted = [
            partial(np.dot, b=_least_squares(rows, y)) if b is None else _logistic(rows, y, b)
            for y, b in zip(targets.T, bounds, strict=True)
        ]
        return lambda there: np.column_stack([f(there) for f in fitted])

    plain, squared = logistic(rows, targets), logistic(quadratic(known[some]), targets[some])
    return {
        "the mean": lambda x: np.broadcast_to(targets.mean(0), (len(x), len(names))),
        "linear regression": lambda x: _bounded(design(x) @ linear, bounds),
        "logistic regression": lambda x: plain(design(x)),
        "logistic regression, squares and products": lambda x: np.concatenate(
            [squared(quadratic(x[n : n + _MOST_SQUARED])) for n in range(0, len(x), _MOST_SQUARED)]
        ),
        "gradient-boosted trees": lambda x: _bounded(
            np.column_stack([tree.predict(x) for tree in trees]), bounds
        ),
    }


def metrics(
    predicted: Array,
    true: Array,
    names: Sequence[str],
    deviation: Array,
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


def _least_squares(design: Array, targets: Array) -> Array:
    return np.asarray(np.linalg.lstsq(design, targets, rcond=None)[0], np.float64)


def _bounded(values: Array, bounds: Sequence[Sequence[float] | None]) -> Array:
    low, high = zip(*(b or (-np.inf, np.inf) for b in bounds), strict=True)
    return np.clip(values, low, high)


def _logistic(design: Array, target: Array, bounds: Sequence[float]) -> Callable[[Array], Array]:
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
    return lambda there: low + (high - low) * torch.sigmoid(torch.from_numpy(there @ best)).numpy()

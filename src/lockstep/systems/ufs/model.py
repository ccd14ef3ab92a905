"""The emulator: a perceptron for each column of the grid, with the scales of its variables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.rows import Scale

Array = npt.NDArray[np.float64]


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

"""Optimizers of the rows of a table: a step moves the rows that have a gradient, and no others.

They compute with single operations that round alike whether a vector kernel or a scalar one does
them, so a row's bits do not depend on the rows that are stepped beside it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.errors import ConfigError

_FEWEST_ROWS = 16
"""With fewer, kernels may give a row several threads, and so another order of summation."""


@dataclass(frozen=True)
class RowOptimizer(ABC):
    """Steps rows of a table.

    A subclass computes each row from itself, its gradient and its state alone, and keeps nothing
    else: which rows are stepped together depends on ranks. A run tries this before it trains.

    Attributes:
        lr: learning rate, multiplied with the schedule's factor.
        weight_decay: rows are multiplied by 1 - lr · decay when they are stepped.
    """

    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is out of range.
        """
        _check(self, "lr", "weight_decay")

    @abstractmethod
    def widths(self, dim: int) -> Mapping[str, int]:
        """What is kept of each row, by name: how many float32 numbers, which begin as 0.

        Args:
            dim: elements of a row.
        """

    def step(self, rows: Tensor, state: Mapping[str, Tensor], gradients: Tensor, lr: float) -> None:
        """Step rows in place.

        Args:
            rows: values of some rows: float32 [n, dim].
            state: for each name of `widths`, [n, width]; changed in place.
            gradients: of the rows: [n, dim].
            lr: the learning rate of this step.
        """
        if self.weight_decay:
            rows.mul_(1.0 - lr * self.weight_decay)
        rows.sub_(self._update(state, gradients).mul_(lr))

    @abstractmethod
    def _update(self, state: Mapping[str, Tensor], gradients: Tensor) -> Tensor:
        """What rows move by at a learning rate of 1, as a new tensor."""


def _check(optimizer: RowOptimizer, *names: str, below: float = math.inf) -> None:
    """Refuse fields that are no numbers, or tuples of them, from 0 to below a bound.

    Raises:
        ConfigError: naming the field.
    """
    for name in names:
        value = getattr(optimizer, name)
        for one in value if isinstance(value, tuple) else (value,):
            if not isinstance(one, (int, float)) or not 0 <= one < below:
                raise ConfigError(
                    f"{type(optimizer).__name__}: {name}={value!r}: must be a number of at least 0"
                    + ("" if below == math.inf else " and below 1")
                )


@dataclass(frozen=True)
class RowSignSGD(RowOptimizer):
    """w ← w (1 - lr · decay) - lr · sign(g): Bernstein et al. 2018 (arXiv:1802.04434), algorithm 1.

    The sign is that of the gradient summed over all samples.
    """

    def widths(self, dim: int) -> Mapping[str, int]:
        """Nothing is kept."""
        return {}

    def _update(self, state: Mapping[str, Tensor], gradients: Tensor) -> Tensor:
        return torch.sign(gradients)


@dataclass(frozen=True)
class RowSGD(RowOptimizer):
    """Stochastic gradient descent, with momentum that rows have in the steps that move them only.

    Attributes:
        momentum: b ← momentum · b + g, and w ← w - lr · b; 0 keeps nothing.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        """As for `RowOptimizer`."""
        super().__post_init__()
        _check(self, "momentum", below=1.0)

    def widths(self, dim: int) -> Mapping[str, int]:
        """The running sum of gradients."""
        return {"momentum": dim} if self.momentum else {}

    def _update(self, state: Mapping[str, Tensor], gradients: Tensor) -> Tensor:
        if not self.momentum:
            return gradients.clone()
        return state["momentum"].mul_(self.momentum).add_(gradients).clone()


@dataclass(frozen=True)
class RowAdagrad(RowOptimizer):
    """w ← w - lr · g / (√s + eps) with s the sum of g²: Duchi et al. 2011 (JMLR 12), section 5.

    Attributes:
        eps: added to the root.
        start: what s begins with.
    """

    eps: float = 1e-10
    start: float = 0.0

    def __post_init__(self) -> None:
        """As for `RowOptimizer`."""
        super().__post_init__()
        _check(self, "eps", "start")

    def widths(self, dim: int) -> Mapping[str, int]:
        """The sum of squares of each element."""
        return {"squares": dim}

    def _update(self, state: Mapping[str, Tensor], gradients: Tensor) -> Tensor:
        squares = state["squares"].add_(gradients.square())
        return gradients / squares.add(self.start).sqrt_().add_(self.eps)


@dataclass(frozen=True)
class RowAdam(RowOptimizer):
    """Adam whose running mean of squares is one number for each row: their mean over its elements.

    Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1, with v of a row in place of v of an element,
    as tables of recommenders have it (Naumov et al. 2019, arXiv:1906.00091). Steps are counted for
    each row: one that has not been moved for long is corrected as a new one is. Decay is decoupled.

    Attributes:
        betas: decay rates of the running means of gradients and of squares.
        eps: added to the root.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """As for `RowOptimizer`."""
        super().__post_init__()
        _check(self, "eps")
        _check(self, "betas", below=1.0)

    def widths(self, dim: int) -> Mapping[str, int]:
        """The mean of gradients of each element, the mean of squares, and the number of steps."""
        return {"mean": dim, "square": 1, "steps": 1}

    def _update(self, state: Mapping[str, Tensor], gradients: Tensor) -> Tensor:
        first, second = self.betas
        steps = state["steps"].add_(1.0)
        mean = state["mean"].mul_(first).add_(gradients * (1.0 - first))
        square = state["square"].mul_(second).add_(_mean_squares(gradients) * (1.0 - second))
        root = (square / (1.0 - _power(second, steps))).sqrt_().add_(self.eps)
        return mean / (1.0 - _power(first, steps)) / root


def _power(base: float, exponents: Tensor) -> Tensor:
    """Powers of a number in float64, computed one by one: a vector kernel may round otherwise."""
    each, places = torch.unique(exponents, return_inverse=True)
    powers = torch.tensor([base**n for n in each.tolist()], dtype=torch.float64)
    return powers.to(exponents.device)[places].to(exponents.dtype)


def _mean_squares(rows: Tensor) -> Tensor:
    """The mean square of each row's elements: [n, 1]."""
    return row_norms(rows).square_().div_(rows.shape[1])[:, None]


def row_norms(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row [n], whatever rows there are beside it."""
    num_rows = len(rows)
    if num_rows < _FEWEST_ROWS:
        rows = pad(rows, (0, 0, 0, _FEWEST_ROWS - num_rows))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms[:num_rows]

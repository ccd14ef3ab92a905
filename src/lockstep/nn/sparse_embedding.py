"""An embedding of which no rank needs all rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lockstep.config import ScheduleConfig
from lockstep.errors import ConfigError, TaskError
from lockstep.optim.rows import RowAdagrad, RowOptimizer
from lockstep.parallel.layout import ROWS, RowLayout

_MOST_NAMED = 4


class Fetched(NamedTuple):
    """Rows of a table for a while.

    Attributes:
        ids: their numbers, ascending, each once: int64 [n].
        rows: their values: float32 [n, dim]; a leaf that takes gradients in training.
    """

    ids: Tensor
    rows: Tensor


class SparseEmbedding(nn.Module):
    """A table of rows that are looked up by number, shared out over the ranks of a run.

    In a run each rank owns a part of the rows. Before a forward pass it has the rows fetched that
    `Task.lookups` names; their gradients go back to the owners, which step these rows only, by an
    optimizer of the table's own. So a step costs what the rows in use cost, and the table may be
    larger than a rank's memory. The values are the same on any number of ranks.

    The table is no parameter of the model. Elsewhere than in a run, as in a model from
    `lockstep.load`, all rows are in the buffer `weight`.

    Args:
        num_rows: number of rows, at least 1.
        dim: elements of a row, at least 1.
        optimizer: what steps the rows; by default `RowAdagrad(lr=0.01)`.
        std: standard deviation of the rows' values at the start, which are normal; 0 for zeros.
        schedule: factor of the learning rate; by default the config's (`schedule`).

    Attributes:
        weight: all rows: float32 [num_rows, dim]; None while they are with their ranks.
        is_distributed: whether the rows are with their ranks.
        name: of the module in its model, in a run.

    Raises:
        ConfigError: a size or the deviation is out of range.
    """

    weight: Tensor | None

    def __init__(
        self,
        num_rows: int,
        dim: int,
        optimizer: RowOptimizer | None = None,
        std: float = 0.0,
        schedule: ScheduleConfig | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"num_rows": num_rows, "dim": dim}.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"SparseEmbedding: {name}={value!r}: must be at least 1")
        if not 0 <= std < float("inf"):
            raise ConfigError(f"SparseEmbedding: std={std!r}: must be a number of at least 0")
        if optimizer is not None and not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"SparseEmbedding: optimizer is a {type(optimizer).__name__}; give one for rows, "
                "such as lockstep.optim.RowAdagrad(lr=0.01)"
            )
        self.num_rows, self.dim, self.std = num_rows, dim, std
        self.optimizer = RowAdagrad() if optimizer is None else optimizer
        self.schedule = schedule
        # Of the global generator, so that two tables begin otherwise, and all ranks alike.
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._fetched: Fetched | None = None
        self.is_distributed = False
        self.name = ""
        self.register_buffer("weight", None)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these numbers.

        Args:
            ids: numbers from 0 to `num_rows` - 1: integers of any shape [...].

        Returns:
            Their values: float32 [..., dim].

        Raises:
            IndexError: a number is out of range.
            TaskError: in a run, `Task.lookups` has not named it.
        """
        if self._fetched is None:
            if self.is_distributed:
                raise TaskError(
                    "SparseEmbedding: the rows are with their ranks while a run goes on, and are "
                    "there for Task.loss and Task.evaluate only; load the trained model by "
                    "lockstep.load"
                )
            return embedding(ids, self._every_row())
        there, rows = self._fetched
        return embedding(_places(ids, there, self.name), rows)

    def check(self, ids: Tensor, where: str) -> None:
        """Refuse what are no numbers of rows.

        Args:
            ids: numbers to look up.
            where: what errors begin with.

        Raises:
            TaskError: naming what is wrong.
        """
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            kind = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise TaskError(f"{where}: must be a tensor of integers, is {kind}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            raise TaskError(
                f"{where}: the numbers {int(ids.min())} to {int(ids.max())}; the table has rows 0 "
                f"to {self.num_rows - 1}"
            )

    def fetch(self, fetched: Fetched | None) -> None:
        """Look up these rows and no others from now on; None for all there are."""
        self._fetched = fetched

    @property
    def fetched(self) -> Fetched | None:
        """The rows that can be looked up; None for all there are."""
        return self._fetched

    def start(self, groups: Tensor) -> Tensor:
        """The values that groups of rows begin with, a function of their numbers.

        Args:
            groups: numbers of the groups (`row_layout.ROWS` rows each): int64 [n].

        Returns:
            Rows on the CPU: float32 [n * ROWS, dim].
        """
        if not self.std:
            return torch.zeros(len(groups) * ROWS, self.dim)
        drawn = np.empty((len(groups), ROWS, self.dim), dtype=np.float32)
        for part, group in zip(drawn, groups.tolist(), strict=True):
            # Philox counts from there on in the lower words, so groups have streams of their own.
            bits = np.random.Philox(key=self._seed, counter=[0, 0, 0, group])
            np.random.Generator(bits).standard_normal(dtype=np.float32, out=part)
        return torch.from_numpy(drawn.reshape(-1, self.dim)).mul_(self.std)

    def start_of(self, ids: Tensor) -> Tensor:
        """The values that rows begin with, on the CPU: float32 [n, dim]."""
        groups, places = torch.unique(ids.cpu() // ROWS, return_inverse=True)
        return self.start(groups)[places * ROWS + ids.cpu() % ROWS]

    @property
    def description(self) -> str:
        """What its values in a run depend on, in words."""
        schedule = "" if self.schedule is None else f", {self.schedule}"
        return f"{self.extra_repr()}, std={self.std}, seed={self._seed}{schedule}"

    def extra_repr(self) -> str:
        """Sizes and optimizer."""
        return f"{self.num_rows}, {self.dim}, {self.optimizer}"

    def _every_row(self) -> Tensor:
        if self.weight is None:
            layout = RowLayout(self.num_rows, 1)
            self.weight = self.start(torch.arange(layout.num_groups))[: self.num_rows]
        return self.weight


def _places(ids: Tensor, there: Tensor, name: str) -> Tensor:
    """Where each number is among those that are there.

    Raises:
        TaskError: one is not there; on a GPU the look-up that follows fails instead, since to raise
            this would be to wait for it.
    """
    ids = ids.long().contiguous()
    places = torch.searchsorted(there, ids)
    if len(there):
        found = there[places.clamp(max=len(there) - 1)] == ids
    else:
        found = torch.zeros_like(ids, dtype=torch.bool)
    if ids.device.type != "cpu":
        return torch.where(found, places, len(there))
    if not bool(found.all()):
        missing = torch.unique(ids[~found]).tolist()
        shown = ", ".join(map(str, missing[:_MOST_NAMED]))
        more = "" if len(missing) <= _MOST_NAMED else f" and {len(missing) - _MOST_NAMED} more"
        raise TaskError(
            f"SparseEmbedding {name}: row {shown}{more} is looked up, which Task.lookups has not "
            "named for this batch; name all rows that loss and evaluate look up"
        )
    return places

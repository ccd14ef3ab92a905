"""Which rows of a model's tables a batch needs: what `Task.lookups` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.task import Task, has_lookups
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.tables.sparse_embedding import Lent, SparseEmbedding
from lockstep.parsing import shown


def tables_of(model: nn.Module) -> dict[str, SparseEmbedding]:
    """The tables of a model by the names of their modules."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseEmbedding)}


class Lookups:
    """The tables of a model, and which rows of them a batch looks up.

    Attributes:
        tables: modules by name.
    """

    def __init__(self, task: Task, model: nn.Module, device: torch.device) -> None:
        """Find the tables.

        Raises:
            TaskError: there are tables and no `Task.lookups`.
        """
        self.tables = tables_of(model)
        for name, table in self.tables.items():
            table.name = name
        self._task, self._device = task, device
        kind = type(task).__name__
        if self.tables and not has_lookups(task):
            raise TaskError(
                f"{kind}.lookups: is missing; the model has a SparseEmbedding "
                f"({min(self.tables)!r}), so write it: it says which rows a batch looks up"
            )

    def wanted(self, batch: Any, *carry: Any) -> dict[str, Tensor]:
        """The rows of each table that a batch looks up: ascending, each once, int64 [n].

        Args:
            batch: the batch.
            carry: what its microbatch carries, if microbatches do.

        Raises:
            TaskError: `Task.lookups` returned something else than numbers for each table.
        """
        with torch.no_grad():
            asked: Any = self._task.lookups(batch, *carry)
        where = f"{type(self._task).__name__}.lookups"
        if not isinstance(asked, Mapping) or sorted(map(str, asked)) != sorted(self.tables):
            got = shown(list(asked) if isinstance(asked, Mapping) else asked)
            raise TaskError(
                f"{where}: must return a dict with the keys {sorted(self.tables)}, which are the "
                f"model's tables; returned {got}"
            )
        for name, table in self.tables.items():
            table.check(asked[name], f"{where}: {name!r}")
        return {n: torch.unique(asked[n]).long().to(self._device) for n in self.tables}

    def lend(self, lent: Mapping[str, Lent] | None) -> None:
        """Have the model look up these rows; None for all that there are."""
        for name, table in self.tables.items():
            table.lend(lent[name] if lent is not None else None)

    def at_start(self, wanted: Mapping[str, Tensor], trains: bool) -> dict[str, Lent]:
        """Rows as they are before the first step, which takes no communication.

        Args:
            wanted: rows of each table.
            trains: whether they take gradients.
        """
        return {
            name: Lent(ids, self.tables[name].start_of(ids).to(self._device).requires_grad_(trains))
            for name, ids in wanted.items()
        }

    @property
    def are_whole(self) -> bool:
        """Whether all rows of all tables are here, as in a model that was loaded."""
        return all(table.weight is not None for table in self.tables.values())


def check_tables_fit(tables: Mapping[str, SparseEmbedding], sizes: Mapping[str, int]) -> None:
    """Refuse a mesh on which rows would be needed where they are not.

    Args:
        tables: the model's.
        sizes: of the axes, by the key that sets them.

    Raises:
        ConfigError: naming the key.
    """
    for key, size in sizes.items():
        if tables and size > 1:
            raise ConfigError(
                f"{key}={size}: a model with a SparseEmbedding ({min(tables)!r}) is trained with "
                f"data parallelism only; set {key}=1"
            )

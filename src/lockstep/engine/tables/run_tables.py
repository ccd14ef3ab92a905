"""All tables of a run's model, the rows that a batch looks up, and their storage on ranks.

If survivors of a loss can go on, each rank also has copies of the rows of the rank before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.engine.checkpoint.share import Scattered
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.step.memory import check_table_memory
from lockstep.engine.tables.exchange import OwnedParts, redistribute
from lockstep.engine.tables.files import load_tables, scattered_tables
from lockstep.engine.tables.table import WEIGHT, DistributedTable, Part, check_row_optimizer, widths
from lockstep.engine.task import Task
from lockstep.engine.task_config import has_lookups
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.sparse_embedding import Fetched, SparseEmbedding
from lockstep.parallel.layout import RowLayout


def tables_of(model: nn.Module) -> dict[str, SparseEmbedding]:
    """The tables of a model by the names of their modules."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseEmbedding)}


class Lookups:
    """The tables of a model, and the rows that batches look up.

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
            rows: Any = self._task.lookups(batch, *carry)
        where = f"{type(self._task).__name__}.lookups"
        if not isinstance(rows, Mapping) or sorted(map(str, rows)) != sorted(self.tables):
            got = shown(list(rows) if isinstance(rows, Mapping) else rows)
            raise TaskError(
                f"{where}: must return a dict with the keys {sorted(self.tables)}, which are the "
                f"model's tables; returned {got}"
            )
        for name, table in self.tables.items():
            table.check(rows[name], f"{where}: {name!r}")
        return {n: torch.unique(rows[n]).long().to(self._device) for n in self.tables}

    def fetch(self, fetched: Mapping[str, Fetched] | None) -> None:
        """Let the model look up these rows; None for the whole tables."""
        for name, table in self.tables.items():
            table.fetch(fetched[name] if fetched is not None else None)

    def at_start(self, wanted: Mapping[str, Tensor], trains: bool) -> dict[str, Fetched]:
        """Initial rows, before the first step; not a collective.

        Args:
            wanted: rows of each table.
            trains: whether they take gradients.
        """
        return {
            name: Fetched(
                ids, self.tables[name].start_of(ids).to(self._device).requires_grad_(trains)
            )
            for name, ids in wanted.items()
        }

    @property
    def are_whole(self) -> bool:
        """Whether this process has all rows of all tables, as in a model that was loaded."""
        return all(table.weight is not None for table in self.tables.values())


def check_tables_fit(tables: Mapping[str, SparseEmbedding], sizes: Mapping[str, int]) -> None:
    """Refuse a mesh with other axes than data parallelism.

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


class TableStorage:
    """The rows of a model's tables on this rank, in the present group of ranks.

    Attributes:
        each: the tables.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        tables: Mapping[str, SparseEmbedding],
    ) -> None:
        """Distribute them with their initial rows; joining ranks have no rows yet.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            placement: where each rank is on the mesh.
            tables: modules by name.
        """
        self._runtime, self._config, self._placement = runtime, config, placement
        self.each = [DistributedTable(n, t, config.num_microbatches) for n, t in tables.items()]
        for table in self.each:
            table.module.is_distributed = True
            table.module.weight = None
            table.module.fetch(None)
        if not runtime.transport.is_joining:
            everywhere(placement.world, self._check)
            self.start()

    def _check(self) -> None:
        """Refuse optimizers that cannot work, and tables that do not fit into memory."""
        for table in self.each:
            check_row_optimizer(table.name, table.module)
        sizes = {t.name: 4 * t.module.num_rows * sum(widths(t.module).values()) for t in self.each}
        with_buddy, device = len(self._shifts) > 1, self._runtime.device
        check_table_memory(sizes, self._placement.world.size, with_buddy, device)

    def start(self) -> None:
        """Set the rows of this rank to their initial values."""
        for table in self.each:
            table.parts = [
                Part.start(table.module, self._layout(table), owner, self._runtime.device)
                for owner in self._owners
            ]

    def redistribute(self) -> bool:
        """Send rows to their owners in the present group; a collective.

        Returns:
            Whether no rank has some of the rows; nothing has changed then.

        Raises:
            GroupBroken: on all ranks; nothing has changed.
        """
        world = self._placement.world
        own = [
            [table.parts[0].layout.size if table.parts else 0, [part.owner for part in table.parts]]
            for table in self.each
        ]
        everyone = world.gather_json(own)
        new_parts: list[list[Part]] = []
        for number, table in enumerate(self.each):
            there = [OwnedParts(*of_rank[number]) for of_rank in everyone]
            layout, device = self._layout(table), self._runtime.device
            parts = redistribute(world, table, there, layout, self._shifts, device)
            if parts is None:
                world.agree()
                return True
            new_parts.append(parts)
        world.agree()
        for table, parts in zip(self.each, new_parts, strict=True):
            table.parts = parts
        return False

    def scattered(self) -> dict[str, dict[str, Scattered]]:
        """All rows, as files of a checkpoint, each with its fields by name."""
        return scattered_tables(self._placement.world, self.each)

    def load(self, folder: Path | None, is_everywhere: bool = False) -> None:
        """Load the rows of a checkpoint that fits; a collective.

        Args:
            folder: folder of the checkpoint; None on ranks that do not have it.
            is_everywhere: whether all ranks have it; else rank 0 does.

        Raises:
            CheckpointError: a file cannot be read; on all ranks.
        """
        for table in self.each:
            table.parts = []  # frees their memory first
            table.parts = [
                Part.empty(table.module, self._layout(table), owner, self._runtime.device)
                for owner in self._owners
            ]
        load_tables(self._placement.world, self.each, folder, is_everywhere)

    def load_weights(self, folder: Path) -> None:
        """As `load` by rank 0, without the state of the rows' optimizers; a collective."""
        self.load(folder if self._placement.world.rank == 0 else None)
        for table in self.each:
            for part in table.parts:
                for name in part.fields.keys() - {WEIGHT}:
                    part.fields[name].zero_()

    @contextmanager
    def temporary(self, folder: Path | None, is_everywhere: bool) -> Iterator[None]:
        """As `load`, within the block; the present rows are restored after it, not a collective."""
        own = [table.parts for table in self.each]
        try:
            self.load(folder, is_everywhere)
            yield
        finally:
            for table, parts in zip(self.each, own, strict=True):
                table.parts = parts

    def digests(self) -> dict[str, str]:
        """Digests of this rank's parts, by a name for people; none if there are no copies."""
        if len(self._shifts) == 1:
            return {}
        return {
            f"the rows of rank {part.owner} in {table.name}": f"{part.digest():064x}"
            for table in self.each
            for part in table.parts
        }

    def digest(self) -> str:
        """SHA-256 of all rows and their optimizer state; a collective."""
        own = [f"{table.parts[0].digest():x}" for table in self.each]
        everyone = self._placement.world.gather_json(own)
        sha = hashlib.sha256()
        for table, numbers in zip(self.each, zip(*everyone, strict=True), strict=True):
            total = sum(int(number, 16) for number in numbers) % 2**256
            sha.update(f"{table.name} {total:064x}\n".encode())
        return sha.hexdigest()

    def _layout(self, table: DistributedTable) -> RowLayout:
        return RowLayout(table.module.num_rows, self._placement.world.size)

    @property
    def _shifts(self) -> list[int]:
        """For each part of a rank, how many ranks before it the owner is."""
        can_regroup = self._runtime.transport.can_regroup and self._placement.world.size > 1
        return [0, 1] if self._config.tables.buddy and can_regroup else [0]

    @property
    def _owners(self) -> list[int]:
        world = self._placement.world
        return [(world.rank - shift) % world.size for shift in self._shifts]

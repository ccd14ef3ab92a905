"""All tables of a run's model, and which of their rows a batch needs.

A rank that may have to go on without the one before it keeps a copy of that one's rows.
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
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.step.memory import check_table_memory
from lockstep.engine.tables.exchange import Described, deal
from lockstep.engine.tables.files import StreamedTables, load_tables
from lockstep.engine.tables.table import DistributedTable, Part, check_row_optimizer, widths
from lockstep.engine.task import Task, has_lookups
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.sparse_embedding import Fetched, SparseEmbedding
from lockstep.parallel.layout import RowLayout


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

    def fetch(self, fetched: Mapping[str, Fetched] | None) -> None:
        """Have the model look up these rows; None for all that there are."""
        for name, table in self.tables.items():
            table.fetch(fetched[name] if fetched is not None else None)

    def at_start(self, wanted: Mapping[str, Tensor], trains: bool) -> dict[str, Fetched]:
        """Rows as they are before the first step, which takes no communication.

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


class HeldTables:
    """The rows of a model's tables that this rank holds, in the present group of ranks.

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
        """Deal them out; their rows are as they are before the first step, but for joining ranks.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            placement: where each rank is on the mesh.
            tables: modules by name.
        """
        self._runtime, self._config, self._placement = runtime, config, placement
        self.each = [DistributedTable(n, t, config.num_microbatches) for n, t in tables.items()]
        for dealt in self.each:
            dealt.table.is_distributed = True
            dealt.table.weight = None
            dealt.table.fetch(None)
        if not runtime.transport.is_joining:
            everywhere(placement.world, self._check)
            self.start()

    def _check(self) -> None:
        """Refuse optimizers that cannot work, and tables that do not fit into memory."""
        for dealt in self.each:
            check_row_optimizer(dealt.name, dealt.table)
        sizes = {d.name: 4 * d.table.num_rows * sum(widths(d.table).values()) for d in self.each}
        with_buddy, device = len(self._shifts) > 1, self._runtime.device
        check_table_memory(sizes, self._placement.world.size, with_buddy, device)

    def start(self) -> None:
        """Hold the rows of this rank as they are before the first step."""
        for dealt in self.each:
            dealt.parts = [
                Part.start(dealt.table, self._layout(dealt), owner, self._runtime.device)
                for owner in self._owners
            ]

    def deal_out(self) -> bool:
        """Bring rows to those that are to own them in the present group; a collective.

        Returns:
            Whether nobody that is left has some of them; each rank then holds what it held.

        Raises:
            GroupBroken: on all ranks, which hold what they held.
        """
        world = self._placement.world
        everyone = [
            [Described(*held) for held in theirs]
            for theirs in world.gather_json([self._described(dealt) for dealt in self.each])
        ]
        distributed: list[list[Part]] = []
        for number, dealt in enumerate(self.each):
            there = [of_rank[number] for of_rank in everyone]
            layout, device = self._layout(dealt), self._runtime.device
            parts = deal(world, dealt, there, layout, self._shifts, device)
            if parts is None:
                world.agree()
                return True
            distributed.append(parts)
        world.agree()
        for dealt, parts in zip(self.each, distributed, strict=True):
            dealt.parts = parts
        return False

    @staticmethod
    def _described(dealt: DistributedTable) -> tuple[int, list[int]]:
        size = dealt.parts[0].layout.size if dealt.parts else 0
        return size, [part.owner for part in dealt.parts]

    def streamed(self) -> StreamedTables:
        """All rows, as files of a checkpoint."""
        return StreamedTables(self._placement.world, self.each)

    def load(self, folder: Path | None) -> None:
        """Hold the rows of a checkpoint that fits; a collective.

        Args:
            folder: of the checkpoint, on rank 0; None elsewhere.

        Raises:
            CheckpointError: a file cannot be read; on all ranks.
        """
        for dealt in self.each:
            dealt.parts = []  # the memory of those that were held
            dealt.parts = [
                Part.empty(dealt.table, self._layout(dealt), owner, self._runtime.device)
                for owner in self._owners
            ]
        load_tables(self._placement.world, self.each, folder)

    @contextmanager
    def borrowed(self, folder: Path | None) -> Iterator[None]:
        """As `load`, for a while; what was held before is put back without communication."""
        own = [dealt.parts for dealt in self.each]
        try:
            self.load(folder)
            yield
        finally:
            for dealt, parts in zip(self.each, own, strict=True):
                dealt.parts = parts

    def digests(self) -> dict[str, str]:
        """Digests of what this rank holds, by a name for people; none without copies of any."""
        if len(self._shifts) == 1:
            return {}
        return {
            f"the rows of rank {part.owner} in {dealt.name}": f"{part.digest():064x}"
            for dealt in self.each
            for part in dealt.parts
        }

    def digest(self) -> str:
        """SHA-256 of all rows and what is kept of them; a collective."""
        own = [f"{dealt.parts[0].digest():x}" for dealt in self.each]
        everyone = self._placement.world.gather_json(own)
        sha = hashlib.sha256()
        for dealt, numbers in zip(self.each, zip(*everyone, strict=True), strict=True):
            total = sum(int(number, 16) for number in numbers) % 2**256
            sha.update(f"{dealt.name} {total:064x}\n".encode())
        return sha.hexdigest()

    def _layout(self, dealt: DistributedTable) -> RowLayout:
        return RowLayout(dealt.table.num_rows, self._placement.world.size)

    @property
    def _shifts(self) -> list[int]:
        """How many ranks before a rank those are whose rows it holds: itself, and its neighbour."""
        can_regroup = self._runtime.transport.can_regroup and self._placement.world.size > 1
        return [0, 1] if self._config.tables.buddy and can_regroup else [0]

    @property
    def _owners(self) -> list[int]:
        world = self._placement.world
        return [(world.rank - shift) % world.size for shift in self._shifts]

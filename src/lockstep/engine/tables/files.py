"""Tables in checkpoints: files with equal numbers of rows, in the order of the rows.

The cuts depend on the table alone, so the files are the same on any number of ranks. Rows are sent
to rank 0 while it writes them, and from it while it reads them: no rank needs memory for a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.checkpoint.format import TABLE, Kind, Snapshot, Tensors, read_tensors
from lockstep.engine.runtime import everywhere
from lockstep.engine.tables.exchange import swap
from lockstep.engine.tables.table import DistributedTable, Part, widths
from lockstep.errors import CheckpointError
from lockstep.nn.sparse_embedding import SparseEmbedding
from lockstep.parallel.layout import ROWS, Range

_FILE_BYTES = 32 << 20
"""Greatest size of a file, unless a single group of rows is larger."""


def cuts(table: SparseEmbedding) -> list[Range]:
    """The rows of each file of a table."""
    of_group = 4 * ROWS * sum(widths(table).values())
    step = max(1, _FILE_BYTES // of_group) * ROWS
    num_rows = table.num_rows
    return [Range(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def file_name(number: int, part: int) -> str:
    """The file of a part of a table, by the numbers of both."""
    return f"{TABLE}{number}.{part:05}.safetensors"


def described(tables: Mapping[str, SparseEmbedding]) -> dict[str, Any]:
    """The description of tables in a manifest, by name."""
    return {
        name: {
            "num_rows": table.num_rows,
            "dim": table.dim,
            "optimizer": repr(table.optimizer),
            "schedule": table.schedule and table.schedule.model_dump(mode="json"),
            "files": [file_name(number, part) for part in range(len(cuts(table)))],
        }
        for number, (name, table) in enumerate(tables.items())
    }


def check_described(
    tables: Mapping[str, SparseEmbedding],
    there: Any,
    where: str,
    keys: Sequence[str] = ("num_rows", "dim", "files"),
) -> None:
    """Refuse a checkpoint of other tables.

    Args:
        tables: of this model, by name.
        there: the description of those of the checkpoint.
        where: name of the checkpoint in errors.
        keys: keys that must be equal; files depend on the optimizer's state.

    Raises:
        CheckpointError: names the first thing that differs.
    """
    here = described(tables)
    if not isinstance(there, dict):
        raise CheckpointError(f"{where}: is damaged: tables is no object")
    for name in dict.fromkeys([*here, *there]):
        mine, theirs = here.get(name), there.get(name)
        if mine is None or theirs is None:
            who = "it has no" if theirs is None else "this one has no"
            raise CheckpointError(f"{where}: is of another model: {who} table {name}")
        if not isinstance(theirs, dict):
            raise CheckpointError(f"{where}: is damaged: tables: {name} is no object")
        for key in keys:
            if mine[key] != theirs.get(key):
                raise CheckpointError(
                    f"{where}: is of another model: {key} of table {name} is "
                    f"{theirs.get(key)!r} there, {mine[key]!r} here"
                )


class StreamedTables:
    """The files of tables, whose rows are gathered on rank 0 while it writes them.

    Every rank goes through all of them in the same order: by reading `files`, or by `drain`.

    Attributes:
        files: content by name.
    """

    def __init__(self, transport: Transport, tables: list[DistributedTable]) -> None:
        self._transport = transport
        self._plan = [
            (number, distributed, part, rows)
            for number, distributed in enumerate(tables)
            for part, rows in enumerate(cuts(distributed.module))
        ]
        self._tensors = self._each()
        self.files = {
            file_name(number, part): self._content(distributed, rows)
            for number, distributed, part, rows in self._plan
        }

    def drain(self) -> None:
        """Take part in gathering the rows that are left."""
        for _ in self._tensors:
            pass

    def _content(self, distributed: DistributedTable, rows: Range) -> Tensors:
        kinds = {
            name: Kind(torch.float32, torch.Size((len(rows), width)))
            for name, width in widths(distributed.module).items()
        }
        return Tensors(kinds, (next(self._tensors) for _ in kinds))

    def _each(self) -> Iterator[Tensor]:
        for _, distributed, _, rows in self._plan:
            for name in widths(distributed.module):
                yield self._gathered(distributed.parts[0], name, rows)

    def _gathered(self, part: Part, name: str, rows: Range) -> Tensor:
        """A field of some rows, on rank 0; empty on other ranks."""
        rank, size = self._transport.rank, self._transport.size
        groups = torch.arange(rows.first // ROWS, -(-rows.last // ROWS))
        field = part.groups(name)
        mine = groups[groups % size == rank] // size
        counts = [int((groups % size == by).sum()) for by in range(size)]
        received = counts if rank == 0 else [0] * size
        sent = [len(mine), *[0] * (size - 1)]
        came = swap(self._transport, field[mine.to(field.device)], sent, received)
        if rank != 0:
            return came.new_empty(0)
        by_owner = torch.argsort(groups % size, stable=True)
        ordered = torch.empty_like(came)
        ordered[by_owner.to(came.device)] = came
        return ordered.view(-1, field.shape[2])[: len(rows)]


def read_fields(table: SparseEmbedding, path: Path, rows: Range) -> dict[str, Tensor]:
    """The fields of the rows in a file, which has been verified.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    fields = read_tensors(path)
    wanted = {name: (len(rows), width) for name, width in widths(table).items()}
    there = {name: tuple(field.shape) for name, field in fields.items()}
    if there != wanted or any(field.dtype != torch.float32 for field in fields.values()):
        raise CheckpointError(f"{path}: is damaged: holds {there}, must hold float32 {wanted}")
    return fields


def read_rows(snapshot: Snapshot) -> Iterator[tuple[str, int, str, Tensor]]:
    """All rows of a checkpoint: table, number of the first row, field, and values [n, width].

    Raises:
        CheckpointError: a file cannot be read.
    """
    for name, table in snapshot.meta.get("tables", {}).items():
        first = 0
        for file in table["files"]:
            assert snapshot.folder is not None, "it was read from disk"
            fields = read_tensors(snapshot.folder / file)
            for key, values in fields.items():
                yield name, first, key, values
            first += len(fields["weight"])


def load_tables(transport: Transport, tables: list[DistributedTable], folder: Path | None) -> None:
    """Load the rows of a checkpoint into parts that are allocated; a collective.

    Args:
        transport: the group of ranks.
        tables: tables with parts.
        folder: folder of the checkpoint on rank 0; None on other ranks.

    Raises:
        CheckpointError: a file cannot be read; on all ranks.
    """
    for number, distributed in enumerate(tables):
        for part, rows in enumerate(cuts(distributed.module)):
            path = folder / file_name(number, part) if folder is not None else None
            table = distributed.module

            def read(
                path: Path | None = path, rows: Range = rows, table: SparseEmbedding = table
            ) -> dict[str, Tensor] | None:
                return read_fields(table, path, rows) if path is not None else None

            with transport.observer.on_disk():
                fields = everywhere(transport, read)
            for name, width in widths(table).items():
                device = distributed.parts[0].fields[name].device
                received = torch.empty(len(rows), width, device=device)
                if fields is not None:
                    received.copy_(fields[name])
                transport.broadcast(received.view(-1), 0)
                for own in distributed.parts:
                    _take(own, name, received, rows)


def _take(part: Part, name: str, received: Tensor, rows: Range) -> None:
    """Copy those rows that belong to a part into it."""
    ids = torch.arange(rows.first, rows.last)
    mine = ids[part.layout.owner(ids) == part.owner]
    device = received.device
    part.fields[name][part.layout.local(mine).to(device)] = received[(mine - rows.first).to(device)]


def load_whole(tables: Mapping[str, SparseEmbedding], folder: Path, device: torch.device) -> None:
    """Load all rows of tables, for `lockstep.load`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    for number, table in enumerate(tables.values()):
        weight = torch.empty(table.num_rows, table.dim, device=device)
        for part, rows in enumerate(cuts(table)):
            fields = read_fields(table, folder / file_name(number, part), rows)
            weight[rows.first : rows.last] = fields["weight"]
        table.weight = weight

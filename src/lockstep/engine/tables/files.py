"""Tables in checkpoints: files with equal numbers of rows, in the order of the rows.

The cuts depend on the table alone, so the files are the same on any number of ranks. Rows are sent
to the rank that writes a file, and a rank reads its own ones: none needs memory for a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.checkpoint.format import TABLE, Snapshot, read_manifest, read_tensors
from lockstep.engine.checkpoint.share import Scattered
from lockstep.engine.checkpoint.tensor_files import Kind
from lockstep.engine.runtime import everywhere
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


class _Rows(Scattered):
    """A field of the rows in a file."""

    def __init__(
        self, transport: Transport, part: Part, name: str, rows: Range, width: int
    ) -> None:
        self._transport, self._part, self._name, self._width = transport, part, name, width
        self._groups = torch.arange(rows.first // ROWS, -(-rows.last // ROWS))
        self._owners = self._groups % transport.size
        counts = torch.bincount(self._owners, minlength=transport.size).tolist()
        kind = Kind(torch.float32, torch.Size((len(rows), width)))
        super().__init__(kind, {by: n * ROWS * width for by, n in enumerate(counts) if n})

    def own(self) -> Tensor:
        field = self._part.groups(self._name)
        mine = self._groups[self._owners == self._transport.rank] // self._transport.size
        return field[mine.to(field.device)].reshape(-1)

    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        came = torch.cat([parts[by].view(-1, ROWS, self._width) for by in sorted(parts)])
        by_owner = torch.argsort(self._owners, stable=True)
        ordered = torch.empty_like(came)
        ordered[by_owner.to(came.device)] = came
        return ordered.view(-1, self._width)[: self.kind.shape[0]]


def scattered_tables(
    transport: Transport, tables: list[DistributedTable]
) -> dict[str, dict[str, Scattered]]:
    """The files of tables, each with its fields by name, whose rows are on all ranks."""
    return {
        file_name(number, part): {
            name: _Rows(transport, distributed.parts[0], name, rows, width)
            for name, width in widths(distributed.module).items()
        }
        for number, distributed in enumerate(tables)
        for part, rows in enumerate(cuts(distributed.module))
    }


def read_fields(
    table: SparseEmbedding,
    path: Path,
    rows: Range,
    files: Mapping[str, Any],
    is_mapped: bool = False,
) -> dict[str, Tensor]:
    """The fields of the rows in a file, which has been verified.

    Args:
        table: table of the rows.
        path: path of the file.
        rows: the rows.
        files: what the checkpoint's manifest says of files.
        is_mapped: whether to read only what is looked at.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    fields = read_tensors(path, files, is_mapped)
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
    tables = snapshot.meta.get("tables", {})
    if not tables:
        return
    assert snapshot.folder is not None, "it was read from disk"
    files = read_manifest(snapshot.folder)["files"]
    for name, table in tables.items():
        first = 0
        for file in table["files"]:
            fields = read_tensors(snapshot.folder / file, files)
            for key, values in fields.items():
                yield name, first, key, values
            first += len(fields["weight"])


def load_tables(
    transport: Transport,
    tables: list[DistributedTable],
    folder: Path | None,
    is_everywhere: bool = False,
) -> None:
    """Load the rows of a checkpoint into parts that are allocated; a collective.

    Args:
        transport: the group of ranks.
        tables: tables with parts.
        folder: folder of the checkpoint; None on ranks that do not have it.
        is_everywhere: whether all ranks have it; else rank 0 does, and sends them the rows.

    Raises:
        CheckpointError: a file cannot be read; on all ranks.
    """
    with transport.observer.on_disk():
        files = everywhere(transport, lambda: read_manifest(folder)["files"] if folder else {})
    for number, distributed in enumerate(tables):
        for part, rows in enumerate(cuts(distributed.module)):
            path = folder / file_name(number, part) if folder is not None else None
            table = distributed.module

            def read(
                path: Path | None = path, rows: Range = rows, table: SparseEmbedding = table
            ) -> dict[str, Tensor] | None:
                if path is None:
                    return None
                return read_fields(table, path, rows, files, is_everywhere)

            with transport.observer.on_disk():
                fields = everywhere(transport, read)
            for name, width in widths(table).items():
                if is_everywhere and fields is not None:
                    received = fields[name]
                else:
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
    field = part.fields[name]
    taken = received[(mine - rows.first).to(received.device)]
    field[part.layout.local(mine).to(field.device)] = taken.to(field.device)


def load_whole(tables: Mapping[str, SparseEmbedding], folder: Path, device: torch.device) -> None:
    """Load all rows of tables, for `lockstep.load`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = read_manifest(folder)["files"] if tables else {}
    for number, table in enumerate(tables.values()):
        weight = torch.empty(table.num_rows, table.dim, device=device)
        for part, rows in enumerate(cuts(table)):
            fields = read_fields(table, folder / file_name(number, part), rows, files)
            weight[rows.first : rows.last] = fields["weight"]
        table.weight = weight

"""Whether an optimizer of rows steps each row by itself, tried before training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.engine.tables.part import WEIGHT, widths
from lockstep.errors import TaskError
from lockstep.nn.tables.sparse_embedding import SparseEmbedding

_NUM_ROWS, _NUM_STEPS, _LR = 37, 2, 0.1
_CHOSEN = (5, 6, 11, 12, 30)


def check_row_optimizer(name: str, table: SparseEmbedding) -> None:
    """Refuse an optimizer whose steps depend on more than a row, its gradient and its state.

    Args:
        name: of the table.
        table: table with the optimizer.

    Raises:
        TaskError: it cannot step rows, or not by themselves.
    """
    where = f"the optimizer of table {name} ({type(table.optimizer).__name__})"
    generator = torch.Generator().manual_seed(0)
    rows, *gradients = torch.randn(1 + _NUM_STEPS, _NUM_ROWS, table.dim, generator=generator)
    chosen = torch.tensor(_CHOSEN)
    try:
        whole = _stepped(table, rows, gradients)
        again = _stepped(table, rows, gradients)
        alone = _stepped(table, rows[chosen], [g[chosen] for g in gradients])
    except Exception as error:
        raise TaskError(f"{where}: cannot step rows: {type(error).__name__}: {error}") from None
    for field, values in whole.items():
        if not bool(values.isfinite().all()):
            raise TaskError(f"{where}: makes {field} NaN or infinite from numbers that are not")
        if not torch.equal(values, again[field]):
            raise TaskError(
                f"{where}: made other rows when it stepped the same again: it draws random "
                "numbers, or keeps something beside `state`, whose names `widths` gives"
            )
        if not torch.equal(values[chosen], alone[field]):
            raise TaskError(
                f"{where}: steps a row otherwise when others are stepped beside it; ranks step "
                "other parts of the rows, so compute each row from itself alone"
            )


def _stepped(
    table: SparseEmbedding, rows: Tensor, gradients: Sequence[Tensor]
) -> dict[str, Tensor]:
    """All fields of some rows after a few steps."""
    fields = {name: torch.zeros(len(rows), width) for name, width in widths(table).items()}
    fields[WEIGHT] = rows.clone()
    state = {name: field for name, field in fields.items() if name != WEIGHT}
    for gradient in gradients:
        table.optimizer.step(fields[WEIGHT], state, gradient.clone(), _LR)
    return fields

"""Models that know which puzzle they see, by rows of a table in front of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.systems.hrm.reasoning import references
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.nn import SparseEmbedding
from lockstep.nn.sparse_embedding import Fetched
from lockstep.systems.hrm.reasoning import HierarchicalModel, ReasoningModel, RecursiveModel, Sizes

Make = Callable[[Sizes, nn.Module], ReasoningModel]

MODELS: dict[str, Make] = {
    "hierarchical": lambda sizes, table: HierarchicalModel(sizes, 1, 1, puzzles=table),
    "recursive": lambda sizes, table: RecursiveModel(sizes, 1, 2, 2, puzzles=table),
    "recursive, mixing by layers": lambda sizes, table: RecursiveModel(
        sizes, 1, 1, 1, "mlp", puzzles=table
    ),
}

ONE = Sizes(vocabulary=5, length=4, dim=8, num_heads=2, multiple=4, puzzle_dim=8)
TWO = Sizes(vocabulary=5, length=4, dim=8, num_heads=2, multiple=4, puzzle_dim=11)
THREE = Sizes(vocabulary=5, length=4, dim=8, num_heads=2, multiple=4, puzzle_dim=5, num_leading=3)


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Make:
    torch.manual_seed(0)
    return MODELS[request.param]


def segment(model: ReasoningModel, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and halting of a first segment, written out position by position."""
    start = model.initial(len(inputs), torch.float64)
    if isinstance(model, HierarchicalModel):
        return references.hierarchical(model, start["z_H"], start["z_L"], inputs, rows)[2:]
    assert isinstance(model, RecursiveModel)
    return references.recursive(model, start["z_H"], start["z_L"], inputs, rows)[2:]


@pytest.mark.parametrize("sizes", [ONE, TWO, THREE])
def test_the_row_of_a_puzzle_is_in_front_of_its_tokens(make: Make, sizes: Sizes) -> None:
    """√dim · concat(row, token embeddings); positions count the row; logits leave it out."""
    table = nn.Embedding(7, sizes.puzzle_dim)
    model = make(sizes, table).double()
    nn.init.normal_(model.halting.weight)
    if model.tables is not None:
        # In float64, from the reference's complex numbers.
        half = model.tables.shape[-1] // 2
        ones = torch.zeros(sizes.positions, 2 * half, dtype=torch.float64)
        ones[:, :half] = 1
        turned = references.turned(ones)
        model.tables = torch.stack([turned[:, :half], turned[:, half:]]).repeat(1, 1, 2)
        assert model.tables.shape[1] == sizes.leading + 4
    inputs, ids = torch.randint(5, (3, 4)), torch.tensor([6, 2, 6])
    rows = table.weight.detach()[ids].requires_grad_()
    _, logits, q_halt, q_continue = model(model.initial(3), inputs, model.rows(ids))
    expected, expected_q = segment(model, inputs, rows)
    assert logits.shape == (3, 4, 5)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-9)
    q = [q_halt] if q_continue is None else [q_halt, q_continue]
    torch.testing.assert_close(torch.stack(q, 1), expected_q.float(), rtol=1e-6, atol=1e-6)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (by_row,) = torch.autograd.grad((expected * weights).sum(), rows)
    summed = torch.zeros_like(table.weight).index_add_(0, ids, by_row)
    torch.testing.assert_close(table.weight.grad, summed, rtol=1e-7, atol=1e-9)
    assert summed[[2, 6]].any(1).all()


def test_gradients_reach_the_rows_that_are_fetched(make: Make) -> None:
    table = SparseEmbedding(100, 11)
    model = make(TWO, table)
    fetched = Fetched(torch.tensor([3, 5, 90]), torch.randn(3, 11).requires_grad_())
    table.fetch(fetched)
    inputs = torch.randint(5, (3, 4))
    rows = model.rows(torch.tensor([90, 3, 90]))
    assert torch.equal(rows, fetched.rows[[2, 0, 2]])
    model(model.initial(3), inputs, rows)[1].square().sum().backward()
    assert fetched.rows.grad is not None
    assert fetched.rows.grad.any(1).tolist() == [True, False, True]
    assert "puzzles.weight" not in model.state_dict()


def test_rows_of_zeros_are_as_none_at_the_start(make: Make) -> None:
    model = make(TWO, SparseEmbedding(100, 11))
    inputs, state = torch.randint(5, (2, 4)), model.initial(2)
    with_rows = model(state, inputs, model.rows(torch.tensor([7, 99])))
    assert torch.equal(with_rows[1], model(state, inputs)[1])


def test_a_model_without_a_table_has_no_rows() -> None:
    with pytest.raises(TaskError, match="no table of puzzles"):
        RecursiveModel(TWO).rows(torch.tensor([0]))

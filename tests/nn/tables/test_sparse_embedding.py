"""A table by itself: its rows at the start, and what can be looked up."""

import pytest
import torch
from torch.nn import functional as F

import lockstep as ls
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.sparse_embedding import Fetched
from lockstep.optim import RowSGD


def table(num_rows=50, dim=4, **keys):
    torch.manual_seed(0)
    return ls.nn.SparseEmbedding(num_rows, dim, **keys)


def test_all_rows_are_there_outside_of_a_run():
    made = table(std=0.5)
    ids = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(made(ids), F.embedding(ids, made.weight))
    assert made.weight.shape == (50, 4)
    assert 0.3 < float(made.weight.std()) < 0.7
    with pytest.raises(IndexError):
        made(torch.tensor([50]))


def test_any_rows_begin_as_they_do_in_the_whole_table():
    made = table(num_rows=100, std=1.0)
    whole = made.start_of(torch.arange(100))
    some = torch.tensor([99, 3, 3, 64])
    assert torch.equal(made.start_of(some), whole[some])
    assert torch.equal(table(num_rows=100, std=1.0).start_of(some), whole[some])  # the same seed
    assert not torch.equal(ls.nn.SparseEmbedding(100, 4, std=1.0).start_of(some), whole[some])
    assert not table().start_of(some).any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_rows_that_were_fetched_are_looked_up_and_get_gradients(dtype):
    made = table()
    rows = torch.randn(3, 4, requires_grad=True)
    made.fetch(Fetched(torch.tensor([2, 5, 9]), rows))
    out = made(torch.tensor([[9, 2], [9, 9]], dtype=dtype))
    assert torch.equal(out, rows[torch.tensor([[2, 0], [2, 2]])])
    out.sum().backward()
    assert rows.grad[:, 0].tolist() == [1.0, 0.0, 3.0]
    assert made(torch.empty(2, 0, dtype=dtype)).shape == (2, 0, 4)


def test_other_rows_cannot_be_looked_up():
    made = table()
    made.fetch(Fetched(torch.tensor([2, 5]), torch.zeros(2, 4)))
    with pytest.raises(
        TaskError, match=r"row 0, 1, 3, 4 and 1 more is looked up, which Task.looku"
    ):
        made(torch.tensor([2, 0, 1, 3, 4, 49]))
    made.fetch(Fetched(torch.empty(0, dtype=torch.int64), torch.zeros(0, 4)))
    assert made(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    with pytest.raises(TaskError, match="row 2 is looked up"):
        made(torch.tensor([2]))
    made.fetch(None)
    made.is_distributed = True
    with pytest.raises(TaskError, match="the rows are with their ranks"):
        made(torch.tensor([2]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ls.nn.SparseEmbedding(0, 4), "num_rows=0: must be at least 1"),
        (lambda: ls.nn.SparseEmbedding(5, 2.5), "dim=2.5: must be at least 1"),
        (lambda: ls.nn.SparseEmbedding(5, 4, std=-1), "std=-1: must be a number of at least 0"),
        (lambda: ls.nn.SparseEmbedding(5, 4, torch.optim.SGD), "optimizer is a type; give one for"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_it_says_what_it_is():
    assert "50, 4, RowSGD(lr=0.5" in repr(table(optimizer=RowSGD(lr=0.5)))

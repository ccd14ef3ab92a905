"""`ls.Reducer` in loops that are not Lockstep's own: the same bits on any number of ranks."""

import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import run
from torch import nn

import lockstep as ls
from lockstep.errors import ConfigError, TaskError

LOOP = Path(__file__).parent / "reducer_loop.py"


def told(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return told(run([sys.executable, LOOP, "alone"], tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "kind"),
    [pytest.param("torchrun", 1, "torch", marks=pytest.mark.slow),
     pytest.param("torchrun", 2, "torch", marks=pytest.mark.slow),
     pytest.param("torchrun", 3, "subgroup", marks=pytest.mark.slow),
     ("mpi", 2, "mpi"), pytest.param("mpi", 9, "mpi", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_same_bits_over_any_group(ranks, alone, launcher, num_ranks, kind):
    assert told(ranks(launcher, num_ranks, LOOP, kind)) == alone


@pytest.mark.slow
def test_a_rank_that_forgets_a_microbatch_is_named(ranks):
    done = ranks("torchrun", 2, LOOP, "torch", "forgets")
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert text.count("error: Reducer.reduce: rank 1 has not added all its microbatches") == 1


def test_the_mean_is_that_of_the_whole_batch():
    torch.manual_seed(1)
    model, x = nn.Linear(4, 2), torch.randn(10, 4)
    reducer = ls.Reducer(model.parameters(), num_microbatches=3)
    for m in reducer.microbatches(0):
        part = x[m::3]
        loss = model(part).square().sum()
        loss.backward()
        reducer.add(len(part), loss=loss)
    means = reducer.reduce()
    ours = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(TaskError, match="has not added all its microbatches"):
        reducer.reduce()  # the sums of a step are not given twice
    model.zero_grad()
    whole = model(x).square().sum() / 10
    whole.backward()
    assert means["loss"] == pytest.approx(whole.item())
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "none of them requires a gradient"),
        (([torch.zeros(2, requires_grad=True)], 0), "num_microbatches=0: must be at least 1"),
        (([torch.zeros(2, requires_grad=True)], 2, "world"), "group: is a str; must be"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ls.Reducer(*arguments)


def test_misuse():
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(TaskError, match=r"dtype is torch\.float16"):
        ls.Reducer([nn.Parameter(torch.zeros(3, dtype=torch.float16))], 2)
    reducer = ls.Reducer([parameter], num_microbatches=1)
    with pytest.raises(TaskError, match="has not added all its microbatches"):
        reducer.reduce()
    for _ in reducer.microbatches(0):
        with pytest.raises(TaskError, match=r"got \['lost'\]; sums=\['loss'\]"):
            reducer.add(1, lost=3)
        reducer.add(0, loss=1)
        with pytest.raises(TaskError, match="this rank has 1 microbatches"):
            reducer.add(1, loss=1)
    with pytest.raises(TaskError, match=r"all weights add up to 0\.0"):
        reducer.reduce()

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import TaskError
from lockstep.systems.hrm.reasoning import (
    IGNORED,
    accuracy,
    exact,
    softmax_cross_entropy,
    stablemax_cross_entropy,
)

LOSSES = [stablemax_cross_entropy, softmax_cross_entropy]
Rows = list[list[float]]


def stablemax(row: list[float], label: int) -> float:
    exactly = [Fraction(x) for x in row]
    weights = [x + 1 if x >= 0 else 1 / (1 - x) for x in exactly]
    return -math.log(weights[label] / sum(weights))


def softmax(row: list[float], label: int) -> float:
    return math.log(math.fsum(math.exp(x - row[label]) for x in row))


def mean(formula: Callable[[list[float], int], float], rows: Rows, labels: list[int]) -> float:
    pairs = zip(rows, labels, strict=True)
    losses = [formula(row, label) for row, label in pairs if label != IGNORED]
    return sum(losses) / len(losses) if losses else 0.0


SAMPLES = st.integers(1, 4).flatmap(
    lambda length: st.lists(
        st.tuples(
            st.lists(
                st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5),
                min_size=length,
                max_size=length,
            ),
            st.lists(st.sampled_from([IGNORED, 0, 1, 2, 3, 4]), min_size=length, max_size=length),
        ),
        min_size=1,
        max_size=3,
    )
)


@settings(deadline=None)
@given(SAMPLES, st.sampled_from([torch.float32, torch.float64]))
def test_losses_are_means_over_the_labels_that_count(
    samples: list[tuple[Rows, list[int]]], dtype: torch.dtype
) -> None:
    logits = torch.tensor([rows for rows, _ in samples], dtype=dtype)
    labels = torch.tensor([of for _, of in samples])
    for loss, formula in zip(LOSSES, (stablemax, softmax), strict=True):
        found = loss(logits, labels)
        assert found.dtype == dtype
        assert found.shape == (len(samples),)
        expected = [mean(formula, rows, of) for rows, of in samples]
        # Softmax of float32 takes the difference of two numbers up to 50.
        near = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
        assert found.tolist() == pytest.approx(expected, rel=near, abs=near)


@settings(deadline=None)
@given(SAMPLES)
def test_a_sample_is_exact_if_all_its_labels_are_predicted(
    samples: list[tuple[Rows, list[int]]],
) -> None:
    logits = torch.tensor([rows for rows, _ in samples])
    labels = torch.tensor([of for _, of in samples])
    right = [
        [row.index(max(row)) == label for row, label in zip(rows, of, strict=True) if label >= 0]
        for rows, of in samples
    ]
    assert exact(logits, labels).tolist() == [bool(r) and all(r) for r in right]
    expected = [sum(r) / max(len(r), 1) for r in right]
    assert accuracy(logits, labels).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_the_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (3, 4))
    labels[0, 1] = labels[2] = IGNORED
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), (logits,))


@pytest.mark.parametrize("loss", LOSSES)
def test_samples_without_labels_have_a_loss_and_gradient_of_0(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    logits = torch.full((2, 3, 4), 1.0, requires_grad=True)
    labels = torch.tensor([[IGNORED] * 3, [IGNORED, 2, IGNORED]])
    losses = loss(logits, labels)
    assert losses[0] == 0
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[0].any()
    assert not logits.grad[1, 0].any()
    assert logits.grad[1, 1].all()


def test_stablemax_has_no_pole_where_logits_are_1() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0, 1e30, -1e30]]], requires_grad=True)
    stablemax_cross_entropy(logits, torch.tensor([[0]])).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_stablemax_is_computed_in_float64() -> None:
    logits = torch.tensor([[[1e9, 0.0]]])
    assert stablemax_cross_entropy(logits, torch.tensor([[0]])).item() == pytest.approx(1e-9)


@pytest.mark.parametrize("function", [*LOSSES, exact, accuracy])
def test_logits_of_bf16_and_labels_of_small_integers_will_do(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 4).bfloat16(), torch.tensor([[0, 1, 2], [3, 0, IGNORED]])
    found = function(logits, labels.to(torch.int8))
    assert torch.equal(found, function(logits.float(), labels))


@pytest.mark.parametrize("function", [*LOSSES, exact, accuracy])
@pytest.mark.parametrize(("logits", "labels"), [((2, 3), (2, 3)), ((2, 3, 4), (2, 4))])
def test_shapes_that_do_not_fit_are_refused(
    function: Callable[[Tensor, Tensor], Tensor], logits: tuple[int, ...], labels: tuple[int, ...]
) -> None:
    with pytest.raises(TaskError, match=r"must be \[B, L, V\] and \[B, L\]"):
        function(torch.zeros(logits), torch.zeros(labels, dtype=torch.long))

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.slices import slices_of
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import check_optimizer, is_elementwise
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.errors import ConfigError
from lockstep.optim import AdamATan2
from lockstep.parallel.layout import Range


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class ByHand:
    """One element in Python's numbers, as in the paper."""

    def __init__(self, value: float) -> None:
        self.p, self.m, self.v, self.t = value, 0.0, 0.0, 0

    def step(self, g: float, lr: float, beta1: float, beta2: float, decay: float) -> None:
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        c1, c2 = 1 - beta1**self.t, 1 - beta2**self.t
        self.p *= 1 - lr * decay
        self.p -= lr / c1 * math.atan2(self.m, math.sqrt(self.v) / math.sqrt(c2))


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.0, 0.999), (0.5, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_steps_are_those_of_the_formula(beta1: float, beta2: float, decay: float) -> None:
    first = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    second = nn.Parameter(torch.randn(5, dtype=torch.float64))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.3}]
    optimizer = AdamATan2(groups, 0.01, (beta1, beta2), decay)
    hands = [[ByHand(v) for v in p.flatten().tolist()] for p in (first, second)]
    for number in range(12):
        for p, elements, lr in zip((first, second), hands, (0.01, 0.3), strict=True):
            # Of very different sizes, and 0 in between.
            p.grad = torch.randn_like(p) * 10.0 ** (number - 6) * (number % 4 > 0)
            for element, g in zip(elements, p.grad.flatten().tolist(), strict=True):
                element.step(g, lr, beta1, beta2, decay)
        optimizer.step()
        for p, elements in zip((first, second), hands, strict=True):
            assert p.flatten().tolist() == pytest.approx([e.p for e in elements], rel=1e-12)


def test_the_scale_of_gradients_changes_nothing() -> None:
    start, found = torch.randn(64, dtype=torch.float64), []
    for scale in (1.0, 2.0**-200, 2.0**200):
        torch.manual_seed(1)
        p = nn.Parameter(start.clone())
        optimizer = AdamATan2([p], 0.1)
        for _ in range(5):
            p.grad = torch.randn_like(p) * scale
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=0)


def test_gradients_of_0_move_nothing() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    AdamATan2([p], 0.1).step()
    assert p.tolist() == [1, 1, 1]


def test_parameters_without_gradients_are_left_alone_and_count_their_own_steps() -> None:
    late, early = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = AdamATan2([late, early], 0.1)
    by_hand = ByHand(1.0)
    for number in range(4):
        early.grad = torch.ones(1)
        late.grad = torch.ones(1) if number >= 2 else None
        if number >= 2:
            by_hand.step(1.0, 0.1, 0.9, 0.95, 0.0)
        optimizer.step()
        if number < 2:
            assert late.item() == 1
            assert late not in optimizer.state
    assert late.item() == pytest.approx(by_hand.p)


def stepped(start: Tensor, gradients: list[Tensor], cuts: list[int]) -> list[Tensor]:
    """Parameter and state after some steps, stepped in slices."""
    bounds = [0, *cuts, len(start)]
    pieces = [nn.Parameter(start[first:last].clone()) for first, last in pairwise(bounds)]
    optimizer = AdamATan2(pieces, 0.01, weight_decay=0.1)
    for gradient in gradients:
        for piece, part in zip(pieces, gradient.split([len(p) for p in pieces]), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    keys = ("exp_avg", "exp_avg_sq")
    states = [torch.cat([optimizer.state[p][key] for p in pieces]) for key in keys]
    return [torch.cat([p.detach() for p in pieces]), *states]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_give_the_bits_of_the_whole(threads: int, dtype: torch.dtype) -> None:
    """With three threads, ends of their shares are elsewhere in a slice than in the whole."""
    torch.set_num_threads(1)
    start = torch.randn(250 * 1024 + 7, dtype=dtype)
    gradients = [torch.randn_like(start) for _ in range(2)]
    whole = stepped(start, gradients, [])
    torch.set_num_threads(threads)
    for cuts in ([], [1024], [33 * 1024, 100 * 1024], [64 * 1024, 65 * 1024, 167 * 1024]):
        found = stepped(start, gradients, cuts)
        assert all(map(torch.equal, found, whole)), cuts


def flat_optimizer(model: nn.Module, cut: int | None) -> tuple[FlatOptimizer, list[Tensor]]:
    optimizer = AdamATan2(model.parameters(), 0.01)
    check_optimizer(optimizer, model, TrainConfig(sharding="optimizer"))
    flat = FlatTensors([[*model.named_parameters()]], "parameter")
    gradients = [torch.zeros_like(f) for f in flat.flats]
    bounds = [0, cut, len(gradients[0])] if cut else [0, len(gradients[0])]
    ranges = [Range(*pair) for pair in pairwise(bounds)]
    return FlatOptimizer(optimizer, flat, slices_of(flat, gradients, [ranges])), gradients


def test_the_engine_steps_it_in_slices_and_restores_its_state() -> None:
    models = [nn.Sequential(nn.Linear(50, 61), nn.Linear(61, 3)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    pairs = [
        flat_optimizer(model, cut) for model, cut in zip(models, (None, 1024, 2048), strict=True)
    ]
    for number in range(6):
        if number == 3:
            pairs[2][0].load_state(pairs[0][0].state())
            for own, other in zip(models[2].parameters(), models[0].parameters(), strict=True):
                own.data.copy_(other.data)
        for position, (optimizer, gradients) in enumerate(pairs):
            if position < 2 or number >= 3:
                torch.manual_seed(number)
                gradients[0].copy_(torch.randn_like(gradients[0]))
                optimizer.step()
                optimizer.check_state()
    for model in models[1:]:
        for own, other in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(own, other)


def test_it_goes_on_from_its_state_dict() -> None:
    straight, stopped = (nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizers = [AdamATan2([p], 0.1, weight_decay=0.2) for p in (straight, stopped)]
    for number in range(6):
        if number == 3:
            saved = optimizers[1].state_dict()
            optimizers[1] = AdamATan2([stopped], 9.0)
            optimizers[1].load_state_dict(saved)
        torch.manual_seed(number)
        gradient = torch.randn(5)
        for p, optimizer in zip((straight, stopped), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(straight, stopped)


def test_it_minimises_with_a_closure() -> None:
    p = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = AdamATan2([p], 0.05)

    def loss() -> float:
        optimizer.zero_grad()
        value = (p - 1).square().sum()
        value.backward()
        return value.item()

    losses = [optimizer.step(loss) for _ in range(200)]
    assert losses[0] == 13
    assert losses[-1] < 1e-3


def test_it_is_element_wise_for_the_engine() -> None:
    assert is_elementwise(AdamATan2([nn.Parameter(torch.ones(1))], 0.1))


def test_parameters_that_are_no_contiguous_memory_are_stepped() -> None:
    start = torch.randn(4, 3, dtype=torch.float64)
    gradient = torch.randn(4, 3, dtype=torch.float64)
    found = []
    for turned in (False, True):
        p = nn.Parameter(start.t().clone().t() if turned else start.clone())
        p.grad = gradient.clone()
        AdamATan2([p], 0.1).step()
        found.append(p.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be a number of at least 0"),
        ({"lr": math.nan}, "lr=nan: must be a number of at least 0"),
        ({"lr": math.inf}, "lr=inf: must be a number of at least 0"),
        ({"lr": 0.1, "betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\): must be two numbers"),
        ({"lr": 0.1, "betas": (0.9, -0.1)}, r"betas=\(0.9, -0.1\): must be two numbers"),
        ({"lr": 0.1, "betas": (0.9,)}, r"betas=\(0.9,\): must be two numbers"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay=-0.1: must be a number of at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(keys: dict[str, Any], message: str) -> None:
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=message):
        AdamATan2([p], **keys)
    with pytest.raises(ConfigError, match=message):
        AdamATan2([{"params": [p], **keys}], lr=0.1)

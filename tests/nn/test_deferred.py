"""Models built without numbers: each tensor has the same bits whichever others are made."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.data.random import host_state
from lockstep.errors import TaskError
from lockstep.nn.deferred import ParameterDraws, build_without_numbers, numbers_given
from lockstep.nn.holding import is_released

SEED = 3
CPU = torch.device("cpu")


class Drawn(nn.Module):
    """Draws in many ways, and keeps tensors where modules keep them, and elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=2)
        self.orthogonal = nn.Parameter(torch.empty(7, 12))
        nn.init.orthogonal_(self.orthogonal)
        self.cut = nn.Parameter(torch.empty(40, 30))
        nn.init.trunc_normal_(self.cut, std=1.0, a=-1.0, b=1.0)  # looks at what it has drawn
        self.sparse = nn.Parameter(torch.empty(10, 4))
        nn.init.sparse_(self.sparse, 0.5)
        self.scaled = nn.Parameter(torch.randn(5, 3).t() * 0.1)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, None, False)
        self.recurrent = nn.LSTM(4, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight
        self.double = nn.Linear(4, 5).to(torch.float64)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("places", torch.sin(torch.arange(12.0)[:, None] / torch.arange(1, 5)))
        self.register_buffer("noise", torch.randn(4))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.sizes = torch.arange(3).tolist()
        self.masks = {"causal": torch.ones(3, 3).tril()}
        self.which = [torch.ones(3).nonzero()]


def build(
    make: Callable[[], nn.Module], is_lean: bool = False
) -> tuple[Any, ParameterDraws | None]:
    model, tape = build_without_numbers(make, SEED)
    return model, numbers_given(model, tape, CPU if is_lean else None)


def test_a_tensor_has_the_same_bits_made_alone_or_with_all_others() -> None:
    whole, _ = build(Drawn)
    parted, draws = build(Drawn, is_lean=True)
    assert draws is not None
    made = {n: p for n, p in parted.named_parameters() if is_released(p)}
    assert whole.state_dict().keys() == parted.state_dict().keys()
    assert {n for n, _ in parted.named_parameters()} - made.keys() == {
        "given", "frozen.weight", "frozen.bias",
    }  # fmt: skip
    for name, parameter in whole.named_parameters():
        here = draws.make(made[name]) if name in made else parted.get_parameter(name)
        assert torch.equal(here, parameter), name
        assert here.stride() == parameter.stride(), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(parted.get_buffer(name), buffer), name


def test_values_are_what_the_modules_code_says() -> None:
    model, _ = build(Drawn)
    torch.manual_seed(0)
    usual = Drawn()
    for name, tensor in usual.state_dict().items():
        there = model.state_dict()[name]
        assert (there.shape, there.dtype) == (tensor.shape, tensor.dtype), name
        if tensor.numel() > 60:
            assert there.std() == pytest.approx(tensor.std(), rel=0.35), name
    assert not model.words.weight[2].any()
    assert torch.allclose(model.orthogonal @ model.orthogonal.T, torch.eye(7), atol=1e-5)
    assert model.cut.abs().max() <= 1
    assert (model.sparse == 0).sum(0).tolist() == [5] * 4
    assert model.head.weight is model.words.weight
    first, second = model.layers.layers
    assert torch.equal(first.linear1.weight, second.linear1.weight)  # one is the other's copy
    for name in ("places", "given"):
        assert torch.equal(getattr(model, name), getattr(usual, name))
    assert (model.rates, model.sizes) == (usual.rates, usual.sizes)
    assert torch.equal(model.masks["causal"], usual.masks["causal"])
    assert torch.equal(model.which[0], usual.which[0])
    assert model.recurrent(torch.zeros(1, 1, 4))[0].shape == (1, 1, 5)


def test_a_draw_depends_on_seed_and_name_and_on_nothing_else() -> None:
    def one() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})

    def more() -> nn.Module:
        layers = {"first": nn.Conv2d(3, 5, 2), "b": nn.Linear(4, 3), "a": nn.Linear(4, 3)}
        return nn.ModuleDict(layers)

    here, there = build(one)[0].state_dict(), build(more)[0].state_dict()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert not torch.equal(here["a.weight"], here["b.weight"])
    model, tape = build_without_numbers(one, SEED + 1)
    numbers_given(model, tape)
    assert not torch.equal(model.state_dict()["a.weight"], here["a.weight"])


class Rewritten(nn.Module):
    """A parameter that another one was made of is drawn again, and changed in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(self.first.detach() * 2)
        self.before = nn.Parameter(self.first.detach().clone())
        with torch.no_grad():
            self.first.normal_()
            self.first[1].fill_(5)
            self.first[2].copy_(self.first[1])


def test_what_was_read_before_it_was_overwritten_is_made_again() -> None:
    whole, _ = build(Rewritten)
    parted, draws = build(Rewritten, is_lean=True)
    assert draws is not None
    for name, parameter in parted.named_parameters():
        assert torch.equal(draws.make(parameter), whole.get_parameter(name)), name
    assert torch.equal(whole.second, whole.before * 2)
    assert not torch.equal(whole.first, whole.before)
    assert torch.equal(whole.first[1:3], torch.full((2, 4), 5.0))


def test_global_generators_are_left_alone() -> None:
    model, draws = build(lambda: nn.Linear(3, 3), is_lean=True)
    before = host_state()
    assert draws is not None
    draws.make(model.weight)
    assert host_state() == before


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def own_generator() -> nn.Module:
    layer = nn.Linear(2, 2)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def computed() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.norm = layer.weight.norm()
    return layer


def viewed() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.first = layer.weight.detach()[0]
    return layer


def referred() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.other = weakref.ref(layer.weight)
    return layer


OUTSIDE = torch.empty(2, 2, device="meta")


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2) + OUTSIDE)


def changed_later() -> nn.Module:
    layer, ones = nn.Linear(2, 2), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    with torch.no_grad():
        layer.weight.copy_(ones)
    ones.mul_(2)
    return layer


def written_by_numpy() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.detach().numpy()[:] = 7
    return layer


def scratch_array() -> nn.Module:
    layer, scratch = nn.Linear(2, 2), np.ones((2, 2), np.float32)
    layer.weight.data.copy_(torch.from_numpy(scratch))
    scratch *= 0
    return layer


def pretrained() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.data = torch.from_numpy(np.ones((2, 2), np.float32))
    return layer


def test_integers_are_drawn_by_name() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.register_buffer("places", torch.randint(2, 9, (50,)))
        layer.register_buffer("like", torch.randint_like(torch.zeros(50), 2, 9))
        return layer

    one, other = build(make)[0], build(make)[0]
    for name in ("places", "like"):
        values = getattr(one, name)
        assert torch.equal(values, getattr(other, name))
        assert (int(values.min()), int(values.max())) == (2, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (written_by_numpy, "build_model needs the values of a tensor in .*read-only"),
        (scratch_array, r"changes a tensor of shape \(2, 2\) after it was copied into another"),
        (pretrained, "build_model needs the values of a tensor in pretrained"),
        (hooked, "weight has hooks before it has its values; add hooks in Task.build_optimizer"),
        (own_generator, r"own_generator \(test_deferred.py, line \d+\) draws from a generator"),
        (computed, "norm was computed from parameters, with gradients"),
        (viewed, "first shares memory with the parameter weight, whose memory moves"),
        (referred, "weight cannot be given values where it is held"),
        (
            Outside,
            r"Outside.__init__ \(test_deferred.py, line \d+\) computes with a tensor on the ",
        ),
        (changed_later, r"changes a tensor of shape \(2, 2\) after it was copied into another"),
    ],
)
def test_what_cannot_be_made_later_is_named_with_what_to_do(
    make: Callable[[], nn.Module], message: str
) -> None:
    def made() -> None:
        model, draws = build(make, is_lean=True)
        assert draws is not None
        draws.make(model.weight)

    with pytest.raises(TaskError, match=message) as raised:
        made()
    assert "init=in_order" in str(raised.value) or "in each forward pass" in str(raised.value)


def test_errors_of_the_models_code_are_its_own() -> None:
    for text in ("no such size", "metadata of the vocabulary is missing"):

        def fail(text: str = text) -> nn.Module:
            raise ValueError(text)

        with pytest.raises(ValueError, match=text):
            build_without_numbers(fail, SEED)


class Copying(nn.Module):
    """Copies modules, and moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.moved = nn.utils.skip_init(nn.Linear, 2, 2)
        nn.init.ones_(self.moved.weight)
        self.to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.online(x)
        return y


def test_copies_are_alike() -> None:
    model, draws = build(Copying, is_lean=True)
    assert draws is not None
    online, target = model.online[0].weight, model.target[0].weight
    assert is_released(online)
    assert torch.equal(draws.make(online), target)
    assert torch.equal(model.online[1].running_var, torch.ones(3))
    assert torch.equal(draws.make(model.moved.weight), torch.ones(2, 2))

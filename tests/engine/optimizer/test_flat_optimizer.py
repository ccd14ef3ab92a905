from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.slices import slices_of
from torch import Tensor, nn, optim

from lockstep.config import OptimizerConfig, TrainConfig, override
from lockstep.engine.digests import model_digest
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import (
    ELEMENTWISE,
    check_optimizer,
    default_optimizer,
    is_elementwise,
)
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.errors import ConfigError, TaskError
from lockstep.nn import Pipeline
from lockstep.nn.cutting import units_of
from lockstep.nn.holding import WHOLE
from lockstep.parallel.fold import BLOCK
from lockstep.parallel.layout import Range, split

Named = list[tuple[str, Tensor]]
Make = Callable[[list[dict[str, Any]]], optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class NormedMomentum(optim.Optimizer):
    """Steps along a momentum of gradients of unit norm; so each tensor is stepped as a whole."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["count"] = 0
                    state["largest"] = torch.tensor(0.0, dtype=torch.float64)
                norm = p.grad.norm()
                state["count"] += 1
                state["largest"] = torch.maximum(state["largest"], norm.double())
                state["momentum"].mul_(0.9).add_(p.grad / (norm + 1e-6))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state["momentum"], alpha=group["lr"] / state["count"])


class SignDescent(optim.Optimizer):
    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() + group["weight_decay"] * p, alpha=group["lr"])


ALL: dict[str, Make] = {
    "sgd": lambda g: optim.SGD(g, lr=0.1),
    "momentum": lambda g: optim.SGD(g, lr=0.1, momentum=0.9),
    "nesterov": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda g: optim.Adam(g, lr=0.01),
    "amsgrad": lambda g: optim.Adam(g, lr=0.01, amsgrad=True),
    "adamw": lambda g: optim.AdamW(g, lr=0.01),
    "adamw_foreach": lambda g: optim.AdamW(g, lr=0.01, foreach=True),
    "adamw_single": lambda g: optim.AdamW(g, lr=0.01, foreach=False, fused=False),
    "adamw_tensor_lr": lambda g: optim.AdamW(g, lr=torch.tensor(0.01)),
    "adamax": lambda g: optim.Adamax(g, lr=0.01),
    "adagrad": lambda g: optim.Adagrad(g, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda g: optim.Adadelta(g, lr=0.5),
    "rmsprop": lambda g: optim.RMSprop(g, lr=0.01, momentum=0.5, centered=True),
    "radam": lambda g: optim.RAdam(g, lr=0.01),
    "nadam": lambda g: optim.NAdam(g, lr=0.01),
    "asgd": lambda g: optim.ASGD(g, lr=0.05, t0=1.0),
    "rprop": lambda g: optim.Rprop(g, lr=0.01),
    "declared": lambda g: SignDescent(g, lr=0.01),
}


class Net(nn.Module):
    """Some thousand parameters of both dtypes, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(40, 61)
        self.second = nn.Linear(61, 33, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.precise = nn.Parameter(torch.zeros(1500, dtype=torch.float64))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return y.double() @ self.precise[:33]


def groups(model: nn.Module, make: Make) -> optim.Optimizer:
    """Weights and the rest, with learning rates and weight decays of their own."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizer = make([{"params": weights}, {"params": rest}])
    second = optimizer.param_groups[1]
    second["lr"] = second["lr"] * 0.5
    if "weight_decay" in second:
        optimizer.param_groups[0]["weight_decay"] = 0.1
        second["weight_decay"] = 0.0
    return optimizer


def gradients(step: int, model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


class Rank:
    """A model that is stepped through flat memory, as one rank does it."""

    def __init__(self, make: Make, rank: int = 0, size: int = 1, sharded: bool = True) -> None:
        self.model = Net()
        optimizer = groups(self.model, make)
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.flat = FlatTensors(
            [[(names[id(p)], p) for p in g["params"]] for g in optimizer.param_groups], "parameter"
        )
        self.owned = [
            Range(parts[rank].first * BLOCK, parts[rank].last * BLOCK)
            for parts in (split(s.numel // BLOCK, size) for s in self.flat.segments)
        ]
        self._gradients = [torch.zeros_like(f) for f in self.flat.flats]
        self._base = [group["lr"] for group in optimizer.param_groups]
        self.flat_optimizer = FlatOptimizer(
            optimizer,
            self.flat,
            slices_of(self.flat, self._gradients, [[o] for o in self.owned]),
        )

    def step(self, number: int, factor: float = 1.0) -> None:
        for name, view in self.flat.named(self._gradients).items():
            view.copy_(gradients(number, self.model)[name])
        for group, lr in zip(self.flat_optimizer.groups, self._base, strict=True):
            group["lr"] = lr * factor
        self.flat_optimizer.step()

    def bits(self) -> dict[str, bytes]:
        return {n: p.detach().numpy().tobytes() for n, p in self.model.named_parameters()}


def in_json(state: OptimizerState) -> OptimizerState:
    """As it is after its JSON has been written and read."""
    scalars, shared = json.loads(json.dumps([state.scalars, state.shared]))
    return state._replace(scalars=scalars, shared=shared)


class Ranks:
    """Ranks that own slices, together."""

    def __init__(self, make: Make, size: int) -> None:
        self.ranks = [Rank(make, rank, size) for rank in range(size)]

    def step(self, number: int, factor: float = 1.0) -> None:
        for rank in self.ranks:
            rank.step(number, factor)
        self.gather([r.flat.flats for r in self.ranks])

    def gather(self, everyones: Sequence[Sequence[Tensor]]) -> None:
        for owner, flats in zip(self.ranks, everyones, strict=True):
            for segment, own in enumerate(owner.owned):
                for theirs in everyones:
                    theirs[segment][own.first : own.last] = flats[segment][own.first : own.last]

    def state(self) -> OptimizerState:
        states = [r.flat_optimizer.state() for r in self.ranks]
        for key in states[0].flats:
            self.gather([s.flats[key] for s in states])
        scalars: Any = {}
        for state in states:
            scalars |= state.scalars
        return in_json(states[0]._replace(scalars=scalars))

    def load(self, model: nn.Module, state: OptimizerState) -> None:
        for rank in self.ranks:
            rank.model.load_state_dict(model.state_dict())
            rank.flat_optimizer.load_state(state)

    @property
    def model(self) -> Net:
        return self.ranks[0].model

    def bits(self) -> list[dict[str, bytes]]:
        return [r.bits() for r in self.ranks]


def plain(make: Make, steps: int, factor: float = 1.0) -> Net:
    """The same steps by torch alone, parameter by parameter."""
    model = Net()
    optimizer = groups(model, make)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = gradients(step, model)[name]
        optimizer.step()
    return model


def close(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


every = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def test_all_elementwise_optimizers_are_tried() -> None:
    made = {type(groups(Net(), make)) for make in ALL.values()}
    assert set(ELEMENTWISE) <= made


@every
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_flat_steps_are_close_to_torchs_own(make: Make, factor: float) -> None:
    rank = Rank(make)
    for step in range(5):
        rank.step(step, factor)
    close(rank.model, plain(make, 5, factor))
    with pytest.raises(AssertionError):
        close(rank.model, Net())


@every
@pytest.mark.parametrize("size", [2, 3, 6])
def test_slices_give_the_same_bits_as_the_whole(make: Make, size: int) -> None:
    whole, ranks = Rank(make), Ranks(make, size)
    for step in range(4):
        whole.step(step, 0.5 + step)
        ranks.step(step, 0.5 + step)
        assert ranks.bits() == [whole.bits()] * size


@every
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (3, 2), (2, 5)])
def test_state_goes_on_to_the_same_bits_on_any_number_of_ranks(
    make: Make, before: int, after: int
) -> None:
    straight = Rank(make)
    first = Ranks(make, before)
    for step in range(3):
        straight.step(step)
        first.step(step)
    second = Ranks(make, after)
    second.load(first.model, first.state())
    for step in range(3, 6):
        straight.step(step)
        second.step(step)
    assert second.bits() == [straight.bits()] * after


@every
def test_state_survives_being_saved_by_parameter(make: Make) -> None:
    """Padding is not saved; what is there instead after a restart must not matter."""
    straight, first, second = Rank(make), Rank(make), Rank(make)
    for step in range(3):
        straight.step(step)
        first.step(step)
    state = first.flat_optimizer.state()
    saved = {
        key: {n: t.clone() for n, t in first.flat.named(flats).items()}
        for key, flats in state.flats.items()
    }
    flats = {key: [torch.zeros_like(f) for f in second.flat.flats] for key in saved}
    for key, tensors in saved.items():
        for name, view in second.flat.named(flats[key]).items():
            view.copy_(tensors[name])
    second.model.load_state_dict(first.model.state_dict())
    second.flat_optimizer.load_state(state._replace(flats=flats))
    for step in range(3, 6):
        straight.step(step)
        second.step(step)
    assert second.bits() == straight.bits()


@every
def test_state_before_the_first_step_can_be_restored(make: Make) -> None:
    fresh, other, straight = Rank(make), Rank(make), Rank(make)
    other.flat_optimizer.load_state(fresh.flat_optimizer.state())
    for step in range(2):
        other.step(step)
        straight.step(step)
    assert other.bits() == straight.bits()


@every
def test_loading_forgets_the_state_there_was(make: Make) -> None:
    used, fresh = Rank(make), Rank(make)
    for step in range(2):
        used.step(step)
    used.model.load_state_dict(fresh.model.state_dict())
    used.flat_optimizer.load_state(fresh.flat_optimizer.state())
    for step in range(2, 4):
        used.step(step)
        fresh.step(step)
    assert used.bits() == fresh.bits()


def test_saved_state_is_not_changed_by_later_steps() -> None:
    rank = Rank(ALL["adamw"])
    rank.step(0)
    state = rank.flat_optimizer.state()
    flats = state.flats
    other = Rank(ALL["adamw"])
    other.flat_optimizer.load_state(state)
    before = {k: [f.clone() for f in v] for k, v in flats.items()}
    rank.step(1)
    other.step(1)
    assert set(flats) == {"exp_avg", "exp_avg_sq"}
    for key, segments in flats.items():
        assert all(torch.equal(a, b) for a, b in zip(segments, before[key], strict=True))


def muon(param_groups: list[dict[str, Any]]) -> optim.Optimizer:
    return optim.Muon(param_groups, lr=0.02, weight_decay=0.1)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(20, 30, generator=generator))
        self.b = nn.Parameter(torch.randn(30, 10, generator=generator))


def flat_of(model: nn.Module, optimizer: optim.Optimizer) -> FlatTensors:
    names = {id(p): n for n, p in model.named_parameters()}
    return FlatTensors(
        [
            [(names[id(p)], p) for p in g["params"] if p.requires_grad]
            for g in optimizer.param_groups
        ],
        "parameter",
    )


def whole(flat: FlatTensors) -> list[list[Range]]:
    return [[Range(0, s.numel)] for s in flat.segments]


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_muon_steps_each_matrix_as_torch_does() -> None:
    ours, theirs = Matrices(), Matrices()
    mine = muon([{"params": list(ours.parameters())}])
    flat = flat_of(ours, mine)
    grads = [torch.zeros_like(f) for f in flat.flats]
    stepper = FlatOptimizer(mine, flat, slices_of(flat, grads, whole(flat)))
    assert not stepper.elementwise
    reference = muon([{"params": list(theirs.parameters())}])
    for step in range(3):
        for name, gradient in gradients(step, theirs).items():
            flat.named(grads)[name].copy_(gradient)
            theirs.get_parameter(name).grad = gradient
        stepper.step()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_of_whole_tensors_steps_as_by_itself() -> None:
    rank = Rank(NormedMomentum)
    for step in range(4):
        rank.step(step, 0.5)
    assert not rank.flat_optimizer.elementwise
    close(rank.model, plain(NormedMomentum, 4, 0.5))
    assert all(p.grad is None for p in rank.model.parameters())


def test_state_of_an_optimizer_of_whole_tensors_goes_on_to_the_same_bits() -> None:
    straight, first, second = (Rank(NormedMomentum) for _ in range(3))
    for step in range(3):
        straight.step(step)
        first.step(step)
    state = in_json(first.flat_optimizer.state())
    assert set(state.tensors) == {
        f"momentum/{n}" for n, _ in Net().named_parameters() if n != "scale"
    }
    assert state.scalars["first.weight"]["count"] == 3
    second.model.load_state_dict(first.model.state_dict())
    second.flat_optimizer.load_state(state)
    states = [r.flat_optimizer._optimizer.state[r.model.first.weight] for r in (first, second)]
    assert [s["largest"].dtype for s in states] == [torch.float64] * 2
    assert states[0]["largest"] == states[1]["largest"]
    for step in range(3, 6):
        straight.step(step)
        second.step(step)
    assert second.bits() == straight.bits()


def test_an_optimizer_of_whole_tensors_may_be_given_frozen_parameters() -> None:
    model = Net()
    model.first.bias.requires_grad_(False)
    before = model.first.bias.clone()
    optimizer = NormedMomentum(model.parameters())
    flat = flat_of(model, optimizer)
    grads = [torch.ones_like(f) for f in flat.flats]
    stepper = FlatOptimizer(optimizer, flat, slices_of(flat, grads, whole(flat)))
    stepper.step()
    stepper.load_state(stepper.state())
    stepper.step()
    assert torch.equal(model.first.bias, before)
    assert "first.bias" not in stepper.state().scalars


def test_state_that_no_checkpoint_can_hold_is_refused_by_name() -> None:
    class Remembering(NormedMomentum):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["history"] = {1, 2}

    rank = Rank(Remembering)
    rank.step(0)
    with pytest.raises(TaskError, match="Remembering keeps state 'history' of type set"):
        rank.flat_optimizer.check_state()


def test_elementwise_optimizers_are_known_or_declared() -> None:
    class Tuned(optim.SGD):
        pass

    class TunedDeclared(optim.SGD):
        elementwise = True

    class Refused(optim.Adam):
        elementwise = False

    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert is_elementwise(optim.SGD(parameters))
    assert not is_elementwise(Tuned(parameters))
    assert is_elementwise(TunedDeclared(parameters))
    assert not is_elementwise(Refused(parameters))
    assert not is_elementwise(NormedMomentum(parameters))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: optim.SGD(Net().parameters()), "the SGD holds parameters that are not"),
        (lambda m: optim.SGD([*m.parameters(), torch.zeros(1)]), "the SGD holds parameters that"),
        (lambda m: m, r"must return a torch\.optim\.Optimizer, not a Net"),
        (lambda m: 3, r"must return a torch\.optim\.Optimizer, not a int"),
    ],
    ids=["other_model", "one_foreign", "module", "number"],
)
def test_an_unusable_optimizer_is_refused(make: Callable[[Net], Any], message: str) -> None:
    model = Net()
    with pytest.raises(TaskError, match=f"build_optimizer: .*{message}"):
        check_optimizer(make(model), model, TrainConfig())


def test_only_elementwise_optimizers_can_be_sharded() -> None:
    model = Net()
    sharded = TrainConfig(optimizer=OptimizerConfig(sharded=True))
    check_optimizer(optim.SGD(model.parameters()), model, sharded)
    check_optimizer(SignDescent(model.parameters()), model, sharded)
    check_optimizer(NormedMomentum(model.parameters()), model, TrainConfig())
    with pytest.raises(ConfigError, match=r"optimizer\.sharded=True: NormedMomentum is not known"):
        check_optimizer(NormedMomentum(model.parameters()), model, sharded)


@pytest.mark.parametrize("key", ["mesh.pp=2", "mesh.tp=2", "sharding=optimizer"])
def test_an_optimizer_with_a_closure_steps_whole_parameters_whatever_it_says(key: str) -> None:
    class Searching(optim.SGD):
        elementwise = needs_closure = True

    model = Net()
    config = override(TrainConfig(), ["num_shards=2", key])
    with pytest.raises(ConfigError, match=f"{key}: Searching is not known to be element-wise"):
        check_optimizer(Searching(model.parameters()), model, config)


@pytest.mark.parametrize(
    ("keys", "kind", "expected"),
    [
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            optim.SGD,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
        ({"name": "adam", "betas": (0.8, 0.9)}, optim.Adam, {"betas": (0.8, 0.9)}),
        ({"name": "adamw", "eps": 1e-6}, optim.AdamW, {"eps": 1e-6, "weight_decay": 0.0}),
    ],
)
def test_the_config_names_the_default_optimizer(
    keys: dict[str, Any], kind: type[optim.Optimizer], expected: dict[str, Any]
) -> None:
    model = Net()
    model.scale.requires_grad_(False)
    made = default_optimizer(model, TrainConfig(lr=0.07, optimizer=OptimizerConfig(**keys)))
    assert type(made) is kind
    [group] = made.param_groups
    assert {k: group[k] for k in expected} == expected
    assert group["lr"] == 0.07
    assert {id(p) for p in group["params"]} == {
        id(p) for n, p in model.named_parameters() if n != "scale"
    }


def named(model: nn.Module) -> Named:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def test_moving_into_flat_memory_changes_no_output() -> None:
    model = Net()
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    before, digest = model(x), model_digest(model)
    FlatTensors([named(model)], "parameter")
    assert torch.equal(model(x), before)
    assert model_digest(model) == digest


def test_parameters_are_views_of_the_flat_memory() -> None:
    model = Net()
    flat = FlatTensors([named(model)], "parameter")
    for f in flat.flats:
        f.fill_(2.0)
    assert all((p == 2.0).all() for p in model.parameters())
    with torch.no_grad():
        model.first.bias.fill_(3.0)
    assert (flat.named(flat.flats)["first.bias"] == 3.0).all()
    model.load_state_dict({n: torch.full_like(p, 5.0) for n, p in model.named_parameters()})
    for entry in flat.entries:
        assert (flat.view(flat.flats, entry) == 5.0).all()


def test_segments_are_whole_blocks_with_zeros_between_the_tensors() -> None:
    model = Net()
    flat = FlatTensors([named(model)], "parameter")
    assert [s.dtype for s in flat.segments] == [torch.float32, torch.float64]
    assert all(s.numel % BLOCK == 0 == len(f) - s.numel for s, f in zip_(flat))
    taken = [torch.zeros(s.numel, dtype=torch.bool) for s in flat.segments]
    for entry in flat.entries:
        part = taken[entry.segment][entry.range.first : entry.range.last]
        assert not part.any()
        part.fill_(True)
        assert entry.offset % 16 == 0
    for f, used in zip(flat.flats, taken, strict=True):
        assert not f[~used].any()
    for segment, places in enumerate(flat.specs):
        assert places == [(e.offset, e.shape) for e in flat.entries if e.segment == segment]


def zip_(flat: FlatTensors) -> Any:
    return zip(flat.segments, flat.flats, strict=True)


def test_pieces_cover_the_tensors_of_their_group() -> None:
    model = Net()
    one, two = named(model)[:2], named(model)[2:]
    flat = FlatTensors([one, two], "parameter")
    for entry in flat.entries:
        holding = [
            piece
            for piece in flat.pieces
            if piece.segment == entry.segment
            and piece.range.first <= entry.range.first
            and entry.range.last <= piece.range.last
        ]
        assert [p.group for p in holding] == [entry.group]
    assert {e.name for e in flat.entries if e.group == 1} == {n for n, _ in two}


def test_offsets_depend_on_nothing_but_the_model_and_groups() -> None:
    one, other = (FlatTensors([named(Net())], "parameter") for _ in range(2))
    assert (one.entries, one.segments, one.pieces) == (other.entries, other.segments, other.pieces)


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    flat = FlatTensors([named(model)], "parameter")
    assert len(flat.entries) == 1
    flat.flats[0].fill_(1.5)
    assert model[1].weight is model[0].weight
    assert (model[1].weight == 1.5).all()


def test_gradients_of_tied_and_plain_parameters_are_those_of_the_model() -> None:
    model = Net()
    reference = copy.deepcopy(model)
    FlatTensors([named(model)], "parameter")
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    model(x).sum().backward()
    reference(x).sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_frozen_parameters_are_left_where_they_are() -> None:
    model = Net()
    model.second.weight.requires_grad_(False)
    place = model.second.weight.data_ptr()
    flat = FlatTensors([named(model)], "parameter")
    assert "second.weight" not in {e.name for e in flat.entries}
    assert model.second.weight.data_ptr() == place


def test_a_transposed_parameter_keeps_its_values() -> None:
    values = torch.arange(6.0).view(2, 3)
    parameter = nn.Parameter(values.t())
    FlatTensors([[("p", parameter)]], "parameter")
    assert torch.equal(parameter, values.t())
    assert parameter.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=dtype))
    with pytest.raises(TaskError, match=rf"parameter 1\.weight: dtype is {dtype}, must be"):
        FlatTensors([named(model)], "parameter")


def test_empty_parameters_need_no_memory() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.precise = nn.Parameter(torch.ones(2, dtype=torch.float64))
    flat = FlatTensors([named(model)], "parameter")
    assert model.empty.dtype == torch.float32
    assert model.empty.shape == (0, 3)
    assert flat.named(flat.flats)["empty"].shape == (0, 3)
    assert torch.equal(flat.named(flat.flats)["precise"], torch.ones(2, dtype=torch.float64))


def test_digest_tells_apart_values_names_shapes_and_dtypes() -> None:
    def digest(**tensors: Tensor) -> str:
        model = nn.Module()
        for name, tensor in tensors.items():
            model.register_buffer(name, tensor)
        return model_digest(model)

    digests = [
        digest(a=torch.zeros(2)),
        digest(b=torch.zeros(2)),
        digest(a=torch.tensor([0.0, -0.0])),
        digest(a=torch.zeros(2, 1)),
        digest(a=torch.zeros(1, dtype=torch.float64)),
        digest(a=torch.zeros(2, dtype=torch.int32)),
        digest(a=torch.zeros(4, dtype=torch.bfloat16)),
        digest(a=torch.tensor(True)),
        digest(a=torch.zeros(0)),
        digest(a=torch.zeros(2), b=torch.zeros(0)),
    ]
    assert len(set(digests)) == len(digests)
    one, two = torch.ones(2), torch.zeros(3)
    assert digest(a=one, b=two) == digest(b=two.clone(), a=one.clone())
    strided = torch.arange(6.0).view(2, 3).t()
    assert digest(a=strided) == digest(a=strided.contiguous())


def blocks_of(model: nn.Module, by_block: bool) -> FlatTensors:
    """In two groups, so that each block has elements of both."""
    named = dict(model.named_parameters())
    groups = [[(n, p) for n, p in named.items() if n.endswith(end)] for end in ("weight", "bias")]
    return FlatTensors(groups, "parameter", {}, units_of(model), by_block=by_block)


def test_segments_of_blocks_have_the_parts_of_one_segment() -> None:
    sizes = (30, 50, 20, 70)
    model = Pipeline(*[nn.Linear(a, b) for a, b in pairwise(sizes)])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    together, apart = (blocks_of(copy.deepcopy(model), by_block) for by_block in (False, True))
    assert together.blocks == [WHOLE]
    assert apart.blocks == [0, 1, 2]
    assert [part[1:] for part in apart.parts] == [part[1:] for part in together.parts]
    assert sum(s.numel for s in apart.segments) == sum(s.numel for s in together.segments)
    for name, tensor in apart.named(apart.flats).items():
        assert torch.equal(tensor, before[name])


def test_a_segment_gives_back_its_memory_and_gets_it_again() -> None:
    model = Pipeline(nn.Linear(30, 50), nn.Linear(50, 20))
    flat = blocks_of(model, by_block=True)
    flat.renew()
    kept = flat.flats[0].clone()
    x = torch.randn(3, 30)
    hidden = model[0](x)
    expected = hidden.detach().clone()
    flat.close(0)
    assert flat.flats[0].untyped_storage().nbytes() == 0
    assert model[0].weight.shape == (50, 30)
    assert bool(model[0](x).isnan().all())
    assert torch.equal(model[1](expected), model[1](hidden))
    flat.open(0)
    flat.flats[0].copy_(kept)
    flat.check_views(0)
    hidden.sum().backward()  # reads the weight that was kept for it
    assert torch.equal(model[0](x), expected)
    model[0].bias.data = torch.zeros(50)
    with pytest.raises(TaskError, match=r"0\.bias was given other memory"):
        flat.check_views(0)

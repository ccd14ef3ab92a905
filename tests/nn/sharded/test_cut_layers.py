"""A cut model computes what the whole one does, with bits that no layout of shards changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.models import PLAN, TOKENS, Transformer
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor, nn

from lockstep.comm.transport import LocalTransport
from lockstep.errors import ConfigError, TaskError
from lockstep.nn import Heads, ShardedLogits, ShardedTensor, shard
from lockstep.nn.cutting import (
    compute_in,
    cut,
    held_tensors,
    joined_by_name,
    keep,
    load_held,
    shards_of,
)
from lockstep.nn.holding import Holding
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.axes import ShardAxis
from lockstep.parallel.layout import Range
from lockstep.sketch import SKLinear


def pair(dropout: float = 0.0, num_shards: int = 4) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = Transformer(dropout).double()
    parts = shard(copy.deepcopy(whole), PLAN)
    cut(parts, num_shards)
    return whole, parts


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TOKENS, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def loss_of(model: nn.Module) -> Tensor:
    tokens, targets = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), targets, reduction="sum")


@pytest.mark.parametrize("num_shards", [2, 4])
def test_loss_and_gradients_are_those_of_the_whole_model(num_shards: int) -> None:
    whole, parts = pair(num_shards=num_shards)
    losses = [loss_of(model) for model in (whole, parts)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in parts.named_parameters() if p.grad is not None}
    joined = dict(joined_by_name(gradients, shards_of(parts)))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(joined[name], parameter.grad)


def test_a_state_dict_speaks_of_whole_tensors() -> None:
    whole, parts = pair()
    assert parts.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], tensor)
    other = Transformer(0.0).double()
    parts.load_state_dict(other.state_dict())
    assert all(torch.equal(parts.state_dict()[n], t) for n, t in other.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected|Missing"):
        parts.load_state_dict({n: t[:1] for n, t in other.state_dict().items()})


def test_what_a_rank_lets_go_of_has_a_shape_and_no_content() -> None:
    whole, parts = pair()
    own = Holding((Range(0, 1),), Range(1, 3))
    keep(parts, own)
    assert parts.state_dict()["embedding.weight"].is_meta
    assert parts.state_dict()["embedding.weight"].shape == (TOKENS, 16)
    held = held_tensors(parts, own)
    assert "blocks.0.up.weight_1" in held
    assert "blocks.0.up.weight_0" not in held
    assert sum(t.numel() for t in held.values()) < sum(p.numel() for p in whole.parameters())
    other = {name: torch.ones_like(tensor) for name, tensor in held.items()}
    load_held(parts, own, other)
    assert all(bool((t == 1).all()) for t in held_tensors(parts, own).values())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_layout_of_shards_gives_the_same_bits(size: int) -> None:
    whole, parts = pair()
    reference = loss_of(parts)
    reference.backward()
    wanted = {n: p.grad for n, p in parts.named_parameters() if p.grad is not None}

    def body(transport: ThreadTransport) -> tuple[Tensor, dict[str, Any]]:
        mine = shard(copy.deepcopy(whole), PLAN)
        cut(mine, 4)
        axis = ShardAxis(4, transport)
        compute_in(mine, Region(axis))
        keep(mine, Holding((Range(0, 1),), axis.own))
        loss = loss_of(mine)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}

    for loss, gradients in on_ranks(size, body):
        assert torch.equal(loss, reference)
        assert len(gradients) < len(wanted)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted[name]), name


def test_gradients_are_right() -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double(), {
        "0": "column", "2": "row",
    })  # fmt: skip
    cut(model, 2)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in model.named_parameters()]

    def compute(x: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(compute, (x, *model.parameters()))


@pytest.mark.parametrize("classes", [7, 8])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy_and_argmax_without_whole_logits(
    classes: int, smoothing: float, reduction: str
) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(5, classes).double()
    parts = shard(nn.ModuleDict({"head": copy.deepcopy(whole)}), {"head": "vocabulary"})
    cut(parts, 3)
    x = torch.randn(6, 5, dtype=torch.float64)
    targets = torch.tensor([0, 2, classes - 1, -100, 3, 4])
    keys: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    logits = parts["head"](x)
    assert isinstance(logits, ShardedLogits)
    assert torch.equal(logits.argmax(-1), whole(x).argmax(-1))
    torch.testing.assert_close(logits.whole(), whole(x))
    losses = [F.cross_entropy(out, targets, **keys) for out in (whole(x), logits)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.sum().backward()
    gradients = {n: p.grad for n, p in parts.named_parameters() if p.grad is not None}
    joined = dict(joined_by_name(gradients, shards_of(parts)))
    torch.testing.assert_close(joined["head.weight"], whole.weight.grad)


def test_of_equal_logits_the_first_class_is_taken() -> None:
    region = Region(ShardAxis(2))
    logits = ShardedLogits([torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])], region, 4)
    assert logits.argmax(-1).tolist() == [1]


def test_random_numbers_of_a_shard_do_not_depend_on_the_other_shards_of_a_rank() -> None:
    def dropped(own: Range) -> list[Tensor]:
        torch.manual_seed(5)
        axis = ShardAxis(4)
        axis.own = own
        x = ShardedTensor([torch.ones(50) for _ in range(*own)], Region(axis))
        y = F.dropout(x, 0.5)  # type: ignore[arg-type]
        return [*y.parts, torch.rand(3)]  # type: ignore[attr-defined]

    together, apart = dropped(Range(0, 4)), [dropped(Range(i, i + 1)) for i in range(4)]
    for number in range(4):
        assert torch.equal(apart[number][0], together[number])
        assert torch.equal(apart[number][1], together[4])  # what is drawn behind the region
    assert not torch.equal(together[0], together[1])


def test_what_is_replicated_gets_its_whole_gradient_where_it_enters() -> None:
    region = Region(ShardAxis(3))
    scale = nn.Parameter(torch.ones(2))
    x = ShardedTensor([torch.full((2,), float(i)) for i in range(3)], region)
    region.gather((x * scale).parts).sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x: torch.empty_like(x).uniform_(), "draws random numbers"),
        (lambda x: 1 if x.sum() > 0 else 2, "a condition depends on"),
    ],
)
def test_what_would_depend_on_the_rank_is_refused(compute: Any, words: str) -> None:
    x = ShardedTensor([torch.ones(2), torch.ones(2)], Region(ShardAxis(2)))
    with pytest.raises(TaskError, match=words):
        compute(x)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Conv1d(1, 1, 1))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"x.*": "column"}, "no module has such a name; there are 0, 1, 2, 3"),
        ({"0": "column"}, "the output of 0 is cut into shards, and no row layer"),
        ({"2": "row"}, "2 takes an input that is cut"),
        (
            {"0": "columns", "2": "row"},
            "'columns' is none of column, heads, row, sketched, sketched_row, vocabulary",
        ),
        ({"3": "column", "2": "row"}, "is a Conv1d; 'column' is for Linear"),
        ({"0": "column", "[02]": "row"}, "is to be both 'column' and 'row'"),
        ({"0": Heads(["num_heads"]), "2": "row"}, "the model.num_heads is None, not a number"),
    ],
)
def test_a_plan_that_does_not_fit(plan: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words.replace(".", r"\.")):
        shard(two_layers(), plan)


def test_widths_that_do_not_divide() -> None:
    model = shard(two_layers(), {"0": "column", "2": "row"})
    with pytest.raises(ConfigError, match="num_shards=3: 0 has 8 features"):
        cut(model, 3)
    with pytest.raises(ConfigError, match="num_shards=3: the model has no layers"):
        cut(two_layers(), 3)
    heads = shard(Transformer(num_heads=2), PLAN)
    with pytest.raises(ConfigError, match=r"blocks.0.attention.num_heads is 2"):
        cut(heads, 4)


def test_a_layer_that_is_used_in_two_places() -> None:
    torch.manual_seed(0)
    layer, row = nn.Linear(4, 8), nn.Linear(8, 4)
    model = shard(
        nn.Sequential(nn.Sequential(layer, row), nn.Sequential(layer, row)),
        {"0.0": "column", "0.1": "row"},
    )
    cut(model, 2)
    own = Holding((Range(0, 1),), Range(0, 1))
    keep(model, own)
    names = set(held_tensors(model, own))
    assert {"0.0.weight_0", "1.0.weight_0"} < names
    assert not any(t.is_meta for t in held_tensors(model, own).values())


def test_a_parameter_of_two_layers_that_are_not_cut_alike() -> None:
    model = two_layers()
    model.append(nn.Linear(4, 8))
    model[4].weight = model[0].weight
    shard(model, {"0": "column", "2": "row"})
    with pytest.raises(ConfigError, match=r"num_shards=2: 0.weight and 4.weight are one parameter"):
        cut(model, 2)


def test_layers_in_the_wrong_order() -> None:
    class Odd(nn.Module):
        def __init__(self, row_first: bool) -> None:
            super().__init__()
            self.a, self.b, self.row_first = nn.Linear(4, 4), nn.Linear(4, 4), row_first

        def forward(self, x: Tensor) -> Any:
            return self.b(x) if self.row_first else self.a(self.a(x))

    for row_first, words in (
        (True, "is not cut into shards"),
        (False, "is cut into shards already"),
    ):
        model = shard(Odd(row_first), {"a": "column", "b": "row"})
        cut(model, 2)
        with pytest.raises(TaskError, match=words):
            model(torch.ones(1, 4))


def test_a_sum_over_shards_is_along_the_tree_and_leaves_its_parts() -> None:
    axis = ShardAxis(5, LocalTransport())
    parts = [torch.tensor([10.0 ** (3 * i), 1.0]) for i in range(5)]
    before = [part.clone() for part in parts]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert torch.equal(axis.total(parts), expected)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    assert torch.equal(axis.maximum(parts), torch.stack(parts).amax(0))


def sketched_chain(kind: Any) -> nn.Sequential:
    torch.manual_seed(1)
    keys: dict[str, Any] = {"seed": 3, "sketch": kind, "dtype": torch.float64}
    return nn.Sequential(
        SKLinear(8, 12, 2, 3, layer=0, **keys), nn.ReLU(), SKLinear(12, 8, 1, 4, layer=1, **keys),
        nn.ReLU(), nn.Linear(8, 8, dtype=torch.float64), SKLinear(8, 3, 1, 2, layer=2, **keys),
    )  # fmt: skip


SKETCHED_PLAN = {"0": "sketched", "2": "sketched", "4": "row", "5": "sketched_row"}


@pytest.mark.parametrize("kind", ["signs", "fold"])
def test_sketched_layers_in_shards_compute_what_the_whole_ones_do(kind: str) -> None:
    whole = sketched_chain(kind)
    parts = shard(copy.deepcopy(whole), SKETCHED_PLAN)
    cut(parts, 4)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    outputs = [model(x) for model in (whole, parts)]
    torch.testing.assert_close(outputs[1], outputs[0])
    (of_whole,) = torch.autograd.grad(outputs[0].square().sum(), x, retain_graph=True)
    (of_parts,) = torch.autograd.grad(outputs[1].square().sum(), x, retain_graph=True)
    torch.testing.assert_close(of_parts, of_whole)
    for output in outputs:
        output.square().sum().backward()
    gradients = {n: p.grad for n, p in parts.named_parameters() if p.grad is not None}
    joined = dict(joined_by_name(gradients, shards_of(parts)))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(joined[name], parameter.grad)
    assert parts.state_dict().keys() == whole.state_dict().keys()


def test_sketched_layers_give_the_same_bits_on_any_layout() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    reference = shard(sketched_chain("signs"), SKETCHED_PLAN)
    cut(reference, 4)
    reference(x).square().sum().backward()
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}

    def body(transport: ThreadTransport) -> dict[str, Any]:
        mine = copy.deepcopy(reference)
        axis = ShardAxis(4, transport)
        compute_in(mine, Region(axis))
        mine.zero_grad()
        keep(mine, Holding((Range(0, 1),), axis.own))
        mine(x).square().sum().backward()
        return {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}

    for gradients in on_ranks(3, body):
        assert len(gradients) < len(start)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted[name]), name

"""`SKLinear`: the fused form is the sum of the terms; shards, sketches and conversion."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, TaskError
from lockstep.sketch import SKLinear

KINDS = [("signs", False), ("signs", True), ("fold", False), ("data", False)]


def layer(num_in=37, num_out=23, terms=2, rank=5, sketch="signs", packed=False, **keys):
    keys = {"seed": 11, "dtype": torch.float64} | keys
    made = SKLinear(num_in, num_out, terms, rank, sketch=sketch, packed=packed, **keys)
    if sketch == "data":
        with torch.no_grad():
            made.U1.normal_()
            made.U2.normal_()
    return made


def by_terms(own, x):
    """The formula as it is written: a sum over terms, for dense signs."""
    _, U1, U2 = own._parts()[1:4]
    U1, U2 = (U / math.sqrt(own.low_rank) for U in (U1, U2))
    terms = zip(*(t.split(own.low_rank) for t in (own.S1, own.S2, U1, U2)), strict=True)
    total = sum(x @ S1.t() @ U1 + x @ U2.t() @ S2 for S1, S2, U1, U2 in terms)
    return total / (2 * own.num_terms) + own.bias


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("terms", "rank"), [(1, 4), (3, 4), (2, 37)])
def test_the_fused_form_is_the_sum_of_the_terms(terms, rank, packed):
    own = layer(terms=terms, rank=rank, packed=packed)
    x = torch.randn(3, 4, 37, dtype=torch.float64)
    torch.testing.assert_close(own(x), by_terms(own, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sketch", "packed"), KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_finite_differences(sketch, packed, bias):
    own = layer(7, 6, 2, 3, sketch, packed, bias=bias)
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def f(x, *parameters):
        names = dict(zip(dict(own.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(own, names, (x,))

    assert torch.autograd.gradcheck(f, (x, *own.parameters()))
    assert torch.autograd.gradgradcheck(f, (x, *own.parameters()))


@pytest.mark.parametrize(("sketch", "packed"), KINDS)
def test_both_ways_to_compute_agree(sketch, packed):
    own, x = layer(sketch=sketch, packed=packed), torch.randn(5, 37, dtype=torch.float64)
    with torch.no_grad():
        plain = own(x)
    torch.testing.assert_close(own(x), plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.expand(own.sketch(x)), plain, rtol=1e-12, atol=1e-12)
    weight = own.weight()
    torch.testing.assert_close(nn.functional.linear(x, weight, own.bias), plain)


def test_gradients_that_nobody_wants_are_none():
    own = layer()
    own.S1.requires_grad_(False)
    own.bias.requires_grad_(False)
    own(torch.randn(2, 37, dtype=torch.float64)).sum().backward()
    assert own.S1.grad is None
    assert own.bias.grad is None
    assert own.S2.grad is not None


@pytest.mark.parametrize("sketch", ["signs", "fold"])
def test_autocast_and_half_precision_work(sketch):
    own, x = layer(sketch=sketch, dtype=torch.float32), torch.randn(8, 37)
    exact = own(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = own(x)
    y.float().sum().backward()
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
    half = copy.deepcopy(own).bfloat16()
    assert torch.equal(half.U1.float(), own.U1)
    torch.testing.assert_close(half(x.bfloat16()).float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("sketch", "packed"), KINDS)
def test_it_can_be_exported_for_any_batch_size(sketch, packed):
    own = layer(sketch=sketch, packed=packed, dtype=torch.float32)
    with torch.no_grad():
        batch = torch.export.Dim("batch")
        exported = torch.export.export(own, (torch.randn(3, 37),), dynamic_shapes=({0: batch},))
        x = torch.randn(7, 37)
        torch.testing.assert_close(exported.module()(x), own(x))


@pytest.mark.parametrize("sketch", ["signs", "fold"])
def test_outputs_vary_at_the_start_as_those_of_a_dense_layer(sketch):
    x = torch.randn(64, 300)
    for terms, rank in ((1, 8), (4, 16)):
        own = [layer(300, 200, terms, rank, sketch, seed=s, dtype=None)(x).var() for s in range(20)]
        dense = [nn.Linear(300, 200)(x).var() for _ in range(20)]
        ratio = torch.stack(own).mean() / torch.stack(dense).mean()
        assert abs(ratio - 1) < 0.1


@pytest.mark.parametrize("sketch", ["signs", "fold"])
def test_the_unbiased_start_has_the_dense_weight_as_its_mean(sketch):
    torch.manual_seed(0)
    dense = nn.Linear(12, 9, dtype=torch.float64)
    made = [
        SKLinear.from_dense(dense, 4, 2, "copy", seed=seed, sketch=sketch).weight().detach()
        for seed in range(1500)
    ]
    weights = torch.stack(made)
    error = weights.mean(0) - dense.weight
    assert (error.abs() < 1e-12 + 5 * weights.std(0) / math.sqrt(len(made))).all()
    assert weights.std(0).median() > 0.03  # so it would be seen


def test_only_the_seed_is_saved_and_it_brings_the_signs_back():
    own, other = layer(seed=1, layer=2), layer(seed=3)
    assert set(own.state_dict()) == {"S1", "S2", "bias", "sketch_key"}
    assert own.sketch_key.tolist() == [1, 2]
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = torch.randn(2, 37, dtype=torch.float64)
    assert torch.equal(own(x), other(x))
    with torch.device("meta"):
        empty = layer()
    empty.load_state_dict(own.state_dict(), assign=True)
    assert torch.equal(own(x), empty(x))


def test_without_a_seed_layers_differ_and_follow_the_global_generator():
    torch.manual_seed(5)
    one, two = layer(seed=None), layer(seed=None)
    torch.manual_seed(5)
    again = layer(seed=None)
    assert not torch.equal(one.U1, two.U1)
    assert torch.equal(one.U1, again.U1)


@pytest.mark.parametrize(("sketch", "packed"), KINDS)
def test_shards_make_their_part_of_the_layer(sketch, packed):
    own, x = layer(sketch=sketch, packed=packed), torch.randn(3, 37, dtype=torch.float64)
    ins, outs = [range(0, 10), range(10, 31), range(31, 37)], [range(0, 9), range(9, 23)]
    h = sum(own.shard(i, outs[0]).sketch(x[:, i.start : i.stop]) for i in ins)
    y = torch.cat([own.shard(ins[0], o).expand(h) for o in outs], 1)
    torch.testing.assert_close(y, own(x), rtol=1e-12, atol=1e-12)
    inner = own.shard(range(5, 30), range(2, 20)).shard(range(10, 20), range(3, 7))
    assert torch.equal(inner.S1, own.S1[:, 10:20])
    assert torch.equal(
        inner.sketch(x[:, 10:20]), own.shard(range(10, 20), outs[0]).sketch(x[:, 10:20])
    )


def test_a_shard_can_be_made_alone():
    whole = layer()
    alone = layer(in_range=range(8, 20), out_range=range(3, 23))
    assert torch.equal(alone.U2, whole.U2[:, 8:20])
    assert torch.equal(alone.U1, whole.U1[:, 3:23])
    assert alone.scale == whole.scale


def power_law(size, bias=True):
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(size, size)).Q for _ in range(2))
    made = nn.Linear(size, size, bias)
    values = 1 / torch.arange(1, size + 1)
    with torch.no_grad():
        made.weight.copy_((left * values) @ right.t())
    return made, values


def error_of(made, dense):
    with torch.no_grad():
        return float((made.weight() - dense.weight).norm() / dense.weight.norm())


@pytest.mark.parametrize(("terms", "rank"), [(1, 8), (2, 16), (1, 64)])
def test_conversion_by_range_finder_is_as_good_as_the_truncated_svd(terms, rank):
    dense, values = power_law(256)
    made = SKLinear.from_dense(dense, rank, terms)
    optimum = values[2 * terms * rank :].norm() / values.norm()
    assert optimum <= error_of(made, dense) * 1.0001 <= optimum * 1.1
    assert torch.equal(made.bias, dense.bias)
    assert {"U1", "U2"} < set(made.state_dict())
    assert set(dict(made.named_parameters())) == {"S1", "S2", "bias"}


@pytest.mark.parametrize("sketch", ["signs", "fold"])
def test_least_squares_cannot_be_improved(sketch):
    dense, _ = power_law(48, bias=False)
    dense.double()
    made = SKLinear.from_dense(dense, 6, 2, "least-squares", sketch=sketch)
    (made.weight() - dense.weight).square().sum().backward()
    assert made.S1.grad.abs().max() < 1e-10
    assert made.S2.grad.abs().max() < 1e-10
    copied = SKLinear.from_dense(dense, 6, 2, "copy", sketch=sketch)
    assert error_of(made, dense) < 1 < error_of(copied, dense)


def test_a_sketch_that_exceeds_the_weights_rank_is_exact():
    dense = nn.Linear(20, 4)
    for method in ("range-finder", "least-squares"):
        assert error_of(SKLinear.from_dense(dense, 17, 1, method), dense) < 1e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_in": 0}, "in_features=0: must be at least 1"),
        ({"num_out": -3}, "out_features=-3: must be at least 1"),
        ({"terms": 0}, "num_terms=0: must be at least 1"),
        ({"rank": 0}, "low_rank=0: must be at least 1"),
        ({"rank": 38}, r"low_rank=38: larger than the layer \(in_features=37, out_features=23\)"),
        ({"sketch": "sign"}, "sketch='sign': must be one of signs, fold, data"),
        ({"sketch": "fold", "packed": True}, "packed=True: needs sketch='signs', not 'fold'"),
        ({"seed": -1}, "seed=-1: must be in 0"),
        (
            {"in_range": range(30, 38)},
            r"in_range=range\(30, 38\): must be a range of step 1 within",
        ),
        ({"out_range": range(3, 3)}, r"out_range=range\(3, 3\): must be a range of step 1 within"),
    ],
)
def test_what_is_no_layer(keys, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        layer(**keys)


def test_a_shard_of_features_that_the_layer_does_not_have():
    with pytest.raises(ConfigError, match=r"in_range=range\(0, 9\): this layer has range\(5, 9\)"):
        layer(in_range=range(5, 9)).shard(range(0, 9), range(2))


def test_a_sketch_of_integers_is_refused():
    for method in (layer().forward, layer().sketch):
        with pytest.raises(TaskError, match=r"input of SKLinear is torch.int64.*x\.float\(\)"):
            method(torch.ones(2, 37, dtype=torch.int64))


def test_conversions_that_cannot_be():
    dense = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="method='svd': must be one of range-finder, least-sq"):
        SKLinear.from_dense(dense, 2, method="svd")
    dense.weight.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match="the dense weight has values that are not finite"):
        SKLinear.from_dense(dense, 2)

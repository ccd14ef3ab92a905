"""`SKConv2d`: a convolution with a kernel of low rank, and its conversion."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, TaskError
from lockstep.sketch import SKConv2d

GEOMETRIES = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": (1, 2)},
    {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2), "dilation": 2},
]


@pytest.mark.parametrize("keys", GEOMETRIES)
def test_it_is_the_convolution_with_its_kernel(keys):
    keys = {"kernel_size": 3} | keys
    own = SKConv2d(4, 10, num_terms=2, low_rank=3, seed=1, dtype=torch.float64, **keys)
    dense = nn.Conv2d(4, 10, dtype=torch.float64, **keys)
    dense.load_state_dict({"weight": own.weight().detach(), "bias": own.bias.detach()})
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(own(x), dense(x))
    again = SKConv2d.from_dense(dense, 3, 2)
    torch.testing.assert_close(again(x), dense(x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_finite_differences(bias):
    own = SKConv2d(2, 3, 2, low_rank=2, bias=bias, seed=0, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def f(x, *parameters):
        names = dict(zip(dict(own.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(own, names, (x,))

    assert torch.autograd.gradcheck(f, (x, *own.parameters()))


def test_outputs_vary_at_the_start_as_those_of_a_dense_layer():
    x = torch.randn(8, 16, 12, 12)
    own = [SKConv2d(16, 32, 3, num_terms=2, low_rank=8, seed=s)(x).var() for s in range(20)]
    dense = [nn.Conv2d(16, 32, 3)(x).var() for _ in range(20)]
    assert abs(torch.stack(own).mean() / torch.stack(dense).mean() - 1) < 0.1


def test_the_methods_of_conversion_rank_as_they_should():
    torch.manual_seed(0)
    dense = nn.Conv2d(8, 24, 3)
    values = torch.linalg.svdvals(dense.weight.detach().flatten(1))
    optimum = values[6:].norm() / values.norm()

    def error(method):
        made = SKConv2d.from_dense(dense, 6, 1, method)
        return float((made.weight() - dense.weight).detach().norm() / values.norm())

    assert optimum <= error("range-finder") * 1.0001 < optimum * 1.1
    assert error("range-finder") < error("least-squares") < 1 < error("copy")


def test_the_unbiased_start_has_the_dense_kernel_as_its_mean():
    torch.manual_seed(0)
    dense = nn.Conv2d(2, 6, 2, dtype=torch.float64)
    made = [SKConv2d.from_dense(dense, 2, 2, "copy", seed=s).weight().detach() for s in range(800)]
    weights = torch.stack(made)
    bound = 1e-12 + 5 * weights.std(0) / math.sqrt(len(made))
    assert ((weights.mean(0) - dense.weight).abs() < bound).all()


def test_only_the_seed_is_saved():
    own, other = (SKConv2d(3, 8, 3, low_rank=4, seed=seed) for seed in (1, 2))
    assert set(own.state_dict()) == {"S", "bias", "sketch_key"}
    other.load_state_dict(own.state_dict())
    x = torch.randn(1, 3, 5, 5)
    assert torch.equal(own(x), other(x))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"in_channels": 0}, "in_channels=0: must be at least 1"),
        ({"kernel_size": (3, 0)}, "kernel_width=0: must be at least 1"),
        ({"num_terms": -1}, "num_terms=-1: must be at least 1"),
        ({"low_rank": 19}, r"low_rank=19: larger than the layer \(fan_in=18, out_channels=4\)"),
        ({"sketch": "fold"}, "sketch='fold': must be signs or data"),
    ],
)
def test_what_is_no_layer(keys, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        SKConv2d(**{"in_channels": 2, "out_channels": 4, "kernel_size": 3, "low_rank": 2} | keys)


def test_what_cannot_be_converted():
    with pytest.raises(ConfigError, match="groups=2, padding_mode='zeros': only convolutions with"):
        SKConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), 2)
    with pytest.raises(ConfigError, match="method='svd': must be one of"):
        SKConv2d.from_dense(nn.Conv2d(4, 4, 3), 2, method="svd")
    with pytest.raises(TaskError, match=r"input of SKConv2d is torch.uint8"):
        SKConv2d(1, 4, 3, low_rank=2)(torch.zeros(1, 1, 5, 5, dtype=torch.uint8))

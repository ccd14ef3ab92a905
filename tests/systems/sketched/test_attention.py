"""Random-feature attention against exact attention."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.errors import ConfigError, TaskError
from lockstep.sketch import RandomFeatureAttention


def layer(features=16, **keys):
    keys = {"seed": 3, "dtype": torch.float64} | keys
    return RandomFeatureAttention(12, 3, features, **keys)


def heads(tokens=10, scale=1.0):
    torch.manual_seed(0)
    return [scale * torch.randn(2, 3, tokens, 4, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_with_many_features_it_is_exact_softmax_attention(causal):
    q, k, v = heads(scale=0.5)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def error(features):
        made = (layer(features, causal=causal, seed=s).attend(q, k, v) - exact for s in range(5))
        return float(torch.stack([m.norm() for m in made]).median() / exact.norm())

    few, more, many = error(32), error(512), error(4096)
    assert many < 0.02
    assert few > 2.5 * more > 3.5 * many  # in expectation as one over the square root of features


def test_orthogonal_projections_have_less_variance():
    q, k, v = heads(scale=0.7)
    exact = F.scaled_dot_product_attention(q, k, v)

    def error(orthogonal):
        made = (layer(4, orthogonal=orthogonal, seed=seed).attend(q, k, v) for seed in range(100))
        return float(torch.stack([(m - exact).square().mean() for m in made]).mean())

    assert error(True) < 0.9 * error(False)


def test_the_kernel_is_unbiased():
    q, k, _ = heads(4, 0.5)
    estimates = []
    for seed in range(400):
        own = layer(8, seed=seed)
        x = torch.cat([q, k], 2)
        peak = (x * 4**-0.25 @ own.projections.mT - x.square().sum(-1, keepdim=True) / 4).amax(-1)
        made = own.features(x, -1) * peak.exp()[..., None]
        estimates.append((made[:, :, :4] @ made[:, :, 4:].mT) / 8)
    found = torch.stack(estimates)
    exact = (q @ k.mT / 2).exp()
    assert ((found.mean(0) - exact).abs() < 5 * found.std(0) / 20 + 1e-4).all()


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_causal_attention_is_the_masked_product(kernel, chunk):
    own = layer(kernel=kernel, causal=True, chunk=chunk)
    q, k, v = heads(8)
    weights = (own.features(q, -1) @ own.features(k, (-1, -2)).mT).tril()
    masked = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(own.attend(q, k, v), masked)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_a_token_does_not_see_later_ones(kernel):
    own, x = layer(kernel=kernel, causal=True, chunk=3), torch.randn(1, 8, 12, dtype=torch.float64)
    later = torch.cat([x[:, :5], 2 * x[:, 5:]], 1)
    torch.testing.assert_close(own(x)[:, :5], own(later)[:, :5], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(own(x)[:, 5:], own(later)[:, 5:])


def test_a_sample_does_not_depend_on_the_others():
    own, x = layer(), torch.randn(4, 6, 12, dtype=torch.float64)
    other = torch.cat([x[:1], 9 * x[1:]])
    torch.testing.assert_close(own(x)[0], own(other)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_gradients_are_those_of_finite_differences(kernel, causal):
    torch.manual_seed(1)
    own = RandomFeatureAttention(4, 2, 5, kernel, causal, chunk=2, seed=0, dtype=torch.float64)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def f(x, *parameters):
        names = dict(zip(dict(own.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(own, names, (x,))

    assert torch.autograd.gradcheck(f, (x, *own.parameters()), fast_mode=True)


def test_rows_of_the_implied_matrix_sum_to_one_for_large_inputs():
    q, k, _ = heads(6, 20.0)
    ones = torch.ones(2, 3, 6, 4, dtype=torch.float64)
    for kernel in ("softmax", "relu"):
        torch.testing.assert_close(layer(kernel=kernel).attend(q, k, ones), ones)


def test_projections_follow_the_seed_and_leave_the_random_state_alone():
    own, same, other = layer(), layer(), layer(seed=4)
    assert torch.equal(own.projections, same.projections)
    assert not torch.equal(own.projections, other.projections)
    assert "projections" not in own.state_dict()
    other.load_state_dict(own.state_dict())
    assert torch.equal(own.projections, other.projections)
    before = torch.get_rng_state()
    own(torch.randn(1, 2, 12, dtype=torch.float64, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 5), "embed_dim=12: must be a multiple of num_heads=5"),
        ((12, 0), "num_heads=0: must be at least 1"),
        ((12, 3, 0), "num_features=0: must be at least 1"),
        ((12, 3, 4, "exp"), "kernel='exp': must be softmax or relu"),
    ],
)
def test_what_is_no_layer(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        RandomFeatureAttention(*arguments)


def test_integers_are_refused():
    with pytest.raises(TaskError, match=r"input of RandomFeatureAttention is torch.int64"):
        layer()(torch.ones(1, 2, 12, dtype=torch.int64))

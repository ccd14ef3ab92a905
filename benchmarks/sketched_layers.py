"""Works that `benchmarks/sketched.py` times: dense, term by term, fused, folded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lockstep.sketch import RandomFeatureAttention, SignKey, SKLinear, sign_matrix

Work = Callable[[], object]


class TermWise(nn.Module):
    """The formula as it is written: the sum over terms of batched products, by autograd."""

    def __init__(self, num_in: int, num_out: int, num_terms: int, low_rank: int) -> None:
        super().__init__()
        self.num_terms = num_terms
        self.S1 = nn.Parameter(torch.randn(num_terms, num_in, low_rank))
        self.S2 = nn.Parameter(torch.randn(num_terms, low_rank, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))
        size = low_rank**-0.5
        for name, rows, columns in (("U1", low_rank, num_out), ("U2", num_in, low_rank)):
            keys = (SignKey(0, term, name) for term in range(num_terms))
            made = [size * sign_matrix(key, rows, range(columns)) for key in keys]
            self.register_buffer(name, torch.stack(made))

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] to [N, out]."""
        each = x.expand(self.num_terms, *x.shape)
        terms = each.bmm(self.S1).bmm(self.U1) + each.bmm(self.U2).bmm(self.S2)
        return terms.sum(0) / (2 * self.num_terms) + self.bias


def linear_works(size: int, batch: int, low_rank: int, num_terms: int) -> dict[str, Work]:
    """A forward and backward pass of each way to compute a layer, all gradients wanted."""
    x, grad = torch.randn(batch, size, requires_grad=True), torch.randn(batch, size)
    arguments = (size, size, num_terms, low_rank)
    layers = {
        "dense": nn.Linear(size, size),
        "term by term": TermWise(*arguments),
        "fused": SKLinear(*arguments, seed=0),
        "fused, as bits": SKLinear(*arguments, seed=0, packed=True),
        "fold": SKLinear(*arguments, seed=0, sketch="fold"),
    }

    def passes(layer: nn.Module) -> Work:
        inputs = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), inputs, grad)

    return {name: passes(layer) for name, layer in layers.items()}


def attention_works(tokens: int, features: int) -> dict[str, Work]:
    """A forward and backward pass of exact and of random-feature attention, 8 heads of 64."""
    x = torch.randn(1, tokens, 512, requires_grad=True)
    own = {
        name: RandomFeatureAttention(512, 8, features, causal=causal, seed=0)
        for name, causal in (("random features", False), ("random features, causal", True))
    }
    base = own["random features"]

    def exact(is_causal: bool) -> Tensor:
        q, k, v = base.qkv(x).view(1, tokens, 3, 8, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return base.out(mixed.transpose(1, 2).reshape(1, tokens, 512))

    def backward(make: Callable[[], Tensor]) -> Work:
        return lambda: make().sum().backward()

    return {
        "exact": backward(lambda: exact(False)),
        "exact, causal": backward(lambda: exact(True)),
        **{name: backward(lambda layer=layer: layer(x)) for name, layer in own.items()},
    }


def fastest(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each work, in turn; a round has the least of what fits into a tenth of one.

    With one thread this is the time that a work takes on a core of its own, but for what others do
    to caches and memory; the least of all rounds has least of that.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            begun, found = time.process_time(), []
            while not found or time.process_time() - begun < 0.1:
                started = time.process_time()
                work()
                found.append(time.process_time() - started)
            times[name].append(min(found))
    return times

"""The products of a sketched layer and their gradients.

A sketch U is either dense, [r, n], or folded: signs [n], where feature i adds to entry i mod r of
the sketch (CountSketch with the buckets in turn; Charikar, Chen and Farach-Colton 2002). A folded
sketch takes n additions, where a dense one takes n r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Fused(NamedTuple):
    """What the fused product of a layer consists of, beside its input.

    Attributes:
        S1: [r, in], trained.
        S2: [r, out], trained.
        U1: sketch of the output's features.
        U2: sketch of the input's features.
        bias: [out], or None.
        scale: factor of the product.
        first_in: number of the first input feature that is held.
        first_out: the same for the output.
    """

    S1: Tensor
    S2: Tensor
    U1: Tensor
    U2: Tensor
    bias: Tensor | None
    scale: float
    first_in: int = 0
    first_out: int = 0


def into_sketch(x: Tensor, U: Tensor, rank: int, first: int = 0) -> Tensor:
    """The product x Uᵀ.

    Args:
        x: [N, n].
        U: dense [rank, n], or folded [n].
        rank: size of the sketch.
        first: number of the first of the n features.

    Returns:
        [N, rank].
    """
    if U.dim() == 2:
        return x @ U.t()
    before = first % rank
    padded = F.pad(x * U, (before, -(before + len(U)) % rank))
    return padded.view(x.shape[0], -1, rank).sum(1)


def out_of_sketch(h: Tensor, U: Tensor, first: int = 0) -> Tensor:
    """H U, the transpose of `into_sketch`: [N, rank] to [N, n]."""
    if U.dim() == 2:
        return h @ U
    before = first % h.shape[1]
    times = -(-(before + len(U)) // h.shape[1])
    return h.repeat(1, times)[:, before : before + len(U)] * U


def plain(x: Tensor, parts: Fused) -> Tensor:
    """The sum b + scale · (x S1ᵀ U1 + x U2ᵀ S2), [N, in] to [N, out], as autograd can follow it."""
    h_1, h_2 = x @ parts.S1.t(), into_sketch(x, parts.U2, len(parts.S2), parts.first_in)
    return from_sketch(h_1, h_2, parts)


def from_sketch(h_1: Tensor, h_2: Tensor, parts: Fused) -> Tensor:
    """The sum b + scale · (H1 U1 + H2 S2), [N, r] each to [N, out]."""
    scale = parts.scale
    if parts.U1.dim() == 2:
        if parts.bias is None:
            y = torch.mm(h_1 * scale, parts.U1)
        else:
            y = torch.addmm(parts.bias, h_1, parts.U1, alpha=scale)
    else:
        y = out_of_sketch(h_1 * scale, parts.U1, parts.first_out)
        y = y if parts.bias is None else y + parts.bias
    return torch.addmm(y, h_2, parts.S2, alpha=scale)


class FusedProduct(torch.autograd.Function):
    """`plain` with fewer passes over memory, forward and backward.

    Autograd would add two gradients of x and two outputs in passes of their own, which is a quarter
    of the time where the sketch is narrow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> Tensor:
        """As `plain`; `parts` are those of a `Fused`."""
        p = Fused(*parts)
        h_2 = into_sketch(x, p.U2, len(p.S2), p.first_in)
        h_1 = x @ p.S1.t()
        if p.U1.dim() == 2 and p.bias is not None:
            y = torch.addmm(p.bias, h_1, p.U1, alpha=p.scale)
        else:
            y = out_of_sketch(h_1.mul_(p.scale), p.U1, p.first_out)
            y = y if p.bias is None else y.add_(p.bias)
        ctx.save_for_backward(x, h_2, p.S1, p.S2, p.U1, p.U2)
        ctx.numbers = (p.scale, p.first_in, p.first_out)
        return y.addmm_(h_2, p.S2, alpha=p.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of x, S1, S2 and the bias; U has none."""
        x, h_2, S1, S2, U1, U2 = ctx.saved_tensors
        scale, first_in, first_out = ctx.numbers
        rank = len(S2)
        needs_x, needs_1, needs_2, _, _, needs_bias = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # second derivatives need what h_2 depends on
            h_2 = into_sketch(x, U2, rank, first_in)
        of_x = of_1 = of_2 = None
        g_1 = into_sketch(grad, U1, rank, first_out) * scale if needs_x or needs_1 else None
        if needs_x:
            assert g_1 is not None
            g_2 = grad @ S2.t() * scale
            if U2.dim() == 2:
                of_x = torch.mm(g_1, S1).addmm_(g_2, U2)
            else:
                of_x = out_of_sketch(g_2, U2, first_in).addmm_(g_1, S1)
        if needs_1:
            assert g_1 is not None
            of_1 = g_1.t() @ x
        if needs_2:
            of_2 = (h_2 * scale).t() @ grad
        of_bias = grad.sum(0) if needs_bias else None
        return (of_x, of_1, of_2, None, None, of_bias, None, None, None)

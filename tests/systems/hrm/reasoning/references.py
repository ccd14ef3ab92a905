"""Reasoning models written out position by position in float64, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.systems.hrm.reasoning import HierarchicalModel, ReasoningModel, RecursiveModel
from lockstep.systems.hrm.reasoning.blocks import Attention, Block, Blocks, SwiGLU


def rms(x: Tensor) -> Tensor:
    rows = [row / (sum(e * e for e in row) / len(row) + 1e-5) ** 0.5 for row in x.flatten(0, -2)]
    return torch.stack(rows).view(x.shape)


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary positions of one head, [S, head_dim], as products of complex numbers."""
    half = x.shape[1] // 2
    rows = []
    for position, row in enumerate(x):
        angles = torch.tensor(
            [position * theta ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64
        )
        product = torch.complex(row[:half], row[half:]) * torch.exp(1j * angles)
        rows.append(torch.cat([product.real, product.imag]))
    return torch.stack(rows)


def attention(layer: Attention, x: Tensor) -> Tensor:
    dim = x.shape[-1]
    size = dim // layer.num_heads
    samples = []
    for sample in x:
        q, k, v = (sample @ layer.qkv.weight[i * dim : (i + 1) * dim].T for i in range(3))
        heads = []
        for head in range(layer.num_heads):
            own = slice(head * size, (head + 1) * size)
            queries, keys, values = turned(q[:, own]), turned(k[:, own]), v[:, own]
            rows = []
            for query in queries:
                weights = torch.stack([(query @ key / size**0.5).exp() for key in keys])
                rows.append((weights / weights.sum()) @ values)
            heads.append(torch.stack(rows))
        samples.append(torch.cat(heads, 1) @ layer.out.weight.T)
    return torch.stack(samples)


def swiglu(layer: SwiGLU, x: Tensor) -> Tensor:
    width = layer.down.weight.shape[1]
    gate = x @ layer.gate_up.weight[:width].T
    up = x @ layer.gate_up.weight[width:].T
    return (gate / (1 + (-gate).exp()) * up) @ layer.down.weight.T


def block(layer: Block, h: Tensor) -> Tensor:
    if isinstance(layer.mixer, Attention):
        h = rms(h + attention(layer.mixer, h))
    else:
        h = torch.stack([rms(s.T + swiglu(layer.mixer, s.T)).T for s in h])
    return rms(h + swiglu(layer.gated, h))


def blocks(layers: Blocks, h: Tensor) -> Tensor:
    for layer in layers.blocks:
        h = block(layer, h)
    return h


def embedded(model: ReasoningModel, inputs: Tensor, rows: Tensor | None) -> Tensor:
    dim, leading = model.sizes.dim, model.sizes.leading
    samples = []
    for number, sample in enumerate(inputs):
        tokens = [model.tokens.weight[token] for token in sample]
        if leading:
            row = torch.zeros(leading * dim, dtype=torch.float64)
            if rows is not None:
                rest = torch.zeros(leading * dim - rows.shape[1], dtype=torch.float64)
                row = torch.cat([rows[number], rest])
            tokens = [*row.split(dim), *tokens]
        samples.append(dim**0.5 * torch.stack(tokens))
    return torch.stack(samples)


def outputs(model: ReasoningModel, z_H: Tensor) -> tuple[Tensor, Tensor]:
    logits = z_H[:, model.sizes.leading :] @ model.answer.weight.T
    return logits, z_H[:, 0] @ model.halting.weight.T + model.halting.bias


def hierarchical(
    model: HierarchicalModel, z_H: Tensor, z_L: Tensor, inputs: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, logits and halting of a segment; states are constants but for the last steps."""
    x = embedded(model, inputs, rows)
    for high in range(model.h_cycles):
        for low in range(model.l_cycles):
            z_L = blocks(model.L, z_L.detach() + (z_H.detach() + x))
            if (high, low) != (model.h_cycles - 1, model.l_cycles - 1):
                z_L = z_L.detach()
        z_H = blocks(model.H, z_H.detach() + z_L)
    return z_H, z_L, *outputs(model, z_H)


def recursive(
    model: RecursiveModel, y: Tensor, z: Tensor, inputs: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = embedded(model, inputs, rows)
    for _ in range(model.num_recursions):
        y, z = y.detach(), z.detach()
        for _ in range(model.num_updates):
            z = blocks(model.net, x + y + z)
        y = blocks(model.net, y + z)
    return y, z, *outputs(model, y)

"""A layer of a model in shards, forward and backward, on all ranks; started by `parallel.py`.

Prints one JSON line on rank 0: seconds of each repeat, and a SHA-256 of the input's gradient.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.nn import Heads, shard
from lockstep.nn.cutting import compute_in, cut, keep
from lockstep.nn.holding import Holding
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.axes import ShardAxis
from lockstep.parallel.layout import Range


class Mlp(nn.Module):
    """Two square layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [rows, width]."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to [batch, tokens, width]."""
        h = self.norm1(x)
        batch, length, _ = x.shape
        q, k, v = (
            layer(h).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


PLAN = {
    "[qkv]": Heads(divide=["num_heads"]), "out": "row", "up": "column", "down": "row",
}  # fmt: skip


def timed(work: Callable[[], None], meet: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of each repeat, after two that do not count."""
    seconds = []
    for number in range(repeats + 2):
        meet()
        start = time.perf_counter()
        work()
        meet()
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


def digest(tensor: Tensor) -> str:
    """The first digits of a SHA-256."""
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


def model_and_input(name: str, width: int, rows: int) -> tuple[nn.Module, Tensor]:
    """The same on every rank."""
    torch.manual_seed(0)
    if name == "mlp":
        return Mlp(width), torch.randn(rows, width)
    return Block(width, 16), torch.randn(rows // 128, 128, width)


def arguments() -> argparse.Namespace:
    """What is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("mlp", "block"), default="mlp")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 60)
    model, x = model_and_input(args.model, args.width, args.rows)
    if args.shards > 1:
        plan = PLAN if args.model == "block" else {"up": "column", "down": "row"}
        cut(shard(model, plan), args.shards)
        axis = ShardAxis(args.shards, transport)
        compute_in(model, Region(axis))
        keep(model, Holding(Range(0, 1), axis.own))
    x.requires_grad_()
    outcome: list[Tensor] = []

    def work() -> None:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.square().mean().backward()
        outcome[:] = [y, x.grad]

    seconds = timed(work, transport.barrier, args.repeats)
    if transport.rank == 0:
        print(
            json.dumps(
                {"seconds": seconds, "digest": digest(torch.cat([t.flatten() for t in outcome]))}
            )
        )
    transport.close()


if __name__ == "__main__":
    main()

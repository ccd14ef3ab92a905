"""The networks of the recipe: of sketched layers, and of dense ones to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.nn import Pipeline, shard
from lockstep.systems.sketched import RandomFeatureAttention, SKLinear

if TYPE_CHECKING:
    from lockstep.systems.sketched.task import SketchedConfig


class Layers:
    """Makes the linear layers of a network, each with a number of its own."""

    def __init__(self, config: SketchedConfig) -> None:
        self._config = config
        self._number = -1

    def number(self) -> int:
        """The number of the next layer with a sketch."""
        self._number += 1
        return self._number

    def linear(self, inputs: int, outputs: int, is_large: bool, ratio: float) -> nn.Module:
        """A linear layer, dense or sketched.

        Args:
            inputs: size of the input's last dim.
            outputs: size of the output's last dim.
            is_large: whether it is sketched in mixed networks, too.
            ratio: columns of a term's sketch over `inputs`, where no other number is given.

        Raises:
            ConfigError: `low_rank` is larger than the layer.
        """
        config, number = self._config, self.number()
        if config.layers == "dense" or (config.layers == "mixed" and not is_large):
            return nn.Linear(inputs, outputs)
        return SKLinear(
            inputs,
            outputs,
            config.num_terms,
            config.low_rank or max(1, int(inputs * ratio)),
            seed=config.seed,
            layer=number,
            sketch=config.sketch,
        )


def mlp(config: SketchedConfig, features: int, classes: int) -> nn.Sequential:
    """A perceptron from images [N, 1, S, S] to logits [N, classes].

    With `num_shards` above 1 the features stay cut from layer to layer, so it is one block.
    Otherwise stages may begin at any layer.

    Raises:
        ConfigError: `low_rank` is larger than a layer.
    """
    layers, sizes = Layers(config), (features, *config.hidden)
    ratios = config.sketch_ratios if config.low_rank is None else (1.0,) * len(sizes)
    network: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs, ratio in zip(sizes, sizes[1:], ratios, strict=False):
        linear = layers.linear(inputs, outputs, True, ratio)
        network += [linear, nn.ReLU(), nn.Dropout(config.dropout)]
    network.append(layers.linear(sizes[-1], classes, False, ratios[-1]))
    if config.num_shards == 1:
        return Pipeline(*network)
    chain = [(str(n), m) for n, m in enumerate(network) if isinstance(m, nn.Linear | SKLinear)]
    return shard(nn.Sequential(*network), _plan_of(chain))


class ExactAttention(nn.Module):
    """Multi-head softmax attention over all pairs of tokens."""

    def __init__(self, width: int, num_heads: int) -> None:
        """Make dense layers `qkv` and `out`."""
        super().__init__()
        self.head_width = width // num_heads
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same."""
        # Query, key and value of one head are adjacent, so that a shard of `qkv` has whole heads.
        split = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = split.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """A transformer block: attention, then two feed-forward layers, each behind a norm."""

    def __init__(self, config: SketchedConfig, layers: Layers) -> None:
        """Make the block; its layers get the next numbers of `layers`."""
        super().__init__()
        width = config.width
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention: ExactAttention | RandomFeatureAttention
        if config.attention == "exact":
            self.attention = ExactAttention(width, config.num_heads)
        else:
            self.attention = RandomFeatureAttention(
                width,
                config.num_heads,
                config.num_features,
                config.kernel,
                seed=config.seed,
                layer=layers.number(),
            )
        self.attention.qkv = layers.linear(width, 3 * width, False, 1 / 8)
        self.attention.out = layers.linear(width, width, False, 1 / 8)
        self.feed_forward = nn.Sequential(
            layers.linear(width, 4 * width, True, 1 / 8),
            nn.GELU(),
            nn.Dropout(config.dropout),
            layers.linear(4 * width, width, True, 1 / 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same."""
        x = x + self.attention(self.norm_1(x))
        after: Tensor = x + self.feed_forward(self.norm_2(x))
        return after


class Start(nn.Module):
    """Images [N, 1, S, S] to vectors [N, tokens, width] of their parts and positions."""

    def __init__(self, config: SketchedConfig, layers: Layers) -> None:
        """Make the block; its layer gets the next number of `layers`."""
        super().__init__()
        size = config.image_size
        self.patch = (1, size) if config.tokens == "rows" else (config.patch_size,) * 2
        pixels = self.patch[0] * self.patch[1]
        num_tokens = size * size // pixels
        self.embed = layers.linear(pixels, config.width, False, 1 / 8)
        self.positions = nn.Parameter(0.02 * torch.randn(num_tokens, config.width))

    def forward(self, images: Tensor) -> Tensor:
        """[N, tokens, width]."""
        embedded: Tensor = self.embed(self.tokens(images)) + self.positions
        return embedded

    def tokens(self, images: Tensor) -> Tensor:
        """The parts of each image [N, tokens, pixels]: rows or patches, from the upper left one."""
        return F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)


class End(nn.Module):
    """Logits [N, classes], from the mean over tokens."""

    def __init__(self, config: SketchedConfig, layers: Layers, classes: int) -> None:
        """Make the block; its layer gets the next number of `layers`."""
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.classify = layers.linear(config.width, classes, False, 1 / 8)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to [N, classes]."""
        logits: Tensor = self.classify(self.norm(x).mean(1))
        return logits


def transformer(config: SketchedConfig, classes: int) -> Pipeline:
    """A transformer encoder from images [N, 1, S, S] to logits [N, classes].

    Heads and the features of feed-forward layers are cut into shards. Attention is left whole where
    heads do not divide into `num_shards`, or are random features; its sketched layers are cut by
    their input alone then.

    Raises:
        ConfigError: `low_rank` is larger than a layer.
    """
    layers = Layers(config)
    start = Start(config, layers)
    blocks = [Block(config, layers) for _ in range(config.depth)]
    model = Pipeline(start, *blocks, End(config, layers, classes))
    if config.num_shards == 1:
        return model
    has_whole_heads = config.attention == "exact" and config.num_heads % config.num_shards == 0
    plan: dict[str, str] = {}
    for number, block in enumerate(blocks, 1):
        name = f"{number}.feed_forward"
        plan |= _plan_of([(f"{name}.{i}", block.feed_forward[i]) for i in (0, 3)])
        qkv = (f"{number}.attention.qkv", block.attention.qkv)
        out = (f"{number}.attention.out", block.attention.out)
        for chain in [[qkv, out]] if has_whole_heads else [[qkv], [out]]:
            plan |= _plan_of(chain)
    return shard(model, plan)


def narrower(sizes: Sequence[int], number: int) -> nn.Module:
    """A dense perceptron whose hidden layers have `number` / 1,000 of the features, or one."""
    hidden = [max(1, size * number // 1000) for size in sizes[1:-1]]
    network: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((sizes[0], *hidden, sizes[-1])):
        network += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*network[:-1])


def of_low_rank(sizes: Sequence[int], rank: int) -> nn.Module:
    """A perceptron whose matrices are products of two of `rank` columns, where that has less."""
    network: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        if rank * (inputs + outputs) < inputs * outputs:
            network.append(nn.Linear(inputs, rank, bias=False))
            inputs = rank
        network += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*network[:-1])


def largest(kind: Callable[[int], nn.Module], most: int) -> nn.Module:
    """The network of the greatest number, up to 1,000, that has at most `most` parameters."""
    number = 1
    with torch.device("meta"):
        for candidate in range(2, 1001):
            if sum(p.numel() for p in kind(candidate).parameters()) > most:
                break
            number = candidate
    return kind(number)


def _plan_of(chain: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """How layers that follow each other are cut into shards (`lockstep.nn.shard`).

    Dense layers alternate between cutting features and summing them; sketched ones keep them cut.
    The output of the last one is whole.

    Args:
        chain: layers by name, in order.
    """
    plan: dict[str, str] = {}
    is_cut = False
    for position, (name, layer) in enumerate(chain, 1):
        is_last = position == len(chain)
        if isinstance(layer, SKLinear):
            plan[name] = "sketched_row" if is_last else "sketched"
            is_cut = not is_last
        elif is_cut:
            plan[name], is_cut = "row", False
        elif not is_last:
            plan[name], is_cut = "column", True
    return plan

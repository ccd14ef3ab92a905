"""The networks: a perceptron and a transformer, of dense and sketched layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.sketched.config import SketchedConfig
from lockstep.sketch import RandomFeatureAttention, SKLinear


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


def mlp(config: SketchedConfig, features: int, classes: int) -> nn.Module:
    """A perceptron from images [N, 1, S, S] to logits [N, classes].

    Raises:
        ConfigError: `low_rank` is larger than a layer.
    """
    layers, sizes = Layers(config), (features, *config.hidden)
    ratios = config.sketch_ratios if config.low_rank is None else (1.0,) * len(sizes)
    network: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs, ratio in zip(sizes, sizes[1:], ratios, strict=False):
        linear = layers.linear(inputs, outputs, True, ratio)
        network += [linear, nn.ReLU(), nn.Dropout(config.dropout)]
    return nn.Sequential(*network, layers.linear(sizes[-1], classes, False, ratios[-1]))


class Tokens(nn.Module):
    """Images [N, 1, S, S] as tokens [N, tokens, pixels]: rows, or square patches."""

    def __init__(self, patch: tuple[int, int]) -> None:
        """Cut images into parts of height and width `patch`."""
        super().__init__()
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        """The parts of each image, from the upper left one on."""
        return F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)


class ExactAttention(nn.Module):
    """Multi-head softmax attention over all pairs of tokens."""

    def __init__(self, width: int, num_heads: int) -> None:
        """Make dense layers `qkv` and `out`."""
        super().__init__()
        self.num_heads = num_heads
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] to the same."""
        num, tokens, width = x.shape
        split = self.qkv(x).view(num, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(num, tokens, width))
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


class Transformer(nn.Module):
    """A transformer encoder from images [N, 1, S, S] to logits [N, classes]."""

    def __init__(self, config: SketchedConfig, classes: int) -> None:
        """Make the network.

        Raises:
            ConfigError: `low_rank` is larger than a layer.
        """
        super().__init__()
        size, layers = config.image_size, Layers(config)
        patch = (1, size) if config.tokens == "rows" else (config.patch_size,) * 2
        num_tokens, pixels = size * size // (patch[0] * patch[1]), patch[0] * patch[1]
        self.tokens = Tokens(patch)
        self.embed = layers.linear(pixels, config.width, False, 1 / 8)
        self.positions = nn.Parameter(0.02 * torch.randn(num_tokens, config.width))
        self.blocks = nn.ModuleList(Block(config, layers) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.classify = layers.linear(config.width, classes, False, 1 / 8)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, from the mean over tokens."""
        x = self.embed(self.tokens(images)) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classify(self.norm(x).mean(1))
        return logits


def plan_of(model: nn.Module) -> dict[str, str]:
    """How a network of this module is cut into shards (`lockstep.nn.shard`).

    The layers of a perceptron, and the feed-forward layers of a transformer, in turn cut features
    and sum them again; sketched ones keep them cut. Attention is left whole.
    """
    if isinstance(model, Transformer):
        chains = [
            [(f"blocks.{n}.feed_forward.{i}", block.feed_forward[i]) for i in (0, 3)]
            for n, block in enumerate(model.blocks)
            if isinstance(block, Block)
        ]
    else:
        chains = [
            [(n, m) for n, m in model.named_children() if isinstance(m, nn.Linear | SKLinear)]
        ]
    plan: dict[str, str] = {}
    for chain in chains:
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

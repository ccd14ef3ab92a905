"""Handwritten digits, learnt by a perceptron or a transformer of sketched layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import (
    NO_OUTCOME,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    TrainConfig,
)
from lockstep.data.images import Labelled, embedded_digits, hold_out, idx_digits, mean_and_deviation
from lockstep.engine.task import Loss, Task
from lockstep.errors import DataError
from lockstep.nn import Pipeline, shard
from lockstep.systems.sketched import RandomFeatureAttention, SKLinear

Ratio = Annotated[float, Field(gt=0, le=1)]


class SketchedConfig(TrainConfig):
    """The keys of the networks and their data, and the defaults of the guide."""

    model: Literal["mlp", "transformer"] = "mlp"
    """A perceptron, or a transformer whose tokens are parts of the image."""
    layers: Literal["dense", "sketched", "mixed"] = "sketched"
    """Which linear layers are sketched: none, all, or the large ones: all but the classifier (mlp),
    the feed-forward layers (transformer)."""
    hidden: Annotated[tuple[Positive, ...], Field(min_length=1)] = (512, 256, 128)
    """Widths of the mlp's hidden layers."""
    sketch_ratios: Annotated[tuple[Ratio, ...], Field(min_length=1)] = (0.5, 0.6, 0.7, 0.8)
    """Columns of a term's sketch over the input's features, for each linear layer of the mlp."""
    low_rank: Positive | None = None
    """Columns of a term's sketch, of every layer; without it, by `sketch_ratios` (mlp), or an
    eighth of the layer's input (transformer)."""
    num_terms: Positive = 1
    """Terms of a sketched layer."""
    sketch: Literal["signs", "fold"] = "signs"
    """What projects: dense random signs, or random signs and a fold, with half the work."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the activations that are dropped in training."""
    image_size: Annotated[int, Field(ge=4, le=256)] = 32
    """Images are brought to this height and width; 32 makes 1,024 features."""
    tokens: Literal["rows", "patches"] = "rows"
    """What is a token (transformer): a row of the image, or a square patch."""
    patch_size: Positive = 8
    """Height and width of a patch; a divisor of `image_size`."""
    width: Positive = 64
    """Size of a token in the transformer; a multiple of `num_heads`."""
    depth: Positive = 2
    """Blocks of the transformer."""
    num_heads: Positive = 4
    """Attention heads of a block."""
    attention: Literal["exact", "random"] = "exact"
    """Softmax over all pairs of tokens, or random features, in time linear in the tokens."""
    num_features: Positive = 64
    """Random features of a head (`attention=random`)."""
    kernel: Literal["softmax", "relu"] = "softmax"
    """Kernel that random features stand for (`attention=random`)."""
    data_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """A folder with MNIST's IDX files; without it, scikit-learn's 1,797 images of 8x8 pixels."""
    val_fraction: Fraction = 0.1
    """Part of the images held out for validation; 0 for none."""
    test_fraction: Fraction = 0.1
    """Part held out for testing, where the data has no test set of its own; 0 for none."""

    batch_size: Positive = 32
    epochs: Positive = 5
    lr: NonNegativeFloat = 1e-3
    optimizer: OptimizerConfig = OptimizerConfig(name="adam")
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"

    @model_validator(mode="after")
    def _ratios_fit(self) -> SketchedConfig:
        needed = len(self.hidden) + 1
        by_ratio = self.model == "mlp" and self.layers != "dense" and self.low_rank is None
        if by_ratio and len(self.sketch_ratios) != needed:
            raise ValueError(
                f"sketch_ratios={list(self.sketch_ratios)}: hidden={list(self.hidden)} makes "
                f"{needed} linear layers; give as many ratios, or low_rank"
            )
        return self

    @model_validator(mode="after")
    def _tokens_fit(self) -> SketchedConfig:
        if self.model != "transformer":
            return self
        if self.tokens == "patches" and self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size}: must divide image_size={self.image_size}"
            )
        if self.width % self.num_heads:
            raise ValueError(f"width={self.width}: must be a multiple of {self.num_heads} heads")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> SketchedConfig:
        if self.model == "mlp" and self.mesh.pp > 1 and self.num_shards > 1:
            raise ValueError(
                f"mesh.pp={self.mesh.pp}: model=mlp keeps its features in shards from layer to "
                f"layer (num_shards={self.num_shards}), so it cannot be in stages too; set "
                "num_shards=1 or model=transformer"
            )
        return self


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


class Sketched(Task):
    """Handwritten digits with sketched layers: a perceptron or a transformer."""

    Config = SketchedConfig
    config: SketchedConfig

    def build_model(self) -> nn.Module:
        """The network `config.model` names: images [N, 1, S, S] to logits [N, classes].

        Raises:
            ConfigError: `low_rank` is larger than a layer.
        """
        classes = 1 + max(int(labels.max()) for _, labels in self._splits.values())
        if self.config.model == "mlp":
            return mlp(self.config, self.config.image_size**2, classes)
        return transformer(self.config, classes)

    def dataset(self, split: str) -> TensorDataset | None:
        """Images [N, 1, S, S] as float32 with mean 0 and deviation 1, labels [N] as int64.

        Raises:
            ConfigError: scikit-learn, which has the built-in images, is not installed.
            DataError: a file in `config.data_dir` is missing, damaged or does not fit the others.
        """
        if split not in self._splits:
            return None
        images, labels = self._splits[split]
        mean, deviation = mean_and_deviation(self._splits["train"][0])
        if deviation == 0:
            raise DataError(f"data_dir={self.config.data_dir}: all training pixels are {mean:g}")
        normal = ((images.float() - mean) / deviation).unsqueeze(1)
        size = (self.config.image_size,) * 2
        return TensorDataset(F.interpolate(normal, size, mode="bilinear"), labels)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Cross entropy and accuracy of a batch (images, labels)."""
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        return Loss(
            sum=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            metrics={"accuracy": (correct, len(labels))},
        )

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        if self.config.data_dir is None:
            by_split = {"train": embedded_digits()}
        else:
            by_split = idx_digits(self.config.data_dir.expanduser())
        return hold_out(by_split, self.config.val_fraction, self.config.test_fraction)

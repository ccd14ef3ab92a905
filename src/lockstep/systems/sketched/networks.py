"""The networks of the recipe: of sketched layers, of dense ones to compare with, of Panther's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import DataError
from lockstep.launching.api.originals import fill
from lockstep.launching.foreign_files import ForeignFile
from lockstep.launching.systems import Original
from lockstep.nn import Pipeline, shard
from lockstep.systems.sketched import RandomFeatureAttention, SignKey, SKLinear, sign_matrix

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
        layer = SKLinear(
            inputs,
            outputs,
            config.num_terms,
            config.low_rank or max(1, int(inputs * ratio)),
            seed=config.seed,
            layer=number,
            sketch=config.sketch,
        )
        if config.sketch == "data":
            for U, name in ((layer.U1, "U1"), (layer.U2, "U2")):
                columns = range(U.shape[1])
                U.copy_(sign_matrix(SignKey(config.seed, number, name), len(U), columns))
        return layer


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


_OF_PANTHER = ("S1s", "S2s", "U1s", "U2s")
_IN_CHAIN = re.compile(r"(?:model\.)?(\d+)")
_LEAST_SIDE, _MOST_SIDE = 4, 256


def read_original(file: ForeignFile) -> Original | None:
    """A state dict with Panther's `SKLinear` layers, for the recipe's perceptron if it is one.

    Args:
        file: of `torch.save`.

    Raises:
        DataError: it is damaged, or its sketched layers are of another kind.
    """
    called = {name.removeprefix("module."): name for name in file.tensors}
    names = [name.rpartition(".")[0] for name in called if name.rpartition(".")[2] == "S1s"]
    if not names:
        return None
    state = {ours: file.tensors[name] for ours, name in called.items()}
    sketched = {n: _of_panther(state, n, number, file) for number, n in enumerate(names)}
    used = {_joined(n, part) for n in names for part in (*_OF_PANTHER, "bias")}
    others = {name: tensor for name, tensor in state.items() if name not in used}
    lines = [f"{name or 'one layer'}: {layer.extra_repr()}" for name, layer in sketched.items()]
    lines += [f"{name}: {[*tensor.shape]}" for name, tensor in others.items()]
    chain = _chain({**sketched, **_dense(others)})
    if not (settings := _settings(chain) if chain else {}):
        for name, layer in sketched.items():
            others |= {_joined(name, key): tensor for key, tensor in layer.state_dict().items()}
        about = "layers of Panther, which the recipe's networks do not have"
        return Original("sketched", about, lines, tensors=others)

    def model(task: Any) -> nn.Module:
        net = mlp(task.config, _size(chain[0])[0], _size(chain[-1])[1])
        own = [name for name, m in net.named_modules() if isinstance(m, nn.Linear | SKLinear)]
        fill(
            net,
            {
                _joined(name, key): tensor
                for name, layer in zip(own, chain, strict=True)
                for key, tensor in layer.state_dict().items()
                if key != "sketch_key"
            },
            str(file.path),
        )
        return net

    return Original("sketched", "a perceptron of Panther's layers", lines, settings, model=model)


def _of_panther(state: Mapping[str, Tensor], name: str, number: int, file: ForeignFile) -> SKLinear:
    """An `SKLinear` layer: S1s and U2s are [L, in, k] there, S2s and U1s [L, k, out]."""
    parts = [state.get(_joined(name, part)) for part in _OF_PANTHER]
    for part, tensor in zip(_OF_PANTHER, parts, strict=True):
        if tensor is None or tensor.dim() != 3:
            found = "is missing" if tensor is None else f"is {[*tensor.shape]}"
            raise DataError(
                f"{file.path}: {_joined(name, part)} {found}: only SKLinear layers are read"
            )
    S1, S2, U1, U2 = (tensor for tensor in parts if tensor is not None)
    (terms, inputs, rank), bias = S1.shape, state.get(_joined(name, "bias"))
    wanted = {"S2s": (terms, rank, S2.shape[2]), "U1s": (terms, rank, S2.shape[2])}
    wanted |= {"U2s": (terms, inputs, rank)}
    for part, tensor in (("S2s", S2), ("U1s", U1), ("U2s", U2)):
        if tuple(tensor.shape) != wanted[part]:
            raise DataError(
                f"{file.path}: {_joined(name, part)} is {[*tensor.shape]}, must be "
                f"{[*wanted[part]]}, by S1s; convolutions and attention are not read"
            )
    layer = SKLinear(
        inputs, S2.shape[2], terms, rank, bias is not None, seed=0, layer=number, sketch="data"
    )
    columns = terms * rank
    ours = {
        "S1": S1.permute(0, 2, 1).reshape(columns, inputs),
        "S2": S2.reshape(columns, -1),
        # Of signs, whose size is in the layer's factor here.
        "U1": U1.reshape(columns, -1) * math.sqrt(rank),
        "U2": U2.permute(0, 2, 1).reshape(columns, inputs) * math.sqrt(rank),
    }
    if bias is not None:
        ours["bias"] = bias
    fill(layer, ours, f"{file.path}: {name}")
    return layer


def _dense(others: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """The linear layers among tensors by name; none if there is anything else."""
    found: dict[str, nn.Module] = {}
    for name, weight in others.items():
        prefix, _, part = name.rpartition(".")
        if part == "weight" and weight.dim() == 2 and _joined(prefix, "bias") in others:
            made = nn.Linear(weight.shape[1], weight.shape[0])
            made.load_state_dict({"weight": weight, "bias": others[_joined(prefix, "bias")]})
            found[prefix] = made
    return found if 2 * len(found) == len(others) else {"": nn.Identity()}


def _chain(layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The layers of an `nn.Sequential` in order, if they are such; with ReLU between them."""
    numbers = {m[1]: layer for n, layer in layers.items() if (m := _IN_CHAIN.fullmatch(n))}
    order = sorted(numbers, key=int)
    if len(numbers) < max(2, len(layers)) or [*map(int, order)] != [*range(0, 2 * len(order), 2)]:
        return []
    chain = [numbers[number] for number in order]
    fits = all(_size(a)[1] == _size(b)[0] for a, b in pairwise(chain))
    return chain if fits else []


def _settings(chain: Sequence[nn.Module]) -> dict[str, Any]:
    """The recipe's keys for a chain of layers; none if it has no such network."""
    sketched = [layer for layer in chain if isinstance(layer, SKLinear)]
    features = _size(chain[0])[0]
    side = math.isqrt(features)
    terms, ranks = {layer.num_terms for layer in sketched}, [layer.low_rank for layer in sketched]
    is_all = len(sketched) == len(chain)
    is_image = side**2 == features and _LEAST_SIDE <= side <= _MOST_SIDE
    is_usual = all(layer.low_rank <= layer.in_features for layer in sketched)
    has_bias = all(layer.bias is not None for layer in chain)
    is_known = len(terms) == 1 and chain[:-1] == sketched[: len(chain) - 1]
    if not (is_image and is_usual and has_bias and is_known):
        return {}
    found = {
        "layers": "sketched" if is_all else "mixed", "sketch": "data", "num_terms": terms.pop(),
        "hidden": [_size(layer)[1] for layer in chain[:-1]], "image_size": side,
    }  # fmt: skip
    if len(set(ranks)) == 1:
        return {**found, "low_rank": ranks[0]}
    sizes = [layer.in_features for layer in sketched]
    ratios = [min(1.0, (k + 0.5) / n) for k, n in zip(ranks, sizes, strict=True)]
    return {**found, "sketch_ratios": ratios + [1.0] * (len(chain) - len(sketched))}


def _size(layer: nn.Module) -> tuple[int, int]:
    assert isinstance(layer, nn.Linear | SKLinear)
    return layer.in_features, layer.out_features


def _joined(prefix: str, part: str) -> str:
    return f"{prefix}.{part}" if prefix else part

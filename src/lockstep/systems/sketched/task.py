"""Handwritten digits, learnt by a perceptron or a transformer of sketched layers."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config import (
    NO_OUTCOME,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    TrainConfig,
)
from lockstep.data.images import (
    Labelled,
    embedded_digits,
    hold_out,
    idx_digits,
    num_classes,
    simple_classifiers,
    standardized,
)
from lockstep.engine.task import Loss, Task
from lockstep.systems.sketched.networks import largest, mlp, narrower, of_low_rank, transformer

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
    sketch: Literal["signs", "fold", "data"] = "signs"
    """What projects: dense random signs, or random signs and a fold, with half the work; `data`:
    signs that checkpoints hold, as those of imported layers."""
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


class Sketched(Task):
    """Handwritten digits with sketched layers: a perceptron or a transformer."""

    Config = SketchedConfig
    config: SketchedConfig

    def build_model(self) -> nn.Module:
        """The network `config.model` names: images [N, 1, S, S] to logits [N, classes].

        Raises:
            ConfigError: `low_rank` is larger than a layer.
        """
        classes = num_classes(self._splits)
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
        normal = standardized(images, self._splits["train"][0], self.config.data_dir)
        resized = F.interpolate(normal, self.config.image_size, mode="bilinear")
        return TensorDataset(resized, labels)

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

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """What simple classifiers reach, and networks without sketches, trained by Adam as long.

        Of the mlp: as wide, and where that has more parameters, also narrower ones, of one hidden
        layer and of low rank.
        """
        found = simple_classifiers(self._splits["train"], self._splits[split])
        train, held_out = self.dataset("train"), self.dataset(split)
        assert train is not None
        assert held_out is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            networks = self._without_sketches(model)
        for name, net in networks.items():
            size = sum(p.numel() for p in net.parameters())
            found[f"{name}, {size:,} parameters"] = self._trained(net, train, held_out)
        return found

    def _without_sketches(self, model: nn.Module) -> dict[str, nn.Module]:
        config = self.config.model_copy(update={"layers": "dense"})
        classes = num_classes(self._splits)
        if config.model == "transformer":
            return {"dense": transformer(config, classes)}
        features = config.image_size**2
        sizes = features, *config.hidden, classes
        found: dict[str, nn.Module] = {"dense": mlp(config, features, classes)}
        most, dense = (sum(p.numel() for p in net.parameters()) for net in (model, found["dense"]))
        if most < dense:
            one_layer = partial(narrower, (features, 1000, classes))
            found["one hidden layer"] = largest(one_layer, most)
            found["narrower"] = largest(partial(narrower, sizes), most)
            found["low rank"] = largest(partial(of_low_rank, sizes), most)
        return found

    def _trained(
        self, net: nn.Module, train: TensorDataset, held_out: TensorDataset
    ) -> dict[str, float]:
        config, order = self.config, torch.Generator().manual_seed(self.config.seed)
        optimizer = torch.optim.Adam(net.parameters(), config.lr)
        steps_an_epoch = -(-len(train) // config.batch_size)
        epochs = config.epochs if config.steps is None else -(-config.steps // steps_an_epoch)
        for _ in range(epochs or 1):
            for rows in torch.randperm(len(train), generator=order).split(config.batch_size):  # type: ignore[no-untyped-call]
                found = self.loss(net, train[rows])
                optimizer.zero_grad()
                torch.autograd.backward(found.sum / found.weight)
                optimizer.step()
        with torch.no_grad():
            found = self.loss(net.eval(), held_out[:])
        hits, count = map(float, found.metrics["accuracy"])
        return {"loss": float(found.sum) / count, "accuracy": hits / count}

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        if self.config.data_dir is None:
            by_split = {"train": embedded_digits()}
        else:
            by_split = idx_digits(self.config.data_dir.expanduser())
        return hold_out(by_split, self.config.val_fraction, self.config.test_fraction)

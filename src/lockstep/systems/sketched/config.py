"""The keys of the networks and their data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config import (
    NO_OUTCOME,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    TrainConfig,
)

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

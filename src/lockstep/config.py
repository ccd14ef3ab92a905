"""Typed configuration: the same keys in Python, in YAML and as `key=value` on the command line.

A recipe adds its own keys by subclassing `TrainConfig`. Keys that cannot change the result
(where files go, how often something is logged) are marked `outcome=False`; all others make up
`TrainConfig.hash`, which a checkpoint carries and a run directory is bound to. The text below a
key is its description in `lockstep config` and in docs/configuration.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict

from lockstep.config_keys import keys, unknown_key
from lockstep.errors import ConfigError
from lockstep.files import read_text
from lockstep.parsing import parse_yaml, shown

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelMetaclass
else:
    _ModelMetaclass = type(BaseModel)

NO_OUTCOME: JsonDict = {"outcome": False}
"""Marks a field that cannot change the final parameters; it is left out of the hash."""

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Checked(_ModelMetaclass):
    """Turns pydantic's errors about a config class's arguments into a `ConfigError`."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            kind = cast("type[Section]", cls)
            lines = [_explain(kind, e, cls.__name__) for e in error.errors()]
            raise ConfigError("\n".join(lines)) from None


class Section(BaseModel, metaclass=_Checked):
    """A group of keys. Unknown keys are errors.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A key that a subclass declares again, for another default, keeps its limits."""
        kept = False
        for base in cls.__bases__:
            for name, field in getattr(base, "model_fields", {}).items():
                own = cls.model_fields[name]
                if own.annotation == field.annotation and field.metadata and not own.metadata:
                    own.metadata = field.metadata
                    kept = True
        if kept:
            cls.model_rebuild(force=True)


class OptimizerConfig(Section):
    """The default optimizer. A Task with its own ignores all keys but `sharded` and `buddy`."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """How gradients become steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of parameters: decoupled (adamw), or added to the gradient (sgd, adam)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of gradients and their squares (adam, adamw)."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator (adam, adamw)."""
    momentum: NonNegativeFloat = 0.0
    """Factor of the last step in the next one (sgd)."""
    nesterov: bool = False
    """Nesterov's momentum (sgd); needs a momentum above 0."""
    sharded: bool = Field(False, json_schema_extra=NO_OUTCOME)
    """Each rank keeps the state of, and steps, its slice only (ZeRO-1): same bits, less memory.
    For element-wise optimizers."""
    buddy: bool = Field(True, json_schema_extra=NO_OUTCOME)
    """With `sharded`, and where survivors can go on: each rank also keeps and steps the slice of
    the rank before it, so that the loss of a rank loses no state."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> OptimizerConfig:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        return self


class ScheduleConfig(Section):
    """How the learning rate changes: linearly up to `lr`, then as `name` says."""

    name: Literal["constant", "linear", "cosine", "step", "plateau"] = "constant"
    """How the learning rate changes after the warmup."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step (linear, cosine), or the least one (plateau), as a part of
    `lr`."""
    step_size: Positive = 1000
    """Steps between two decays (step)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of each decay (step, plateau)."""
    patience: Count = 10
    """Evaluations without a better `watch` before the next one decays (plateau)."""


class PrecisionConfig(Section):
    """Autocast and loss scaling."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast of forward passes; parameters stay as they are."""
    loss_scale: PositiveFloat = 2.0**16
    """First loss scale (fp16): halved when a gradient overflows, and that step changes nothing."""
    growth_interval: Positive = 2000
    """Steps without overflow before the loss scale is doubled (fp16)."""


class EarlyStoppingConfig(Section):
    """Stop when `watch` has not improved for `patience` evaluations."""

    patience: Count = 0
    """Evaluations without a better `watch` after which the run ends; 0 never ends it."""
    min_delta: NonNegativeFloat = 0.0
    """Least change of `watch` that counts as better."""


class ConvergenceConfig(Section):
    """A rule that ends the run when a metric has settled."""

    metric: str = "loss"
    """An evaluation metric."""
    window: Annotated[int, Field(ge=2)] = 5
    """Evaluations that are looked at."""
    tolerance: NonNegativeFloat = 1e-3
    """Most by which they may differ, as a part of their greatest magnitude."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every: Count = Field(0, json_schema_extra=NO_OUTCOME)
    """Steps between checkpoints; 0 writes one at each epoch's end. The last step, and each new best
    one, always has one."""
    keep: Positive = Field(3, json_schema_extra=NO_OUTCOME)
    """How many of the newest to keep, beside the best."""
    background: bool = Field(True, json_schema_extra=NO_OUTCOME)
    """Write in a background thread from a copy in memory."""


class DataConfig(Section):
    """How batches are fetched."""

    num_workers: Count = Field(0, json_schema_extra=NO_OUTCOME)
    """Processes of each rank that fetch microbatches ahead; 0 fetches in the training process."""
    prefetch: Positive = Field(2, json_schema_extra=NO_OUTCOME)
    """Microbatches each worker process fetches ahead."""
    shuffle: bool = True
    """Draw a new order for each epoch."""


class TrainConfig(Section):
    """Everything that shapes a run. Subclass it to give a recipe keys of its own."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything random."""
    batch_size: Positive = 256
    """Samples in a global batch: one optimizer step, whatever the number of ranks."""
    num_microbatches: Positive = 8
    """Parts of a global batch, dealt out to the ranks; at most `batch_size`. More ranks than this
    have nothing to do."""
    epochs: Positive = 1
    """Passes over the data."""
    steps: Positive | None = None
    """Optimizer steps of the whole run, instead of `epochs`; the schedule spans them."""
    stop_at_step: Positive | None = Field(None, json_schema_extra=NO_OUTCOME)
    """End this sitting after this step, with a checkpoint; the run can be resumed. Not written to
    `config.yaml`."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: PositiveFloat | None = None
    """Scale the mean gradient down to this global norm."""
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: tuple[str, ...] = ()
    """Glob patterns of module names whose activations are recomputed in the backward pass."""

    threads: Positive = 1
    """Threads a rank computes with. Sums inside an operation, and so the bits, depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto` is a GPU for each rank if the host has that many, else the CPU.
    The hash holds the word, not the device found."""

    min_ranks: Positive = Field(1, json_schema_extra=NO_OUTCOME)
    """Stop with a checkpoint when fewer ranks than this are left."""

    balance_every: Count = Field(50, json_schema_extra=NO_OUTCOME)
    """Steps between looks at whether slow ranks should get fewer microbatches; 0 never looks."""
    hang_timeout_s: NonNegativeFloat = Field(300.0, json_schema_extra=NO_OUTCOME)
    """Kill a rank that does nothing for this long (or ten times as long as it ever did), or that
    is stopped for this long by a signal, so that the others can go on; 0 never does."""

    eval_every: Count = 0
    """Steps between evaluations of `val`; 0 evaluates at each epoch's end. There always is one
    after the last step."""
    eval_batch_size: Positive = 256
    """Samples in one evaluation batch, on one rank."""
    watch: str = "loss"
    """The evaluation metric that says which checkpoint is best."""
    watch_mode: Literal["min", "max"] = "min"
    """Whether less or more of `watch` is better."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    convergence: tuple[ConvergenceConfig, ...] = ()
    """Rules that each end the run when a metric has settled, such as
    `{metric: loss, window: 5, tolerance: 0.001}`."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    digest_every: Count = Field(0, json_schema_extra=NO_OUTCOME)
    """Steps between checks that all replicas are bit-identical; 0 checks at checkpoints only."""
    log_every: Positive = Field(10, json_schema_extra=NO_OUTCOME)
    """Steps between rows of `metrics.csv` and `events.jsonl`. One more comes before each evaluation
    and checkpoint."""
    tensorboard: bool = Field(False, json_schema_extra=NO_OUTCOME)
    """Write event files for TensorBoard."""
    bucket_bytes: Positive = Field(8 << 20, json_schema_extra=NO_OUTCOME)
    """About the most bytes of gradient that a rank receives at a time."""

    @model_validator(mode="after")
    def _microbatches_fit(self) -> TrainConfig:
        if self.num_microbatches > self.batch_size:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} is more than "
                f"batch_size={self.batch_size}: a microbatch needs at least one sample"
            )
        return self

    @property
    def hash(self) -> str:
        """SHA-256 (16 hex digits) of all keys that can change the final parameters."""
        canonical = json.dumps(outcome(self), sort_keys=True, default=str)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """All keys with their values, as YAML that `load` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


Config = TypeVar("Config", bound=TrainConfig)
AnySection = TypeVar("AnySection", bound=Section)


def override(config: Config, overrides: Iterable[str], source: str = "command line") -> Config:
    """A new config with `key=value` items applied; keys may be dotted, values are YAML.

    Raises:
        ConfigError: an item has no `=`, a key is unknown or a value is of the wrong type.
    """
    data = config.model_dump()
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{source}: {shown(item)} is not of the form key=value")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(
                f"{source}: {shown(key)[1:-1]}: {shown(text)} is not a YAML value: {error}"
            ) from None
        _set(data, key, value, type(config), source)
    return build(type(config), data, source)


def load(kind: type[AnySection], path: Path) -> AnySection:
    """The config in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not fit `kind`.
    """
    try:
        data = parse_yaml(read_text(path, follow_links=True))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold keys and values, holds a {type(data).__name__}")
    return build(kind, data, str(path))


def build(kind: type[AnySection], data: Mapping[str, Any], source: str) -> AnySection:
    """A validated config from plain data; errors name `source`, the key and the value.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(kind, e, source) for e in error.errors())) from None


def outcome(section: BaseModel) -> dict[str, Any]:
    """The keys of a section that can change the result, as plain data."""
    values: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("outcome") is False:
            continue
        value = getattr(section, name)
        values[name] = outcome(value) if isinstance(value, BaseModel) else value
    return values


def _explain(kind: type[Section], error: Any, source: str) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if len(error["loc"]) == 1 and key in keys(kind):
            section, _, leaf = key.rpartition(".")
            return f"{source}: {key}: write it as {section}: {{{leaf}: …}}"
        return f"{source}: {unknown_key(kind, key)}"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{source}: {message}"
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        return f"{source}: {key}: {message}"
    return f"{source}: {key}={shown(error['input'])}: {message[0].lower()}{message[1:]}"


def _set(data: dict[str, Any], key: str, value: Any, kind: type[TrainConfig], source: str) -> None:
    *sections, leaf = key.split(".")
    target: dict[str, Any] = data
    section: type[BaseModel] | None = kind
    for name in sections:
        section = _section(section, name)
        # What was set as a whole before may lack keys, which then have their defaults.
        inside = target.get(name)
        target[name] = inside = inside if isinstance(inside, dict) else {}
        target = inside
    if section is None or leaf not in section.model_fields:
        raise ConfigError(f"{source}: {unknown_key(kind, key)}")
    if isinstance(target.get(leaf), dict) and not isinstance(value, dict):
        inner = ", ".join(f"{key}.{name}" for name in target[leaf])
        raise ConfigError(f"{source}: {key}={shown(value)}: {key} is a section; set one of {inner}")
    target[leaf] = value


def _section(kind: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    """The class of a section of a config class, if there is such a section."""
    field = kind.model_fields.get(name) if kind else None
    annotation = field.annotation if field else None
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    )

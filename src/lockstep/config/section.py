"""`Section`: a typed, checked group of config keys, whose errors name the key and the value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.config import JsonDict
from typing_extensions import dataclass_transform

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError

_FOREIGN_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "activation_checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing"),
        "batch_size": ("batch", "bs", "train_batch_size", "global_batch_size"),
        "checkpoint.every": ("save_steps", "save_interval"),
        "clip_norm": ("clip", "grad_clip", "gradient_clip_val", "max_grad_norm"),
        "data.num_workers": ("workers",),
        "data_dir": ("data_path",),
        "epochs": ("max_epochs", "num_epochs", "num_train_epochs"),
        "eval_every": ("eval_interval", "eval_steps"),
        "log_every": ("logging_steps",),
        "low_rank": ("sketch_size",),
        "lr": ("learning_rate",),
        "max_segments": ("halt_max_steps",),
        "mesh.pp": ("num_pipeline_stages", "pipeline_parallel_size"),
        "mesh.tp": ("model_parallel_size", "tensor_parallel_size"),
        "num_microbatches": (
            "accumulation_steps",
            "gradient_accumulation_steps",
            "micro_batch_size",
        ),
        "optimizer.name": ("optim", "optimizer"),
        "optimizer.weight_decay": ("wd",),
        "precision.dtype": ("amp", "mixed_precision", "precision"),
        "schedule.name": ("lr_scheduler", "schedule", "scheduler"),
        "schedule.warmup_steps": ("warmup",),
        "seed": ("random_seed",),
        "steps": ("max_steps", "num_steps"),
        "val_fraction": ("validation_split",),
    }
)
"""Names of Lockstep's keys in other libraries, where they are not similar."""


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a config class; the name of a section alone is not a key."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_key(kind: type[BaseModel], key: str) -> str:
    """The message that a config has no such key, with a similar one."""
    nearest = nearest_key(kind, key)
    return f"unknown key {shown(key)}" + (f"; did you mean {nearest}?" if nearest else "")


def plain_key(key: str) -> str:
    """A key as Lockstep spells them."""
    return key.lower().replace("-", "_")


def nearest_key(kind: type[BaseModel], key: str, cutoff: float = 0.6) -> str | None:
    """The key of a config class that is most like another spelling or name; None if none is.

    Args:
        kind: config class.
        key: what was written.
        cutoff: how like it a key must be, from 0 to 1, where neither name nor section says it.
    """
    known, plain = list(keys(kind)), plain_key(key)
    for own, others in _FOREIGN_NAMES.items():
        if plain in others and own in known:
            return own
    leaf = plain.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return difflib.get_close_matches(plain, same, n=1, cutoff=0.0)[0]
    # A key is often given without its section.
    names = {k.rpartition(".")[2]: k for k in reversed(known)} | {k: k for k in known}
    matches = difflib.get_close_matches(plain, names, n=1, cutoff=cutoff)
    return names[matches[0]] if matches else None


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelMetaclass
else:
    _ModelMetaclass = type(BaseModel)

NO_OUTCOME: JsonDict = {"outcome": False}
"""Marks a field that cannot change the final parameters; it is left out of the hash."""

OF_MODEL: JsonDict = {"of_model": True}
"""Marks a field, outside sections, that says what a model is or what its inputs and outputs mean.
A trained model is not evaluated or exported with another value of it."""

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, lt=0.5)]


# Type checkers look for this on the metaclass itself, not on pydantic's below it.
@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(Field, PrivateAttr)
)
class _Checked(_ModelMetaclass):
    """Turns pydantic's errors about a config class's arguments into a `ConfigError`."""

    if not TYPE_CHECKING:  # else type checkers would no longer check names and types of arguments

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                lines = [explain(cls, e, cls.__name__) for e in error.errors()]
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
        is_changed = False
        for base in cls.__bases__:
            for name, field in getattr(base, "model_fields", {}).items():
                redeclared = cls.model_fields[name]
                if (
                    redeclared.annotation == field.annotation
                    and field.metadata
                    and not redeclared.metadata
                ):
                    redeclared.metadata = field.metadata
                    is_changed = True
        if is_changed:
            cls.model_rebuild(force=True)


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


def explain(kind: type[Section], error: Any, source: str) -> str:
    """One of pydantic's errors as a message that names the source, the key and the value."""
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

"""What a group of config keys is: typed, checked, and errors that name the key."""

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

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "accumulation_steps": "num_microbatches",
        "amp": "precision.dtype",
        "batch": "batch_size",
        "bs": "batch_size",
        "clip": "clip_norm",
        "eval_interval": "eval_every",
        "eval_steps": "eval_every",
        "grad_clip": "clip_norm",
        "gradient_accumulation_steps": "num_microbatches",
        "gradient_clip_val": "clip_norm",
        "learning_rate": "lr",
        "logging_steps": "log_every",
        "max_epochs": "epochs",
        "max_grad_norm": "clip_norm",
        "max_steps": "steps",
        "mixed_precision": "precision.dtype",
        "num_epochs": "epochs",
        "num_steps": "steps",
        "num_train_epochs": "epochs",
        "optim": "optimizer.name",
        "random_seed": "seed",
        "save_steps": "checkpoint.every",
        "scheduler": "schedule.name",
        "train_batch_size": "batch_size",
        "warmup": "schedule.warmup_steps",
        "wd": "optimizer.weight_decay",
        "workers": "data.num_workers",
    }
)
"""Names that other libraries have for Lockstep's keys, where they are not similar."""


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a config class; the name of a section alone is not a key."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_key(kind: type[BaseModel], key: str) -> str:
    """The message that a config has no such key, with the one that may be meant."""
    nearest = _nearest(list(keys(kind)), key)
    return f"unknown key {shown(key)}" + (f"; did you mean {nearest}?" if nearest else "")


def _nearest(known: list[str], key: str) -> str | None:
    plain = key.lower().replace("-", "_")
    if _ELSEWHERE.get(plain) in known:
        return _ELSEWHERE[plain]
    leaf = plain.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return difflib.get_close_matches(plain, same, n=1, cutoff=0.0)[0]
    # A key is often given without its section.
    names = {k.rpartition(".")[2]: k for k in reversed(known)} | {k: k for k in known}
    matches = difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
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
        kept = False
        for base in cls.__bases__:
            for name, field in getattr(base, "model_fields", {}).items():
                own = cls.model_fields[name]
                if own.annotation == field.annotation and field.metadata and not own.metadata:
                    own.metadata = field.metadata
                    kept = True
        if kept:
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

"""Configs from YAML files, from `key=value` items and from plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lockstep.config.files import read_text
from lockstep.config.parsing import parse_yaml, shown
from lockstep.config.section import Section, explain, unknown_key
from lockstep.config.train_config import TrainConfig
from lockstep.errors import ConfigError

Config = TypeVar("Config", bound=TrainConfig)
AnySection = TypeVar("AnySection", bound=Section)


def override(config: Config, overrides: Iterable[str], source: str = "command line") -> Config:
    """A new config with `key=value` items applied; keys may be dotted, values are YAML.

    Raises:
        ConfigError: an item has no `=`, a key is unknown or a value is of the wrong type.
    """
    data = config.model_dump(exclude_unset=config.is_completed)
    items = list(overrides)
    chosen = [item for item in items if item.partition("=")[0] == "preset"]
    if chosen and "preset" in type(config).model_fields:
        # Keys that were not set explicitly get the values of the preset.
        name = chosen[-1].partition("=")[2]
        given = config.model_dump(exclude_unset=True) | {"preset": name}
        data = build(type(config), given, source).model_dump()
    for item in items:
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


def with_keys(config: Config, keys: Mapping[str, Any], source: str) -> Config:
    """A new config with other values of some keys, which keyword arguments have named.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """
    if not keys:
        return config
    return build(type(config), config.model_dump(exclude_unset=True) | dict(keys), source)


def override_data(config: Config, overrides: Iterable[str]) -> Config:
    """As `override`, for the config of a trained model: its data may change, the model may not.

    Raises:
        ConfigError: as `override`, or a key that is marked `OF_MODEL` has another value.
    """
    changed = override(config, overrides)
    here, there = changed.model_dump(mode="json"), config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        is_of_model = isinstance(extra, dict) and extra.get("of_model") is True
        if is_of_model and here[name] != there[name]:
            raise ConfigError(
                f"command line: {name}={shown(here[name])}: the model was trained with "
                f"{name}={shown(there[name])}, which says what it is; leave the key out, or train "
                "another model with it"
            )
    return changed


def load(kind: type[AnySection], path: Path) -> AnySection:
    """The config in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not fit `kind`.
    """
    return build(kind, read_keys(path), str(path))


def read_keys(path: Path) -> dict[str, Any]:
    """The keys and values in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else.
    """
    try:
        data = parse_yaml(read_text(path, follow_links=True))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold keys and values, holds a {type(data).__name__}")
    return data


def build(kind: type[AnySection], data: Mapping[str, Any], source: str) -> AnySection:
    """A validated config from plain data; errors name `source`, the key and the value.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(kind, e, source) for e in error.errors())) from None


def _set(data: dict[str, Any], key: str, value: Any, kind: type[TrainConfig], source: str) -> None:
    *sections, leaf = key.split(".")
    target: dict[str, Any] = data
    section: type[BaseModel] | None = kind
    for name in sections:
        section = _section(section, name)
        # A section that an earlier item has set as a whole may lack keys: they get their defaults.
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
    found = field.annotation if field else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None

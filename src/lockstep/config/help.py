"""Descriptions of the keys of a config: their types, defaults and meanings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

_MOST_SHOWN = 60
_NAMES: Mapping[Any, str] = MappingProxyType({str: "text", Path: "path", NoneType: "null"})
_NUMBER_WORDS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        name: with its sections, separated by dots.
        type: its type in words; values in backquotes.
        default: default as in JSON; None also for a key that has none.
        is_needed: whether it has no default.
        is_outcome: whether it can change the result.
        meaning: one paragraph; empty if its class has no description.
    """

    name: str
    type: str
    default: Any
    is_needed: bool
    is_outcome: bool
    meaning: str

    @property
    def shown(self) -> str:
        """The default as it is written on the command line; shortened if it is long."""
        if self.is_needed:
            return "needed"
        if isinstance(self.default, str) and self.default:
            return self.default
        text = json.dumps(self.default, ensure_ascii=False)
        if isinstance(self.default, list) and all(isinstance(v, str) for v in self.default):
            text = f"[{', '.join(self.default)}]"
        is_long = isinstance(self.default, list) and len(text) > _MOST_SHOWN
        return f"{len(self.default)} names" if is_long else text


@dataclass(frozen=True)
class Group:
    """The keys of one section.

    Attributes:
        name: the section, with dots; empty for keys outside sections.
        about: what it is for, one paragraph.
        keys: in the order of their class.
        is_list: whether the section is one of a list, its keys being named without it.
    """

    name: str
    about: str
    keys: tuple[Key, ...]
    is_list: bool = False


def describe(kind: type[BaseModel]) -> list[Group]:
    """All keys of a config class: those outside sections, then each section's."""
    return list(_groups(kind, {}, "", _paragraph(kind.__doc__)))


def _groups(
    kind: type[BaseModel], values: Mapping[str, Any], name: str, about: str
) -> Iterator[Group]:
    """A section's group, and those of the sections in it.

    Args:
        kind: the section's class.
        values: its default, where that is not the class's own.
        name: the section, with dots; empty for the outermost.
        about: what it is for.
    """
    prefix = f"{name}." if name else ""
    keys, inner = [], []
    for leaf, field in kind.model_fields.items():
        default = values.get(leaf, field.get_default(call_default_factory=True))
        section, is_list = _section(field.annotation)
        if section is not None:
            start = dict(default) if isinstance(default, BaseModel) else {}
            text = _paragraph(section.__doc__)
            inner += [
                Group(g.name, g.about, g.keys, is_list)
                for g in _groups(section, start, prefix + leaf, text)
            ]
        if section is None or is_list:
            keys.append(_key(kind, leaf, field, prefix + leaf, default))
    yield Group(name, about, tuple(keys))
    yield from inner


def _key(kind: type[BaseModel], leaf: str, field: FieldInfo, name: str, default: Any) -> Key:
    extra = field.json_schema_extra
    is_outcome = not (isinstance(extra, dict) and extra.get("outcome") is False)
    is_needed = field.is_required()
    plain = None if is_needed else to_jsonable_python(default, fallback=str)
    type_name = in_words(field.annotation, field.metadata)
    return Key(name, type_name, plain, is_needed, is_outcome, _meaning(kind, leaf))


def in_words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type and its bounds in words, such as `int ≥ 1 or null`.

    Args:
        annotation: the type; may be `Annotated`.
        metadata: bounds, as pydantic keeps them.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return in_words(args[0], [*nested, *(metadata or [])])
    if origin in (Union, UnionType):
        return " or ".join(in_words(arg) for arg in args)
    if origin is Literal:
        return ", ".join(f"`{str(v).lower() if isinstance(v, bool) else v}`" for v in args)
    if origin in (tuple, list) and args:
        is_open = origin is list or args[-1] is Ellipsis
        many = "list" if is_open else _NUMBER_WORDS[len(args)] if len(args) < 5 else str(len(args))
        return f"{many} of {in_words(args[0])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "sections"
    name = str(_NAMES.get(annotation) or getattr(annotation, "__name__", annotation))
    return _bounded(name, metadata or [])


def _bounded(name: str, metadata: list[Any]) -> str:
    bounds = {
        bound: getattr(m, bound) for m in metadata for bound in ("ge", "gt", "le", "lt")
        if getattr(m, bound, None) is not None
    }  # fmt: skip
    if name == "int" and "gt" in bounds:
        bounds["ge"] = bounds.pop("gt") + 1
    low = next(((bounds[b], sign) for b, sign in (("ge", "≤"), ("gt", "<")) if b in bounds), None)
    high = next(((bounds[b], sign) for b, sign in (("le", "≤"), ("lt", "<")) if b in bounds), None)
    if low and not high:
        return f"{name} {'≥' if low[1] == '≤' else '>'} {_number(low[0])}"
    left = f"{_number(low[0])} {low[1]} " if low else ""
    return left + name + (f" {high[1]} {_number(high[0])}" if high else "")


def _number(value: float) -> str:
    is_power = isinstance(value, int) and value >= 1 << 16 and not value & (value - 1)
    return f"2^{int(value).bit_length() - 1}" if is_power else f"{value:g}"


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The class of a section, if a key is one, and whether the key is a list of them."""
    args = get_args(annotation)
    is_list = get_origin(annotation) in (tuple, list) and bool(args)
    inner = args[0] if is_list else annotation
    is_section = inspect.isclass(inner) and issubclass(inner, BaseModel)
    return (inner, is_list) if is_section else (None, False)


def _meaning(kind: type[BaseModel], leaf: str) -> str:
    """The description of a key in a class, or in the nearest of its bases that has one."""
    for base in kind.__mro__:
        field = getattr(base, "model_fields", {}).get(leaf) if base is not BaseModel else None
        if field is not None and field.description:
            return _paragraph(field.description)
    return ""


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())

"""Whether a task's code asks where the run ends: then its result may depend on that.

A run may go on for longer than it was begun for only if nobody knew how long that was. So what a
task and its hooks get is a config that notes who reads `epochs` or `steps`, by whatever way.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from typing import Any, TypeVar

from lockstep.config import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)

_TELLING = {"epochs": "config.epochs", "steps": "config.steps", "__dict__": "the whole config"}
"""Attributes that tell where a run ends. All that reads or copies a config as a whole, such as
`model_dump`, `repr` and `hash`, reads `__dict__`."""

TOTAL_STEPS = "run.total_steps"

_TRAVELLING = (*_TELLING.values(), TOTAL_STEPS)
"""What ranks tell one another in each step; all else that is noted, all of them know anyway."""

_SLOTS = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")


class Asked:
    """What the code of a task and of its hooks has read that tells where the run ends.

    Attributes:
        names: what was read, for messages.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, names: Iterable[str]) -> None:
        """Note what was read."""
        self.names |= {*names}

    @property
    def bits(self) -> int:
        """What was read, as a number that a step's header has a place for."""
        if not self.names:
            return 0
        return sum(1 << place for place, name in enumerate(_TRAVELLING) if name in self.names)

    def add_bits(self, bits: int) -> None:
        """Note what was read on another rank, by its `bits`."""
        self.add(name for place, name in enumerate(_TRAVELLING) if bits >> place & 1)


def watched(config: Config, asked: Asked) -> Config:
    """A config of the same values and class that notes what is read of it."""
    kind = type(plain(config))

    def read(self: Config, name: str) -> Any:
        if name in _TELLING:
            asked.add([_TELLING[name]])
        return kind.__getattribute__(self, name)

    def equals(self: Config, other: object) -> bool:
        asked.add([_TELLING["__dict__"]])
        return isinstance(other, TrainConfig) and plain(self) == plain(other)

    def reduced(self: Config) -> tuple[Any, ...]:
        asked.add([_TELLING["__dict__"]])
        return plain, (plain(self),)  # pickle takes a class by its name, which is the plain one's

    body = {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "__getattribute__": read, "__eq__": equals, "__hash__": kind.__hash__,
        "__reduce__": reduced, "_asked": asked,
    }  # fmt: skip
    # Not pydantic's own way to make a class, which would build its validation anew.
    return _moved(config, ABCMeta.__new__(type(kind), kind.__name__, (kind,), body))


def plain(config: Config) -> Config:
    """A config that nobody watches, with the same values."""
    kind = type(config)
    return config if asked_of(config) is None else _moved(config, kind.__mro__[1])


def asked_of(config: TrainConfig) -> Asked | None:
    """What was read of a config that `watched` has made; None for any other."""
    asked: Asked | None = type(config).__dict__.get("_asked")
    return asked


def _moved(config: Config, kind: Any) -> Config:
    """An instance of another class with the values of a config, of which nothing is noted."""
    moved: Config = kind.__new__(kind)
    object.__setattr__(moved, "__dict__", dict(object.__getattribute__(config, "__dict__")))
    for name in _SLOTS:
        object.__setattr__(moved, name, object.__getattribute__(config, name))
    return moved

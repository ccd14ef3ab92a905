"""Tasks with another config, attributes of tasks, and configs that note reads of a run's length.

A run can be made longer only if no code has used its length. So a task and its hooks get a config
that notes each read of `epochs` or `steps`, in any way.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.engine.task import Task, check_config
from lockstep.errors import TaskError

Config = TypeVar("Config", bound=TrainConfig)
TOTAL_STEPS = "run.total_steps"

_LENGTH = {"epochs": "config.epochs", "steps": "config.steps", "__dict__": "the whole config"}
"""Attributes that tell a run's length. Whatever reads or copies a config as a whole, such as
`model_dump`, `repr` and `hash`, reads `__dict__`."""

_SENT = (*_LENGTH.values(), TOTAL_STEPS)
"""What ranks send one another in each step; anything else that is noted is the same on all."""
_SLOTS = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")


def with_config(task: Task, config: TrainConfig) -> Task:
    """The task with another config; a new task if `__init__` may have used the present one.

    Raises:
        TaskError: `config` is not of the task's own config class; or a new task would be needed,
            and `__init__` takes something else than `config`.
    """
    kind = type(task)
    check_config(kind, config)
    if plain(config) == plain(task.config):
        return task
    if kind.__init__ is not Task.__init__:
        new = rebuilt(task, config)
        if new is not None:
            return new
        own = kind.Config.model_fields.keys() - TrainConfig.model_fields.keys()
        changed = sorted(k for k in own if getattr(config, k) != getattr(task.config, k))
        if changed:
            key = changed[0]
            raise TaskError(
                f"{key}={getattr(config, key)}: {kind.__name__}.__init__ may have used "
                f"{key}={getattr(task.config, key)} already; let it take just the config, "
                "`def __init__(self, config=None)`, so that a new task can be made"
            )
    task.config = config
    return task


def with_watched_config(task: Task, config: TrainConfig) -> Task:
    """As `with_config`, and the task's config notes whether its code reads the run's length.

    Raises:
        TaskError: see `with_config`.
    """
    if length_reads(task.config) is not None and config == plain(task.config):
        return task
    reads = LengthReads()
    seen = watched(config, reads)
    made = with_config(task, seen)
    if made is task and type(task).__init__ is not Task.__init__:
        # It may have read anything of the config it was made with.
        reads.add([f"{type(task).__name__}.__init__ (made by a script)"])
    made.config = seen
    return made


def rebuilt(task: Task, config: TrainConfig) -> Task | None:
    """Another task of the same class; None if its `__init__` takes something else than `config`."""
    kind = type(task)
    takes = [*inspect.signature(kind).parameters]
    return kind(config) if takes == ["config"] else None


class LengthReads:
    """What the code of a task and of its hooks has read that tells the run's length.

    Attributes:
        names: what was read, for messages.
        bits: what was read, as a number for a step's header.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.bits = 0

    def add(self, names: Iterable[str]) -> None:
        """Note what was read."""
        self.names |= {*names}
        self.bits = sum(1 << place for place, name in enumerate(_SENT) if name in self.names)

    def share(self, transport: Transport) -> None:
        """Note on all ranks what was read on any; a collective."""
        if transport.size > 1:
            for names in transport.gather_json(sorted(self.names)):
                self.add(names)

    def add_bits(self, bits: int) -> None:
        """Note what was read on another rank, by its `bits`."""
        self.add(name for place, name in enumerate(_SENT) if bits >> place & 1)


def watched(config: Config, reads: LengthReads) -> Config:
    """A config with the same values and class that notes what is read of it."""
    kind = type(plain(config))

    def read(self: Config, name: str) -> Any:
        if name in _LENGTH:
            reads.add([_LENGTH[name]])
        return kind.__getattribute__(self, name)

    def equals(self: Config, other: object) -> bool:
        reads.add([_LENGTH["__dict__"]])
        return isinstance(other, TrainConfig) and plain(self) == plain(other)

    def reduced(self: Config) -> tuple[Any, ...]:
        reads.add([_LENGTH["__dict__"]])
        return plain, (plain(self),)  # pickle takes a class by its name, which is the plain one's

    body = {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "__getattribute__": read, "__eq__": equals, "__hash__": kind.__hash__,
        "__reduce__": reduced, "_reads": reads,
    }  # fmt: skip
    # Not by pydantic's own metaclass, which would rebuild the validation.
    return _moved(config, ABCMeta.__new__(type(kind), kind.__name__, (kind,), body))


def plain(config: Config) -> Config:
    """The config with the same values that notes nothing."""
    kind = type(config)
    return config if length_reads(config) is None else _moved(config, kind.__mro__[1])


def length_reads(config: TrainConfig) -> LengthReads | None:
    """What was read of a config that `watched` has made; None for any other."""
    reads: LengthReads | None = type(config).__dict__.get("_reads")
    return reads


def _moved(config: Config, kind: Any) -> Config:
    """An instance of another class with the values of a config, without noting a read."""
    moved: Config = kind.__new__(kind)
    object.__setattr__(moved, "__dict__", dict(object.__getattribute__(config, "__dict__")))
    for name in _SLOTS:
        object.__setattr__(moved, name, object.__getattribute__(config, name))
    return moved


def has_lookups(task: Task) -> bool:
    """Whether a task says which rows of tables a batch needs."""
    return type(task).lookups is not Task.lookups


def own_collate(task: Task) -> Callable[[list[Any]], Any] | None:
    """The task's `collate` if it has one of its own."""
    inherited = getattr(task.collate, "__func__", None) is Task.collate
    return None if inherited else task.collate


def is_scratch(task: Task, path: str) -> bool:
    """Whether a value may change between steps, since the task names it or a whole that it is in.

    Raises:
        TaskError: `scratch` is not a tuple of strings.
    """
    return is_part_of(path, scratch_paths(task))


def scratch_paths(task: Task) -> tuple[str, ...]:
    """The values, and wholes with values, that may change between steps, as the task declares.

    Raises:
        TaskError: `scratch` is not a tuple of strings.
    """
    return _texts(task, "scratch", "paths", "task.calls")


def is_part_of(path: str, wholes: Iterable[str]) -> bool:
    """Whether a path is one of some others, or lies below one of them."""
    return not outside({path: ""}, wholes)


def outside(texts: Mapping[str, str], wholes: Iterable[str]) -> dict[str, str]:
    """Those of some texts by path whose path is none of some others, and lies below none."""
    names = {*wholes}
    below = tuple(f"{name}{sign}" for name in names for sign in ".[!")
    return {p: text for p, text in texts.items() if p not in names and not p.startswith(below)}


def data_buffers(task: Task, model: nn.Module) -> set[str]:
    """The names of the buffers of the model that are set from the data, as the task declares.

    Raises:
        TaskError: `data_buffers` is not a tuple of strings, or one of them matches no buffer.
    """
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    found: set[str] = set()
    for pattern in _texts(task, "data_buffers", "names", "mean"):
        named = [name for name in buffers if fnmatchcase(name, pattern)]
        if not named:
            raise TaskError(
                f"{type(task).__name__}.data_buffers: {pattern!r} is the name of no buffer of the "
                f"model; it has {', '.join(buffers) or 'none'}"
            )
        found.update(named)
    return found


def _texts(task: Task, attribute: str, items: str, example: str) -> tuple[str, ...]:
    """The value of a task's attribute that must be a tuple of strings.

    Args:
        task: task that has it.
        attribute: name of the attribute.
        items: what the strings are, for the message.
        example: one of them, for the message.
    """
    texts: object = getattr(task, attribute)
    if not isinstance(texts, tuple) or not all(isinstance(one, str) for one in texts):
        hint = (texts,) if isinstance(texts, str) else (example,)
        raise TaskError(
            f"{type(task).__name__}.{attribute}: must be a tuple of {items}, is {texts!r}; write "
            f"`{attribute} = {hint!r}`"
        )
    return texts

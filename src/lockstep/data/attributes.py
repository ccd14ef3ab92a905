"""Attributes that one pass sets and another one reads: their values depend on the number of ranks.

A pass is the work on one microbatch or on one batch of an evaluation: fetching its samples and
computing it. An attribute that a pass sets for itself does no harm. One that another pass reads is
state, and the order of passes in a process depends on the number of ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

_ABSENT: Any = object()


@dataclass(eq=False)
class PassAttribute:
    """An attribute that a pass has set.

    Attributes:
        path: its name for users, such as `task.mean`.
        owner: object that has it.
        name: its name in that object.
        before: last value that was set outside of passes, if any.
        set_by: pass that has set it; None if it was set outside of passes afterwards.
        is_trusted: whether a check has shown that its present value changes no result.
        num_trusted: number of values for which a check has shown that.
    """

    path: str
    owner: object
    name: str
    before: Any
    set_by: Hashable = None
    is_trusted: bool = False
    num_trusted: int = 0

    def reset(self) -> None:
        """Give the attribute the value that it had before any pass set it."""
        with suppress(AttributeError):  # it may be absent already
            if self.before is _ABSENT:
                object.__delattr__(self.owner, self.name)
            else:
                object.__setattr__(self.owner, self.name, self.before)


class AttributeGuard:
    """Notices, in any step, that a pass reads an attribute that another pass has set.

    `nn.Module` and the classes of the watched objects get a `__setattr__` and a `__delattr__` that
    record what a pass sets. From then on, reads of the attribute go through a descriptor, so code
    that sets no attributes is as quick as before. `close` restores the classes.

    Without a call of `watch` it notices nothing.

    Attributes:
        now: the present pass; None outside of passes.
        read: attributes that passes have read and other passes had set, until it is emptied.
        num_modes_set: how often the mode of a module, of any in this process, was set.
    """

    def __init__(self) -> None:
        self.now: Hashable = None
        self.num_modes_set = 0
        self.read: dict[PassAttribute, None] = {}
        self._is_scratch: Callable[[str], bool] = bool
        self._watched: dict[int, tuple[str, object]] = {}
        self._set: dict[tuple[int, str], PassAttribute] = {}
        self._cleared: list[PassAttribute] = []
        self._undo: list[Callable[[], None]] = []

    def watch(self, objects: Mapping[str, object], is_scratch: Callable[[str], bool]) -> None:
        """Begin to watch objects.

        Args:
            objects: objects whose classes can be changed, by path.
            is_scratch: whether the user has declared that no result depends on a path.
        """
        self._is_scratch = is_scratch
        # The objects are kept alive, so that an id stays with its object.
        self._watched = {id(value): (path, value) for path, value in objects.items()}
        # `nn.Module` first: the plain functions of classes that inherit it are then the new ones.
        for kind in dict.fromkeys([nn.Module, *map(type, objects.values())]):
            self._watch_class(kind)

    def clear(self, attributes: Iterable[PassAttribute]) -> None:
        """Let each pass, until `leave`, begin with attributes as they were before passes set them.

        Args:
            attributes: those of `read`.
        """
        self._cleared = list(attributes)

    def enter(self, at: Hashable) -> None:
        """Begin a pass, or continue the present one."""
        if self._cleared and at != self.now:
            for attribute in self._cleared:
                attribute.reset()
                attribute.set_by = None
        self.now = at

    def leave(self) -> None:
        """End the present pass."""
        self.now = None
        self._cleared = []

    @property
    def paths(self) -> list[str]:
        """The paths of all attributes that passes have set."""
        return [attribute.path for attribute in self._set.values()]

    def close(self) -> None:
        """Restore all classes."""
        self.leave()
        while self._undo:
            self._undo.pop()()
        self._watched, self._set, self.read = {}, {}, {}

    def _watch_class(self, kind: type) -> None:
        plain_set: Any = kind.__setattr__
        plain_delete: Any = kind.__delattr__

        def set_attribute(owner: object, name: str, value: object) -> None:
            self.num_modes_set += name == "training"
            if id(owner) in self._watched:
                self._note_set(owner, name, value)
            plain_set(owner, name, value)

        def delete_attribute(owner: object, name: str) -> None:
            if id(owner) in self._watched:
                self._note_set(owner, name, _ABSENT)
            plain_delete(owner, name)

        self._put(kind, "__setattr__", set_attribute)
        self._put(kind, "__delattr__", delete_attribute)

    def _put(self, kind: type, name: str, value: object) -> None:
        """Set an attribute of a class until `close`; classes that refuse stay as they are."""
        previous = vars(kind).get(name, _ABSENT)

        def undo() -> None:
            if previous is _ABSENT:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, previous)

        with suppress(TypeError, AttributeError):
            type.__setattr__(kind, name, value)
            self._undo.append(undo)

    def _note_set(self, owner: object, name: str, value: object) -> None:
        attribute = self._set.get((id(owner), name))
        if self.now is None:
            if attribute is not None:
                attribute.set_by, attribute.before = None, value
            return
        if attribute is None:
            path = f"{self._watched[id(owner)][0]}.{name}"
            if name == "training" or self._is_scratch(path) or _is_part_of_module(owner, name):
                return
            before = _present(owner, name)
            attribute = PassAttribute(path, owner, name, before)
            if not self._watch_reads(type(owner), name):
                return
            self._set[id(owner), name] = attribute
        attribute.set_by = self.now
        attribute.is_trusted = False

    def _watch_reads(self, kind: type, name: str) -> bool:
        """Let reads of a class's attribute go through a descriptor; whether that is possible."""
        plain = next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), _ABSENT)
        if isinstance(plain, WatchedAttribute):
            return True
        is_slot = isinstance(plain, types.MemberDescriptorType)
        if hasattr(type(plain), "__set__") and not is_slot:
            return False  # a property, whose own attributes are watched
        self._put(kind, name, WatchedAttribute(self._note_read, name, plain, is_slot))
        return isinstance(vars(kind).get(name), WatchedAttribute)

    def _note_read(self, owner: object, name: str) -> None:
        attribute = self._set.get((id(owner), name))
        if attribute is None or self.now is None or attribute.set_by in (None, self.now):
            return
        if not attribute.is_trusted:
            self.read[attribute] = None


class WatchedAttribute:
    """A descriptor in place of an attribute, which reports each read.

    Attributes:
        plain: what the class has under that name otherwise, if anything.
    """

    def __init__(
        self, note_read: Callable[[object, str], None], name: str, plain: Any, is_slot: bool
    ) -> None:
        self._note_read = note_read
        self._name = name
        self.plain = plain
        self._is_slot = is_slot

    @property
    def is_empty(self) -> bool:
        """Whether the class itself has nothing under that name."""
        return self.plain is _ABSENT

    def __get__(self, owner: object | None, kind: type | None = None) -> Any:
        if owner is not None:
            self._note_read(owner, self._name)
            if self._is_slot:
                return self.plain.__get__(owner, kind)
            inside = object.__getattribute__(owner, "__dict__")
            if self._name in inside:
                return inside[self._name]
        if self.plain is _ABSENT:
            which = kind if owner is None else type(owner)
            name = which.__name__ if which is not None else "object"
            raise AttributeError(f"{name!r} object has no attribute {self._name!r}")
        bind = getattr(type(self.plain), "__get__", None)
        return bind(self.plain, owner, kind) if bind is not None else self.plain

    def __set__(self, owner: object, value: object) -> None:
        if self._is_slot:
            self.plain.__set__(owner, value)
        else:
            object.__getattribute__(owner, "__dict__")[self._name] = value

    def __delete__(self, owner: object) -> None:
        if self._is_slot:
            self.plain.__delete__(owner)
            return
        inside = object.__getattribute__(owner, "__dict__")
        if self._name not in inside:
            raise AttributeError(self._name)
        del inside[self._name]


def _present(owner: object, name: str) -> Any:
    """The value of an object's own attribute, without calling any code of its class."""
    with suppress(AttributeError):
        inside = object.__getattribute__(owner, "__dict__")
        if name in inside:
            return inside[name]
    slot = getattr(type(owner), name, None)
    if isinstance(slot, types.MemberDescriptorType):
        with suppress(AttributeError):
            return slot.__get__(owner)
    return _ABSENT


def _is_part_of_module(owner: object, name: str) -> bool:
    """Whether it is a parameter, buffer or module of a module; other code checks those."""
    inside = getattr(owner, "__dict__", {})
    return any(name in inside.get(part, ()) for part in ("_parameters", "_buffers", "_modules"))

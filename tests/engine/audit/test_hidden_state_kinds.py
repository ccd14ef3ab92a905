"""Objects of many kinds may hold state; a look sees it change, and changes nothing itself."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import gc
import hashlib
import io
import itertools
import mmap
import multiprocessing
import random
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.sections import OptimizerConfig
from lockstep.engine.audit.hidden_state import hidden_state

Change = Callable[[Any], object]


class Key:
    """Something that can be referred to weakly."""


class Named(dict[str, int]):
    """A dict with attributes."""


class Numbered(list[int]):
    """A list with attributes."""


KEY = Key()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def box(maxsize: int | None) -> Callable[[int], list[int]]:
    @functools.lru_cache(maxsize)
    def boxed(number: int) -> list[int]:
        return [number]

    boxed(1)
    return boxed


def table() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table seen (number)")
    return connection


def local() -> threading.local:
    made = threading.local()
    made.count = 0
    return made


def appended(numbers: list[int] = []) -> None:  # noqa: B006
    numbers.append(1)


def advance(iterator: Any) -> None:
    next(iterator)


def start_over(value: Any) -> None:
    value[0] = b"x" if isinstance(value[0], bytes) else 120


KINDS: dict[str, tuple[Callable[[], Any], Change]] = {
    "bytes in memory": (io.BytesIO, lambda v: v.write(b".")),
    "text in memory": (io.StringIO, lambda v: v.write(".")),
    "place in a file in memory": (lambda: io.BytesIO(b"ab"), lambda v: v.read(1)),
    "hash": (hashlib.sha256, lambda v: v.update(b".")),
    "another hash": (hashlib.blake2b, lambda v: v.update(b".")),
    "number of C": (lambda: ctypes.c_int(3), lambda v: setattr(v, "value", 4)),
    "array of C": (lambda: (ctypes.c_int * 3)(), start_over),
    "view of memory": (lambda: memoryview(bytearray(3)), start_over),
    "mapped memory": (lambda: mmap.mmap(-1, 10), start_over),
    "shared number": (lambda: multiprocessing.Value("i", 3), lambda v: setattr(v, "value", 4)),
    "data base": (table, lambda v: v.execute("insert into seen values (1)")),
    "attribute of a thread": (local, lambda v: setattr(v, "count", 1)),
    "variable of a context": (lambda: VARIABLE, lambda v: v.set(v.get() + 1)),
    "weak keys": (
        lambda: weakref.WeakKeyDictionary({KEY: 1}),
        lambda v: v.__setitem__(KEY, 2),
    ),
    "result of a cache": (lambda: box(None), lambda v: v(1).append(2)),
    "result of a bounded cache": (lambda: box(4), lambda v: v(1).append(2)),
    "list iterator": (lambda: iter([1, 2]), advance),
    "iterator of a dict": (lambda: iter({1: 2, 3: 4}.items()), advance),
    "cycle": (lambda: itertools.cycle([1, 2]), advance),
    "zip": (lambda: zip([1, 2], [3, 4], strict=True), advance),
    "enumerate": (lambda: enumerate([1, 2]), advance),
    "map": (lambda: map(str, [1, 2]), advance),
    "chain": (lambda: itertools.chain([1, 2], [3]), advance),
    "slice": (lambda: itertools.islice([1, 2], 2), advance),
    "default of an argument": (lambda: [appended], lambda v: v[0]()),
    "first default": (lambda: [lambda a: a], lambda v: setattr(v[0], "__defaults__", (1,))),
    "method of NumPy's generator": (lambda: np.random.default_rng(0).random, lambda v: v()),
    "method of Python's generator": (lambda: random.Random(0).random, lambda v: v()),
    "method of a list": (lambda: [].append, lambda v: v(1)),
    "attribute of a dict": (Named, lambda v: setattr(v, "count", 1)),
    "attribute of a list": (Numbered, lambda v: setattr(v, "count", 1)),
    "key of a config": (OptimizerConfig, lambda v: vars(v).__setitem__("weight_decay", 0.5)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_any_kind_is_seen(kind: str) -> None:
    make, change = KINDS[kind]
    roots = {"value": make()}
    first = hidden_state(roots)
    assert first
    assert hidden_state(roots) == first
    change(roots["value"])
    assert hidden_state(roots) != first


def test_a_look_takes_nothing_from_an_iterator() -> None:
    lists: list[Any] = [iter([1, 2]), zip([1, 2], strict=True), itertools.cycle([1, 2])]
    hidden_state({"lists": lists})
    assert [next(iterator) for iterator in lists] == [1, (1,), 1]


def test_what_a_thread_keeps_for_itself_is_not_another_one_s() -> None:
    mine = local()
    other = threading.Thread(target=lambda: setattr(mine, "count", 9))
    other.start()
    other.join()
    assert hidden_state({"mine": mine}) == {"mine.count": "0"}


def test_a_look_leaves_a_tensor_free_to_give_back_its_memory() -> None:
    """Parameters of blocks do between their passes (`sharding=parameters`)."""
    tensor = torch.arange(8.0)
    hidden_state({"tensor": tensor})
    tensor.untyped_storage().resize_(0)  # an error once numpy has had it


def test_a_class_that_was_looked_at_is_not_kept() -> None:
    """With its functions it may hold much else, as one of a notebook's cell does."""

    def look() -> weakref.ref[type]:
        class Here(dict[str, int]):
            count = 1

        hidden_state({"value": [Here(), Here]})
        return weakref.ref(Here)

    kind = look()
    gc.collect()
    assert kind() is None

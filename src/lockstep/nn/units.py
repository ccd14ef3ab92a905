"""Which parts of a model are units of slices or blocks of stages, said from outside of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from lockstep.errors import TaskError
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import row_of, set_row

_Model = TypeVar("_Model", bound=nn.Module)
_FEWEST = 2
_MOST_NAMED = 8


def units(model: _Model, names: Sequence[str] = ()) -> _Model:
    """Name the parts of a model whose parameters are together in memory (`sharding=parameters`).

    What is in no unit is together too: what is used before the first unit, between two, and behind
    the last one. The model computes what it computed, and parameters keep their names.

        lockstep.nn.units(model, ["encoder.layers", "decoder.layers"])

    Args:
        model: a model that is no `Pipeline`; marked in place.
        names: names of modules, or glob patterns of names. Of a `ModuleList` or `Sequential` of
            modules of one class each item is a unit. By default all outermost such rows.

    Returns:
        The model.

    Raises:
        TaskError: a pattern matches nothing, or units overlap, share a module or are not alike.
    """
    if not names:
        found = rows_in(model)
        if not found:
            raise TaskError(
                f"units: the {type(model).__name__} has no ModuleList or Sequential of modules of "
                f"one class; name its units, such as {_named(model)}"
            )
        names = found
    elif isinstance(names, str):
        raise TaskError(f"units: names must be a list, such as [{names!r}]")
    chosen: list[str] = []
    for pattern in names:
        for name in _matching(model, pattern, "units"):
            chosen += _items(model, name, "units")
    return _marked(model, list(dict.fromkeys(chosen)), "units", has_stages=False)


def stages(model: _Model, row: str) -> _Model:
    """Name the row of blocks of a model that stages are made of (`mesh.pp`).

    A block takes what the one before has returned. The first stage also computes what the model
    does before the row, and the last one what it does behind it. Random numbers that a block draws
    depend on its number. The blocks are units of `sharding=parameters` as well. For models of
    transformers:

        lockstep.nn.stages(LlamaForCausalLM(config), "model.layers")
        lockstep.nn.stages(GPT2LMHeadModel(config), "transformer.h")
        lockstep.nn.stages(BertForMaskedLM(config), "bert.encoder.layer")

    Args:
        model: a model that is no `Pipeline`; marked in place.
        row: name of a `ModuleList` or `Sequential` of modules of one class, which the model calls
            one after another, each once.

    Returns:
        The model.

    Raises:
        TaskError: there is no such row, or its modules are not alike.
    """
    if _matching(model, row, "stages") != [row]:
        raise TaskError(f"stages: {row!r} is a pattern; name one of {_rows_named(model)}")
    items = _items(model, row, "stages")
    if items == [row]:
        raise TaskError(
            f"stages: {row} is no ModuleList or Sequential of at least {_FEWEST} modules; there "
            f"are {_rows_named(model)}"
        )
    return _marked(model, items, "stages", has_stages=True)


def found_row(model: nn.Module) -> ModuleRow | None:
    """A row of the units that `units` would find, without marking the model; None without any."""
    items = [item for row in rows_in(model) for item in _items(model, row, "units")]
    return ModuleRow(model, items, was_found=True) if items else None


def rows_in(model: nn.Module) -> list[str]:
    """Names of the outermost rows: lists and sequences of modules of one class."""
    rows: list[str] = []
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if _is_row(module) and _kinds(module) == 1:
            rows.append(name)
        else:
            prefix = f"{name}." if name else ""
            waiting += [(prefix + key, child) for key, child in module.named_children()][::-1]
    return rows


def _is_row(module: nn.Module) -> bool:
    items = list(module.children())
    are_apart = len(items) == len(module._modules)
    has_parameters = all(any(True for _ in item.parameters()) for item in items)
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    return is_list and len(items) >= _FEWEST and are_apart and has_parameters


def _kinds(module: nn.Module) -> int:
    return len({type(item) for item in module.children()})


def _matching(model: nn.Module, pattern: str, what: str) -> list[str]:
    names = fnmatch.filter([name for name, _ in model.named_modules()], pattern)
    if not names:
        raise TaskError(
            f"{what}: {pattern!r}: no module has such a name; there are {_rows_named(model)}"
        )
    return names


def _items(model: nn.Module, name: str, what: str) -> list[str]:
    """The items of a row, by name; a module that is no row by itself."""
    module = model.get_submodule(name)
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module._modules) < _FEWEST:
        return [name]
    if _kinds(module) > 1:
        classes = ", ".join(dict.fromkeys(type(item).__name__ for item in module.children()))
        raise TaskError(
            f"{what}: {name or 'the model'} is a row of unlike modules ({classes}); name units by "
            "lockstep.nn.units one by one, or for stages write a lockstep.nn.Pipeline"
        )
    prefix = f"{name}." if name else ""
    return [prefix + key for key in module._modules]


def _marked(model: _Model, names: list[str], what: str, has_stages: bool) -> _Model:
    if row_of(model) is not None:
        raise TaskError(
            f"{what}: the {type(model).__name__} is a row of blocks already, by Pipeline, units or "
            "stages; say it once"
        )
    _check_apart(model, names, what)
    set_row(model, ModuleRow(model, names, has_stages))
    return model


def _check_apart(model: nn.Module, names: Sequence[str], what: str) -> None:
    """Refuse units that are in one another, or have a module in common.

    Raises:
        TaskError: naming two.
    """
    if "" in names:
        raise TaskError(f"{what}: the whole model cannot be a unit; name modules in it")
    homes: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        around = [unit for unit in names if f"{name}.".startswith(f"{unit}.")]
        if len(around) > 1:
            raise TaskError(f"{what}: {around[1]} is in the unit {around[0]}; name one of them")
        home = around[0] if around else ""
        other, first = homes.setdefault(id(module), (home, name))
        if other != home:
            raise TaskError(
                f"{what}: {first} and {name} are one module in two units; units may share "
                "parameters, but not modules: build two, and let one have the other's parameters "
                "(`b.weight = a.weight`)"
            )


def _rows_named(model: nn.Module) -> str:
    rows = [name for name in rows_in(model) if name]
    return f"the rows {', '.join(rows[:_MOST_NAMED])}" if rows else _named(model)


def _named(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")

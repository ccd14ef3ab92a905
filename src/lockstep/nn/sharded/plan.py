"""Which layers of a model are cut into shards, said from outside of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from lockstep.config.parsing import shown
from lockstep.errors import TaskError
from lockstep.nn.sharded.layers import (
    DIVIDED,
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
)

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True)
class Heads:
    """Layers whose output features are attention heads, for a plan of `shard`.

    Attributes:
        divide: names of integer attributes of the module that the layer is in, such as
            `num_heads`: they are divided by the number of shards, for code that counts on them.
    """

    divide: Sequence[str] = ()


_LAYERS_OF: Mapping[str, str] = MappingProxyType(
    {
        "column": "Linear",
        "heads": "Linear",
        "row": "Linear",
        "sketched": "SKLinear",
        "sketched_row": "SKLinear",
        "vocabulary": "Embedding and Linear",
    }
)
"""The layers that each kind of a plan is for, in words."""

_OF_TORCH: Mapping[type, tuple[type[ShardedModule], ...]] = MappingProxyType(
    {
        nn.Linear: (ColumnLinear, RowLinear, VocabularyLinear),
        nn.Embedding: (VocabularyEmbedding,),
    }
)


def shard(model: _Model, plan: Mapping[str, str | Heads]) -> _Model:
    """Mark the layers of a model that `num_shards` of the config cuts into shards.

    Until they are cut they compute what they computed, and parameters keep their names. The plan
    for a block of a transformer:

        lockstep.nn.shard(model, {
            "*.q_proj": "heads", "*.k_proj": "heads", "*.v_proj": "heads", "*.o_proj": "row",
            "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row",
            "*.embed_tokens": "vocabulary", "lm_head": "vocabulary",
        })

    Args:
        model: model with layers of torch; changed in place.
        plan: by glob pattern of module names, how layers are cut: `column` and `heads` by output
            features, `row` by input features, `vocabulary` by rows of an embedding or by classes
            of an output layer. A sketched layer (`lockstep.sketch.SKLinear`) is cut by input and
            output features (`sketched`), or by input features alone (`sketched_row`).

    Returns:
        The model.

    Raises:
        TaskError: a pattern matches nothing, or a layer that cannot be cut so; or the features
            that a column layer cuts are never summed by a row layer, or the other way round.
    """
    modules = dict(model.named_modules())
    chosen: dict[str, str] = {}
    for pattern, kind in plan.items():
        names = fnmatch.filter((name for name in modules if name), pattern)
        if not names:
            there = [name for name in modules if name]
            raise TaskError(
                f"shard: {pattern!r}: no module has such a name; there are "
                f"{', '.join(there[:8])}{', …' if len(there) > 8 else ''}"
            )
        for name in names:
            word = "heads" if isinstance(kind, Heads) else kind
            if chosen.setdefault(name, word) != word:
                raise TaskError(f"shard: {name} is to be both {chosen[name]!r} and {word!r}")
            _mark(modules[name], name, word)
            if isinstance(kind, Heads):
                _divide(modules[name.rpartition(".")[0]], name.rpartition(".")[0], kind)
    _check_regions(chosen)
    return model


def _mark(module: nn.Module, name: str, kind: str) -> None:
    if isinstance(module, ShardedModule):
        if kind not in module.kinds:
            raise TaskError(f"shard: {name} is a {type(module).__name__} already")
        return
    if parametrize.is_parametrized(module):
        raise TaskError(
            f"shard: {name} is parametrized (torch.nn.utils.parametrize), so it cannot be cut; "
            "leave the layer out of the plan, or the parametrization out of the layer"
        )
    made = next((c for c in _sharded_classes(type(module)) if kind in c.kinds), None)
    if made is None:
        if kind not in _LAYERS_OF:
            raise TaskError(
                f"shard: {name}: {shown(kind)} is none of {', '.join(_LAYERS_OF)}, Heads"
            )
        raise TaskError(
            f"shard: {name}: is a {type(module).__name__}; {kind!r} is for {_LAYERS_OF[kind]}"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise TaskError(f"shard: {name}: an embedding with max_norm or sparse cannot be cut")
    # The very module, with its parameters, hooks and name.
    module.__class__ = made


def _sharded_classes(layer: type[nn.Module]) -> tuple[type[ShardedModule], ...]:
    """What a layer of exactly this class can become; a subclass may compute something else."""
    if layer in _OF_TORCH:
        return _OF_TORCH[layer]
    return layer.sharded_classes() if "sharded_classes" in vars(layer) else ()  # type: ignore[attr-defined]


def _divide(parent: nn.Module, name: str, heads: Heads) -> None:
    for attribute in heads.divide:
        value = getattr(parent, attribute, None)
        if not isinstance(value, int):
            raise TaskError(
                f"shard: {name or 'the model'}.{attribute} is {shown(value)}, not a number that "
                "could be divided among shards"
            )
    divided = getattr(parent, DIVIDED, ())
    setattr(parent, DIVIDED, tuple(dict.fromkeys([*divided, *heads.divide])))


def _check_regions(chosen: Mapping[str, str]) -> None:
    """Make sure that what is cut is made whole again nearby, and the other way round.

    Raises:
        TaskError: naming the first layer for which it is not.
    """
    rows = {name for name, kind in chosen.items() if kind in ("row", "sketched_row")}
    columns = {n for n, kind in chosen.items() if kind in ("column", "heads", "sketched")}
    for name in columns:
        if not any(_are_near(name, other) for other in rows):
            raise TaskError(
                f"shard: the output of {name} is cut into shards, and no row layer near it sums "
                "them; name the layer that takes it as 'row'"
            )
    for name in rows:
        # A sketched layer cuts what comes whole itself.
        if chosen[name] == "row" and not any(_are_near(name, other) for other in columns):
            raise TaskError(
                f"shard: {name} takes an input that is cut into shards, and no layer near it cuts "
                "one; name the layer before it as 'column' or 'heads'"
            )


def _are_near(one: str, other: str) -> bool:
    """Whether two modules are in one module, or in two that are in one."""
    return any(a == b for a in _around(one) for b in _around(other))


def _around(name: str) -> list[str]:
    parent = name.rpartition(".")[0]
    return list(dict.fromkeys([parent, parent.rpartition(".")[0]]))

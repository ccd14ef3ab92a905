"""Replacing layers of a trained model by sketched ones, by the names of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.conv import SKConv2d
from lockstep.systems.sketched.decompositions import Method
from lockstep.systems.sketched.linear import SKLinear

Dense = nn.Linear | nn.Conv2d
"""Layers that have a sketched form."""


def dense_layers(model: nn.Module, patterns: Iterable[str] = ("*",)) -> dict[str, Dense]:
    """The layers of a model that can be sketched, by dotted name.

    A layer that stands at several places is there once, under its first name.

    Args:
        model: model to look into.
        patterns: names, where `*` and `?` stand for any letters; one of them must match.

    Raises:
        ConfigError: a pattern matches no layer that can be sketched; the message has the names.
    """
    found: dict[str, Dense] = {}
    every = {
        name: module
        for name, module in model.named_modules()
        if name and type(module) in (nn.Linear, nn.Conv2d) and _is_plain(module)
    }
    for pattern in patterns:
        names = [name for name in every if fnmatchcase(name, pattern)]
        if not names:
            there = ", ".join(every) or "none"
            raise ConfigError(
                f"layers={pattern!r}: matches no layer that can be sketched (there are: {there})"
            )
        found |= {name: every[name] for name in names}
    return {name: found[name] for name in every if name in found}


def replace_layers(
    model: nn.Module,
    patterns: Iterable[str] = ("*",),
    low_rank: int | Callable[[str, Dense], int] = 16,
    num_terms: int = 1,
    method: Method = "range-finder",
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Put sketched layers in place of dense ones, in the model itself.

    Args:
        model: trained model; it is changed.
        patterns: names of layers, where `*` and `?` stand for any letters.
        low_rank: k of every layer, or a function of a layer's name and the layer.
        num_terms: number L of terms.
        method: see `SKLinear.from_dense`.
        seed: seed of the signs; layers are numbered in the order of the model.

    Returns:
        The new layers by name.

    Raises:
        ConfigError: a pattern matches nothing, or a layer cannot be sketched so; the message has
            the layer's name.
    """
    layers = dense_layers(model, patterns)
    made: dict[str, nn.Module] = {}
    for number, (name, layer) in enumerate(layers.items()):
        rank = low_rank if isinstance(low_rank, int) else low_rank(name, layer)
        made[name] = sketched(name, layer, rank, num_terms, method, seed, number)
    put(model, made)
    return made


def sketched(
    name: str,
    layer: Dense,
    low_rank: int,
    num_terms: int = 1,
    method: Method = "range-finder",
    seed: int = 0,
    number: int = 0,
) -> SKLinear | SKConv2d:
    """The sketched form of one layer.

    Raises:
        ConfigError: the layer cannot be sketched so; the message has its name.
    """
    try:
        if isinstance(layer, nn.Conv2d):
            return SKConv2d.from_dense(layer, low_rank, num_terms, method, seed=seed, layer=number)
        return SKLinear.from_dense(layer, low_rank, num_terms, method, seed=seed, layer=number)
    except ConfigError as error:
        raise ConfigError(f"layer {name}: {error}") from error


def put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers into a model, at all places of those that have these names now."""
    instead = {id(model.get_submodule(name)): new for name, new in layers.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in instead:
                parent._modules[name] = instead[id(child)]


def _is_plain(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Conv2d) or (layer.groups == 1 and layer.padding_mode == "zeros")

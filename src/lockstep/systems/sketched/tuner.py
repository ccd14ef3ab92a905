"""Replacing the layers of trained models by sketched ones: by name, or by measured cost.

`replace_layers` uses a given k and L. `measure`, `choose` and `apply` find them for each layer.
Measured times differ from run to run; the choice depends on the measurements alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.conv import SKConv2d
from lockstep.systems.sketched.decompositions import Method
from lockstep.systems.sketched.linear import SKLinear

_LEAST_S = 0.02
"""Seconds for which short passes are repeated."""

Dense = nn.Linear | nn.Conv2d
"""Layers that have a sketched form."""


def dense_layers(model: nn.Module, patterns: Iterable[str] = ("*",)) -> dict[str, Dense]:
    """The layers of a model that can be sketched, by dotted name.

    A layer that is used at several places is listed once, under its first name.

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
            raise ConfigError(
                f"layers={pattern!r}: matches no layer that can be sketched (there are: "
                f"{', '.join(every) or 'none'})"
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
        made[name] = _sketched(name, layer, rank, num_terms, method, seed, number)
    _put(model, made)
    return made


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer, and its cost.

    Attributes:
        low_rank: number k of columns of a term; 0 for the dense layer itself.
        num_terms: number L of terms; 0 for the dense layer.
        error: relative error of the layer's output on the sample, in the Frobenius norm.
        weight_error: relative error of the weight.
        parameters: numbers that are trained.
        seconds: of a forward and backward pass on the sample.
        kept: numbers that a checkpoint keeps: the parameters, and a U that was made from data.
    """

    low_rank: int
    num_terms: int
    error: float
    weight_error: float
    parameters: int
    seconds: float
    kept: int


@dataclass(frozen=True)
class Choice:
    """The way chosen for a layer.

    Attributes:
        chosen: the way to compute it; the dense one if that is best.
        dense: the layer as it is, for comparison.
    """

    chosen: Candidate
    dense: Candidate


def measure(
    layer: Dense,
    sample: Tensor,
    low_ranks: Iterable[int],
    num_terms: Iterable[int] = (1,),
    method: Method = "range-finder",
    seed: int = 0,
    repeats: int = 3,
    name: str = "layer",
) -> list[Candidate]:
    """The cost of each way to compute a layer, on a sample of its input; the dense one is first.

    Args:
        layer: trained layer.
        sample: input of the layer, as it comes in the model.
        low_ranks: values of k to try; those that are larger than the layer are left out.
        num_terms: values of L to try with each.
        method: see `SKLinear.from_dense`.
        seed: seed of the signs.
        repeats: least number of passes, of which the fastest counts.
        name: name of the layer in errors.

    Raises:
        ConfigError: the layer cannot be sketched so.
    """
    with torch.no_grad():
        exact = layer(sample)
        # The bias is the same in all of them, and would hide the error.
        without = exact if layer.bias is None else exact - _spread(layer.bias, layer)
    weight = layer.weight.detach()
    found = [Candidate(0, 0, 0.0, 0.0, *_costs(layer, sample, repeats))]
    most = max(weight[0].numel(), len(weight))
    for terms in num_terms:
        for rank in sorted({k for k in low_ranks if k <= most}):
            made = _sketched(name, layer, rank, terms, method, seed)
            with torch.no_grad():
                error = _ratio(made(sample) - exact, without)
                weight_error = _ratio(made.weight() - weight, weight)
            costs = _costs(made, sample, repeats)
            found.append(Candidate(rank, terms, error, weight_error, *costs))
    return found


def choose(
    measured: Mapping[str, Sequence[Candidate]],
    max_error: float | None = None,
    max_parameters: int | None = None,
) -> dict[str, Choice]:
    """A choice for each layer of a model, from what was measured of it.

    With `max_error`, each layer gets the fastest way whose error is at most that, and stays dense
    if none is faster. With `max_parameters`, all layers start with their smallest way; then
    parameters go where each of them lowers the squared error most, up to the limit. Of ways with
    as many parameters and as small an error, the fastest is taken.

    Args:
        measured: the result of `measure` for each layer, by its name; the dense way is first.
        max_error: greatest relative error of a layer's output.
        max_parameters: greatest number of parameters of these layers together.

    Raises:
        ConfigError: not exactly one of the limits is given, or it cannot be kept.
    """
    if (max_error is None) == (max_parameters is None):
        raise ConfigError("give one of max_error and max_parameters")
    if max_error is not None:
        if not max_error >= 0:
            raise ConfigError(f"max_error={max_error:g}: must not be negative")
        picked = {name: _fastest(ways, max_error) for name, ways in measured.items()}
    else:
        assert max_parameters is not None
        picked = _within(measured, max_parameters)
    return {name: Choice(way, measured[name][0]) for name, way in picked.items()}


def apply(
    model: nn.Module,
    plan: Mapping[str, Choice],
    method: Method = "range-finder",
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Put the chosen layers into a model; those that stay dense are left as they are.

    Returns:
        The new layers by name.

    Raises:
        ConfigError: the model has no such layer, or it cannot be sketched so.
    """
    modules = dict(model.named_modules())
    made: dict[str, nn.Module] = {}
    for number, (name, choice) in enumerate(plan.items()):
        layer = modules.get(name)
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            raise ConfigError(f"layer {name}: the model has no dense layer of that name")
        way = choice.chosen
        if way.low_rank:
            made[name] = _sketched(name, layer, way.low_rank, way.num_terms, method, seed, number)
    _put(model, made)
    return made


def _sketched(
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


def _put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace the layers of these names, wherever the model uses them."""
    instead = {id(model.get_submodule(name)): new for name, new in layers.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in instead:
                parent._modules[name] = instead[id(child)]


def _is_plain(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Conv2d) or (layer.groups == 1 and layer.padding_mode == "zeros")


def _fastest(ways: Sequence[Candidate], max_error: float) -> Candidate:
    allowed = [way for way in ways if way.error <= max_error]
    return min(allowed, key=lambda way: (way.seconds, way.parameters, way.error))


def _within(
    measured: Mapping[str, Sequence[Candidate]], max_parameters: int
) -> dict[str, Candidate]:
    """A greedy choice along the convex hulls of all layers."""
    hulls = {name: _hull(ways) for name, ways in measured.items()}
    least = sum(hull[0].parameters for hull in hulls.values())
    if least > max_parameters:
        raise ConfigError(
            f"max_parameters={max_parameters}: the smallest layers that were measured have "
            f"{least} together; allow as many, or measure smaller ones"
        )
    at = dict.fromkeys(hulls, 0)
    total = least
    steps = sorted(
        (-_gain(hull[i], hull[i + 1]), number, i)
        for number, hull in enumerate(hulls.values())
        for i in range(len(hull) - 1)
    )
    names = list(hulls)
    for _, number, i in steps:
        name = names[number]
        more = hulls[name][i + 1].parameters - hulls[name][i].parameters
        if at[name] == i and total + more <= max_parameters:
            at[name], total = i + 1, total + more
    return {name: hull[at[name]] for name, hull in hulls.items()}


def _hull(ways: Sequence[Candidate]) -> list[Candidate]:
    """The lower convex hull of squared error over parameters, by parameters."""
    hull: list[Candidate] = []
    for way in sorted(ways, key=lambda w: (w.parameters, w.error, w.seconds)):
        if hull and way.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], way):
            hull.pop()
        hull.append(way)
    return hull


def _gain(one: Candidate, two: Candidate) -> float:
    """The decrease of the squared error for each additional parameter."""
    return (one.error**2 - two.error**2) / (two.parameters - one.parameters)


def _costs(layer: nn.Module, sample: Tensor, repeats: int) -> tuple[int, float, int]:
    """Parameters, seconds, and numbers that a checkpoint keeps."""
    parameters = sum(p.numel() for p in layer.parameters())
    num_kept = sum(t.numel() for t in layer.state_dict().values() if t.is_floating_point())
    return parameters, _seconds(layer, sample, repeats), num_kept


def _seconds(layer: nn.Module, sample: Tensor, repeats: int) -> float:
    """The fastest of some forward and backward passes, after one that does not count.

    Short ones are repeated for `_LEAST_S`, since a single one may be disturbed.
    """
    sample = sample.detach().clone().requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    grad = torch.ones_like(layer(sample))
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) <= repeats or time.perf_counter() - begun < _LEAST_S:
        _synchronise(sample)
        started = time.perf_counter()
        torch.autograd.grad(layer(sample), [sample, *parameters], grad)
        _synchronise(sample)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _synchronise(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _ratio(part: Tensor, whole: Tensor) -> float:
    norm = float(whole.norm())
    return float(part.norm()) / norm if norm else 0.0


def _spread(bias: Tensor, layer: Dense) -> Tensor:
    return bias[:, None, None] if isinstance(layer, nn.Conv2d) else bias

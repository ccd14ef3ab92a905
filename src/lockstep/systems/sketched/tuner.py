"""Which layers to sketch, and with which k and L: measure, then choose, then apply.

Measuring takes time and so differs from run to run. The choice is a function of what was measured
alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.convert import Dense, put, sketched
from lockstep.systems.sketched.decompositions import Method

_LEAST_S = 0.02
"""Seconds for which short passes are repeated."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer, and what it would cost.

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
    """What was chosen for a layer.

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
    """What each way to compute a layer costs on a sample of its input; the dense one is first.

    Args:
        layer: trained layer.
        sample: input of the layer, as it comes in the model.
        low_ranks: values of k to try; those that are larger than the layer are left out.
        num_terms: values of L to try with each.
        method: see `SKLinear.from_dense`.
        seed: seed of the signs.
        repeats: least number of passes, of which the fastest counts.
        name: what errors call the layer.

    Raises:
        ConfigError: the layer cannot be sketched so.
    """
    with torch.no_grad():
        exact = layer(sample)
        # The bias is the same in all of them, and would hide the error.
        without = exact if layer.bias is None else exact - _spread(layer.bias, layer)
    weight = layer.weight.detach()
    found = [
        Candidate(0, 0, 0.0, 0.0, *_costs(layer, sample, repeats)),
    ]
    most = max(weight[0].numel(), len(weight))
    for terms in num_terms:
        for rank in sorted({k for k in low_ranks if k <= most}):
            made = sketched(name, layer, rank, terms, method, seed)
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
    """The plan for a model: a choice for each layer, from what was measured of it.

    With `max_error`, each layer gets the fastest way whose error is at most that, and stays dense
    if none is faster. With `max_parameters`, the smallest ways are taken first, then parameters are
    spent where they lower the squared error most for each of them, while the sum allows; of ways
    with as many parameters and as small an error the fastest.

    Args:
        measured: what `measure` gave, by the layer's name; the dense way is first.
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
            made[name] = sketched(name, layer, way.low_rank, way.num_terms, method, seed, number)
    put(model, made)
    return made


def _fastest(ways: Sequence[Candidate], max_error: float) -> Candidate:
    allowed = [way for way in ways if way.error <= max_error]
    return min(allowed, key=lambda way: (way.seconds, way.parameters, way.error))


def _within(
    measured: Mapping[str, Sequence[Candidate]], max_parameters: int
) -> dict[str, Candidate]:
    """Greedy along each layer's lower convex hull of squared error over parameters."""
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
    """Ways that no mix of two others beats, by parameters."""
    hull: list[Candidate] = []
    for way in sorted(ways, key=lambda w: (w.parameters, w.error, w.seconds)):
        if hull and way.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], way):
            hull.pop()
        hull.append(way)
    return hull


def _gain(one: Candidate, two: Candidate) -> float:
    """Squared error that goes for each further parameter."""
    return (one.error**2 - two.error**2) / (two.parameters - one.parameters)


def _costs(layer: nn.Module, sample: Tensor, repeats: int) -> tuple[int, float, int]:
    """Parameters, seconds, and numbers that a checkpoint keeps."""
    parameters = sum(p.numel() for p in layer.parameters())
    kept = sum(t.numel() for t in layer.state_dict().values() if t.is_floating_point())
    return parameters, _seconds(layer, sample, repeats), kept


def _seconds(layer: nn.Module, sample: Tensor, repeats: int) -> float:
    """The fastest of some forward and backward passes, after one that does not count.

    Short ones are repeated for `_LEAST_S`, since a single one may meet with anything.
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

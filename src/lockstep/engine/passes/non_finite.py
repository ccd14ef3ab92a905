"""Error messages for a loss, a gradient or its norm that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.flat.slices import Slice
from lockstep.errors import NonFiniteError, shared

_OTHERS = (
    ". A loss that reads parameters itself sees NaN for those of other ranks (mesh.tp, mesh.pp) "
    "and of blocks that are not computed just then (sharding=parameters)"
)
_UNCHANGED = "parameters and checkpoints are as after the step before"


def non_finite_loss(
    transport: Transport, step: int, losses: Mapping[int, float], is_divided: bool = False
) -> NonFiniteError:
    """Name the microbatches; a collective.

    Args:
        transport: the group of ranks.
        step: number of the step.
        losses: loss sums of this rank's microbatches by number.
        is_divided: whether a rank has a part of the parameters only.
    """
    bad = [[m, str(value)] for m, value in losses.items() if not math.isfinite(value)]
    everyone = transport.gather_json(bad)
    places = [
        f"{value} in microbatch {m} (rank {rank})"
        for rank, losses_there in enumerate(everyone)
        for m, value in losses_there
    ]
    rest = f" and {len(places) - 3} others" if len(places) > 3 else ""
    return shared(
        NonFiniteError(
            f"step {step}: the loss is {', '.join(places[:3])}{rest}; {_UNCHANGED}. Lower lr, "
            f"set clip_norm, or look at the data of this step{_OTHERS if is_divided else ''}"
        )
    )


def non_finite_gradient(
    transport: Transport,
    step: int,
    flat: FlatTensors,
    stepped: Sequence[Sequence[Slice]],
    tables: Mapping[str, Tensor],
) -> NonFiniteError:
    """Name the parameters, or the one with the greatest gradient; a collective.

    Args:
        transport: the group of ranks.
        step: number of the step.
        flat: trainable parameters in flat memory.
        stepped: slices of each segment that this rank has the gradient of.
        tables: gradients of rows of tables that this rank has, by the name of the table.
    """
    parts = [
        (entry.name, own.of(entry.range))
        for entry in flat.entries
        for own in stepped[entry.segment]
    ]
    parts += tables.items()
    names = [name for name, part in parts if not part.isfinite().all()]
    affected = sorted({n for of_rank in transport.gather_json(names) for n in of_rank})
    if affected:
        what = (
            f"the loss is finite, but not the gradient of {', '.join(affected[:3])}"
            f"{' and others' if len(affected) > 3 else ''}"
        )
    else:
        own_greatest = [(name, float(part.abs().max())) for name, part in parts if part.numel()]
        everyone = transport.gather_json(own_greatest)
        what = norm_overflows(pair for of_rank in everyone for pair in of_rank)
    return shared(NonFiniteError(f"step {step}: {what}; {_UNCHANGED}"))


def norm_overflows(greatest: Iterable[tuple[str, float]]) -> str:
    """What to say where gradients are finite, but their norm is not.

    Args:
        greatest: names of parameters, and the greatest magnitude in the gradient of each.
    """
    name, value = max(greatest, key=lambda pair: pair[1])
    return (
        f"the gradient is finite, but too large for its norm (up to {value:.3g}, in {name}), and "
        "optimizers square it; divide the loss by a constant"
    )

"""From a trained dense weight to the numbers of a sketched layer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.sketch.decompositions import rsvd
from lockstep.sketch.products import Fused, out_of_sketch

Method = Literal["range-finder", "least-squares", "copy"]
"""How a sketched layer is made from a dense one."""


def fit(weight: Tensor, parts: Fused, method: Method, unit: float, seed: int) -> dict[str, Tensor]:
    """Values for S1 and S2, and for U1 and U2 where the method makes them.

    Args:
        weight: dense weight, [in, out].
        parts: the layer's tensors, of which shapes, U and the scale are used.
        method: how.
        unit: size of an entry of U.
        seed: seed of the range finder.

    Returns:
        Tensors by name, float64.

    Raises:
        ConfigError: the weight is not finite.
    """
    if not bool(weight.isfinite().all()):
        raise ConfigError("the dense weight has values that are not finite")
    weight, rank = weight.double(), len(parts.S1)
    if method == "range-finder":
        return _from_range(weight, rank, parts.scale, seed)
    eye = torch.eye(rank, dtype=torch.float64, device=weight.device)
    U1 = out_of_sketch(eye, parts.U1.double(), parts.first_out)
    U2 = out_of_sketch(eye, parts.U2.double(), parts.first_in)
    if method == "copy":
        return {"S1": unit * U1 @ weight.t(), "S2": unit * U2 @ weight}
    # The best weight of this form is P2 W + (1 - P2) W P1, with the projectors onto U2 and U1.
    S2 = torch.linalg.pinv(U2.t()) @ weight
    rest = weight - U2.t() @ S2
    S1 = (rest @ torch.linalg.pinv(U1)).t()
    return {"S1": S1 / parts.scale, "S2": S2 / parts.scale}


def _from_range(weight: Tensor, rank: int, scale: float, seed: int) -> dict[str, Tensor]:
    """The best weight of rank 2 r, nearly: every other singular triplet for each of the terms.

    So both S1 and S2 have as large numbers, and U has the norms that random signs have; a learning
    rate that suits sketched layers suits this one. What exceeds the weight's rank is zero.
    """
    num_in, num_out = weight.shape
    found = rsvd(weight, min(2 * rank, num_in, num_out), seed=seed)
    values = {
        name: torch.zeros(rank, size, dtype=torch.float64, device=weight.device)
        for name, size in (("S1", num_in), ("S2", num_out), ("U1", num_out), ("U2", num_in))
    }
    for U, S, size, first, (kept, trained) in (
        ("U2", "S2", num_in, 0, (found.U.t(), found.V.t())),
        ("U1", "S1", num_out, 1, (found.V.t(), found.U.t())),
    ):
        count = len(kept[first::2])
        values[U][:count] = kept[first::2] * math.sqrt(size)
        factor = found.S[first::2, None] / (scale * math.sqrt(size))
        values[S][:count] = trained[first::2] * factor
    return values

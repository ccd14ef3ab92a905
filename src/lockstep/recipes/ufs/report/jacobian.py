"""The emulator's Jacobians ∂output/∂input of many rows at once, and figures of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from lockstep.recipes.ufs.model import SeaIceNet

CHUNK = 4096
"""Rows whose Jacobians are computed at a time: activations of so many stay in the cache."""

_SMALLEST_RATIO = 1e-12


def jacobians(function: Callable[[Tensor], Tensor], x: Tensor, num_outputs: int) -> Tensor:
    """Jacobians of a function that treats each row by itself.

    One reverse pass for each output gives a row of all Jacobians, since no output depends on
    another row's inputs.

    Args:
        function: function from inputs [N, in] to outputs [N, out] that treats each row by itself.
        x: inputs, [N, in].
        num_outputs: number of outputs.

    Returns:
        Jacobians [N, out, in], without gradient.
    """
    parts = [_jacobians(function, part, num_outputs) for part in torch.split(x, CHUNK)]
    return torch.cat(parts) if parts else x.new_zeros(0, num_outputs, x.shape[-1])


def _jacobians(function: Callable[[Tensor], Tensor], x: Tensor, num_outputs: int) -> Tensor:
    with torch.no_grad():
        pull = vjp(function, x)[1]
        chosen = torch.eye(num_outputs, dtype=x.dtype, device=x.device)
        cotangents = chosen[:, None].expand(-1, len(x), -1)
        (by_output,) = vmap(pull)(cotangents)
    transposed: Tensor = by_output.transpose(0, 1)
    return transposed.contiguous()


def normalised(net: SeaIceNet, x: Tensor) -> Tensor:
    """∂output/∂input [N, out, in] in units of their deviations, at normalised x [N, in]."""
    return jacobians(net, x, len(net.outputs))


def physical(net: SeaIceNet, x: Tensor) -> Tensor:
    """∂output/∂input [N, out, in] in physical units, at x [N, in] in physical units.

    It is J σ_out / σ_in, J being the normalised one.
    """
    return jacobians(net.predict, x, len(net.outputs))


class BalanceOperator:
    """The emulator linearised about a background state, as data assimilation uses it.

    `apply` is J: it maps changes of the inputs to those of the outputs. `apply_adjoint` is its
    transpose: <J δx, δy> = <δx, Jᵀ δy>. Neither computes J itself.
    """

    def __init__(self, net: SeaIceNet, background: Tensor) -> None:
        """Linearise.

        Args:
            net: network of the dtype of `background`; float64 (`net.double()`) for tests of the
                adjoint.
            background: background state in physical units, [N, in].
        """
        self._net = net
        self._background = background

    def apply(self, change: Tensor) -> Tensor:
        """J δx: changes of the inputs [N, in] to changes of the outputs [N, out], both physical."""
        with torch.no_grad():
            value_and_change = jvp(self._net.predict, (self._background,), (change,))
        result: Tensor = value_and_change[1]
        return result

    def apply_adjoint(self, change: Tensor) -> Tensor:
        """Jᵀ δy: [N, out] to [N, in], both in physical units."""
        with torch.no_grad():
            (gradient,) = vjp(self._net.predict, self._background)[1](change)
        result: Tensor = gradient
        return result


def describe(jacobian: Tensor) -> dict[str, float]:
    """Figures of normalised Jacobians [N, out, in], N at least 1.

    Returns:
        `jacobian_norm` (mean Frobenius norm), `jacobian_mean`, `jacobian_std` and `jacobian_max`
        of the entries' magnitudes, and `jacobian_condition` (greatest by least singular value of
        the matrix that all rows make together).
    """
    entries = jacobian.double()
    magnitude = entries.abs()
    singular = torch.linalg.svdvals(entries.flatten(0, 1))
    ratio = float(singular[-1] / singular[0]) if float(singular[0]) > 0 else 0.0
    return {
        "jacobian_norm": float(entries.flatten(1).norm(dim=1).mean()),
        "jacobian_mean": float(magnitude.mean()),
        "jacobian_std": float(magnitude.std(correction=0)),
        "jacobian_max": float(magnitude.max()),
        "jacobian_condition": 1 / max(ratio, _SMALLEST_RATIO),
    }


def sensitivity(jacobian: Tensor) -> Tensor:
    """The sensitivity to each input, [in]: its mean magnitude in Jacobians [N, out, in]."""
    return jacobian.double().abs().mean(dim=(0, 1))

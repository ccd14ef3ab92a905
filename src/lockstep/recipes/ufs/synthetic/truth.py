"""The synthetic sea ice's law: concentration as a known function, with its derivatives.

Ice forms where the sea is colder than an edge temperature, which falls with salinity as the
freezing point does: aice = s(-(sst - edge(sss)) / WIDTH), s the logistic function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.ufs.fields.variables import DEFAULT_INPUTS

Array = npt.NDArray[np.floating[Any]]

WIDTH = 0.25
"""Width of the transition from open water to ice, in °C."""

EDGE = -0.9
"""Temperature at which half of the sea is covered at salinity `SALINITY`, in °C."""

SALINITY = 34.0
"""Salinity, in psu, at which the edge temperature is `EDGE`."""

SALT_SLOPE = -0.0543
"""Change of the edge temperature with salinity, in °C/psu: that of the freezing point."""


def concentration(sst: Array, sss: Array) -> Array:
    """Aice in [0, 1] from temperature in °C and salinity in psu, of any shape."""
    edge = EDGE + SALT_SLOPE * (sss - SALINITY)
    # As tanh, which does not overflow.
    half: Array = 0.5 - 0.5 * np.tanh((sst - edge) / (2 * WIDTH))
    return half


def true_jacobian(
    sst: Array, sss: Array, inputs: tuple[str, ...] = DEFAULT_INPUTS
) -> npt.NDArray[np.float64]:
    """∂aice/∂input of the law, in physical units.

    Args:
        sst: sea surface temperature in °C, [N].
        sss: sea surface salinity in psu, [N].
        inputs: short names of the inputs.

    Returns:
        Derivatives [N, len(inputs)], float64; 0 for all inputs but sst and sss.
    """
    aice = concentration(sst.astype(np.float64), sss.astype(np.float64))
    slope = -aice * (1 - aice) / WIDTH
    jacobian = np.zeros((len(aice), len(inputs)))
    if "sst" in inputs:
        jacobian[:, inputs.index("sst")] = slope
    if "sss" in inputs:
        jacobian[:, inputs.index("sss")] = -slope * SALT_SLOPE
    return jacobian

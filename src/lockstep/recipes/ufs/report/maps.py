"""Maps of emulated fields: truth, emulation and their difference; pole-centred or global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.pictures import new_figure, save
from lockstep.recipes.ufs.fields.places import REGIONS
from lockstep.recipes.ufs.fields.variables import VARIABLES
from lockstep.recipes.ufs.report.scores import inside

Floats = npt.NDArray[np.floating[Any]]


def draw_map(
    path: Path,
    region: str,
    name: str,
    when: str,
    land: Floats,
    place: Floats,
    true: Floats,
    predicted: Floats,
) -> Path | None:
    """Draw one variable in one region.

    Args:
        path: path of the PNG file to write.
        region: a key of `REGIONS`; all but `global` are seen from above the pole.
        name: short name of the variable.
        when: time of the fields, as text.
        land: latitude and longitude in degrees of cells without ocean, [M, 2].
        place: latitude and longitude in degrees of the values, [N, 2].
        true: values in the files, in the variable's unit, [N].
        predicted: values by the emulator, in the variable's unit, [N].

    Returns:
        The file; None if no point is in the region.
    """
    here = inside(place[:, 0], region)
    if not here.any():
        return None
    variable = VARIABLES[name]
    place, true, predicted = place[here], true[here], predicted[here]
    land = land[inside(land[:, 0], region)]
    figure = new_figure(
        13, 4.2 if region != "global" else 3.2, ", ".join(filter(None, (name, region, when)))
    )
    low, high = variable.bounds or (float(true.min()), float(true.max()))
    error = predicted - true
    most = float(np.abs(error).max()) or 1.0
    panels = (
        ("truth", true, low, high, "viridis"),
        ("emulator", predicted, low, high, "viridis"),
        ("emulator - truth", error, -most, most, "RdBu_r"),
    )
    for number, (title, values, least, greatest, colours) in enumerate(panels, start=1):
        axes = _axes(figure, number, region)
        if len(land):
            axes.scatter(
                *_position(land, region), color="0.85", s=_size(land), marker="s", linewidths=0
            )
        drawn = axes.scatter(
            *_position(place, region), c=values, s=_size(place), marker="s", linewidths=0,
            vmin=least, vmax=greatest, cmap=colours,
        )  # fmt: skip
        axes.set_title(title)
        figure.colorbar(
            drawn, ax=axes, shrink=0.8, label="" if variable.unit == "1" else variable.unit
        )
    return save(figure, path)


def _axes(figure: Any, number: int, region: str) -> Any:
    if region == "global":
        axes = figure.add_subplot(1, 3, number)
        axes.set(xlim=(0, 360), ylim=(-90, 90), xlabel="longitude", ylabel="latitude")
        return axes
    axes = figure.add_subplot(1, 3, number, projection="polar")
    south, north = REGIONS[region][:2]
    axes.set_ylim(0, north - south)
    circles = [10, 20, 30, 40]
    axes.set_yticks(circles, [f"{90 - c}°" for c in circles], fontsize=7)
    if region == "arctic":
        axes.set_theta_zero_location("S")  # Greenwich below, as on most maps
    else:
        axes.set_theta_zero_location("N")
        axes.set_theta_direction(-1)
    axes.grid(alpha=0.3)
    return axes


def _position(place: Floats, region: str) -> tuple[Floats, Floats]:
    """The places of points on the axes: azimuthal equidistant about a pole, or plate carrée."""
    latitude, longitude = place.T
    if region == "global":
        return longitude % 360, latitude
    return np.radians(longitude), 90 - np.abs(latitude)


def _size(place: Floats) -> float:
    """Area of a marker, in square points, so that neighbouring cells about touch."""
    latitudes = np.unique(np.round(place[:, 0], 3))
    gap = float(np.median(np.diff(latitudes))) if len(latitudes) > 1 else 1.0
    return max(1.0, (3.2 * gap) ** 2)

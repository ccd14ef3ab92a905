"""Maps of emulated fields, and the training history in eight panels."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config.files import open_text
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import DataError
from lockstep.observe.figures import new_figure, save
from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.grids import REGIONS
from lockstep.systems.ufs.report.scores import Score, inside

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
    in_region = inside(place[:, 0], region)
    if not in_region.any():
        return None
    variable = VARIABLES[name]
    place, true, predicted = place[in_region], true[in_region], predicted[in_region]
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
    """The positions of points on the axes: azimuthal equidistant about a pole, or plate carrée."""
    latitude, longitude = place.T
    if region == "global":
        return longitude % 360, latitude
    return np.radians(longitude), 90 - np.abs(latitude)


def _size(place: Floats) -> float:
    """Area of a marker, in square points, so that neighbouring cells about touch."""
    latitudes = np.unique(np.round(place[:, 0], 3))
    gap = float(np.median(np.diff(latitudes))) if len(latitudes) > 1 else 1.0
    return max(1.0, (3.2 * gap) ** 2)


Curve = tuple[list[int], list[float]]

_MOST_POINTS = 5000


def read_curves(path: Path) -> dict[tuple[str, str], Curve]:
    """The curves of a `metrics.csv` by (split, column): steps and values.

    Raises:
        DataError: it cannot be read.
    """
    curves: dict[tuple[str, str], Curve] = {}
    line = 1
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file)
            for row in reader:
                line = reader.line_num
                step, split = parse_int(row.pop("step")), row.pop("split")
                for column, text in row.items():
                    if text:
                        steps, values = curves.setdefault((split, column), ([], []))
                        steps.append(step)
                        values.append(_number(text))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: line {line}: cannot be read: {error}") from error
    return curves


def _number(text: str) -> float:
    """A number, which may be NaN or infinite: what a metric was."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None


def draw_history(
    path: Path,
    curves: dict[tuple[str, str], Curve],
    name: str,
    true: Floats,
    predicted: Floats,
    score: Score,
    ranking: Sequence[tuple[str, float]],
) -> Path:
    """Draw losses, learning rate, errors, Jacobians over steps; scatter and sensitivities.

    Args:
        path: path of the PNG file to write.
        curves: steps and values of each curve, see `read_curves`.
        name: short name of the output that errors and scatter are of.
        true: values of the output in the files, [N], in its unit.
        predicted: values of the output by the emulator, [N], in its unit.
        score: score of `predicted` against `true`.
        ranking: input names with their sensitivities, the greatest first.
    """
    figure = new_figure(17, 8, "training history")
    panels = figure.subplots(2, 4).flatten()
    lines = {
        "loss": ([("train", "loss"), ("val", "loss")], "log"),
        "learning rate": ([("train", "lr")], "linear"),
        f"validation error of {name}": ([("val", f"mae_{name}"), ("val", f"mse_{name}")], "log"),
        "Jacobian norm": ([("val", "jacobian_norm")], "linear"),
        "Jacobian entries": (
            [("val", f"jacobian_{statistic}") for statistic in ("mean", "std", "max")],
            "log",
        ),
        "Jacobian condition number": ([("val", "jacobian_condition")], "log"),
    }
    for axes, (title, (wanted, scale)) in zip(panels, lines.items(), strict=False):
        for split, column in wanted:
            steps, values = curves.get((split, column), ([], []))
            axes.plot(steps, values, label=f"{split} {column}")
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.legend(fontsize=8)
    _scatter(panels[6], name, true, predicted, score)
    inputs, sensitivities = zip(*reversed(ranking), strict=True)
    panels[7].barh(inputs, sensitivities)
    panels[7].set(title="sensitivity", xlabel="mean |∂output/∂input|, normalised")
    return save(figure, path)


def draw_jacobian(
    path: Path, sst: Floats, learned: Floats, true: Floats, errors: Mapping[str, float]
) -> Path:
    """Draw the learned ∂aice/∂sst beside the law's.

    Args:
        path: path of the PNG file to write.
        sst: sea surface temperature in °C, [N].
        learned: the learned ∂aice/∂sst in 1/°C, [N].
        true: ∂aice/∂sst of the law in 1/°C, [N].
        errors: relative errors of whole Jacobians, by where they were measured.
    """
    shown = ", ".join(f"{error:.1%} off {where}" for where, error in errors.items())
    figure = new_figure(11, 4.5, f"∂aice/∂sst; whole Jacobians are {shown}")
    left, right = figure.subplots(1, 2)
    left.scatter(sst, true, s=10, label="law", color="black")
    left.scatter(sst, learned, s=4, label="emulator", color="tab:orange")
    left.set(xlabel="sst, °C", ylabel="∂aice/∂sst, 1/°C")
    left.legend()
    ends = [float(min(true.min(), learned.min())), float(max(true.max(), learned.max()))]
    right.plot(ends, ends, color="black", linewidth=0.8)
    right.scatter(true, learned, s=4, color="tab:orange")
    right.set(xlabel="law, 1/°C", ylabel="emulator, 1/°C")
    return save(figure, path)


def _scatter(axes: Any, name: str, true: Floats, predicted: Floats, score: Score) -> None:
    thinned = slice(None, None, max(1, len(true) // _MOST_POINTS))
    axes.scatter(true[thinned], predicted[thinned], s=2, alpha=0.4)
    ends = [float(true.min()), float(true.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    figures = f"RMSE {score.rmse:.3g}\nbias {score.bias:.2g}\nslope {score.slope:.4f}"
    axes.text(0.05, 0.95, figures, transform=axes.transAxes, va="top")
    axes.set(title=name, xlabel="truth", ylabel="emulator")

"""Skill by region and season: errors beside those of persistence and climatology."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.pictures import new_figure, save
from lockstep.recipes.ufs.fields.places import REGIONS
from lockstep.recipes.ufs.report.baselines import Baseline
from lockstep.recipes.ufs.report.scores import inside

Floats = npt.NDArray[np.floating[Any]]

SEASONS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"DJF": (12, 1, 2), "MAM": (3, 4, 5), "JJA": (6, 7, 8), "SON": (9, 10, 11)}
)
"""Calendar months by season."""

ALL = "all"
"""The name of all rows, whatever their season."""


def skill(predicted: Floats, baseline: Floats, true: Floats) -> dict[str, Any] | None:
    """1 - RMSE / RMSE of the baseline, over the rows that the baseline has; None if it has none.

    1 is perfect, 0 no better than the baseline, below 0 worse.

    Args:
        predicted: values by the emulator, [N].
        baseline: values by the baseline, [N], NaN where it has none.
        true: values in the files, [N].

    Returns:
        `count` of rows, `rmse` of the baseline and of the emulator (`rmse_emulator`) over them, and
        `skill`, NaN where the baseline makes no error.
    """
    there = np.isfinite(baseline)
    if not there.any():
        return None
    own, other = (
        float(np.sqrt(np.mean((values[there] - true[there]) ** 2)))
        for values in (predicted, baseline)
    )
    return {
        "count": int(there.sum()),
        "rmse": other,
        "rmse_emulator": own,
        "skill": 1 - own / other if other else float("nan"),
    }


def by_region_and_season(
    latitude: Floats,
    month: npt.NDArray[np.int64],
    true: Floats,
    predicted: Floats,
    baselines: Mapping[str, Floats],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Errors and skill of one output by region, then season; those without rows are left out.

    Args:
        latitude: latitudes of N rows in degrees, [N].
        month: calendar month of each, [N], 0 where it is not known.
        true: values in the files, [N].
        predicted: values by the emulator, [N].
        baselines: values by each baseline, [N], by its name.

    Returns:
        `count`, `rmse`, `bias`, and for each baseline what `skill` returns.
    """
    seasons = {ALL: np.ones(len(month), bool)}
    seasons |= {name: np.isin(month, months) for name, months in SEASONS.items()}
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for region in REGIONS:
        for season, of_season in seasons.items():
            here = inside(latitude, region) & of_season
            if not here.any():
                continue
            error = predicted[here] - true[here]
            entry: dict[str, Any] = {
                "count": int(here.sum()),
                "rmse": float(np.sqrt(np.mean(error**2))),
                "bias": float(np.mean(error)),
            }
            for name, values in baselines.items():
                entry[name] = skill(predicted[here], values[here], true[here])
            table.setdefault(region, {})[season] = entry
    return table


def lines(
    name: str, table: Mapping[str, Mapping[str, Mapping[str, Any]]], baselines: Sequence[str]
) -> Iterator[str]:
    """What `by_region_and_season` says of an output, for people."""
    for region, by_season in table.items():
        for season, entry in by_season.items():
            shown = [
                f"skill {against['skill']:.3f} against {baseline} ({against['count']:,} points)"
                for baseline in baselines
                if (against := entry[baseline]) is not None
            ]
            if season != ALL or shown:
                what = (
                    f"{entry['count']:,} points  RMSE {entry['rmse']:.4g}  bias {entry['bias']:.2g}"
                )
                yield f"{name} {region} {season}: " + "  ".join([what, *shown])


def bars(
    by_season: Mapping[str, Mapping[str, Any]], baselines: Sequence[str]
) -> dict[str, list[float]]:
    """RMSE by season of the emulator and, for each baseline, of both over the baseline's rows.

    Args:
        by_season: what `by_region_and_season` says of a region.
        baselines: names of the baselines.

    Returns:
        By what they are of, a number for each season, NaN where a baseline has no row.
    """
    entries = by_season.values()
    found = {"emulator": [float(entry["rmse"]) for entry in entries]}
    for baseline in baselines:
        against = [entry[baseline] or {} for entry in entries]
        for label, key in ((baseline, "rmse"), (f"emulator, rows of {baseline}", "rmse_emulator")):
            found[label] = [float(one.get(key, math.nan)) for one in against]
    return found


def draw_skill(
    path: Path,
    name: str,
    unit: str,
    table: Mapping[str, Mapping[str, Mapping[str, Any]]],
    baselines: Mapping[str, Baseline],
) -> Path:
    """Draw the errors of emulator and baselines, by region and season.

    Args:
        path: path of the PNG file to write.
        name: short name of the output.
        unit: its unit.
        table: what `by_region_and_season` returns.
        baselines: the baselines by name.
    """
    figure = new_figure(4.2 * len(table) + 1, 4, f"{name}: RMSE by region and season")
    panels = np.atleast_1d(figure.subplots(1, len(table), sharey=True))
    for axes, (region, by_season) in zip(panels, table.items(), strict=True):
        place = np.arange(len(by_season))
        series = bars(by_season, [*baselines])
        width = 0.8 / len(series)
        for number, (label, heights) in enumerate(series.items()):
            style: dict[str, Any] = {}
            if label not in ("emulator", *baselines):
                style = {"color": "C0", "alpha": 0.5, "hatch": "//"}
            axes.bar(place + number * width, heights, width, label=label, **style)
        axes.set_xticks(place + width * (len(series) - 1) / 2, list(by_season))
        axes.set(title=region)
    # Below the panels, where it covers no bar.
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8
    )
    panels[0].set_ylabel("RMSE" if unit == "1" else f"RMSE, {unit}")
    return save(figure, path)

"""The evaluation of a trained emulator: scores by region, sensitivities, maps, history."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config.files import replacing
from lockstep.errors import DataError, file_errors
from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.grids import REGIONS
from lockstep.systems.ufs.fields.rows import Rows, joined
from lockstep.systems.ufs.model import SeaIceNet
from lockstep.systems.ufs.report.maps import draw_history, draw_jacobian, draw_map, read_curves
from lockstep.systems.ufs.report.scores import (
    Intervals,
    Score,
    at_edge,
    inside,
    normalised,
    physical,
    relative_error,
    score,
    sensitivity,
)
from lockstep.systems.ufs.report.skill import Baseline, by_region_and_season, draw_skill, lines
from lockstep.systems.ufs.synthetic import Law

Floats = npt.NDArray[np.floating[Any]]

_MOST_JACOBIANS = 100_000
_ROWS_AT_A_TIME = 50_000


@dataclass(frozen=True)
class Ground:
    """The grid of a report.

    Attributes:
        when: time of the fields, as text; may be empty.
        land: latitude and longitude in degrees of cells without ocean, [M, 2].
        area: relative areas of all cells, [cells].
        months: calendar month of each time, 0 if it is unknown, [times].
    """

    when: str
    land: Floats
    area: Floats
    months: npt.NDArray[np.int64]


class Report:
    """The evaluation of one split, with maps of all rows at the time of its first row."""

    def __init__(
        self,
        net: SeaIceNet,
        splits: Mapping[str, Rows],
        split: str,
        ground: Ground,
        baselines: Mapping[str, Baseline],
    ) -> None:
        """Predict the outputs of all rows of the split.

        Args:
            net: trained network on the CPU.
            splits: all rows, by split.
            split: name of the split to evaluate.
            ground: the grid at the time of the maps, that of the split's first row.
            baselines: predictions to compare with, by name.
        """
        self._baselines = baselines
        self._net = net
        self._ground = ground
        self._splits = splits
        self._rows = splits[split]
        self._true, self._predicted = self._compare(self._rows)

    def write(self, folder: Path, run_dir: Path, law: Law | None) -> list[str]:
        """Write `report.json` and pictures; returns lines to print.

        Args:
            folder: folder to write to; it exists.
            run_dir: run directory with the `metrics.csv` of the training.
            law: of synthetic data, so that true Jacobians are known.

        Raises:
            DataError: the folder cannot be written, or the run has no curves.
        """
        scores = {name: self._scores(name) for name in self._net.outputs}
        ranking = self._ranking()
        skills = {name: self._skill(name) for name in self._net.outputs}
        summary: dict[str, Any] = {
            "scores": {
                name: {region: asdict(s) for region, s in by_region.items()}
                for name, by_region in scores.items()
            },
            "skill": skills,
            "baselines": {name: baseline.remark for name, baseline in self._baselines.items()},
            "sensitivity": dict(ranking),
            "intervals": {name: self._intervals(name) for name in self._net.outputs},
        }
        pictures = list(self._maps(folder))
        for name, table in skills.items():
            picture = folder / f"skill_{name}.png"
            pictures.append(draw_skill(picture, name, VARIABLES[name].unit, table, self._baselines))
        if law is not None:
            summary["jacobian_error"] = self._against_law(folder / "jacobian.png", law)
            pictures.append(folder / "jacobian.png")
        name = self._net.outputs[0]
        pictures.append(
            draw_history(
                folder / "history.png", read_curves(run_dir / "metrics.csv"), name,
                self._true[:, 0], self._predicted[:, 0], scores[name]["global"], ranking,
            )
        )  # fmt: skip
        with file_errors(DataError, folder), replacing(folder / "report.json") as file:
            json.dump(_finite(summary), file, indent=1)
        remarks = [
            line for name, t in skills.items() for line in lines(name, t, [*self._baselines])
        ]
        remarks += [f"{n}: {b.remark}" for n, b in self._baselines.items() if b.remark]
        return [
            *_lines(scores, ranking, summary),
            *remarks,
            *(f"wrote {path}" for path in pictures),
        ]

    def _compare(self, rows: Rows) -> tuple[Floats, Floats]:
        """True and predicted outputs [N, out] of rows."""
        cut = len(self._net.inputs)
        parts = np.array_split(rows.values[:, :cut], 1 + len(rows) // _ROWS_AT_A_TIME)
        with torch.no_grad():
            predicted = torch.cat([self._net.predict(torch.from_numpy(part)) for part in parts])
        return rows.values[:, cut:].astype(np.float64), predicted.double().numpy()

    def _scores(self, name: str) -> dict[str, Score]:
        """The scores of an output by region; regions without rows are left out."""
        column = self._net.outputs.index(name)
        latitude = self._rows.place[:, 0].astype(np.float64)
        area = self._ground.area[self._rows.cell]
        by_region = {}
        for region in REGIONS:
            in_region = inside(latitude, region)
            if in_region.any():
                true, predicted = self._true[in_region, column], self._predicted[in_region, column]
                by_region[region] = score(predicted, true, area[in_region], name == "aice")
        return by_region

    def _skill(self, name: str) -> dict[str, dict[str, dict[str, Any]]]:
        """Errors and skill of an output by region and season."""
        column = self._net.outputs.index(name)
        return by_region_and_season(
            self._rows.place[:, 0].astype(np.float64),
            self._ground.months[self._rows.time],
            self._true[:, column],
            self._predicted[:, column],
            {name: baseline.values[:, column] for name, baseline in self._baselines.items()},
        )

    def _intervals(self, name: str) -> dict[str, dict[str, float]]:
        """How often intervals that were calibrated on validation rows have the truth."""
        if "val" not in self._splits or self._rows is self._splits["val"]:
            return {}
        column = self._net.outputs.index(name)
        true, predicted = self._compare(self._splits["val"])
        known = Intervals(predicted[:, column], true[:, column], VARIABLES[name].bounds)
        return known.coverage(self._predicted[:, column], self._true[:, column])

    def _ranking(self) -> list[tuple[str, float]]:
        """Inputs with their sensitivities, the greatest first."""
        x = torch.from_numpy(self._rows.values[:_MOST_JACOBIANS, : len(self._net.inputs)])
        sensitivities = sensitivity(normalised(self._net, self._net.normalise(x))).tolist()
        pairs = zip(self._net.inputs, sensitivities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])

    def _against_law(self, picture: Path, law: Law) -> dict[str, float]:
        """Relative errors of normalised Jacobians; draws them."""
        net, values = self._net, self._rows.values[:_MOST_JACOBIANS]
        columns = dict(zip((*net.inputs, *net.outputs), values.T, strict=True))
        learned = (
            physical(net, torch.from_numpy(values[:, : len(net.inputs)]))[:, 0].double().numpy()
        )
        true = law.jacobian(columns, net.inputs)
        edge = at_edge(columns["aice"])
        # In units of deviations, which make the inputs comparable.
        unit = (net.input_deviation / net.output_deviation).double().numpy()
        errors = {"everywhere": relative_error(learned * unit, true * unit)}
        if edge.any():
            errors["at the ice edge"] = relative_error((learned * unit)[edge], (true * unit)[edge])
        sst, slope = columns["sst"], net.inputs.index("sst")
        draw_jacobian(picture, sst, learned[:, slope], true[:, slope], errors)
        return errors

    def _maps(self, folder: Path) -> Iterator[Path]:
        time = self._rows.time[0]
        rows = joined([rows.take(rows.time == time) for rows in self._splits.values()])
        rows = rows.take(np.argsort(rows.cell))
        true, predicted = self._compare(rows)
        for column, name in enumerate(self._net.outputs):
            for region in REGIONS:
                path = draw_map(
                    folder / f"map_{region}_{name}.png", region, name, self._ground.when,
                    self._ground.land, rows.place, true[:, column], predicted[:, column],
                )  # fmt: skip
                if path is not None:
                    yield path


def _lines(
    scores: Mapping[str, Mapping[str, Score]],
    ranking: list[tuple[str, float]],
    summary: Mapping[str, Any],
) -> Iterator[str]:
    for name, by_region in scores.items():
        for region, s in by_region.items():
            edge = "" if math.isnan(s.edge_error) else f"  ice edge error {s.edge_error:.2%}"
            yield (
                f"{name} {region}: {s.count:,} points  RMSE {s.rmse:.4g}  MAE {s.mae:.4g}  "
                f"bias {s.bias:.2g}  r {s.correlation:.5f}{edge}"
            )
    yield "sensitivity: " + ", ".join(f"{name} {value:.3g}" for name, value in ranking)
    for name, by_level in summary["intervals"].items():
        for level, found in by_level.items():
            yield (
                f"{name}: intervals of {level} have {found['coverage']:.1%} of the points, mean "
                f"width {found['width']:.3g}"
            )
    for where, error in summary.get("jacobian_error", {}).items():
        yield f"Jacobian against the law, {where}: {error:.2%} off"


def _finite(value: Any) -> Any:
    """A value with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

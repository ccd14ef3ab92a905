"""The emulator in the noisy world beside simple models; writes `docs/benchmarks/ufs-noisy.md`.

Trains on two Arctic years from several seeds, of world and network, and predicts a held-out year,
there and in the Antarctic. `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

import lockstep as ls
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.fields.rows import Rows
from lockstep.systems.ufs.fields.sources import find_sources, moments_of
from lockstep.systems.ufs.model import simple_models
from lockstep.systems.ufs.report.scores import (
    Intervals,
    at_edge,
    inside,
    physical,
    relative_error,
)
from lockstep.systems.ufs.report.skill import Period, climatology, persistence
from lockstep.systems.ufs.synthetic import LAWS, write_history
from lockstep.systems.ufs.task import Ufs
from page import Section, around, command, publish
from run import DOCS, machine

GRID, MONTHS = (45, 90), 48
INPUTS = UfsConfig().inputs
LAW = "the law itself (limit)"
SQUARED, SMALLER = "logistic regression, squares and products", "300 trees of smaller steps"
BOTH = "mean of the regression with squares and 100 trees"
NET, ENSEMBLE = "the emulator", "mean of 3 emulators"
PLACES = {"arctic": "held-out year, Arctic", "antarctic": "held-out year, Antarctic"}
Floats = Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch", "numpy", "scikit-learn")), "command": command("ufs_noisy")}
    found = []
    for seed in range(1, 1 + (1 if args.quick else args.seeds)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(of_one_seed(Path(folder), seed, 3 if args.quick else 60))
        print(f"seed {seed}: {found[-1]}", flush=True)
    sections = [errors(found), coverage(found), jacobians(found)]
    publish(
        None if args.quick else DOCS,
        "ufs-noisy",
        "The emulator in the noisy world",
        facts,
        sections,
        METHOD,
    )


def of_one_seed(folder: Path, seed: int, epochs: int) -> dict[str, Any]:
    """Everything that is measured in one world."""
    for month in range(MONTHS):
        write_history(folder / f"iceh.{month:03}.nc", *GRID, month, seed, "noisy")
    given: dict[str, Any] = {
        "history": (str(folder / "iceh.*.nc"),), "mask_mode": "both", "cache_dir": folder,
    }  # fmt: skip
    nets = []
    for member in range(3):
        config = UfsConfig(
            **given, region="arctic", split="time", val_fraction=0.25, test_fraction=0.25,
            epochs=epochs, seed=3 * seed + member,
        )  # fmt: skip
        task = Ufs(config)
        done = ls.train(task, config, run_dir=folder / f"run{member}", quiet=True)
        nets.append(ls.load(done.run_dir, "best", task=Ufs).model)
    splits = task.rows_by_split
    whole = Ufs(UfsConfig(**given, split="time", val_fraction=0.25, test_fraction=0.25))
    test = whole.rows_by_split["test"]
    sources = find_sources(given["history"], [], [], None)
    moments = moments_of(sources)
    trained = np.unique(splits["train"].time)
    periods = (
        Period(sources, moments),
        Period(*([x[t] for t in trained] for x in (sources, moments))),
    )
    models = predictors(splits["train"], nets)
    names = ["aice"]
    out: dict[str, Any] = {"rmse": {}, "coverage": {}, "jacobian": {}}
    for region, place in PLACES.items():
        rows = test.take(inside(test.place[:, 0].astype(float), region))
        predicted = {
            name: model(rows.values[:, :-1].astype(float)) for name, model in models.items()
        }
        true = rows.values[:, -1].astype(float)
        simple = {
            "climatology": climatology(rows, names, *periods).values[:, 0],
            "persistence": persistence(rows, names, periods[0]).values[:, 0],
        }
        out["rmse"][place] = {
            name: float(np.sqrt(np.nanmean((values - true) ** 2)))
            for name, values in (simple | predicted).items()
        }
        out["coverage"][place] = covered(splits["val"], models, nets, rows, predicted, true)
        out["jacobian"][place] = against_law(rows, models, nets)
    return out


def predictors(train: Rows, nets: Sequence[Any]) -> dict[str, Any]:
    """Functions from inputs [N, in] to aice [N], by name."""
    fitted = simple_models(train.values.astype(float), len(INPUTS), ["aice"])
    named = {name: partial(lambda f, x: f(x)[:, 0], function) for name, function in fitted.items()}
    law = LAWS["noisy"]
    places = [INPUTS.index(name) for name in law.inputs]
    x, y = train.values[:, :-1].astype(float), train.values[:, -1].astype(float)
    trees = HistGradientBoostingRegressor(
        max_iter=300, learning_rate=0.05, min_samples_leaf=40, random_state=0
    ).fit(x, y)
    return named | {
        SMALLER: lambda x: trees.predict(x).clip(0, 1),
        BOTH: lambda x: (named[SQUARED](x) + named["gradient-boosted trees"](x)) / 2,
        NET: lambda x: forward(nets[0], x),
        ENSEMBLE: lambda x: np.mean([forward(net, x) for net in nets], 0),
        LAW: lambda x: law.expected(*x.T[places]),
    }


def forward(net: Any, x: Floats) -> Floats:
    with torch.no_grad():
        return net.predict(torch.from_numpy(x).float())[:, 0].double().numpy()


def covered(
    val: Rows, models: Mapping[str, Any], nets: Sequence[Any], rows: Rows,
    predicted: Mapping[str, Floats], true: Floats,
) -> dict[str, dict[str, dict[str, float]]]:  # fmt: skip
    """Coverage and width of calibrated intervals, and of the spread of networks alone."""
    x, y = val.values[:, :-1].astype(float), val.values[:, -1].astype(float)
    found = {
        name: Intervals(models[name](x), y, (0, 1)).coverage(predicted[name], true)
        for name in ("logistic regression", "gradient-boosted trees", BOTH, NET, LAW)
    }
    members = np.stack([forward(net, rows.values[:, :-1].astype(float)) for net in nets])
    mean, spread = members.mean(0), members.std(0, ddof=1)
    found["spread of 3 emulators"] = {
        level: {
            "coverage": float((np.abs(true - mean) <= z * spread).mean()),
            "width": float(2 * z * spread.mean()),
        }
        for level, z in {"50%": 0.6745, "90%": 1.6449}.items()
    }
    return found


def against_law(rows: Rows, models: Mapping[str, Any], nets: Sequence[Any]) -> dict[str, Any]:
    """Relative errors of Jacobians in units of deviations, everywhere and at the ice edge."""
    x = rows.values[:, :-1]
    columns = dict(zip(INPUTS, x.T, strict=True))
    unit = (nets[0].input_deviation / nets[0].output_deviation).double().numpy()
    true = LAWS["noisy"].jacobian(columns, INPUTS) * unit
    learned = [physical(net, torch.from_numpy(x))[:, 0].double().numpy() * unit for net in nets]
    found = {NET: learned[0], ENSEMBLE: np.mean(learned, 0)}
    for name in ("linear regression", "logistic regression", SQUARED):
        found[name] = by_differences(models[name], x.astype(float), unit)
    # Of means over the neighbourhood: trees are steps.
    for name in ("gradient-boosted trees", BOTH, NET):
        found[f"{name}, over ±0.2 deviations"] = by_differences(
            models[name], x.astype(float), unit, 0.2
        )
    edge = at_edge(rows.values[:, -1])
    by_name = {}
    for name, jacobian in found.items():
        gaps = {"everywhere": relative_error(jacobian, true)}
        gaps["at the ice edge"] = relative_error(jacobian[edge], true[edge])
        for variable in LAWS["noisy"].inputs:
            column = INPUTS.index(variable)
            gaps[variable] = relative_error(jacobian[:, column], true[:, column])
        by_name[name] = gaps
    return by_name


def by_differences(model: Any, x: Floats, unit: Floats, step: float = 1e-4) -> Floats:
    """Central differences of a function of rows, in units of deviations; a step is in these."""
    deviation = x.std(0)
    columns = []
    for n in range(x.shape[1]):
        moved = [x.copy() for _ in range(2)]
        width = step * deviation[n]
        moved[0][:, n] += width
        moved[1][:, n] -= width
        columns.append((model(moved[0]) - model(moved[1])) / (2 * width))
    return np.stack(columns, 1) * unit


METHOD = (
    "The world `noisy` (`systems/ufs/synthetic.py`): 45 x 90 cells; two years of the Arctic for "
    "training, one for validation, one for the test. The Antarctic is never trained on. Median of "
    "the seeds, of world and networks, ± the greatest distance from it."
)


def spread(found: Sequence[dict[str, Any]], *path: str, scale: float = 1, decimals: int = 4) -> str:
    values = []
    for one in found:
        value: Any = one
        for key in path:
            value = value[key]
        values.append(scale * float(value))
    return around(values, decimals)


def errors(found: list[dict[str, Any]]) -> Section:
    made = Section(
        "RMSE of the concentration",
        "Climatology has the cell's training years, in the Antarctic too; persistence the month "
        "before; the others this month's ocean and atmosphere. Nothing can be expected to beat the "
        "law: the mean of what is recorded, errors and clipping included, with a Gaussian for what "
        "is unobserved. The emulator is the best of 60 epochs by validation; skill is by what part "
        "its RMSE is lower. Smaller steps: 0.05, leaves of 40. The mean of regression and trees "
        "was chosen with a look at these test errors.",
        ("", *(text for place in PLACES.values() for text in (place, "skill, %"))),
        raw={"seeds": found},
    )
    for name in (n for n in found[0]["rmse"][PLACES["arctic"]] if n != "the mean"):
        cells = []
        for place in PLACES.values():
            skills = [1 - one["rmse"][place][NET] / one["rmse"][place][name] for one in found]
            cells.append(spread(found, "rmse", place, name))
            cells.append(
                "" if name == NET else f"{100 * min(skills):+.0f}…{100 * max(skills):+.0f}"
            )
            if name not in (NET, ENSEMBLE, LAW) and min(skills) <= 0:
                seeds = "every seed" if max(skills) <= 0 else "some seed"
                made.verdicts.append(f"- **{name} win** from {seeds}: {place}")
        made.rows.append([name, *cells])
    return made


def coverage(found: list[dict[str, Any]]) -> Section:
    made = Section(
        "Intervals",
        "Percent of the points inside intervals of 50 % and 90 %, and the mean width of the "
        "latter. Calibrated on the Arctic's validation year (split conformal, by tenths of the "
        "prediction), but for the last row: mean ± z deviations of three networks.",
        (
            "", "Arctic, 50 %", "Arctic, 90 %", "width", "Antarctic, 50 %", "Antarctic, 90 %",
            "width",
        ),
    )  # fmt: skip
    for name in found[0]["coverage"][PLACES["arctic"]]:
        cells = [
            cell
            for place in PLACES.values()
            for cell in (
                spread(found, "coverage", place, name, "50%", "coverage", scale=100, decimals=1),
                spread(found, "coverage", place, name, "90%", "coverage", scale=100, decimals=1),
                spread(found, "coverage", place, name, "90%", "width", decimals=3),
            )
        ]
        made.rows.append([name, *cells])
    return made


def jacobians(found: list[dict[str, Any]]) -> Section:
    law = LAWS["noisy"].inputs
    made = Section(
        "Jacobians against the law's",
        "Relative error in units of deviations, %, of all 14 columns, at the ice edge, and of "
        "single columns; Arctic, held-out year. A Jacobian of zeros has 100.",
        ("", "everywhere", "ice edge", *law),
    )
    for name in found[0]["jacobian"][PLACES["arctic"]]:
        cells = [
            spread(found, "jacobian", PLACES["arctic"], name, key, scale=100, decimals=0)
            for key in ("everywhere", "at the ice edge", *law)
        ]
        made.rows.append([name, *cells])
    return made


if __name__ == "__main__":
    main()

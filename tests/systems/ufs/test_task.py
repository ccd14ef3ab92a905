"""The task: its rows, its metrics, its keys, and what it learns."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.systems.ufs.conftest import NUM_LONGITUDES

from lockstep import config as config_module
from lockstep.errors import ConfigError
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.task import Ufs

SMALL = ("hidden=[8]", "steps=12", "eval_every=6", "log_every=6", "checkpoint.every=6")
SMALL += ("batch_size=64", "eval_batch_size=128")


def ufs(files: Path, **keys: Any) -> Ufs:
    return Ufs(UfsConfig(**{"history": f"{files}/iceh.*.nc", **keys}))


def tensors(task: Ufs, split: str) -> tuple[torch.Tensor, ...]:
    dataset = task.dataset(split)
    assert dataset is not None
    return dataset.tensors


def test_training_rows_have_mean_0_and_deviation_1(files: Path) -> None:
    x, y = tensors(ufs(files), "train")
    both = torch.cat([x, y], dim=1)
    assert (x.dtype, x.shape[1], y.shape[1]) == (torch.float32, 14, 1)
    assert both.mean(0).abs().max() < 1e-5
    assert (both.std(0, correction=0) - 1).abs().max() < 1e-5


def test_validation_rows_have_no_part_in_the_statistics(files: Path) -> None:
    one, other = ufs(files, val_fraction=0.1), ufs(files, val_fraction=0.3)
    assert len(other.rows_by_split["train"]) < len(one.rows_by_split["train"])
    assert not np.array_equal(one.scale.mean, other.scale.mean)
    train = one.rows_by_split["train"].values.astype(np.float64)
    assert one.scale.mean == pytest.approx(train.mean(0), rel=1e-12)


@pytest.mark.parametrize("split", ["blocks", "time"])
def test_splits_share_no_cell(files: Path, split: str) -> None:
    found = ufs(files, split=split).rows_by_split
    cells = {name: set(zip(r.cell, r.time, strict=True)) for name, r in found.items()}
    assert sum(map(len, cells.values())) == len(set.union(*cells.values()))
    if split == "time":
        assert found["train"].time.max() < found["test"].time.min()


def test_roles_can_be_swapped(files: Path) -> None:
    task = ufs(files, inputs=["aice", "hi", "strocnx"], outputs=["sst", "tair"], mask_mode="both")
    x, y, _ = tensors(task, "val")
    model = task.build_model()
    assert model(x).shape == y.shape == (len(x), 2)
    assert set(task.evaluate(model, (x, y)).metrics) >= {"mse_sst", "mse_tair", "bias_tair"}


def test_pairs_without_fluxes(files: Path) -> None:
    names = [n for n in UfsConfig().inputs if n not in ("flwdn", "fswdn")]
    config = UfsConfig(atmosphere=f"{files}/atm*", ocean=f"{files}/ocn*", inputs=names)
    assert tensors(Ufs(config), "train")[0].shape[1] == 12


def test_metrics_do_not_depend_on_how_validation_is_cut(files: Path) -> None:
    task = ufs(files, jacobian_samples=10)
    model, batch = task.build_model(), tensors(task, "val")
    model.requires_grad_(False)
    whole = task.evaluate(model, batch)
    parts = [task.evaluate(model, part) for part in zip(*(t.split(40) for t in batch), strict=True)]
    for name, (total, weight) in whole.metrics.items():
        pairs = [part.metrics[name] for part in parts]
        assert sum(w for _, w in pairs) == weight
        assert float(sum(s for s, _ in pairs)) == pytest.approx(float(total), rel=1e-4, abs=1e-6)
    assert whole.metrics["jacobian_norm"][1] == 1


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_losses_are_sums_with_their_weight(files: Path, loss: str) -> None:
    task = ufs(files, loss=loss)
    x, y, _ = tensors(task, "val")
    with torch.no_grad():
        model = task.build_model()
        error = (model(x) - y).abs()
    expected = {
        "mse": error**2,
        "mae": error,
        "huber": torch.where(error < 1, error**2 / 2, error - 0.5),
    }[loss]
    found = task.loss(model.requires_grad_(False), (x, y))
    assert float(found.sum) == pytest.approx(float(expected.sum()), rel=1e-5)
    assert found.weight == len(x)


UNUSABLE = {
    "inputs=[sst, sal]": r"inputs: unknown variable 'sal'; did you mean",
    "inputs=[sst, aice]": r"inputs, outputs: aice is there twice",
    "jacobian_samples=2000": r"jacobian_samples=2000 is more than eval_batch_size=1000",
    "split=random": r"split='random'",
    "region=north": r"region='north'",
    "region=[50, 40, 0, 10]": r"region=.* must be a name .global, arctic, antarctic",
    "region=[40, 50, 10, 0]": r"region=.* west < east",
    "thin_fraction=0": r"thin_fraction=0",
}


@pytest.mark.parametrize("override", UNUSABLE)
def test_unusable_keys_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=UNUSABLE[override]):
        config_module.override(UfsConfig(), [override])


def test_the_config_survives_yaml(tmp_path: Path) -> None:
    config = UfsConfig(history="a*.nc", cache_dir=tmp_path)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert config_module.load(UfsConfig, tmp_path / "config.yaml") == config
    assert config.hash == UfsConfig().hash


def test_without_netcdf4_the_message_says_what_to_install(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "netCDF4", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[ufs\]"'):
        ufs(files).dataset("train")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "runs"), [("2", 3), ("1,2,3", 5)])
def test_ranks_do_not_matter(lockstep: Any, files: Path, ranks: str, runs: int) -> None:
    done = lockstep("verify", "ufs", f"history={files}/iceh.*.nc", *SMALL, "--ranks", ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal: {runs} runs, one SHA-256" in done.stdout


def test_bad_input_ends_a_run_with_one_message(here: Any, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.nc"
    path.write_bytes((files / "iceh.000.nc").read_bytes()[:5000])
    done = here("train", "ufs", f"history={path}", "--run-dir", "run")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}: is not NetCDF, or is truncated")
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_can_start_from_the_best_network_of_another(
    here: Any, files: Path, tmp_path: Path
) -> None:
    given = f"history={files}/iceh.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "first").returncode == 0
    first = ufs(files, hidden=[8], start_from=tmp_path / "first", val_fraction=0.3)
    best = (tmp_path / "first" / "checkpoints" / "best").read_text().strip()
    saved = load_file(tmp_path / "first" / "checkpoints" / best / "model.safetensors")
    net = first.build_model()
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, saved[name])
    assert not torch.equal(net.input_mean, saved["input_mean"])  # of this run's own rows
    for source, message in {"first": "is of another model", "none": "holds no valid"}.items():
        done = here("train", "ufs", given, *SMALL, "hidden=[4]", f"start_from={source}")
        assert done.returncode == 2
        assert f"start_from={source}: {message}" in done.stderr


def test_a_settled_jacobian_ends_a_run(here: Any, files: Path, tmp_path: Path) -> None:
    rule = "convergence=[{metric: jacobian_norm, window: 2, tolerance: 1.0}]"
    done = here("train", "ufs", f"history={files}/iceh.*.nc", *SMALL, rule, "--run-dir", "run")
    assert done.returncode == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["reason"].startswith("converged: jacobian_norm within 1")
    assert found["step"] == 12
    again = here("eval", "run", "--split", "val", "--checkpoint", "best")
    assert "jacobian_condition" in again.stdout
    assert "mse_aice" in again.stdout


@pytest.fixture
def data(files: Path, tmp_path: Path) -> Path:
    """A folder with one history file, to be changed."""
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(files / "iceh.000.nc", folder)
    return folder


def test_other_rows_are_normalised_as_the_model_was_trained(files: Path, data: Path) -> None:
    trained = ufs(data)
    model = trained.build_model()
    same, other = ufs(data), ufs(files)
    for task in (same, other):
        task.adopt(model)
    for one, two in zip(tensors(trained, "test"), tensors(same, "test"), strict=True):
        assert torch.equal(one, two)
    x, y, _ = tensors(other, "test")
    rows = torch.from_numpy(other.rows_by_split["test"].values)
    assert torch.allclose(x, model.normalise(rows[:, :-1]), atol=1e-5)
    assert torch.allclose(y * model.output_deviation + model.output_mean, rows[:, -1:], atol=1e-5)
    assert other.data_digest() != same.data_digest() == trained.data_digest()


def test_eval_takes_other_files_on_purpose(here: Any, files: Path, data: Path) -> None:
    given = f"history={data}/iceh.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "run").returncode == 0
    everything = ("--split", "train", "val_fraction=0", "test_fraction=0")
    before = here("eval", "run", *everything)
    warning = "warning: the data are not those that the run was trained on"
    assert before.returncode == 0, before.stderr
    assert warning not in before.stdout  # all rows are the same, however they are split
    shutil.copy(files / "iceh.002.nc", data)
    first, second, both = (
        here("eval", "run", *everything, f"history={data}/iceh.{pattern}.nc")
        for pattern in ("000", "002", "*")
    )
    assert first.stdout == before.stdout
    assert warning in second.stdout
    assert warning in both.stdout
    errors = [float(re.findall(r"mse_aice +(\S+)", d.stdout)[0]) for d in (first, second, both)]
    whole = {"val_fraction": 0, "test_fraction": 0}
    counts = [
        len(ufs(files, history=f"{files}/iceh.{n}.nc", **whole).rows_by_split["train"])
        for n in ("000", "002")
    ]
    assert errors[2] == pytest.approx(np.average(errors[:2], weights=counts), rel=1e-4)
    done = here("eval", "run", "hidden=[4]")
    assert done.returncode == 2
    assert "hidden=[4]: the model was trained with hidden=[8]" in done.stderr


def test_clipped_values_are_counted_where_people_look(
    here: Any, data: Path, tmp_path: Path
) -> None:
    with netCDF4.Dataset(data / "iceh.000.nc", "a") as file:
        icy = np.argwhere(file["aice_h"][0].filled(0) > 0.5)[:3]
        for row, column in icy:
            file["fswdn_h"][0, row, column] = -0.25
    keys = (*SMALL, "val_fraction=0", "test_fraction=0")
    done = here("train", "ufs", f"history={data}/iceh.*.nc", *keys, "--run-dir", "run")
    said = "3 values of fswdn were up to 1 W/m^2 outside 0 to 1500 and are clipped"
    assert done.returncode == 0, done.stderr
    events = [*map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())]
    assert [said in str(e) for e in events].count(True) == 1
    again = here("eval", "run", "--split", "train")
    assert f"warning: {said}" in again.stdout


def test_regions_share_the_rows(files: Path) -> None:
    whole = {"val_fraction": 0, "test_fraction": 0, "mask_mode": "both"}
    everywhere = ufs(files, **whole).rows_by_split["train"]
    count = 0
    for box in ([-90, 0, 0, 170], [-90, 0, 170, 360], [0, 90, -190, 20], [0, 90, 20, 170]):
        part = ufs(files, **whole, region=box).rows_by_split["train"]
        count += len(part)
        assert part.place[:, 0].min() >= box[0]
        assert (((part.place[:, 1] - box[2]) % 360) <= box[3] - box[2]).all()
    assert count == len(everywhere)
    arctic = ufs(files, **whole, region="arctic").rows_by_split["train"]
    assert len(arctic) == (everywhere.place[:, 0] >= 50).sum()


def test_a_run_does_not_go_on_with_other_test_rows(here: Any, data: Path) -> None:
    given = f"history={data}/iceh.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "run").returncode == 0
    row, column = divmod(int(ufs(data).rows_by_split["test"].cell[0]), NUM_LONGITUDES)
    with netCDF4.Dataset(data / "iceh.000.nc", "a") as file:
        file["hi_h"][0, row, column] = 3.0
    done = here("train", "ufs", given, *SMALL, "--run-dir", "run", "--resume")
    assert done.returncode == 2, done.stdout
    assert "was trained on other data" in done.stderr


def test_a_run_from_anothers_weights_keeps_the_statistics_of_its_own_rows(
    here: Any, files: Path, tmp_path: Path
) -> None:
    given = (f"history={files}/iceh.*.nc", *SMALL)
    assert here("train", "ufs", *given, "region=arctic", "--run-dir", "north").returncode == 0
    keys = ("region=antarctic", "steps=1", "lr=0", "--from", "north/latest", "--run-dir", "south")
    done = here("train", "ufs", *given, *keys)
    assert done.returncode == 0, done.stderr
    north, south = (
        load_file(tmp_path / run / "checkpoints" / f"step_{step:08}" / "model.safetensors")
        for run, step in (("north", 12), ("south", 1))
    )
    mean = ufs(files, region="antarctic").scale.mean.astype(np.float32)
    assert np.array_equal(south["input_mean"].numpy(), mean[:14])
    assert not torch.equal(south["input_mean"], north["input_mean"])
    assert torch.equal(south["layers.0.weight"], north["layers.0.weight"])
    events = [*map(json.loads, (tmp_path / "south" / "events.jsonl").read_text().splitlines())]
    evaluated = [e for e in events if e["event"] == "Evaluated" and e["split"] == "val"]
    trained = evaluated[-1]["metrics"]
    again = here("eval", "south", "--split", "val", "--checkpoint", "latest")
    found = float(re.findall(r"mse_aice +(\S+)", again.stdout)[0])
    assert found == pytest.approx(trained["mse_aice"], rel=1e-5)


class OwnConfig(UfsConfig):
    mine: int = 0


class Own(Ufs):
    """A task with a key of its own."""

    Config = OwnConfig


def test_the_climatology_is_of_the_rows_of_the_training(
    here: Any, files: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f"history={data}/iceh.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "run").returncode == 0
    with (tmp_path / "run" / "config.yaml").open("a") as file:
        file.write("mine: 1\n")
    reported: dict[str, Any] = {}

    class Seen:
        def __init__(self, *arguments: Any) -> None:
            reported.update(arguments[-1])

        def write(self, *_: Any) -> list[str]:
            return []

    monkeypatch.setattr("lockstep.systems.ufs.task.Report", Seen)

    def remark() -> str:
        task = Own(OwnConfig(history=f"{files}/iceh.*.nc"))
        task.report(task.build_model(), "test", tmp_path, tmp_path / "run")
        told: str = reported["climatology"].remark
        return told

    assert "rows have none: no other field of the training" in remark()
    assert np.isfinite(reported["climatology"].values).any()
    shutil.copy(files / "iceh.002.nc", data)
    gone = "the files of the training have other rows now"
    assert remark() == gone
    assert np.isnan(reported["climatology"].values).all()
    (tmp_path / "run" / "config.yaml").write_text("mine: text\n")
    assert remark().startswith("the rows of the training cannot be read: ")


OTHER_MODELS = {
    "squash=false": r"squash=False: the model was trained with squash=True",
    "hidden=[4]": r"hidden=\[4\]: the model was trained with hidden=\[8\]",
    "inputs=[sss, sst]": r"inputs=\['sss', 'sst'\]: the model .* inputs=\['sst', 'sss'\]",
    "outputs=[hi]": r"outputs=\['hi'\]: the model was trained with outputs=\['aice'\]",
}


def test_a_model_is_not_taken_for_another_one(here: Any, files: Path, tmp_path: Path) -> None:
    given = (f"history={files}/iceh.*.nc", *SMALL, "inputs=[sst, sss]", "steps=1")
    assert here("train", "ufs", *given, "--run-dir", "run").returncode == 0
    for override, message in OTHER_MODELS.items():
        command = ("export", "run", "out") if override == "squash=false" else ("eval", "run")
        done = here(*command, override)
        assert done.returncode == 2
        assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()
    done = here("export", "run", "out", "inputs=[sst, sss]", "mask_mode=both", "level=5")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "out" / "metadata.json").read_text())
    config = config_module.load(UfsConfig, tmp_path / "run" / "config.yaml")
    assert said["config_hash"] == config.hash


def test_the_last_times_are_the_latest_whatever_the_files_are_called(
    files: Path, tmp_path: Path
) -> None:
    for number, name in enumerate("bca"):
        shutil.copy(files / f"iceh.{number:03}.nc", tmp_path / f"{name}.nc")
    keys = {"split": "time", "history": f"{tmp_path}/?.nc"}
    task = ufs(files, **keys)
    times = {name: {*rows.time.tolist()} for name, rows in task.rows_by_split.items()}
    assert times == {"train": {1}, "test": {2}, "val": {0}}  # b is the first, a the last
    assert task.data_remarks() == []
    for name in "abc":
        with netCDF4.Dataset(tmp_path / f"{name}.nc", "a") as data:
            data["time"].units = "furlongs"
    undated = ufs(files, **keys)
    times = {name: {*rows.time.tolist()} for name, rows in undated.rows_by_split.items()}
    assert times == {"train": {0}, "test": {1}, "val": {2}}
    assert undated.data_remarks() == [
        "the files do not date all of their times, so split=time holds out the last ones in the "
        "order of the files' names"
    ]
    whole = {**keys, "val_fraction": 0, "test_fraction": 0}
    assert ufs(files, **whole).data_remarks() == []


def test_cells_that_are_left_out_are_counted(files: Path) -> None:
    whole = sum(map(len, ufs(files).rows_by_split.values()))
    assert ufs(files, max_patterns=whole).data_remarks() == []
    assert ufs(files, max_patterns=500).data_remarks() == [
        f"500 of {whole:,} chosen cells are kept (max_patterns)"
    ]

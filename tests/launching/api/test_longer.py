"""`lockstep resume RUN epochs=…`: the bits of the run begun for that many, or a refusal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import result, slow
from tests.launching.api import longer_tasks

import lockstep as ls
from lockstep.config import load
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.errors import CheckpointError, ConfigError, RunDirectoryError

FILE = longer_tasks.__file__
_CIRCUMSTANCES = ("sha256", "saved_at", "layout", "files", "config", "config_hash")


SLOWLY: list[dict[str, Any]] = [
    {},
    {"eval_every": 7, "schedule": {"name": "plateau", "patience": 0}},
    {"schedule": {"name": "inverse_sqrt", "warmup_steps": 4}},
    {"schedule": {"name": "cosine", "warmup_steps": 30}},
    {"early_stopping": {"patience": 1, "min_delta": 0.2}},
    {"how": "show"},
    {"how": "counted"},
    {"compression": {"name": "int8"}},
]
"""Keys of runs that go on for longer; with `eval_every: 5`, more is taken back."""


def trained(path: Path, name: str = "Line", **keys: Any) -> ls.Result:
    """A run from its start, or on from where it is."""
    kind = getattr(longer_tasks, name)
    config = kind.Config(**keys)
    return ls.train(kind(config), config, run_dir=path, resume=True, quiet=True)


def manifest(path: Path) -> dict[str, Any]:
    """The newest checkpoint's, without what may differ: a finished run is not saved again."""
    folder = path / "checkpoints" / (path / "checkpoints" / "latest").read_text().strip()
    there = checkpoint.read_manifest(folder)
    return {k: v for k, v in there.items() if k not in _CIRCUMSTANCES}


def assert_same(one: Path, other: Path) -> None:
    """Two runs have the same config, state and result."""
    assert (one / "config.yaml").read_text() == (other / "config.yaml").read_text()
    ids = [json.loads((path / "run.json").read_text())["config_hash"] for path in (one, other)]
    assert ids[0] == ids[1] == result(one)["config_hash"]
    assert manifest(one) == manifest(other)
    keys = ("status", "reason", "step", "params_sha256", "arrays", "test_step")
    assert [result(one)[key] for key in keys] == [result(other)[key] for key in keys]
    # What is complete when it is resumed has no training metrics of its own.
    all_metrics = [result(path)["metrics"].items() for path in (one, other)]
    evaluated = [{k: v for k, v in each if k[:6] != "train/"} for each in all_metrics]
    assert evaluated[0] == evaluated[1] != {}
    hints = [(path / "checkpoints" / "best").read_text() for path in (one, other)]
    assert hints[0] == hints[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"eval_every": 5},
        *(pytest.param(keys, marks=pytest.mark.slow) for keys in SLOWLY),
    ],
    ids=str,
)
def test_a_finished_run_goes_on_as_the_longer_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    trained(tmp_path / "short", epochs=2, **keys)
    trained(tmp_path / "short", epochs=6, **keys)
    trained(tmp_path / "long", epochs=6, **keys)
    assert_same(tmp_path / "short", tmp_path / "long")


def test_early_stopping_counts_at_what_was_the_last_step(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"early_stopping": {"patience": 1, "min_delta": 10.0}}
    keys |= {"checkpoint": {"every": 5}}
    assert trained(tmp_path, epochs=2, **keys).reason == "all steps done"
    longer = trained(tmp_path, epochs=3, **keys)
    assert (longer.step, longer.reason[:14]) == (12, "early stopping")


def test_no_checkpoint_is_the_best_once_its_evaluation_is_taken_back(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_every": 100}
    assert trained(tmp_path, **keys).best_checkpoint is not None
    longer = trained(tmp_path, epochs=6, stop_at_step=13, **keys)
    assert longer.best_checkpoint is None
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_kill_while_the_new_length_is_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "one", eval_every=5)
    plain = RunDirectory._write

    def killed(directory: RunDirectory, name: str, text: str) -> None:
        if name == "run.json":
            os._exit(9)
        plain(directory, name, text)

    monkeypatch.setattr(RunDirectory, "_write", killed)
    child = os.fork()
    if not child:
        trained(tmp_path / "one", epochs=4, eval_every=5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    config = load(longer_tasks.LineConfig, tmp_path / "one" / "config.yaml")
    assert config.epochs == 4
    ls.train(longer_tasks.Line(config), config, run_dir=tmp_path / "one", resume=True, quiet=True)
    trained(tmp_path / "other", epochs=4, eval_every=5)
    assert_same(tmp_path / "one", tmp_path / "other")


def test_an_interrupted_run_gets_longer_shorter_and_on(tmp_path: Path) -> None:
    trained(tmp_path / "one", steps=20, stop_at_step=5, eval_every=4)
    trained(tmp_path / "one", steps=30, stop_at_step=9, eval_every=4)
    trained(tmp_path / "one", steps=14, eval_every=4)
    trained(tmp_path / "one", steps=None, epochs=3, eval_every=4)
    trained(tmp_path / "other", epochs=3, eval_every=4)
    assert_same(tmp_path / "one", tmp_path / "other")
    assert trained(tmp_path / "one", epochs=3, eval_every=4).status == "completed"


@pytest.mark.parametrize("first", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_on_any_number_of_ranks(lockstep: Any, here: Any, tmp_path: Path, first: int) -> None:
    target = f"{FILE}:Line"
    assert here("train", target, "--run-dir", "one", "-n", str(first), "-q").returncode == 0
    done = lockstep("resume", "one", "epochs=4", "-n", "2", "-q")
    assert done.returncode == 0, done.stderr
    assert here("train", target, "--run-dir", "other", "epochs=4", "-q").returncode == 0
    assert_same(tmp_path / "one", tmp_path / "other")


def test_a_script_goes_on_by_the_command(here: Any, tmp_path: Path) -> None:
    script = tmp_path / "line.py"
    script.write_text(Path(FILE).read_text().replace("ls.main(OwnInit())", "ls.main(Line())"))
    trained(tmp_path / "other", epochs=3)
    for arguments in (
        ("train", str(script), "--run-dir", "one", "-q"),
        ("resume", "one", "epochs=3", "-q"),
    ):
        done = here(*arguments)
        assert done.returncode == 0, done.stderr
    assert result(tmp_path / "one")["params_sha256"] == result(tmp_path / "other")["params_sha256"]


@pytest.mark.parametrize("keys", [{"steps": 11}, slow({"epochs": 1})], ids=str)
def test_less_than_was_done_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    trained(tmp_path)
    with pytest.raises(ConfigError, match=r"the run has done 12; give more"):
        trained(tmp_path, **keys)
    assert "epochs: 2\nsteps: null" in (tmp_path / "config.yaml").read_text()
    assert trained(tmp_path).status == "completed"


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("Line", {"schedule": {"name": "cosine"}}, "step 1 would have had another"),
        slow("Line", {"schedule": {"name": "onecycle"}}, "learning rate depends"),
        slow("Line", {"schedule": {"name": "linear", "warmup_steps": 6}}, "step 7 would"),
        ("OwnRate", {}, "learning rate depends on where the run ends"),
        ("Line", {"how": "build"}, "has read the whole config"),
        slow("Line", {"how": "compare"}, "has read the whole config"),
        ("Line", {"how": "late"}, r"has read config\.epochs"),
        ("Line", {"how": "look"}, r"has read run\.total_steps"),
        ("Line", {"how": "count", "eval_every": 5}, "Count.after_evaluation has seen"),
        ("OwnInit", {}, r"OwnInit\.__init__ \(made by a script\)"),
    ],
)
def test_what_may_have_used_the_length_is_refused(
    tmp_path: Path, name: str, keys: dict[str, Any], reason: str
) -> None:
    trained(tmp_path, name, **keys)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    before |= {path: path.read_bytes() for path in tmp_path.glob("*.yaml")}
    before.pop(tmp_path / "result.json")
    with pytest.raises(ConfigError, match=reason) as caught:
        trained(tmp_path, name, epochs=4, **keys)
    assert "--from RUN_DIR" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert trained(tmp_path, name, **keys).status == "completed"


def test_a_rate_of_the_step_alone_may_go_on(tmp_path: Path) -> None:
    trained(tmp_path / "one", "OwnRate", how="of step")
    trained(tmp_path / "one", "OwnRate", how="of step", epochs=3)
    trained(tmp_path / "other", "OwnRate", how="of step", epochs=3)
    assert_same(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(("how", "code"), [("", 0), ("init", 2)])
def test_what_init_has_read_is_known_if_the_command_made_the_task(
    here: Any, tmp_path: Path, how: str, code: int
) -> None:
    assert here("train", f"{FILE}:OwnInit", "--run-dir", "one", f"how='{how}'").returncode == 0
    assert here("resume", "one", "epochs=3").returncode == code


def test_what_a_lost_rank_has_read_is_known(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has informed the others in each step, not only when a checkpoint was written."""
    for name, value in to_env([PlannedFault(1, 4)]).items():
        monkeypatch.setenv(name, value)
    how = ("how='on one rank'", "checkpoint.every=100")
    trains = ("train", f"{FILE}:Line", "-n", "2", "--launcher", "local", "--run-dir", "one", *how)
    assert here(*trains).returncode == 0
    assert result(tmp_path / "one")["world_size"] == 1
    refused = here("resume", "one", "epochs=3")
    assert refused.returncode == 2
    assert "has read config.epochs" in refused.stderr


def test_a_run_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    root = tmp_path / "checkpoints"
    snapshot, folder, _ = checkpoint.newest_valid(root)
    assert snapshot is not None
    assert folder is not None
    del snapshot.meta["asked"]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    checkpoint.write(root, snapshot)
    with pytest.raises(ConfigError, match="begun by a version that did not note"):
        trained(tmp_path, epochs=4)


def test_a_manifest_without_the_length_is_damaged(tmp_path: Path) -> None:
    trained(tmp_path)
    snapshot, folder, _ = checkpoint.newest_valid(tmp_path / "checkpoints")
    assert snapshot is not None
    assert folder is not None
    snapshot.meta["config"]["epochs"] = "two"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    checkpoint.write(tmp_path / "checkpoints", snapshot)
    with pytest.raises(CheckpointError, match="config: epochs or steps"):
        trained(tmp_path, epochs=4)


def test_a_config_whose_epochs_may_be_none_goes_on_by_steps(tmp_path: Path) -> None:
    class ByStepsConfig(longer_tasks.Line.Config):
        epochs: int | None = None  # type: ignore[assignment]
        steps: int | None = 4

    class BySteps(longer_tasks.Line):
        Config = ByStepsConfig

    with pytest.raises(ConfigError, match=r"epochs=None, steps=None: nothing says when training e"):
        ByStepsConfig(steps=None)
    for steps in (4, 6):
        config = ByStepsConfig(steps=steps)
        done = ls.train(BySteps(config), config, run_dir=tmp_path, resume=True, quiet=True)
        assert done.step == steps


def test_the_best_without_the_last_evaluation_must_be_there(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"eval_every": 5, "checkpoint": {"every": 1, "keep": 1}}
    short = trained(tmp_path, **keys)
    assert short.best_checkpoint is not None
    assert short.best_checkpoint.name == "step_00000012"
    with pytest.raises(ConfigError, match="step_00000010 is the best one without"):
        trained(tmp_path, epochs=4, **keys)


def test_other_keys_are_refused_as_ever(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"lr is 0\.03 there"):
        trained(tmp_path, epochs=4, lr=0.5)

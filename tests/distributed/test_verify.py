"""`lockstep verify` tells equal from different."""

import re

import pytest
from rich.console import Console
from tests.conftest import target

from lockstep.cli.prove import repeated as training
from lockstep.cli.prove import verify
from lockstep.cli.prove.repeated import launches_of, meshes_of
from lockstep.launching.job.ending import Ended


@pytest.mark.slow
def test_equal(lockstep):
    done = lockstep(
        "verify", target(), "--ranks", "1,2", "--launchers", "python,mpi,torchrun", "steps=5"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 6 runs, one SHA-256, and the same metrics in 1 evaluation" in done.stdout
    assert "python, then torchrun" in done.stdout
    assert "1, then 2" in done.stdout


class Trainings(training.Training):
    """Runs that are made up: those in two launches forget something."""

    def run(self, launches, stop=0, more=()):
        assert stop == (len(launches) > 1 and 10)
        return training.Run(launches, "forgot" if len(launches) > 1 else "kept", 20, 1.0)


def _parting(_, runs):
    return f"{runs[1].name} {runs[0].half}"


def test_a_run_that_forgets_something_when_it_is_resumed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "Training", Trainings)
    monkeypatch.setattr(
        verify, "first_difference", lambda _, runs: f"{runs[1].name} {runs[0].half}"
    )
    code = verify.verify(
        "digits", [], verify.Variants("1,2,3", "mpi"), tmp_path, Console(width=150)
    )
    out = capsys.readouterr().out
    assert code == 1, out
    assert "different: 1 of 4 runs" in out
    assert "mpi × 1, resumed: mpi × 3 10" in out


def test_several_runs_are_resumed_each_on_other_ranks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "Training", Trainings)
    monkeypatch.setattr(verify, "first_difference", lambda *_: "")
    variants = verify.Variants("", "mpi", meshes="1x1x1,2x1x1,1x2x1", resumes=5)
    verify.verify("digits", [], variants, tmp_path, Console(width=150))
    out = capsys.readouterr().out
    assert "different: 3 of 6 runs" in out
    for there, then in (("1x1x1", "1x2x1"), ("2x1x1", "1x1x1"), ("1x2x1", "1x1x1")):
        assert f"{there}, then {then}" in out


def test_meshes_with_and_without_slices():
    meshes = ["2x3x1", "2x1x2+optimizer", "2x1x1+parameters"]
    launches = list(launches_of("mpi", meshes_of(",".join(meshes))))
    assert [launch.mesh for launch in launches] == meshes
    assert [launch.num_ranks for launch in launches] == [6, 4, 2]
    for launch, kind in zip(launches, ("none", "optimizer", "parameters"), strict=True):
        assert launch.overrides[2:] == [f"sharding={kind}", "optimizer.sharded=false"]
    assert launches[1].overrides[:2] == ["mesh.pp=1", "mesh.tp=2"]
    [alone] = launches_of("mpi", meshes_of("2x1x1"))
    assert alone.overrides == ["mesh.pp=1", "mesh.tp=1"]  # the rest is left to the config


def test_a_signal_ends_it_all(monkeypatch, tmp_path):
    started = []

    def interrupted(command, *_, **__):
        started.append(command.num_ranks)
        return Ended(130, "ended before a checkpoint was written")

    monkeypatch.setattr(training, "start", interrupted)
    with pytest.raises(SystemExit) as raised:
        verify.verify("digits", [], verify.Variants("1,2,3", "mpi"), tmp_path, Console(width=150))
    assert raised.value.code == 130
    assert started == [1]


def test_different_names_step_and_parameter(lockstep):
    done = lockstep("verify", target(), "--ranks", "1,2", "--launchers", "mpi", "evil=rank")
    assert done.returncode == 1
    assert "different: 1 of 2 runs" in done.stdout
    assert "first differ after step 2, in " in done.stdout


@pytest.mark.slow
def test_evaluations_that_depend_on_ranks_differ_though_the_parameters_do_not(lockstep):
    done = lockstep(
        "verify", target(), "--ranks", "1,2", "--launchers", "local", "evil=world", "steps=4",
        "eval_every=2",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different: 1 of 2 runs" in done.stdout
    assert re.search(
        r"the evaluation of val after step 2: accuracy is 0\.\d+ in local × 1, 0\.\d+ in local × 2",
        done.stdout,
    )
    assert "first differ after step" not in done.stdout


def test_a_run_that_fails(lockstep):
    done = lockstep("verify", target(), "--ranks", "1", "--launchers", "mpi", "evil=shape")
    assert done.returncode == 1
    assert "mpi × 1 failed: Task.loss: Loss.sum must be a scalar tensor" in done.stdout


def test_bad_ranks_and_launchers(lockstep):
    done = lockstep("verify", target(), "--ranks", "1,x")
    assert done.returncode == 2
    assert "--ranks 1,x" in done.stderr
    done = lockstep("verify", target(), "--ranks", "2", "--launchers", "python")
    assert done.returncode == 2
    assert "plain python runs one rank" in done.stderr
    for meshes in ("2x2", "2x0x1", "2x1x1+params", "2x1x1+"):
        done = lockstep("verify", target(), "--meshes", meshes)
        assert done.returncode == 2
        assert f"--meshes {meshes}: must be three positive numbers" in done.stderr
    done = lockstep("verify", target(), "--resumes", "-1")
    assert done.returncode == 2
    assert "--resumes -1: must not be negative" in done.stderr
    done = lockstep("verify", target(), "--launchers", "bus")
    assert done.returncode == 2
    assert "--launchers bus" in done.stderr

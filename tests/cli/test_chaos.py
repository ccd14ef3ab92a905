"""Random faults: the plan, the table and the verdict."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from lockstep.cli.prove import chaos as command
from lockstep.cli.prove.chaos import (
    Ranks,
    SessionResult,
    Sessions,
    stalling_reader,
    trained,
)
from lockstep.cli.prove.chaos import _was_hit_at_start as was_hit_at_start
from lockstep.cli.prove.chaos_plan import Group, Incident, draw
from lockstep.cli.prove.chaos_verdict import (
    Effect,
    Trained,
    effect_of,
    lost_unexplained,
    render,
    started_again,
    verdict,
)
from lockstep.cli.start import init
from lockstep.engine.faults import (
    FAULTS,
    MOMENTS,
    PRINTED,
    FaultsInside,
    InjectedError,
    Pace,
    PlannedFault,
    injector,
    logged,
    moved,
    to_env,
)
from lockstep.errors import ConfigError, LaunchError
from lockstep.launching import start as launching
from lockstep.launching.job.ending import Ended
from lockstep.nn import Pipeline
from lockstep.observe import read_events
from lockstep.parallel.mesh import Mesh, rearranged

DEADLY = ("kill", "stop", "edit", "start")


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 2**32), st.integers(0, 1))
def test_every_session_leaves_somebody_alive_or_ends(num_incidents, num_ranks, seed, more):
    sessions = draw(num_incidents, 60, seed, Group(num_ranks, more, has_workers=bool(more)))
    assert sum(len(incidents) for incidents in sessions) == num_incidents
    for number, incidents in enumerate(sessions):
        dead = {b.faults[0].slot for b in incidents if b.what in DEADLY}
        assert len(dead) == sum(b.what in DEADLY for b in incidents) < num_ranks
        assert [b.ends_session for b in incidents[:-1]] == [False] * (len(incidents) - 1)
        if number < len(sessions) - 1:
            assert incidents[-1].ends_session
        for incident in incidents:
            own = [f for f in incident.faults if f.slot < num_ranks]
            first = 0 if incident.what == "start" else 1
            assert all(0 <= f.slot < num_ranks and first <= f.step < 59 for f in own)
            joiners = {(f.moment, f.kind) for f in incident.faults[len(own) :]}
            assert joiners <= {("join", "edit"), ("committed", "kill")}
            assert more or not joiners
        assert sum(b.what == "edit" for b in incidents) <= more
        assert "start" not in [b.what for b in incidents[1:]]
        raised = [b.step for b in incidents if b.what in ("raise", "worker")]
        assert all(b - a >= 8 for a, b in itertools.pairwise(raised))


def kills(moments, num_plans):
    """The moments at which ranks are killed in some plans."""
    plans = [draw(20, 60, seed, Group(4, moments=moments)) for seed in range(num_plans)]
    incidents = [b for sessions in plans for of_session in sessions for b in of_session]
    return {fault.moment for b in incidents if b.what == "kill" for fault in b.faults}


@given(st.sets(st.sampled_from(MOMENTS), min_size=1))
def test_ranks_are_killed_at_the_moments_of_their_run_alone(seen):
    found = kills(seen | {"compute"}, 3)
    # At others only while the rest recovers.
    assert found <= seen | {"compute", "regroup", "catch_up"}
    assert "join" not in found


def test_ranks_are_killed_at_all_moments_of_their_run():
    seen = {"compute", "summing", "factors", "gather", "committed"}
    assert seen <= kills(seen, 9)


def evaluated(step, value):
    metrics = {"accuracy": value}
    return {"event": "Evaluated", "time": 1.0, "step": step, "split": "val", "metrics": metrics}


RESULT = {"step": 2, "params_sha256": "0" * 64, "carry_sha256": "1" * 64}
TRAINED = Trained(RESULT, [1, 2], [evaluated(1, 0.5), evaluated(2, 0.75)])


@pytest.mark.parametrize(
    ("run", "struck", "lost", "says", "code"),
    [
        (TRAINED, 1, [], "evaluations: the same metrics in 2 evaluations", 0),
        (TRAINED, 0, [], "faults: 0 of 2 struck: nothing is shown", 1),
        (TRAINED, 2, [3], "ranks: lost without a fault that explains it: slot 3", 1),
        (replace(TRAINED, steps=[1, 1, 2]), 2, [], "steps: 3 rows for 2 steps", 1),
        (replace(TRAINED, result={**RESULT, "carry_sha256": "2"}), 2, [], "different: SHA-256", 1),
        (
            replace(TRAINED, events=[evaluated(1, 0.5), evaluated(2, 0.5), evaluated(2, 0.75)]),
            2,
            [],
            "evaluations: differ first in the evaluation of val after step 2: accuracy is 0.75 in "
            "the run without faults, 0.5 in the run with them",
            1,
        ),
    ],
)
def test_a_run_must_be_like_the_one_without_faults(capsys, run, struck, lost, says, code):
    incident = draw(1, 10, 1, Group(2))[0][0]
    effects = [Effect(incident, number < struck) for number in range(2)]
    assert verdict(TRAINED, run, effects, lost, Console()) == code
    out = capsys.readouterr().out
    assert says in out
    assert ("equal without and with faults: SHA-256" in out) == ("different" not in says)


def test_the_best_state_may_go_with_the_run_directory_and_nothing_else(capsys):
    def tested(value, model_step=None, step=2):
        return {**evaluated(step, value), "split": "test", "model_step": model_step}

    reference = replace(TRAINED, events=[evaluated(1, 0.5), tested(0.75, model_step=1)])
    last = replace(TRAINED, events=[evaluated(1, 0.5), tested(0.25)])
    for what, code in (("directory", 0), ("job", 1)):
        effects = [Effect(Incident(what, 1, ()), struck=True)]
        assert verdict(reference, last, effects, [], Console()) == code
    assert "the same metrics in 1 evaluation\n" in capsys.readouterr().out
    effects = [Effect(Incident("directory", 1, ()), struck=True)]
    for other in (tested(0.25, model_step=1), tested(0.25, step=1)):
        run = replace(last, events=[evaluated(1, 0.5), other])
        assert verdict(reference, run, effects, [], Console()) == 1


def test_what_a_run_has_left_is_put_together_from_its_directories(tmp_path):
    def session(moved, rows=()):
        return SessionResult([], list(rows), [], moved, tmp_path / "run-rescued")

    for name, steps in (("run-moved", "12"), ("run-rescued", "45")):
        (tmp_path / name).mkdir()
        lines = ["step,split", *(f"{step},train" for step in steps), f"{steps[-1]},val"]
        (tmp_path / name / "metrics.csv").write_text("\n".join(lines) + "\n")
    result = {"status": "completed", "step": 5, "params_sha256": "0" * 64, "exit_code": 0}
    result |= {"reason": "", "metrics": {}, "world_size": 2, "wall_s": 1.0, "error": None}
    (tmp_path / "run-rescued" / "result.json").write_text(json.dumps({**result, "checkpoint": ""}))
    # There was no file any more to which the row of step 3 could be added.
    rows = [row("StepDone", 1.0, step=3), evaluated(4, 0.5), evaluated(5, 0.75)]
    run = trained([session(tmp_path / "run-moved", rows[:2]), session(None, rows[2:])])
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.events == rows
    assert run.result["step"] == 5


def test_a_fault_moves_the_run_directory_away(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    fault = PlannedFault(0, 3, "compute", "move", sleep_s=0.0)
    at = injector(to_env([fault], tmp_path / "log", run_dir), 0)
    at("compute", 3)
    assert not run_dir.exists()
    assert moved(run_dir).is_dir()


def test_a_rank_that_is_lost_without_a_fault_is_known():
    incidents = [
        Incident("start", 0, (PlannedFault(1, 0, "met"),)),
        Incident("slow", 3, (PlannedFault(2, 3, kind="slow"),)),
        Incident("kill", 4, (PlannedFault(0, 4),)),
    ]
    rows = [row("RankLost", 1.0, slot=slot) for slot in (0, 2, 1, 5)]
    assert lost_unexplained(incidents, rows, 4) == [2]


def strike(incident):
    return {"time": 1.0, **vars(incident.faults[0])}


def test_a_reader_stands_still_where_a_fault_prints_and_then_reads_on():
    more_than_a_pipe_holds = 2000 * ("-" * 79 + "\n")
    with stalling_reader(0.3):
        print(PRINTED)
        started = time.monotonic()
        print(more_than_a_pipe_holds, flush=True)
        waited_s = time.monotonic() - started
    assert waited_s >= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_reader_that_stands_still_ends_nobody(tmp_path, monkeypatch, is_buffered):
    if not is_buffered:
        monkeypatch.setattr(launching, "pumped_output", nullcontext)
    incidents = [
        Incident("reader", step, (PlannedFault(slot, step, "compute", "print"),))
        for slot, step in ((1, 5), (0, 20))
    ]
    sessions = Sessions("digits", ["steps=40"], Ranks(2, "local"), server="")
    if is_buffered:
        result = sessions.run(tmp_path / "run", incidents)
        assert [effect.struck for effect in result.effects] == [True, True]
        assert result.lost == []
    else:  # the fault is one that would end ranks
        with pytest.raises(LaunchError, match="which its faults do not explain"):
            sessions.run(tmp_path / "run", incidents)


def test_a_signal_to_the_command_ends_it_also_in_a_session_that_a_preemption_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(command, "start", lambda *_, **__: Ended(143, stopped_by=signal.SIGTERM))
    incident = Incident("preempt", 5, (PlannedFault(1, 5, "committed", "preempt"),))
    with pytest.raises(SystemExit, match="143"):
        Sessions("digits", [], Ranks(2, "local"), "").run(tmp_path / "run", [incident])


def test_ranks_that_were_hit_while_they_started_are_started_again():
    start, slow, job = (
        Incident("start", 0, (PlannedFault(1, 0, "met"),)),
        Incident("slow", 3, (PlannedFault(2, 3, kind="slow"),)),
        Incident("job", 4, (PlannedFault(0, 4, "committed"), PlannedFault(1, 4, "committed"))),
    )
    assert was_hit_at_start([start, slow, job], [strike(start)])
    assert was_hit_at_start([start, slow], [strike(start), strike(slow)])
    assert not was_hit_at_start([start, job], [strike(start), strike(job)])
    assert not was_hit_at_start([start, job], [])
    assert not was_hit_at_start([slow], [strike(slow)])


def test_a_run_without_faults_tells_its_moments(here, tmp_path, monkeypatch):
    for name, value in to_env([], tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    done = here("train", "digits", "steps=3", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    seen = [row["moment"] for row in logged(tmp_path / "log")]
    assert len(seen) == len(set(seen))
    assert {"forward", "backward", "compute", "reduce", "optimizer", "committed"} <= set(seen)
    # Of one rank, whose gradients are small and whole.
    assert not {"summing", "copying", "gather", "factors", "send", "regroup"} & set(seen)


@given(st.integers(0, 2**32))
def test_a_seed_gives_one_plan(seed):
    state = random.getstate()
    assert draw(20, 200, seed, Group(4)) == draw(20, 200, seed, Group(4))
    assert random.getstate() == state


COMPUTED = {
    "forward",
    "backward",
    "shards_forward",
    "shards_backward",
    "send",
    "receive",
    "compute",
}


@given(st.integers(0, 2**32), st.sampled_from([(1, 2), (2, 1), (2, 2)]), st.integers(0, 1))
def test_spares_are_struck_where_they_come_to_it(seed, axes, num_spares):
    tp, pp = axes
    num_ranks = 4 + num_spares
    for incidents in draw(10, 60, seed, Group(num_ranks, tp=tp, pp=pp)):
        columns = {slot: slot % (tp * pp) for slot in range(num_ranks)}
        for incident in incidents:
            if incident.what in ("job", "corrupt"):
                assert [f.slot for f in incident.faults] == list(range(num_ranks))
                continue
            mesh = Mesh(8, tuple(columns.values()), tp, pp)
            spares = [list(columns)[rank] for rank in mesh.incomplete]
            fault = incident.faults[0]
            assert fault.slot in columns
            assert fault.slot not in spares or fault.moment not in COMPUTED
            if incident.what == "start" and list(columns.values()).count(columns[fault.slot]) == 1:
                continue  # all start again
            if incident.what in DEADLY:
                del columns[fault.slot]
                kept = rearranged(list(columns.values()), tp * pp)
                columns = dict(zip(columns, kept, strict=True))
                assert set(kept) == set(range(tp * pp))


def test_every_stage_comes_to_the_middle_of_its_passes():
    model = Pipeline(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Tanh())
    for block, moments in ((0, ["forward", "backward"]), (1, ["forward", "backward"])):
        seen: list[str] = []
        stage = copy.deepcopy(model)
        FaultsInside(stage, lambda moment, step, seen=seen: seen.append(moment))
        stage[block](torch.ones(1, 2)).sum().backward()
        assert list(dict.fromkeys(seen)) == moments


def test_too_many_faults_for_the_steps():
    with pytest.raises(ConfigError, match="--faults 20: a run of 10 steps has room for 8"):
        draw(20, 10, 0, Group(4))


def test_a_fault_strikes_once_and_in_no_other_process(tmp_path):
    env = to_env([PlannedFault(1, 3, "compute", "raise")], tmp_path / "log")
    at = injector(env, 1)
    at("compute", 2)
    at("reduce", 3)
    injector(env, 0)("compute", 3)
    with pytest.raises(InjectedError, match="compute of step 3"):
        at("compute", 4)
    at("compute", 5)
    injector(env, 1)("compute", 5)  # in its next life


@pytest.mark.parametrize(
    "text", ["[", "[]", '{"log": "", "faults": [{"slot": 1}]}',
             '{"log": "", "faults": [{"slot": 1, "step": 2, "kind": "melt"}]}'],
)  # fmt: skip
def test_a_variable_that_holds_no_faults(text):
    with pytest.raises(ConfigError, match=FAULTS):
        injector({FAULTS: text}, 0)


def row(event, time, **values):
    return {"event": event, "time": time, **values}


def test_times_of_a_killed_rank():
    incident = draw(1, 10, 1, Group(2))[0][0]
    fault = PlannedFault(1, 4, "compute", "kill")
    incident = type(incident)("kill", 4, (fault,))
    strikes = [{"time": 10.0, **vars(fault)}]
    rows = [
        row("StepDone", 9.9, step=4),
        row("RankLost", 10.05, step=4, slot=1),
        row("Recovered", 10.06, step=4, seconds=0.02),
        row("StepDone", 10.1, step=5),
    ]
    effect = effect_of(incident, strikes, rows)
    assert effect.noticed_s == pytest.approx(0.04)
    assert effect.regroup_s == 0.02
    assert effect.resumed_s == pytest.approx(0.1)
    assert effect.steps_lost == 0
    missed = effect_of(incident, [], rows)
    assert not missed.struck
    assert started_again(missed, rows, [row("StepDone", 13, step=3)]) == missed
    assert render([effect]).row_count == 1
    again = started_again(
        effect, rows, [row("RunStarted", 12, step=2), row("StepDone", 13, step=3)]
    )
    assert again.steps_lost == 3
    assert again.resumed_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "1"), "-n 1: must be at least 2"),
        (("--faults", "0"), "--faults 0: must be at least 1"),
        (("stepz=3",), "unknown key 'stepz'"),
        (("--launcher", "torchrun"), "--launcher torchrun: must be one of mpi, local"),
        (("--hosts", "1"), "--hosts 1 -n 1: must be at least 2 and 1"),
        (("--hosts", "2", "-n", "0"), "--hosts 2 -n 0: must be at least 2 and 1"),
        (("--hosts", "2", "--launcher", "mpi"), "--launcher mpi: leave it out"),
    ],
)
def test_bad_arguments(here, arguments, message):
    done = here("chaos", "digits", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(700)  # jobs that start again, on a machine that does other things too
@pytest.mark.parametrize(
    ("seed", "arguments"),
    [
        (4, ()),
        (5, ("data.num_workers=1",)),
        (6, ("--launcher", "local")),
        (7, ("--launcher", "local", "--replace", 2)),
        (8, ("--replace", 2)),
    ],
)
def test_twenty_faults_do_not_change_the_result(lockstep, seed, arguments):
    done = lockstep(
        "chaos", "digits", "-n", 4, "--faults", 20, "--seed", seed, *arguments, "steps=200",
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 20 struck" in done.stdout
    assert "each of 200 was committed once" in done.stdout
    assert "without and with faults" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "seed"), [("local", 2), ("mpi", 9)])
def test_starts_of_a_mesh_that_needs_all_ranks_are_hit_too(lockstep, launcher, seed):
    task = f"{Path(__file__).parents[1] / 'distributed' / 'state_tasks.py'}:Plain"
    done = lockstep(
        "chaos", task, "-n", 2, "--faults", 6, "--seed", seed, "--launcher", launcher, "mesh.pp=2",
        "steps=60", timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: 6 of 6 struck" in done.stdout
    assert re.search(r"\bstart\b.*slot \d", done.stdout)
    assert "the same metrics in 12 evaluations" in done.stdout


@pytest.mark.slow
def test_a_disk_that_stands_still_under_tensors_of_all_ranks_ends_nobody(lockstep):
    small = ("steps=30", "num_layers=2", "width=32", "num_heads=2", "batch_size=8", "eval_every=20")
    done = lockstep(
        "chaos", Path(__file__).parents[2] / "examples" / "gpt.py", "-n", 2, "--faults", 3,
        "--seed", 29, "--launcher", "local", "sharding=parameters", "clip_norm=null", *small,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: 3 of 3 struck" in done.stdout
    assert re.search(r"\bdisk\b.*slot 0", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "seed"), [("mpi", 2), ("local", 29)])
def test_starts_readers_and_directories_do_not_change_the_result(lockstep, launcher, seed):
    done = lockstep(
        "chaos", "digits", "-n", 3, "--faults", 5, "--seed", seed, "--launcher", launcher,
        "steps=40", timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: 5 of 5 struck" in done.stdout
    for what, victim in (("start", r"slot \d"), ("reader", "reader"), ("directory", "run dir")):
        assert re.search(rf"\b{what}\b.*{victim}", done.stdout)
    assert "without and with faults" in done.stdout


def test_a_pace_has_all_ranks_sleep_once_in_a_step_while_its_file_is_there(tmp_path):
    file = tmp_path / "paced"
    env = to_env([], pace=Pace(0.02, str(file)))
    slept = []
    for slot in range(2):
        at = injector(env, slot)
        for step in range(6):
            if step == 4:
                file.unlink(missing_ok=True)
            elif step == 1:
                file.touch()
            for moment in 2 * MOMENTS:
                began = time.monotonic()
                at(moment, step)
                if time.monotonic() - began > 0.019:
                    slept.append((slot, step, moment))
    mine, others = ([row[1:] for row in slept if row[0] == slot] for slot in range(2))
    assert mine == others
    assert [step for step, _ in mine] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("target", ["digits", Path(init.__file__).with_name("template.py")])
def test_hosts_that_are_struck_change_nothing(lockstep, tmp_path, target):
    done = lockstep(
        "chaos", target, "--hosts", 3, "--faults", 4, "--seed", 3, "--replace", 4,
        "--keep", tmp_path / "kept", "steps=60", timeout=360, cold=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults: 4 of 4 struck" in done.stdout
    assert "each of 60 was committed once" in done.stdout
    assert "without and with faults" in done.stdout
    rows = read_events(tmp_path / "kept" / "chaos" / "events.jsonl")
    assert any(row["event"] in ("Recovered", "Resumed") for row in rows)

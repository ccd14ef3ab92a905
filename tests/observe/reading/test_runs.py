"""Runs in folders: listed, chosen, tagged, compared, removed."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.conftest import environment
from tests.observe.reading.test_histories import PLAN, done, joined, written

from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.observe.reading import follow
from lockstep.observe.reading.follow import EVENTS, is_claimed
from lockstep.observe.reading.listing import (
    Summary,
    change_tags,
    chosen,
    find_runs,
    read_tags,
    remove_run,
    summarise,
)
from lockstep.observe.storing.jsonl import EventsJsonl, event_from_row

TASK = f"{Path(__file__).with_name('flip_tasks.py')}:Flip"
CONFIG = ("steps=12", "batch_size=16", "num_microbatches=4", "log_every=1", "checkpoint.every=4")
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def run_in(folder, *rows, **result):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"task": "t", "config_hash": "c", "target": "", "overrides": []})
    )
    (folder / "config.yaml").write_text("lr: 0.5\noptimizer: {name: sgd}\n")
    written(folder, rows)
    os.utime(folder / EVENTS, (1, 1))
    if result:
        ended = {"status": "completed", "step": 9, "params_sha256": "ab", "metrics": {}}
        (folder / "result.json").write_text(json.dumps(ended | {"exit_code": 0} | result))
    return folder


def test_pauses_between_sessions_are_no_time_of_a_run(tmp_path):
    """Also one that was killed, whose next session only finds its file."""

    def session(began, steps, *ended):
        now = [began]
        sink = EventsJsonl(tmp_path / "run" / EVENTS, clock=lambda: now[0])
        for row in (joined(0), PLAN, *(done(n, 1.0) for n in steps), *ended):
            sink(event_from_row({"step": 0, **row}))
            now[0] += 2.0
        sink.close()

    run_in(tmp_path / "run")
    session(100.0, range(3))  # five rows: 8 s
    assert summarise(tmp_path / "run").value("seconds") == 8.0
    session(90_000.0, range(3, 5))  # 6 s
    session(100_000.0, range(5, 6))  # 4 s
    summary = summarise(tmp_path / "run")
    assert (summary.started, summary.newest) == (100.0, 100_004.0)
    assert summary.value("seconds") == 18.0


def test_of_a_run_of_an_earlier_version_all_time_counts(tmp_path):
    rows = [{**joined(0), "time": 100.0}, {**PLAN, "time": 101.0}, {**done(1, 1.0), "time": 140.0}]
    run = run_in(tmp_path / "run", *rows)
    assert summarise(run).value("seconds") == 40.0
    with closing(EventsJsonl(run / EVENTS, clock=lambda: 9000.0)) as sink:
        sink(event_from_row({"step": 0, **PLAN}))
    assert summarise(run).value("seconds") == 40.0


def test_states_are_told_apart(tmp_path):
    assert summarise(run_in(tmp_path / "new")).state == "new"
    assert summarise(run_in(tmp_path / "killed", PLAN, done(3, 2.0))).state == "killed"
    ended = summarise(run_in(tmp_path / "ended", PLAN, done(9, 1.0), metrics={"val/loss": 0.25}))
    assert (ended.state, ended.step, ended.total_steps, ended.sha256) == ("completed", 9, 9, "ab")
    assert ended.metrics == {"train/loss": 1.0, "val/loss": 0.25}
    # On another host: for half a minute, or for some times as long as between two reports.
    now = time.time()
    slow = [{**done(n, 2.0), "time": 300.0 * n} for n in range(1, 4)]
    for name, rows, ages in (("fresh", [done(3, 2.0)], (9, 40)), ("slow", slow, (900, 1300))):
        run = run_in(tmp_path / name, PLAN, *rows)
        for age, state in zip(ages, ("running", "killed"), strict=True):
            os.utime(run / EVENTS, (now - age, now - age))
            assert summarise(run).state == state
    # Here, the lock says it.
    own = {**joined(0), "host": socket.gethostname()}
    run = run_in(tmp_path / "here", own, PLAN, done(3, 2.0))
    os.utime(run / EVENTS, (now, now))
    assert summarise(run).state == "killed"


def test_a_run_that_goes_on_elsewhere_is_not_removed(tmp_path):
    folder = run_in(tmp_path / "run", PLAN, done(3, 2.0))
    os.utime(folder / EVENTS, (time.time(), time.time()))
    with pytest.raises(RunDirectoryError, match="was a moment ago on another host"):
        remove_run(folder)
    assert (folder / EVENTS).exists()


def test_a_run_is_removed_from_within(here, tmp_path):
    run_in(tmp_path / "run", PLAN, done(3, 2.0), metrics={})
    os.chdir(tmp_path / "run")
    try:
        assert remove_run(Path()) == []
    finally:
        os.chdir(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_run_that_another_process_trains_is_running_and_cannot_be_removed(tmp_path):
    folder = run_in(tmp_path / "run", PLAN, done(3, 2.0), status="stopped")
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, folder / ".lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    ) as holder:  # fmt: skip
        assert holder.stdout.readline()
        assert is_claimed(folder)
        assert summarise(folder).state == "running"
        with pytest.raises(RunDirectoryError, match="is trained in"):
            remove_run(folder)
        holder.stdin.close()
    assert not is_claimed(folder)
    assert summarise(folder).state == "stopped"


def test_asking_does_not_take_the_lock(tmp_path):
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open("w") as own:
        assert not is_claimed(tmp_path)
        fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_damaged_run_is_listed_with_what_is_wrong(tmp_path):
    folder = run_in(tmp_path / "run", PLAN, done(3, 2.0))
    (folder / "run.json").write_text("{")
    (folder / "config.yaml").write_text("a: [")
    (folder / "result.json").write_text('{"status": "completed"}')
    with (folder / EVENTS).open("ab") as file:
        file.write(b"\x00\xff\n" * 3 + b'{"event": "StepDone", "loss": [], "metrics": 4}\n{"to')
    run = summarise(folder)
    assert "result.json" in "".join(run.problems)
    assert run.value("lr") is None
    (folder / EVENTS).unlink()
    (folder / EVENTS).mkdir()
    assert "events.jsonl: cannot be read" in summarise(folder).problems[1]


def test_the_ends_of_long_files_are_enough(tmp_path, monkeypatch):
    evaluated = {"event": "Evaluated", "split": "val", "seconds": 1.0, "metrics": {"loss": 4.0}}
    large = {**evaluated, "split": "large", "arrays": {"confusion": [[1] * 9000]}, "step": 1500}
    lost = {"event": "Recovered", "world_size": 2, "seconds": 0.1, "copied": False}
    rows = [*map(joined, range(500)), PLAN, *(done(step, float(step)) for step in range(1, 5000))]
    folder = run_in(tmp_path / "run", *rows[:4500], evaluated, large, lost, *rows[4500:])
    size = (folder / EVENTS).stat().st_size
    monkeypatch.setattr(follow, "_BLOCK", size // 3)
    run = summarise(folder)
    assert (run.step, run.total_steps, run.metrics["train/loss"]) == (4999, 9, 4999.0)
    assert (run.metrics["val/loss"], run.metrics["large/loss"], run.ranks) == (4.0, 4.0, 2)


def test_counts_of_a_foreign_file_are_not_negative(tmp_path):
    folder = run_in(tmp_path / "run", {**PLAN, "total_steps": -9}, done(-1, 1.0))
    run = summarise(folder)
    assert (run.step, run.total_steps) == (0, 0)


def test_the_newest_report_is_found_before_much_that_was_logged(tmp_path, monkeypatch):
    evaluated = {"event": "Evaluated", "split": "val", "seconds": 1.0, "metrics": {"loss": 4.0}}
    logged = {"event": "Logged", "name": "a", "kind": "text", "text": "x" * 80}
    words = [{**logged, "step": 10} for _ in range(200)]
    done_20 = {**done(20, 2.0), "time": 500.0}
    folder = run_in(tmp_path / "run", PLAN, done(10, 1.0), evaluated, *words, done_20, *words)
    size = (folder / EVENTS).stat().st_size
    for block in (size // 9, size // 9 + 40, size // 3, 1 << 22):
        monkeypatch.setattr(follow, "_BLOCK", block)
        run = summarise(folder)
        assert (run.step, run.metrics) == (20, {"train/loss": 2.0, "val/loss": 4.0})
    # Too far from the end: what the beginning says is not said as the newest.
    monkeypatch.setattr(follow, "_BLOCK", size // 9)
    monkeypatch.setattr(follow, "_MAX_BYTES", size // 3)
    run = summarise(folder)
    assert (run.step, run.total_steps, run.metrics) == (0, 9, {})


@pytest.mark.parametrize("cut", range(0, 130, 10))
def test_a_report_that_begins_before_the_part_that_is_read_is_not_missed(
    tmp_path, monkeypatch, cut
):
    words = [{"event": "Logged", "step": 9, "name": "a", "kind": "text", "text": "x"}] * 100
    folder = run_in(tmp_path / "run", PLAN, done(1, 1.0), *words, done(5, 5.0), *words)
    text = (folder / EVENTS).read_bytes()
    begin = text.index(b"StepDone", text.index(b"StepDone") + 1)
    monkeypatch.setattr(follow, "_BLOCK", len(text) - begin + cut - 65)
    assert summarise(folder).step == 5
    (folder / EVENTS).write_bytes(text + text[begin - 20 : begin + 50])  # it goes on being written
    assert summarise(folder).step == 5


@pytest.mark.parametrize("value", ["NaN", "Infinity", 1e300, [], None, "x", 10**30])
def test_numbers_that_cannot_be_are_no_error(tmp_path, value):
    plan = {**PLAN, "total_steps": value, "world_size": value, "time": value}
    run = summarise(run_in(tmp_path / "run", plan, {**done(3, 2.0), "step": value}))
    assert (run.step, run.total_steps, run.ranks, run.started) == (0, 0, 0, 101.0)


def test_a_folder_that_one_may_not_enter_holds_no_run(tmp_path, monkeypatch):
    run_in(tmp_path / "mine")
    (tmp_path / "theirs").mkdir()
    real = os.stat

    def stat(path, *more, **options):
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert find_runs([tmp_path]) == [tmp_path / "mine"]


def test_runs_are_found_in_folders_and_links_are_not_followed(tmp_path):
    paths = [run_in(tmp_path / name) for name in ("a", "deep/er/b", "a/checkpoints/no")]
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    assert find_runs([tmp_path]) == paths[:2]
    assert find_runs([tmp_path / "a", tmp_path]) == paths[:2]
    with pytest.raises(RunDirectoryError, match="none: is no folder"):
        find_runs([tmp_path / "none"])


RUNS = [
    Summary(Path("one"), "t", "completed", 5, metrics={"val/loss": 0.5}, tags=("paper",)),
    Summary(Path("two"), "t", "failed", 50, metrics={"val/loss": float("nan")}, started=2.0),
    Summary(Path("three"), "u", "running", 7, metrics={}, started=1.0),
]


@pytest.mark.parametrize(
    ("conditions", "order", "names"),
    [
        ([], "", ["one", "three", "two"]),
        ([], "-step", ["two", "three", "one"]),
        ([], "val/loss", ["one", "two", "three"]),
        ([], "-task", ["three", "one", "two"]),
        (["step>=7"], "", ["three", "two"]),
        (["step < 7"], "", ["one"]),
        (["val/loss<1"], "", ["one"]),
        (["val/loss!=0.5"], "", ["three", "two"]),
        (["tags=paper"], "", ["one"]),
        (["tags!=paper"], "", ["three", "two"]),
        (["state=FAILED"], "", ["two"]),
        (["name~w", "task=t"], "", ["two"]),
        (["nothing=1"], "", []),
    ],
)
def test_conditions_choose_runs(conditions, order, names):
    assert [run.path.name for run in chosen(RUNS, conditions, order)] == names


def test_two_signs_of_equality_are_one():
    assert chosen(RUNS, ["val/loss==0.5"]) == chosen(RUNS, ["val/loss=0.5"]) == [RUNS[0]]


@pytest.mark.parametrize("text", ["val/loss<0,3", "val/loss>=", "step<1e-3x"])
def test_a_number_is_not_compared_with_a_word(text):
    with pytest.raises(ConfigError, match="is a number"):
        chosen(RUNS, [text])


@pytest.mark.parametrize("text", ["", "lr", "=3", "<"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match="must be a key, one of"):
        chosen(RUNS, [text])


def test_tags_are_words(tmp_path):
    assert read_tags(tmp_path) == ()
    assert change_tags(tmp_path, ["é", "b"], []) == ("b", "é")
    assert change_tags(tmp_path, ["c"], ["b", "none"]) == ("c", "é")
    for bad in ("", "two words", "a,b", "x=1", "y" * 65, "\x1b[0m"):
        with pytest.raises(ConfigError, match="must be a word"):
            change_tags(tmp_path, [bad], [])
    for damaged in ("{", '{"a": 1}', "3", '[1, "ok"]'):
        (tmp_path / "tags.json").write_text(damaged)
        assert read_tags(tmp_path) == (("ok",) if "ok" in damaged else ())


def test_only_what_a_run_has_written_is_removed(tmp_path):
    folder = run_in(tmp_path / "run", PLAN, metrics={})
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "train.py").write_text("mine")
    (tmp_path / "outside").write_text("mine too")
    (folder / "view").symlink_to(tmp_path)
    assert remove_run(folder) == ["train.py"]
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert (tmp_path / "outside").exists()
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        remove_run(folder)
    (tmp_path / "link").symlink_to(run_in(tmp_path / "other"))
    with pytest.raises(RunDirectoryError, match="is a link"):
        remove_run(tmp_path / "link")
    assert remove_run(tmp_path / "other") == []
    assert not (tmp_path / "other").exists()


def test_the_command_lists_tags_and_removes(here, tmp_path):
    run_in(tmp_path / "runs" / "one", PLAN, done(9, 1.0), metrics={"val/loss": 0.25})
    run_in(tmp_path / "runs" / "two", PLAN, done(3, 2.0))
    listed = here("runs").stdout.splitlines()
    assert listed[0].split()[:3] == ["run", "task", "state"]
    assert [line.split()[0] for line in listed[1:]] == ["one", "two"]
    assert here("runs", "tag", "runs/one", "paper").stdout == "paper\n"
    assert here("runs", "tag", "runs/one").stdout == "paper\n"
    rows = here("runs", "runs", "--where", "tags=paper", "--json").stdout.splitlines()
    (row,) = map(json.loads, rows)
    assert (row["path"], row["state"], row["tags"]) == ("runs/one", "completed", ["paper"])
    columns = here("runs", "--columns", "name,lr,optimizer.name,nothing", "--sort", "name").stdout
    assert columns.splitlines()[1].split() == ["one", "0.5", "sgd"]
    assert "fulfils the conditions" in here("runs", "--where", "step>100").stdout
    assert here("runs", "list", "none").returncode == 2
    assert here("runs", "remove", "runs/one", "--yes").stdout == "removed runs/one\n"
    assert [line.split()[0] for line in here("runs").stdout.splitlines()[1:]] == ["two"]
    assert here("runs", "remove", "runs", "--yes").returncode == 2
    assert here("runs", "compare", "runs/two").returncode == 2


def test_runs_that_were_stopped_and_reported_otherwise_are_equal(here, tmp_path):
    here("train", TASK, *CONFIG, "log_every=3", "--run-dir", "one")
    here("train", TASK, *CONFIG, "log_every=4", "--run-dir", "two", "stop_at_step=5")
    here("resume", "two")
    told = here("runs", "compare", "one", "two")
    assert "no curve differs in the" in told.stdout
    assert "so they should be equal: they are\n" in told.stdout
    assert told.returncode == 0
    assert here("report", "one", "two", "--markdown", "--output", "r.md").returncode == 0
    assert "part at step" not in (tmp_path / "r.md").read_text()


def test_what_steps_cost_is_compared_and_can_be_sorted_by(here, tmp_path):
    for name, step_s in (("one", 0.25), ("two", 0.125)):
        cost = {"step_s": step_s, "peak_bytes": 0}
        predicted = cost | {"by": f"{name}.json"}
        reports = [done(n, 1.0) for n in range(1, 3)]
        run_in(tmp_path / name, *map(joined, range(3)), PLAN, *reports,
               measured=cost, predicted=predicted)  # fmt: skip
    run_in(tmp_path / "new")
    rows = [
        line.split() for line in here("runs", "compare", "one", "two", "new").stdout.splitlines()
    ]
    assert ["time", "of", "a", "step", "250", "ms", "125", "ms", "none"] in rows
    assert ["predicted", "250", "ms", "(one.json)", "125", "ms", "(two.json)", "none"] in rows
    found = here(
        "runs", "one", "two", "--sort", "step_s", "--columns", "name,predicted_step_s", "--json"
    )
    assert [json.loads(line) for line in found.stdout.splitlines()] == [
        {"name": "two", "predicted_step_s": 0.125}, {"name": "one", "predicted_step_s": 0.25}
    ]  # fmt: skip
    chosen = here("runs", "one", "two", "--where", "step_s<0.2", "--columns", "name")
    assert chosen.stdout.split() == ["name", "two"]


def test_runs_without_a_step_in_common_are_not_called_equal(here, tmp_path):
    for name, step in (("one", 3), ("two", 5)):
        run_in(tmp_path / name, *map(joined, range(3)), PLAN, done(step, 1.0))
    told = here("runs", "compare", "one", "two")
    assert told.returncode == 0
    assert "should be equal: they have nothing in common yet" in told.stdout


def test_two_runs_part_at_the_step_and_the_tensor_of_a_flipped_bit(here, tmp_path, monkeypatch):
    here("train", TASK, *CONFIG, "--run-dir", "one")
    here("train", TASK, *CONFIG, "--run-dir", "same", "threads=1")
    equal = here("runs", "compare", "one", "same")
    assert equal.returncode == 0, equal.stdout
    assert "none of the 3 checkpoints that both have differs" in equal.stdout
    assert "so they should be equal: they are" in equal.stdout
    monkeypatch.setenv("FLIP_AT", "6")
    for bit in ("0", "18"):
        monkeypatch.setenv("FLIP_BIT", bit)
        here("train", TASK, *CONFIG, "--run-dir", bit)
        parted = here("runs", "compare", "one", bit)
        assert parted.returncode == 1
        text = " ".join(parted.stdout.split())
        assert "differ in the checkpoint of step 8; equal in that of step 4" in text
        assert "should be equal: they are not" in text
        if bit == "0":  # too little for the loss to show
            assert "first tensor 2.weight (model.safetensors)" in text
            assert "1 of 8 elements, the first at [0, 5]: -0.0253" in text
        else:
            assert "A and B part at step 7: train/loss" in text
            assert "equal up to step 6" in text
    monkeypatch.delenv("FLIP_AT")
    here("train", TASK, *CONFIG, "lr=0.5", "--run-dir", "other")
    other = here("runs", "compare", "one", "other")
    assert other.returncode == 0
    assert "lr: A 0.001, B 0.5" in other.stdout

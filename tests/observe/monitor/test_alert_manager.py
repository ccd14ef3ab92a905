"""Alerts that come and go, on run directories of every kind."""

import json
import math
import os
from types import SimpleNamespace

import pytest
from tests.observe.monitor.watched_runs import LOST, RECOVERED, START, ended, more, running
from tests.observe.reading.test_histories import PLAN, done, joined
from tests.observe.reading.test_runs import run_in

from lockstep.observe.monitor.alerts import Rules
from lockstep.observe.monitor.alerts.manager import AlertManager
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.reading.follow import EVENTS


class Trial:
    """Rules tried on a folder, by a clock that a test moves."""

    def __init__(self, folder, *rules):
        self.now = 50.0  # before the events, which are of 100.0 and later
        self.told = []
        values = [{"name": f"rule{number}", **rule} for number, rule in enumerate(rules)]
        self.manager = AlertManager(Rules(rules=values), self._take, lambda: self.now)
        self.watch = Watch([folder])

    def _take(self, alert, rule):
        assert alert.rule == rule.name
        self.told.append(alert)

    def look(self, after_s=1.0):
        """States and messages of alerts that have come or gone at the next look."""
        self.now += after_s
        first = len(self.told)
        self.manager(self.watch, self.watch.poll())
        return [(alert.state, alert.message) for alert in self.told[first:]]


def states(told):
    return [state for state, _ in told]


def test_a_metric_that_is_too_great_is_told_once_and_when_it_is_over(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 1.0))
    trial = Trial(tmp_path, {"when": {"metric": "train/loss", "above": 2.0}})
    assert trial.look() == []
    more(folder, done(2, 2.5))
    assert trial.look() == [("on", "train/loss 2.5 is above 2")]
    assert [alert.run for alert in trial.manager.on] == [str(folder)]
    more(folder, done(3, 2.75), first=60)
    assert trial.look() == []
    more(folder, done(4, 2.0), first=70)
    ((state, _),) = trial.look(5)
    assert state == "over"
    assert trial.told[-1].time - trial.told[-1].since == 6.0
    assert trial.manager.on == ()
    more(folder, done(5, 9.0), first=80)
    assert states(trial.look()) == ["on"], "it comes again"


def test_below_looks_at_metrics_of_every_split_and_at_what_the_engine_adds(tmp_path):
    row = {"event": "Evaluated", "step": 1, "split": "val", "metrics": {"acc": 0.25}, "seconds": 1}
    running(tmp_path / "run", *START, done(1, 1.0), row)
    names = ("val/acc", "lr", "val/none")
    rules = [{"when": {"metric": name, "below": 0.5}} for name in names]
    assert [message for _, message in Trial(tmp_path, *rules).look()] == [
        "val/acc 0.25 is below 0.5", "lr 0.1 is below 0.5",
    ]  # fmt: skip


def test_a_condition_has_to_last_for_its_seconds_or_steps(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    high = {"metric": "train/loss", "above": 2.0}
    trial = Trial(tmp_path, {"when": high, "for_s": 10}, {"when": high, "for_steps": 2})
    assert trial.look() == []
    more(folder, done(2, 3.0))
    assert trial.look(9) == []
    assert [trial.told, trial.look(1), trial.told[0].rule][1:] == [
        [("on", "train/loss 3 is above 2")], "rule0",
    ]  # fmt: skip
    more(folder, done(3, 3.0), first=60)
    assert len(trial.look()) == 1
    assert trial.told[-1].rule == "rule1"


def test_one_that_does_not_last_is_never_told(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"metric": "train/loss", "above": 2.0}, "for_s": 10})
    trial.look()
    more(folder, done(2, 1.0))
    assert trial.look(9) == []
    more(folder, done(3, 3.0), first=60)
    assert trial.look(9) == [], "it began again"
    assert states(trial.look(10)) == ["on"]


def test_a_run_that_takes_no_step_is_told_until_it_does(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"no_step_for_s": 30}})
    trial.now = 120.0
    assert trial.look() == []
    assert trial.look(20) == [("on", "no step since step 1, for 0:00:37")]
    more(folder, done(2, 3.0))
    assert states(trial.look()) == ["over"]
    assert trial.look(20) == []
    ended(folder)
    assert trial.look(100) == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_metric_that_is_no_number_is_told(tmp_path, value):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"not_finite": "train/*"}})
    assert trial.look() == []
    more(folder, {**done(2, 3.0), "metrics": {"ppl": value}, "grad_norm": value})
    ((state, message),) = trial.look()
    assert (state, message) == ("on", f"train/ppl is {float(value)} at step 2")
    assert math.isfinite(trial.watch.runs[folder].summary.metrics["train/loss"])


def test_a_run_that_ended_with_a_loss_that_is_no_number_is_told(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"not_finite": "*"}})
    trial.look()
    failed = {"event": "Failed", "step": 1, "error": "NonFiniteError", "message": "loss is nan"}
    more(folder, failed)
    ended(folder, status="failed")
    assert trial.look() == [("on", "ended at step 1: loss is nan")]


def test_a_lost_rank_is_told_once_even_if_all_is_well_again_at_the_next_look(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"rank_lost": True}})
    assert trial.look() == []
    joiner = joined(1, slot=3, step=2)
    more(folder, LOST, joiner, {**RECOVERED, "world_size": 3}, done(3, 2.0))
    told = trial.look()
    assert states(told) == ["on"]
    assert told[0][1] == "slot 1 (rank 1 on h) is lost: it hung at line 7; 3 of 3 ranks"
    assert states(trial.look()) == ["over"]
    assert trial.look() == []
    more(folder, {**LOST, "slot": 3, "step": 3}, {**RECOVERED, "step": 3}, first=70)
    assert states(trial.look()) == ["on"]
    assert trial.look() == [], "on for as long as ranks are fewer"


def test_a_rank_lost_before_the_first_look_is_told_only_while_it_is_missing(tmp_path):
    whole = [LOST, joined(1, slot=3, step=2), {**RECOVERED, "world_size": 3}, done(3, 2.0)]
    running(tmp_path / "whole", *START, done(1, 3.0), *whole)
    running(tmp_path / "short", *START, done(1, 3.0), LOST, RECOVERED)
    trial = Trial(tmp_path, {"when": {"rank_lost": True}})
    trial.manager._since = 1000.0
    assert states(trial.look()) == ["on"]
    assert trial.told[0].run.endswith("short")


def test_fewer_ranks_and_a_low_efficiency_are_told_of_runs_that_go_on(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    rules = ({"when": {"ranks_below": 3}}, {"when": {"efficiency_below": 0.9}})
    trial = Trial(tmp_path, *rules)
    assert trial.look() == [("on", "ranks compute for 80% of the time, below 90%")]
    more(folder, LOST, RECOVERED)
    assert trial.look() == [("on", "2 ranks, fewer than 3")]
    ended(folder)
    assert states(trial.look()) == ["over", "over"]


def test_a_run_that_ends_otherwise_than_in_order_is_told_until_it_goes_on(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"ended": ["failed", "killed", "stopped"]}})
    assert trial.look() == []
    os.utime(folder / EVENTS, (1, 1))
    assert trial.look() == [("on", "killed at step 1")]
    more(folder, *(joined(r) for r in range(3)), PLAN)
    assert states(trial.look()) == ["over"]
    more(folder, {"event": "Failed", "step": 1, "error": "TaskFailure", "message": "m"}, first=70)
    ended(folder, status="failed", step=1)
    assert trial.look() == [("on", "failed at step 1: TaskFailure")]
    ended(folder, status="completed")
    assert states(trial.look()) == ["over"]


def test_runs_that_had_ended_before_are_passed_over_unless_asked_for(tmp_path):
    folder = run_in(tmp_path / "old", *START, done(9, 9.0), status="failed")
    when = {"metric": "train/loss", "above": 2.0}
    trial = Trial(tmp_path, {"when": when}, {"when": {"ended": ["failed"]}})
    assert trial.look() == []
    assert not trial.watch.runs[folder].is_open, "its events are not even read"
    asked = Trial(tmp_path, {"when": when, "past": True})
    assert states(asked.look()) == ["on"]
    (folder / "result.json").unlink()
    more(folder, *START, done(9, 9.0))
    assert states(trial.look()) == ["on"], "somebody goes on with it"


def test_a_run_that_comes_and_ends_between_two_looks_is_not_missed(tmp_path):
    trial = Trial(tmp_path, {"when": {"ended": ["failed"]}})
    assert trial.look() == []
    run_in(tmp_path / "quick", *START, done(1, 1.0), status="failed", step=1)
    assert states(trial.look()) == ["on"]


def test_a_rule_is_tried_on_the_runs_of_its_pattern_only(tmp_path):
    for name in ("sweep1", "sweep2", "other"):
        running(tmp_path / name, *START, done(1, 3.0))
    when = {"metric": "train/loss", "above": 2.0}
    trial = Trial(tmp_path, {"when": when, "runs": "sweep*"}, {"when": when, "runs": "*/other"})
    trial.look()
    assert sorted((a.rule, os.path.basename(a.run)) for a in trial.told) == [
        ("rule0", "sweep1"), ("rule0", "sweep2"), ("rule1", "other"),
    ]  # fmt: skip


def test_a_disk_that_is_nearly_full_is_told_once_for_all_runs_on_it(tmp_path, monkeypatch):
    for name in "ab":
        running(tmp_path / name, *START, done(1, 3.0))
    disk = SimpleNamespace(f_bavail=50, f_frsize=1024, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    rules = ({"when": {"disk_free_bytes_below": 51_201}}, {"when": {"disk_free_share_below": 0.05}})
    trial = Trial(tmp_path, *rules)
    assert trial.look() == [("on", "the disk has 50.0 KiB left, 5.0%")]
    disk.f_bavail = 49
    assert [(a.rule, a.step) for a in trial.told] == [("rule0", 0)], "the step of no run"
    trial.look()
    assert [a.rule for a in trial.told] == ["rule0", "rule1"]
    ended(tmp_path / "a")
    assert trial.look() == [], "the other one is on the same disk"
    ended(tmp_path / "b")
    assert states(trial.look()) == ["over", "over"]


def test_two_results_of_one_config_that_differ_are_told(tmp_path):
    def completed(name, digest, config="c", task="t"):
        folder = run_in(tmp_path / name, *START, done(9, 1.0))
        identity = {"task": task, "config_hash": config}
        (folder / "run.json").write_text(json.dumps(identity))
        ended(folder, params_sha256=digest)

    completed("a", "11" * 32)
    trial = Trial(tmp_path, {"when": {"digest_differs": True}})
    assert trial.look() == []
    completed("b", "11" * 32)
    completed("c", "22" * 32, config="d")
    completed("d", "22" * 32, task="u")
    assert trial.look() == []
    completed("e", "33" * 32)
    ((state, message),) = trial.look()
    assert state == "on"
    assert message.startswith("SHA-256 3333333333333333… differs from 1111111111111111… of ")
    assert trial.told[0].run.endswith("/e")
    assert trial.look() == []


def test_runs_that_vanish_take_their_alerts_with_them(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))
    trial = Trial(tmp_path, {"when": {"metric": "train/loss", "above": 2.0}})
    assert states(trial.look()) == ["on"]
    folder.rename(tmp_path / ".hidden")
    assert states(trial.look()) == ["over"]

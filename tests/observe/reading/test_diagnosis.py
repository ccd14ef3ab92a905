"""Causes named from events, each by what it looks like."""

import json

import pytest
from tests.observe.reading.test_histories import PLAN, joined, written
from tests.observe.reading.test_runs import run_in

from lockstep import errors
from lockstep.comm.calls import KINDS, CallRing
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.observe.reading.diagnosis import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.follow import EVENTS, read_run
from lockstep.observe.reading.listing import summarise

STACK = (
    "did nothing for 3.0 s; its Python stack:\nThread 0x1 (most recent call first):\n"
    '  File "/x/lib/python3.11/threading.py", line 331 in wait\n'
    '  File "/home/me/task.py", line 42 in loss\n'
    '  File "/x/lockstep/engine/run/loop.py", line 9 in run\n'
)


def times(rank, compute=8.0, exchange=0.5, data=0.1, checkpoint=0.1, **more):
    spent = {"compute_s": compute, "communication_s": exchange, "data_s": data}
    own = {"checkpoint_s": checkpoint, "cpu_s": compute, "cores_s": 0.0}
    return {"rank": rank, **spent, **own, **more}


def step(*ranks):
    return {
        "event": "StepDone", "step": 5, "num_steps": 5, "epoch": 0, "loss": 1.0, "lr": 0.1,
        "metrics": {}, "grad_norm": 1.0, "loss_scale": 1.0, "samples": 10, "seconds": 10.0,
        "ranks": list(ranks), "time": 110.0,
    }  # fmt: skip


def event(kind, **fields):
    return {"event": kind, "step": 5, "time": 110.0, **fields}


def processes(counts=(3, 3), **more):
    first = 0
    for rank, count in enumerate(counts):
        own = {"microbatches": [first, first + count], "time": 100.0, "cores": len(counts)}
        yield {**joined(rank), **own, **more}
        first += count


def caused(run_dir):
    summary = summarise(run_dir)
    return causes(summary, read_run(run_dir), calls_of(summary))


def found(tmp_path, *rows, counts=(3, 3), plan=(), state="completed", **more):
    start = {**PLAN, "world_size": len(counts), "time": 100.0, **dict(plan)}
    ended = {"status": state} if state not in ("killed", "failed") else {}
    run_dir = run_in(tmp_path / "run", *processes(counts, **more), start, *rows, **ended)
    return caused(run_dir), run_dir


def _is_kind(value):
    base = errors.LockstepError
    return isinstance(value, type) and issubclass(value, base) and value is not base


SHORT = step(times(0), times(1)) | {"num_steps": 5000}
SAVED = {"path": "c/s", "num_bytes": 1_000_000, "stall_s": 3.0, "write_s": 0.1}
EVALUATED = {"split": "val", "metrics": {}, "seconds": 4.0}
LOST = {"slot": 1, "rank": 1}
BACK = {"world_size": 1, "seconds": 0.1, "copied": False}


@pytest.mark.parametrize(
    ("cause", "rows", "options", "said"),
    [
        ("", [step(times(0), times(1))], {}, "nothing stands out"),
        ("", [step(times(0), times(1))], {"cores": 16, "device": "cuda:0"}, "nothing stands out"),
        ("", [step(times(0), times(1))], {"cores": 1, "device": "cuda:0"}, "nothing stands out"),
        ("", [step(times(0), times(1)), event("RankLost", **LOST), joined(1, slot=7, step=5),
              event("Recovered", **BACK | {"world_size": 2}),
              step(times(0, 8.0), times(1, 8.0))], {}, "nothing stands out"),
        ("slow_rank", [step(times(0, 4.0, 5.0), times(1, 9.0))], {}, "rank 1 on h computes 2.2x"),
        ("data", [step(times(0, 5.0, data=4.0), times(1, 5.0, data=4.0))], {}, "data.num_workers"),
        ("data", [step(times(0, 5.0, 4.0), times(1, 5.0, data=4.0))], {}, "rank 1 waits for its"),
        ("checkpoints", [step(times(0), times(1)), event("Checkpointed", **SAVED)], {}, "3.0 s"),
        ("disk", [step(times(0), times(1)), event("Checkpointed", **SAVED | {"write_s": 3.0})], {},
         "put the run directory on another disk"),
        ("evaluation", [step(times(0), times(1)), event("Evaluated", **EVALUATED)], {}, "40 % of"),
        ("oversubscribed", [step(times(0, 3.0, 6.0), times(1, 3.0, 6.0))], {"cores": 1},
         "2 ranks with 2 threads share 1 core of h"),
        ("busy", [step(times(0, cores_s=20.0, cpu_s=5.0), times(1, cores_s=20.0, cpu_s=5.0))],
         {"counted_cores": 2}, "of 2 cores they have 1.0, the ranks 1.0"),
        ("busy", [step(times(0, cores_s=10.0, cpu_s=5.0), times(1, cores_s=10.0, cpu_s=5.0))],
         {"counted_cores": 1}, "of 2 cores they have 1.0, the ranks 1.0"),
        # A rank that has nothing to compute and waits busily is none of the others.
        ("imbalance", [step(times(0, 8.0, 1.0, cores_s=19.0, cpu_s=9.0),
                            times(1, 0.1, 9.0, cores_s=19.0, cpu_s=9.5))],
         {"counts": (3, 0), "counted_cores": 2}, "1 rank of 2 have"),
        ("busy", [step(times(0, 8.0, 1.0, cores_s=10.0, cpu_s=3.0),
                       times(1, 0.1, 9.0, cores_s=10.0, cpu_s=3.0))],
         {"counts": (3, 0), "counted_cores": 1}, "of 2 cores they have 1.4, the ranks 0.6"),
        # Cores of a host of which a control group may use two.
        ("", [step(times(0, cores_s=300.0, cpu_s=5.0), times(1, cores_s=300.0, cpu_s=5.0))],
         {"counted_cores": 64}, "nothing stands out"),
        ("memory", [step(times(0, faults=9000, peak_bytes=1 << 30, swapped_bytes=1 << 29),
                         times(1))], {}, "512.0 MiB were swapped out"),
        # Pages of a file that is mapped.
        ("", [step(times(0, faults=9000, peak_bytes=1 << 30), times(1))], {}, "nothing stands out"),
        ("device_memory", [step(times(0, device_bytes=79 << 30, device_retries=99), times(1))],
         {"device": "cuda:0", "device_bytes": 80 << 30}, "79.0 GiB of 80.0 GiB"),
        ("device_idle", [step(times(0, device_busy=0.2), times(1, device_busy=0.3))],
         {"device": "cuda:0"}, "25 % of the time: they wait for Python"),
        ("", [step(times(0, device_busy=0.9), times(1, device_busy=0.8))],
         {"device": "cuda:0"}, "nothing stands out"),
        ("imbalance", [step(times(0), times(1, 4.0, 4.0))], {"counts": (4, 2)}, "multiple of 2"),
        ("imbalance", [step(times(0), times(1, 0.1, 8.0))], {"counts": (3, 0)}, "1 rank of 2 have"),
        ("short_microbatches", [SHORT], {},
         "set num_microbatches=2 (other bits"),
        ("", [SHORT], {"counts": (1, 1)},
         "nothing stands out"),
        ("latency", [step(times(0, 4.0, 5.0), times(1, 4.0, 5.0))], {}, "their messages take much"),
        ("bandwidth", [step(times(0, 4.0, 5.0), times(1, 4.0, 5.0))],
         {"plan": {"num_parameters": 10**8}}, "exchange of gradients"),
        ("idle_cores", [step(times(0), times(1))], {"cores": 8}, "6 of 8 cores"),
        ("lost_ranks", [step(times(0), times(1)), event("RankLost", **LOST),
                        event("Recovered", **BACK)], {}, "1 process died"),
        ("hang", [step(times(0), times(1)), event("RankLost", **LOST, reason=STACK)], {},
         "/home/me/task.py:42, in loss"),
        ("not_finite", [event("Failed", error="NonFiniteError", message="a\nb")],
         {"state": "failed"}, "set clip_norm"),
        ("divergence", [event("Failed", error="DivergenceError", message="rank 1")],
         {"state": "failed"}, "no longer held the same bits"),
        ("killed", [step(times(0), times(1))], {"state": "killed"}, "without a word"),
    ],
)  # fmt: skip
def test_the_first_cause(tmp_path, cause, rows, options, said):
    causes_found, run_dir = found(tmp_path, *rows, **options)
    names = [one.name for one in causes_found]
    assert names[:1] == ([cause] if cause else []), names
    text = "\n".join(diagnosis_lines(summarise(run_dir), read_run(run_dir), causes_found))
    assert said in text


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if _is_kind(kind)],
    ids=lambda kind: kind.__name__,
)
def test_each_kind_of_error_has_a_name_of_its_own(tmp_path, kind):
    failed = event("Failed", error=kind.__name__, message="why")
    (first, *_), _ = found(tmp_path, step(times(0), times(1)), failed, state="failed")
    assert first.name != "failed"
    assert first.sentence.endswith("5 steps had been reported")


def test_effects_of_a_cause_are_left_out(tmp_path):
    rows = [step(times(0, 3.0, 6.0, cores_s=99.0), times(1, 5.0, 4.0, cores_s=99.0))]
    names = [cause.name for cause in found(tmp_path, *rows, cores=1)[0]]
    assert names == ["oversubscribed"]


def test_only_the_newest_session_counts(tmp_path):
    evaluated = event("Evaluated", **EVALUATED)
    again = [*processes(), {**PLAN, "step": 5, "world_size": 2, "time": 109.0}]
    rows = [step(times(0), times(1)), evaluated, *again, step(times(0, 0.9, 0.05, 0.01, 0.01))]
    assert found(tmp_path, *rows)[0] == []


def test_the_command_speaks_to_people_and_to_programs(here, tmp_path):
    found(tmp_path, step(times(0, 5.0, data=4.0), times(1, 5.0, data=4.0)))
    lines = here("diagnose", "run").stdout.splitlines()
    assert lines[0] == "ranks wait for data (40 % of the time)"
    assert lines[-1].startswith("  -> raise data.num_workers")
    (cause,) = map(json.loads, here("diagnose", "run", "--json").stdout.splitlines())
    assert (cause["name"], cause["lost"]) == ("data", 0.4)
    run_in(tmp_path / "new")
    assert "nothing to judge by yet" in here("diagnose", "new").stdout
    (tmp_path / "new" / EVENTS).unlink()
    assert "nothing to judge by yet" in here("diagnose", "new").stdout
    (tmp_path / "new" / "run.json").unlink()
    assert here("diagnose", "new").returncode == 2


def test_what_foreign_ranks_write_is_no_error(tmp_path):
    run_dir = run_in(tmp_path / "run", PLAN)
    odd = [{"event": "Rebalanced", "step": 1, "microbatches": [1], "slowest": 9, "slowdown": 2.0},
           {"event": "RankLost", "step": 1, "slot": 77, "rank": 3, "reason": "x"},
           {"event": "Recovered", "step": 1, "world_size": 0, "seconds": 1.0, "copied": False},
           {**step(times(7), times(8)), "num_steps": 0}]  # fmt: skip
    written(run_dir, odd)
    caused(run_dir)


def waiting_in(directory, rank, kind, num_before=4, size=3, slot=None, has_failed=False):
    """Have a rank wait in a call, as its watchdog writes it down; or fail in it."""
    ring = CallRing()
    group = ring.start(rank, size)
    for _ in range(num_before):
        ring.end(ring.begin(group, KINDS.index("all_gather"), (8, 24, -1)), is_done=True)
    if kind:
        place = ring.begin(group, KINDS.index(kind), (8, 24, -1))
        if has_failed:
            ring.end(place, is_done=False)
    own = rank if slot is None else slot
    path = directory.flight.lost_file(own) if has_failed else directory.flight.waiting_file(own)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ring.copy())


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("barrier", None, "barrier"),
         ["ranks 0 and 2 in call 5 (barrier): waiting for the others",
          "rank 1: not known to wait"]),
        (("barrier", "broadcast", "barrier"),
         ["ranks have made different calls, and wait for each other: call 5 is barrier on ranks "
          "0 and 2, broadcast of 24 bytes on rank 1",
          "ranks 0 and 2 in call 5 (barrier), rank 1 in call 5 (broadcast)"]),
    ],
)  # fmt: skip
def test_ranks_that_wait_are_told_while_they_do(tmp_path, kinds, said):
    options = {"counts": (2, 2, 2), "state": "killed"}
    _, run_dir = found(tmp_path, step(times(0), times(1), times(2)), **options)
    for rank, kind in enumerate(kinds):
        waiting_in(RunDirectory(run_dir), rank, kind)
    cause = next(c for c in caused(run_dir) if c.name == "standstill")
    assert [cause.sentence, *cause.evidence] == said


def test_a_hang_that_nobody_could_report_is_told_from_the_files(tmp_path):
    _, run_dir = found(tmp_path, step(times(0), times(1)), state="killed")
    directory = RunDirectory(run_dir)
    waiting_in(directory, 0, "barrier", size=2)
    waiting_in(directory, 1, None, size=2)
    directory.flight.waiting_file(1).rename(directory.flight.lost_file(1))
    directory.hang_report(1).write_text(json.dumps({"reason": STACK}))
    hang = next(c for c in caused(run_dir) if c.name == "hang")
    assert hang.sentence == (
        "rank 1 (slot 1) hung in step 1, after call 4 (all_gather), at task.py:42 in loss; "
        "rank 0 waited for it in call 5 (barrier)"
    )


@pytest.mark.parametrize(
    ("reason", "sentence", "advice"),
    [
        ("was stopped by a signal for 4 s", "rank 1 (slot 1) was stopped by a signal in step 6",
         "look for who has stopped it"),
        ("did nothing for 4.0 s; its Python stack:\nThread 0x2 (most recent call first):\n"
         '  File "/x/lockstep/comm/listen.py", line 1 in listen\n\n'
         "Current thread 0x1 (most recent call first):\n"
         '  File "/x/lockstep/comm/mailbox.py", line 7 in wait\n'
         '  File "/x/.venv/bin/lockstep", line 8 in <module>\n',
         "rank 1 (slot 1) hung in step 6, at mailbox.py:7 in wait", "look at that line"),
    ],
)  # fmt: skip
def test_a_rank_that_stands_still_is_named_with_its_step_and_cause(
    tmp_path, reason, sentence, advice
):
    """Neither the command's own script is where it stood, nor a thread that waits all the time."""
    lost = event("RankLost", **LOST, reason=reason, reached="in step 6", waiting="")
    causes_found, _ = found(tmp_path, step(times(0), times(1)), lost)
    hang = next(cause for cause in causes_found if cause.name == "hang")
    assert hang.sentence == sentence
    assert hang.evidence[0].startswith("after step 5 its watchdog ended it, since it ")
    assert advice in hang.advice


def test_a_hang_of_before_does_not_hide_that_ranks_stand_still_now(tmp_path):
    rows = [step(times(0), times(1), times(2)), event("RankLost", **LOST, reason=STACK),
            joined(1, slot=7, step=5), event("Recovered", **BACK | {"world_size": 3})]  # fmt: skip
    _, run_dir = found(tmp_path, *rows, counts=(2, 2, 2), state="killed")
    for rank, slot, kind in ((0, 0, "barrier"), (1, 7, "broadcast"), (2, 2, "barrier")):
        waiting_in(RunDirectory(run_dir), rank, kind, slot=slot)
    by_name = {cause.name: cause for cause in caused(run_dir)}
    assert {"hang", "standstill"} <= by_name.keys()
    assert "call 5 is barrier on ranks 0 and 2" in by_name["standstill"].sentence


def test_ranks_whose_calls_a_loss_has_ended_do_not_stand_still(tmp_path):
    failed = event("Failed", error="RankFailure", message="rank 1 is lost")
    _, run_dir = found(tmp_path, step(times(0), times(1), times(2)), failed,
                       counts=(2, 2, 2), state="failed")  # fmt: skip
    for rank in (0, 2):
        waiting_in(RunDirectory(run_dir), rank, "all_gather", has_failed=True)
    names = [cause.name for cause in caused(run_dir)]
    assert names == ["rank_failure"]


def test_calls_that_are_written_are_told_to_people_and_to_programs(here, tmp_path):
    _, run_dir = found(tmp_path, step(times(0), times(1), times(2)), state="killed")
    for rank in (0, 2):
        waiting_in(RunDirectory(run_dir), rank, "barrier")
    said = here("diagnose", "run", "--flight", "dumps").stdout
    assert "calls of ranks 0 and 2, after step 0: dumps\n" in said
    assert said.endswith("of rank 1 nothing is known; add --allow-incomplete-ranks\n")
    *_, last = here("diagnose", "run", "--json", "--flight", "more").stdout.splitlines()
    assert json.loads(last) == {"flight": "more", "step": 0, "ranks": [0, 2], "unknown_ranks": [1]}
    assert sorted(path.name for path in (tmp_path / "more").iterdir()) == ["rank_0", "rank_2"]

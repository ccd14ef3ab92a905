from __future__ import annotations

import io
import os
import re
import sys
import textwrap
import time
from dataclasses import dataclass

import pytest
from rich.console import Console
from sample_events import (
    Recorder,
    checkpointed,
    evaluated,
    finished,
    joined,
    run_started,
    step_done,
)
from shown_runs import HIDE_CURSOR, SHOW_CURSOR, Pty, Shown, ranks

from lockstep.engine.events import (
    Event,
    ExchangeChosen,
    Failed,
    Improved,
    Rebalanced,
    Resumed,
    Warned,
)
from lockstep.observe import Measured, Predicted, Sinks, StepCost, text
from lockstep.observe.showing.console import ConsoleView, QuietView
from lockstep.observe.showing.terminal import stdout_console


@pytest.mark.parametrize("start_first", [True, False])
def test_the_banner_sums_up_who_takes_part(start_first: bool) -> None:
    processes = ranks("node1", "node1", "node2", "node2")
    shown = Shown()
    shown(*[run_started(), *processes] if start_first else [*processes, run_started()])
    assert shown.lines == [
        "task        digits, 9,345 parameters, 1,437 samples",
        "ranks       4 ranks on 2 hosts (mpirun, mpi4py), cpu, 1 thread a rank",
        "plan        500 steps, 25 an epoch; a step: 64 samples in 8 microbatches",
        "run         /runs/grün (config 0123456789abcdef)",
    ]


def test_a_verbose_banner_says_what_each_rank_computes() -> None:
    shown = Shown(verbose=True)(run_started(), *ranks("node1", "node1", "node2", "node2"))
    assert shown.lines == [
        "task        digits, 9,345 parameters, 1,437 samples",
        "ranks       4 ranks on 2 hosts (mpirun, mpi4py)",
        "device      cpu, 1 thread a rank",
        "batch       64 samples in 8 microbatches, 2 a rank",
        "samples     of a step: ranks 0 to 3, each 16",
        "plan        500 steps, 25 an epoch",
        "run         /runs/grün (config 0123456789abcdef)",
    ]


def test_the_banner_counts_the_samples_of_each_rank() -> None:
    """100 samples in 8 microbatches of 13 or 12, on ranks with 3, 3 and 2 of them."""
    shares = [(0, 3), (3, 6), (6, 8)]
    processes = [joined(rank, microbatches=share) for rank, share in enumerate(shares)]
    shown = Shown(verbose=True)(run_started(batch_size=100, world_size=3), *processes)
    assert shown.lines[4] == "samples     of a step: rank 0 39; rank 1 37; rank 2 24"
    few = [joined(rank, microbatches=share) for rank, share in enumerate([(0, 1), (1, 1)])]
    shown = Shown(verbose=True)(run_started(batch_size=5, num_microbatches=1, world_size=2), *few)
    assert shown.lines[4] == "samples     of a step: rank 0 5; rank 1 0"


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([0, 0], "ranks 0 to 1, together 64"),
        ([0, 0, 1, 1], "ranks 0 to 3, each 2 together 32"),
        ([0, 0, 0, 1, 1, 1, None], "ranks 0 to 5, each 3 together 32; rank 6 0"),
    ],
)
def test_the_banner_counts_the_samples_of_a_replica_once(
    shares: list[int | None], said: str
) -> None:
    num = max(share for share in shares if share is not None) + 1
    size = 8 // num
    processes = [
        joined(rank, microbatches=(8, 8) if s is None else (s * size, (s + 1) * size))
        for rank, s in enumerate(shares)
    ]
    shown = Shown(verbose=True)(run_started(world_size=len(shares)), *processes)
    assert shown.lines[4] == f"samples     of a step: {said}"


def test_the_banner_does_not_wait_for_ever_for_ranks() -> None:
    shown = Shown()(run_started(step=120), joined(0), Warned(step=120, message="a rank is late"))
    assert shown.lines[2] == (
        "plan        500 steps, 25 an epoch, going on from step 120; a step: 64 samples in 8 "
        "microbatches"
    )
    assert shown.lines[-1] == "step 120: warning: a rank is late"


def test_a_rank_that_comes_later_is_a_line() -> None:
    shown = Shown()(run_started(world_size=1), joined(0), joined(1, "spare", step=7))
    assert shown.lines[-1] == "step 7: rank 1 joined from spare (pid 1001)"


def test_a_second_start_has_its_own_banner() -> None:
    shown = Shown()(run_started(world_size=1), joined(0), step_done(3))
    shown(run_started(world_size=1, step=2), joined(0))
    assert shown.count("^task ") == 2
    assert shown.count("on 1 host ") == 2


def test_progress_lines_are_rate_limited_and_the_last_one_is_shown() -> None:
    shown = Shown()(run_started(world_size=1), joined(0))
    for step in range(1, 101):
        shown.now += 0.1
        shown(step_done(step))
    shown(finished(100))
    shown.view.close()
    steps = [int(step) for step in re.findall(r"^step (\d+)/500", shown.file.getvalue(), re.M)]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) == len(set(steps))
    assert 5 <= len(steps) <= 7


def test_a_progress_line_holds_what_matters() -> None:
    shown = Shown(width=110)(run_started(world_size=1), joined(0))
    shown(step_done(100, num_steps=100, seconds=10.0, samples=1280, loss=0.123456, lr=1e-5))
    assert shown.lines[-1] == (
        "step 100/500  epoch 1  loss 0.1235  accuracy 0.3  lr 1e-05  128 samples/s  "
        "efficiency 75%  left 0:00:40"
    )


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_progress_line_holds_what_matters_most(width: int) -> None:
    shown = Shown(width=width)(run_started(world_size=1), joined(0))
    shown = shown(step_done(100, num_steps=10, seconds=5.0)).lines[-1]
    assert shown.startswith("step 100/500  epoch 1  loss 0.3333")
    assert shown.endswith("  left 0:03:20")
    assert len(shown) <= width


def test_all_other_events_are_shown_at_once_one_line_each() -> None:
    shown = Shown(width=20)(run_started(world_size=1), joined(0))
    before = len(shown.lines)
    shown(
        evaluated(5),
        Improved(step=5, metric="loss", value=0.25),
        checkpointed(5),
        Resumed(step=5, path="c/5", skipped=("c/6: checksum of model.safetensors differs",)),
        Warned(step=5, message="[bold]markup[/] is text"),
    )
    assert shown.lines[before:] == [
        "step 5: val: loss 0.25  accuracy 0.9  best",
        "step 5: resumed from c/5; passed over c/6: checksum of model.safetensors differs",
        "step 5: warning: [bold]markup[/] is text",
    ]


@pytest.mark.parametrize("verbose", [False, True])
def test_a_planned_checkpoint_is_a_line_only_on_demand(verbose: bool) -> None:
    shown = Shown(verbose=verbose)(run_started(world_size=1), joined(0), evaluated(5), step_done(6))
    shown(Warned(step=6, message="mind"), checkpointed(6))
    saved = "step 6: saved step_00000006 (3.0 MiB, 0.50 s, training waited 0.01 s)"
    lines = ["step 5: val: loss 0.25  accuracy 0.9", "step 6: warning: mind", *[saved] * verbose]
    assert shown.lines[-len(lines) :] == lines


@pytest.mark.parametrize("slowdown", [1.04, 1.8])
def test_noise_in_the_speed_of_ranks_is_no_line(slowdown: float) -> None:
    event = Rebalanced(step=7, microbatches=(5, 3), slowest=1, slowdown=slowdown)
    shown = Shown()(run_started(world_size=1), joined(0), event)
    assert shown.count("microbatches of each rank") == (slowdown > 1.5)
    assert Shown(verbose=True)(event).count("microbatches of each rank") == 1


@pytest.mark.parametrize("total", [2000, 0])
def test_many_evaluations_are_thinned_out_evenly(total: int) -> None:
    shown = Shown()(run_started(world_size=1, total_steps=total), joined(0))
    for step in range(10, 2001, 10):
        shown.now += 1.0
        shown(evaluated(step))
        if step == 130:
            shown(Improved(step=step, metric="loss", value=0.25))
    shown(finished(2000))
    steps = re.findall(r"^step ([\d,]+): val", shown.file.getvalue(), re.M)
    assert 10 <= len(steps) <= 60 if total == 0 else 15 <= len(steps) <= 20
    assert steps[0] == "10"
    assert shown.count("best( at 130)?$") == 1
    assert Shown(verbose=True)(*[evaluated(step) for step in range(200)]).count("val: ") == 199


def test_an_evaluation_has_the_training_loss_if_there_is_room() -> None:
    for width, training in ((100, "train: loss 0.3333  "), (40, "")):
        shown = Shown(width=width)(run_started(world_size=1), joined(0), step_done(5), step_done(7))
        shown(evaluated(7), Improved(step=7, metric="loss", value=0.25), finished(7))
        assert f"step 7: {training}val: loss 0.25  accuracy 0.9  best" in shown.lines


def test_an_evaluation_does_not_wait_for_a_slow_step() -> None:
    shown = Shown(interval_s=0.01)(run_started(world_size=1), joined(0), evaluated(5))
    deadline = time.monotonic() + 10
    while "step 5: val: loss 0.25  accuracy 0.9" not in shown.lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("width", [60, 80])
def test_lines_are_broken_between_words_on_a_terminal(width: int) -> None:
    shown = Shown(terminal=True, width=width)
    metrics = {f"metric_{number}": 0.12345 * number for number in range(1, 9)}
    warning = "a long warning about a value of 0.000123456 in this run " * 3
    shown(run_started(), Warned(step=0, message=warning), evaluated(5, **metrics), finished(500))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.file.getvalue()).splitlines()
    assert max(map(len, plain)) <= (80 if width == 80 else 64), "but a SHA-256 of 64 digits"
    assert any(line.endswith("ab" * 32) for line in plain)
    assert "0.000123456" in " ".join(plain)


@pytest.mark.parametrize(
    ("run_dir", "command"),
    [
        ("runs/digits", "lockstep resume runs/digits"),
        ("my runs/it's", """lockstep resume 'my runs/it'"'"'s'"""),
        ("-n", "lockstep resume ./-n"),
    ],
)
def test_a_stopped_run_says_how_to_go_on(run_dir: str, command: str) -> None:
    shown = Shown()(run_started(run_dir=run_dir), finished(5, status="stopped"))
    assert shown.lines[-1] == f"go on with  {command}"
    shown = Shown()(run_started(run_dir=run_dir), finished(500))
    assert shown.count("resume") == 0
    shown = Shown(resumable=False)(run_started(run_dir=run_dir), finished(5, status="stopped"))
    assert shown.count("resume") == 0


def test_control_characters_of_names_and_messages_do_not_reach_the_terminal() -> None:
    shown = Shown()(run_started(run_dir="a\x1b[2Jb"), step_done(1, metrics={"\x07beep": 1.0}))
    shown(Warned(step=1, message="line\nline\r\x9b1m"), finished(1))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.file.getvalue())
    assert "a\\x1b[2Jb" in shown.file.getvalue()


def test_a_spinner_until_the_run_starts_on_a_terminal_only() -> None:
    shown = Shown(terminal=True)
    shown.view.wait("starting 4 ranks")
    time.sleep(0.05)
    assert "starting 4 ranks" in shown.file.getvalue()
    shown(run_started(), step_done(3)).view.close()
    assert shown.file.getvalue().count(HIDE_CURSOR) == 1
    assert "starting" not in shown.file.getvalue().rpartition("task ")[2]
    for view in (Shown().view, QuietView(shown.console)):
        before = shown.file.getvalue()
        view.wait("starting 4 ranks")
        view.close()
        assert shown.file.getvalue() == before


def test_an_event_of_an_unknown_kind_is_shown_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class RankLost(Event):
        rank: int
        cause: str

    assert text.line(RankLost(step=3, rank=2, cause="killed")) == (
        "step 3: rank lost: rank 2, cause killed"
    )


@pytest.mark.parametrize(
    ("way", "reason", "told"),
    [
        ("shared memory", "", "by shared memory"),
        ("messages", "rank 1: no", "by messages, not in shared memory: rank 1: no"),
        ("hierarchical", "2 hosts", "host by host: 2 hosts"),
    ],
)
def test_how_gradients_are_exchanged_is_a_line(way: str, reason: str, told: str) -> None:
    line = text.line(ExchangeChosen(step=1, way=way, reason=reason))
    assert line == f"step 1: gradients are exchanged {told}"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_summary_tells_what_a_step_took_beside_what_was_predicted(is_terminal: bool) -> None:
    predicted = StepCost(0.0061, 1)
    cost = Measured(step=500, measured=StepCost(0.0059, 1), predicted=predicted, by="a\x1bb.json")
    predicted = Predicted(step=0, by="b.json", cost=predicted)
    shown = Shown(terminal=is_terminal)(predicted, run_started(), joined(0), cost, finished(500))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s+", " ", shown.file.getvalue())
    assert plain.count("5.9 ms a step, 6.1 ms predicted by a\\x1bb.json)") == 1
    assert shown.count("predicted") == 1
    nothing = Measured(step=500, measured=None, predicted=None, reason="no report")
    assert not Shown()(run_started(), nothing, finished(500)).count("predict|report")


def test_the_summary_tells_how_it_ended() -> None:
    shown = Shown()(run_started(world_size=1), joined(0))
    before = len(shown.lines)
    shown(finished(500, reason="time limit", status="stopped", checkpoint="c/500"))
    assert shown.lines[before:] == [
        "status      stopped at step 500: time limit (0:01:05 on 4 ranks)",
        "metrics     accuracy 0.97",
        f"SHA-256     {'ab' * 32}",
        "run         /runs/grün (newest checkpoint: 500)",
        "go on with  lockstep resume '/runs/grün'",
    ]


@pytest.mark.parametrize("show_failure", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_failure_ends_the_display_and_is_printed_once_on_demand(
    terminal: bool, show_failure: bool
) -> None:
    shown = Shown(terminal=terminal, show_failure=show_failure)(run_started(), step_done(3))
    shown(Failed(step=3, error="DataError", message="data/a.idx: is cut short"))
    assert shown.count(r"data/a\.idx: is cut short") == show_failure
    assert shown.count("DataError|Traceback|Error:") == 0
    assert shown.file.getvalue().count(SHOW_CURSOR) == terminal


def test_the_live_display_is_gone_when_an_exception_flies() -> None:
    shown = Shown(terminal=True)
    stdout = sys.stdout

    def train() -> None:
        with Sinks([shown.view]) as sinks:
            sinks(run_started())
            sinks(step_done(1))
            assert sys.stdout is not stdout, "prints of the model go above the bar"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert sys.stdout is stdout
    output = shown.file.getvalue()
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1


def test_text_the_console_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    for terminal in (False, True):
        view = ConsoleView(Console(file=file, force_terminal=terminal, width=80, _environ={}))
        view(run_started(run_dir="/läufe/\udcff実"))
        view(step_done(1, metrics={"größe": 1.0}))
        view.close()
    assert raw.getvalue().count(rb"/l\xe4ufe/\udcff\u5b9f") == 2


def test_a_reader_that_goes_away_does_not_end_training() -> None:
    recorder = Recorder()
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        console = stdout_console()
        console.file = file
        sinks = Sinks([recorder, ConsoleView(console)])
        os.close(read)
        for event in (run_started(), step_done(1), finished(1)):
            sinks(event)
        sinks.close()
    warnings = [event for event in recorder.events if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert warnings[0].message.startswith("whoever read the console's output is gone")


def test_force_color_does_not_put_a_bar_into_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not stdout_console().is_interactive


SCRIPT = textwrap.dedent(
    """
    import os, time
    from lockstep.observe.showing.console import ConsoleView
    from sample_events import *

    def show(name, pause_s, **environ):
        os.environ.update(environ)
        print(f"<{name}>")
        view = ConsoleView()
        view(run_started(world_size=1))
        view(joined(0))
        for step in (100, 200, 500):
            view(step_done(step))
            print(f"printed by the model at {step}")
            time.sleep(pause_s)
        view(finished(500))
        view.close()

    show("full", 0.25)
    show("no color", 0, NO_COLOR="1")
    show("dumb", 0, TERM="dumb")
    """
)


@pytest.fixture(scope="module")
def shown_in_pty() -> dict[str, str]:
    """What a real terminal of 60 columns gets from the script, by kind of terminal."""
    terminal = Pty(SCRIPT, 60)
    output = terminal.output()
    assert terminal.process.returncode == 0, output.decode()
    parts = re.split("<(full|no color|dumb)>", output.decode())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_in_a_real_terminal_the_bar_is_redrawn_and_left_in_order(
    shown_in_pty: dict[str, str],
) -> None:
    output = shown_in_pty["full"]
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    assert "━" in output
    assert "\x1b[3" in output or "\x1b[9" in output, "there are colours"
    assert "\x1b[1A" in output, "the bar is drawn over itself"
    assert output.count("printed by the model at 200") == 1
    assert "500/500" in output
    assert output.index(SHOW_CURSOR) < output.index("status      completed at step 500")


def test_without_colours_the_bar_is_still_drawn(shown_in_pty: dict[str, str]) -> None:
    output = shown_in_pty["no color"]
    assert HIDE_CURSOR in output
    assert not re.search(r"\x1b\[[0-9;]*(3|9)[0-7][0-9;]*m", output)
    assert "status      completed at step 500" in output


def test_a_dumb_terminal_gets_plain_lines(shown_in_pty: dict[str, str]) -> None:
    output = shown_in_pty["dumb"]
    assert "\x1b" not in output
    assert "step 500/500" in output
    assert "status      completed at step 500" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_view_shows_what_matters(terminal: bool) -> None:
    shown = Shown(terminal=terminal, width=120)
    shown.view = QuietView(shown.console)
    shown(run_started(), joined(0), step_done(1), checkpointed(1), evaluated(1, accuracy=0.5))
    assert shown.lines == []
    shown(Warned(step=2, message="mind"), Failed(step=2, error="E", message="printed elsewhere"))
    end = finished(2)
    shown(end)
    shown.view.close()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown.lines))
    assert plain.splitlines() == [
        "step 2: warning: mind",
        f"{end.status} at step 2, SHA-256 {end.params_sha256}, /runs/grün",
    ]

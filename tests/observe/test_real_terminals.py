"""What programs draw on terminals of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shown_runs import Pty, screen

PROGRAM = """
import os, signal, sys, time
from lockstep.observe.showing.console import ConsoleView
from lockstep.observe import Sinks
from sample_events import *

def steps(first, last, pause_s=0.0):
    for step in range(first, last + 1):
        sinks(step_done(step))
        sinks(evaluated(step))
        sinks(checkpointed(step))
        time.sleep(pause_s)

view = ConsoleView()
with Sinks([view]) as sinks:
    view.wait("preparing the run")
    time.sleep(0.25)
    sinks(run_started(world_size=1))
    sinks(joined(0))
"""


def test_many_evaluations_do_not_flood_a_real_terminal() -> None:
    terminal = Pty(PROGRAM + "    steps(1, 500, 0.001)\n    sinks(finished(500))\n", 80)
    output = terminal.output().decode()
    assert terminal.process.returncode == 0, output
    lines = screen(output, 80)
    assert len(lines) < 20, "for 500 evaluations and as many checkpoints"
    assert any(line.startswith("val at 500: loss 0.25 ") for line in lines)


def test_a_terminal_that_changes_its_width_is_used_as_it_is() -> None:
    terminal = Pty(PROGRAM + "    steps(1, 20, 0.05)\n    sinks(finished(20))\n", 100)

    def shrink(shown: bytes) -> None:
        if b"saved at" in shown:
            terminal.resize(40)

    output = terminal.output(shrink).decode()
    assert terminal.process.returncode == 0, output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "\rstep 20/500 " in plain
    assert "digits  step 20/500" not in plain, "there is no room for it"
    assert "Traceback" not in output


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_a_terminal_that_knows_few_characters_gets_those(encoding: str) -> None:
    terminal = Pty(
        PROGRAM + "    steps(1, 3, 0.3)\n    sinks(finished(3))\n", 80, PYTHONIOENCODING=encoding
    )
    output = terminal.output()
    assert terminal.process.returncode == 0, output
    assert "digits  step 3/500 ------" in "\n".join(screen(output.decode("latin-1"), 80))
    assert b"Traceback" not in output
    assert all(byte < 128 or byte == "ü".encode("latin-1")[0] for byte in output)


def test_ctrl_c_while_it_is_drawn_gives_the_cursor_back() -> None:
    terminal = Pty(PROGRAM + "    steps(1, 9, 0.5)\n", 46)
    typed = iter([b"\x03"])

    def interrupt(shown: bytes) -> None:
        if b"saved at" in shown:
            terminal.type(next(typed, b""))

    output = terminal.output(interrupt).decode()
    assert terminal.process.returncode
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert output.index("\x1b[?25h") > output.index("\x1b[?25l")
    assert "Traceback" not in output
    lines = screen(output, 46)
    assert sum(line.startswith("digits  step") for line in lines) == 1, "^C breaks no line"


def test_a_terminal_that_goes_away_leaves_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "errors"
    program = (
        f"import os, sys; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        + PROGRAM
        + "    steps(1, 20, 0.05)\n    sinks(finished(20))\n"
    )
    terminal = Pty(program, 80)
    terminal.hang_up_at(b"saved at")
    assert terminal.process.wait(20) == 0, log.read_text()
    assert log.read_text() == ""

"""The monitor's screen on a real terminal: it comes, takes keys, and gives the terminal back."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shown_runs import Pty
from tests.observe.monitor.watched_runs import START, more, running
from tests.observe.reading.test_histories import done

ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"


def monitor(folder: Path) -> Pty:
    code = (
        f"import os, sys; os.chdir({str(folder)!r})\n"
        "sys.argv = ['lockstep', 'monitor', '--interval', '0.2']\n"
        "from lockstep.cli.main import main; main()"
    )
    return Pty(code, 100)


def driven(terminal: Pty, steps: Iterator[tuple[bytes, Callable[[], None]]]) -> str:
    """What the terminal got; each step is done when its sign has been shown since the last one."""
    sign, act = next(steps)
    seen, end = 0, time.monotonic() + 60

    def meanwhile(shown: bytes) -> None:
        nonlocal sign, act, seen
        assert time.monotonic() < end, shown[-2000:]
        if sign and sign in re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown[seen:]):
            seen = len(shown)
            act()
            sign, act = next(steps, (b"", lambda: None))

    return terminal.output(meanwhile).decode(errors="replace")  # a signal may cut a sign in two


@pytest.mark.parametrize(
    "by",
    ["ctrl+c", *(pytest.param(by, marks=pytest.mark.slow) for by in ("q", "SIGINT", "SIGTERM"))],
)
def test_a_run_is_opened_followed_and_left_and_the_terminal_is_as_before(
    tmp_path: Path, by: str
) -> None:
    folder = running(tmp_path / "runs/first", *START, done(1, 3.0))
    terminal = monitor(tmp_path)

    def leave() -> None:
        if by.startswith("SIG"):
            os.kill(terminal.process.pid, getattr(signal, by))
        else:
            terminal.type(b"q" if by == "q" else b"\x03")

    steps = [
        (b"running", lambda: terminal.type(b"\r")),
        (b"newest 3", lambda: more(folder, done(2, 2.5))),
        (b"2.5", lambda: terminal.resize(60)),
        (b"train/loss", leave),
    ]
    output = driven(terminal, iter(steps))
    assert terminal.process.returncode == 0, output[-2000:]
    assert "Traceback" not in output
    assert output.count(ALTERNATE) == output.count(NORMAL) == 1
    assert output.rindex(SHOW_CURSOR) > output.index(ALTERNATE)
    for mode in ("1000", "1003", "2004"):  # the mouse, and what is pasted
        assert output.rfind(f"\x1b[?{mode}l") >= output.rfind(f"\x1b[?{mode}h")


def test_a_bad_file_of_rules_is_one_message_and_no_screen(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: []")
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r})\n"
        "sys.argv = ['lockstep', 'monitor', '--alerts', 'rules.yaml']\n"
        "from lockstep.cli.main import main; main()"
    )
    terminal = Pty(code, 100)
    output = terminal.output().decode()
    assert terminal.process.returncode == 2
    assert output.strip() == "error: rules.yaml: rules: must have a rule"

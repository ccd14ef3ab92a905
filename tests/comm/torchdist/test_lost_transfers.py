"""What gloo forgets when connections close keeps no rank waiting, and no process from its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

SCRIPT = Path(__file__).parents[1] / "launched" / "lost_transfer.py"


def test_a_transfer_that_gloo_forgets_is_given_up(
    run_to_end: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_to_end([sys.executable, str(SCRIPT)], 60)
    assert done.returncode == 0, done.stdout
    forgotten, *ends = done.stdout.splitlines()
    # A day when gloo forgets none, the transport has less to do.
    assert forgotten == "forgotten by gloo: 2"
    assert ends == ["given up"] * 2

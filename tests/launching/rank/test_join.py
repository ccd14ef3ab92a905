"""What keeps ranks from meeting, in one message that names the variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_ranks

SCRIPT = """
import os, torch
from lockstep.errors import EnvironError
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
try:
    open_transport(detect(os.environ), torch.device("cpu"), 5.0)
except EnvironError as error:
    print(error)
"""
OVER_MPI = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {
    f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")
}
OVER_GLOO = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29",
}  # fmt: skip


@pytest.mark.parametrize(
    ("places", "name", "value", "words"),
    [
        pytest.param(
            OVER_MPI,
            "LD_LIBRARY_PATH",
            "{folder}",
            "no MPI library can be loaded (",
            marks=pytest.mark.slow,
        ),
        (OVER_GLOO, "GLOO_SOCKET_IFNAME", "lo,none7", "has no network interface none7 ("),
    ],
)
def test_a_variable_that_keeps_ranks_from_meeting_is_named(
    tmp_path: Path, places: dict[str, str], name: str, value: str, words: str
) -> None:
    value = value.format(folder=tmp_path)
    for library in ("libmpi.so.40", "libopen-pal.so.80"):
        (tmp_path / library).write_text("no library")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | places | {name: value}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}={value}: ")
    assert words in done.stdout

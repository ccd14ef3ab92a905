"""Which rank prints an error that came before there was a group."""

from __future__ import annotations

import time

import pytest

from lockstep.errors import ConfigError, alone
from lockstep.launching.rank.process import tell

TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "a",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "1",
}


@pytest.mark.parametrize(
    ("env", "error", "printed", "waits"),
    [
        (SLURM, ConfigError("no GPU"), "", False),
        (SLURM, alone(ConfigError("no GPU")), "error: no GPU\n", False),
        (TORCHRUN, alone(ConfigError("no GPU")), "error: no GPU\n", False),
        (TORCHRUN, ConfigError("no GPU"), "", True),
        (TORCHRUN | {"RANK": "0"}, ConfigError("no GPU"), "error: no GPU\n", False),
    ],
)
def test_under_torchrun_the_others_leave_the_first_rank_time_to_speak(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: dict[str, str],
    error: ConfigError,
    printed: str,
    waits: bool,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    tell(error)
    assert capsys.readouterr().err == printed
    assert bool(waited) == waits

"""Which rank prints an error that came before there was a group."""

from __future__ import annotations

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
    ("env", "error", "printed"),
    [
        (SLURM, ConfigError("no GPU"), ""),
        (SLURM, alone(ConfigError("no GPU")), "error: no GPU\n"),
        (TORCHRUN, ConfigError("no GPU"), "error: no GPU\n"),
    ],
)
def test_the_second_rank_says_what_the_first_may_have_no_time_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: dict[str, str],
    error: ConfigError,
    printed: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    tell(error)
    assert capsys.readouterr().err == printed

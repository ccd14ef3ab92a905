"""Checkpoints that all ranks write: the files of one process, also if ranks die meanwhile."""

from pathlib import Path

import pytest
from tests.distributed.conftest import CONFIG as USUAL
from tests.distributed.conftest import files, same

from lockstep.engine.faults import PlannedFault
from lockstep.observe import read_events

TASK = f"{Path(__file__).parents[1] / 'nn' / 'models.py'}:Deep"
CONFIG = (*USUAL, "checkpoint.every=2", "eval_every=8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "keys", "faults"),
    [
        # In the background, the others go on; in the foreground they wait.
        ("local", 4, ("mesh.tp=2",), [(1, 4, "checkpoint")]),
        ("local", 4, ("sharding=parameters",), [(2, 4, "checkpoint")]),
        ("mpi", 4, ("mesh.tp=2",), [(3, 4, "checkpoint")]),
        ("mpi", 2, ("mesh.pp=2", "num_shards=4"), []),
        (
            "local", 8, ("mesh.pp=2", "mesh.tp=2", "sharding=parameters"),
            [(5, 4, "checkpoint"), (0, 6, "checkpoint")],
        ),
        (
            "mpi", 3, ("sharding=optimizer",), [(1, 2, "checkpoint"), (0, 6, "checkpoint")],
        ),
        ("torchrun", 2, ("sharding=parameters",), []),
    ],
)  # fmt: skip
def test_the_files_are_those_of_one_process(
    train_on, reference, reference_dir, tmp_path, launcher, num_ranks, keys, faults
):
    planned = [PlannedFault(*fault) for fault in faults]
    run_dir = tmp_path / "run"
    ended = train_on(run_dir, num_ranks, *keys, launcher=launcher, faults=planned)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(run_dir, reference)
    assert files(run_dir) == files(reference_dir)
    assert sum(name.startswith("model-") for name in files(run_dir)) > 4
    rows = read_events(run_dir / "events.jsonl")
    assert sum(row["event"] == "RankLost" for row in rows) == len(faults)
    assert not list((run_dir / "checkpoints").glob(".*"))

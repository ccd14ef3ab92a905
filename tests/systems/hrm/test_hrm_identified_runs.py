"""Runs of the recipe `hrm` with puzzle identifiers: bits do not follow ranks; rows are learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import result
from tests.systems.hrm.tiny_arc import RUN

from lockstep.config import override
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.launching.api import Session, run
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.data.build import new_dataset
from lockstep.systems.hrm.data.format import Puzzle
from lockstep.systems.hrm.reports.scores import by_segments
from lockstep.systems.hrm.reports.trained_model import load_trained
from lockstep.systems.hrm.task import Hrm


@pytest.mark.slow
def test_what_only_the_identifier_tells_is_learnt(tmp_path: Path) -> None:
    """The same questions have other answers under other identifiers, which shift colours."""
    generator = np.random.default_rng(0)
    with new_dataset(tmp_path / "data", 8, 16) as writer:
        identifiers = [writer.identifier(str(number)) for number in range(1, 7)]
        for split, count in (("train", 40), ("test", 10)):
            inputs = generator.integers(1, 8, (count, 16))
            for shift in identifiers:
                labels = (inputs - 1 + shift) % 7 + 1
                writer.add(split, [Puzzle(shift, inputs, labels)])
    keys = (
        "puzzle_ids=true", "dim=32", "num_heads=2", "mixing=attention", "num_blocks=1", "ema=0",
        "batch_size=48", "steps=200", "max_segments=1", "eval_segments=1", "eval_every=200",
        "puzzle_lr=0.02", "lr=0.005", "threads=1", "device=cpu",
    )  # fmt: skip
    config = override(HrmConfig(), [f"data_dir={tmp_path / 'data'}", *keys])
    run(Hrm(config), config, Session(str(tmp_path / "run"), target="hrm", quiet=True))
    found = load_trained(tmp_path / "run", "latest")
    inputs, labels = found.puzzles("val")
    with_ids, without = (
        by_segments(found, inputs, labels, [1], False, known)[0]
        for known in (found.identifiers("val"), None)
    )
    assert with_ids.exact > 0.95
    assert without.exact == 0


def same(run_dir: Path, alone: dict[str, Any]) -> None:
    there = result(run_dir)
    for key in ("params_sha256", "carry_sha256", "tables_sha256", "metrics"):
        assert there[key] == alone[key], key


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of one process."""
    folder = tmp_path_factory.mktemp("alone")
    config = override(HrmConfig(), [*RUN, "threads=1"])
    run(Hrm(config), config, Session(str(folder / "run"), False, (), False))
    found: dict[str, Any] = result(folder / "run")
    return found


@pytest.mark.slow
def test_two_ranks_and_then_three_give_the_bits_of_one_process(
    lockstep: Callable[..., Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    """Stopped and resumed in the middle of puzzles."""
    folder = tmp_path / "run"
    ranks = ("--launcher", "local")
    begun = lockstep("train", "hrm", "-n", 2, *ranks, "--run-dir", folder, *RUN, "stop_at_step=3")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    ended = lockstep("resume", folder, "-n", 3, *ranks, "stop_at_step=null")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "faults"),
    [("local", 2, []), ("mpi", 3, [(1, 3, "rows")]), ("local", 3, [(2, 4, "lookup")])],
)
def test_any_ranks_give_the_bits_of_one_process(
    lockstep: Callable[..., Any],
    alone: dict[str, Any],
    tmp_path: Path,
    launcher: str,
    num_ranks: int,
    faults: list[tuple[int, int, str]],
) -> None:
    env = to_env([PlannedFault(*fault) for fault in faults], tmp_path / "faults")
    ended = lockstep(
        "train", "hrm", "-n", num_ranks, "--launcher", launcher, "--run-dir", "run", *RUN,
        timeout=150, **env,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    same(tmp_path / "run", alone)

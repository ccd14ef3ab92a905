"""What each rank's own gradient is, before the sum over ranks: in events, and with `--per-rank`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.observe import read_events
from lockstep.parallel.fold import ArenaLayout, Fold, Segment, rows_needed
from lockstep.parallel.layout import Range
from lockstep.parallel.norm import norm_of_mean


@pytest.mark.parametrize("microbatches", [range(3), range(1, 6), range(2, 3), range(0)])
def test_the_norm_of_a_ranks_own_sum(microbatches: range) -> None:
    own = Range(microbatches.start, microbatches.stop)
    layout = ArenaLayout([Segment(torch.float32, 2048)], 2, 0)
    _, (arena,) = layout.allocate([rows_needed(own, 8)], torch.device("cpu"))
    specs = [[(0, torch.Size([2000]))]]
    fold = Fold(arena.rows, specs, own, 8)
    leaves = [torch.randn(2000) for _ in microbatches]
    for number, leaf in enumerate(leaves):
        assert not fold.summed  # not all are in
        fold.add([leaf], torch.tensor([1.0, 2.0 + number], dtype=torch.float64))
    wanted = 0.0
    if leaves:
        weight = sum(2.0 + number for number in range(len(leaves)))
        wanted = float(torch.stack(leaves).sum(0).norm()) / weight
    assert norm_of_mean(fold.summed, 1) == pytest.approx(wanted, rel=1e-5)


def norms(run_dir: Path) -> list[tuple[float, list[float]]]:
    rows = read_events(run_dir / "events.jsonl")
    done = [row for row in rows if row["event"] == "StepDone"]
    return [(row["grad_norm"], [rank["grad_norm"] for rank in row["ranks"]]) for row in done]


def test_gradients_before_and_after_the_sum(lockstep: Any, tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text("birds sing songs\n" * 4)
    (tmp_path / "other.txt").write_text("birds sing songs\nthe old cat sleeps\n" * 2)
    keys = ("val_fraction=0", "num_microbatches=4", "epochs=2", "-n", "2", "--launcher", "local")
    for name in ("same", "other"):
        done = lockstep(
            "train", "quantum", f"corpus={name}.txt", *keys, "--per-rank", "--run-dir", name
        )
        assert done.returncode == 0, done.stderr
        assert "rank 1: compute" in done.stdout
        assert ", of all " in done.stdout
    for of_all, own in norms(tmp_path / "same"):
        assert own == pytest.approx([of_all] * 2, rel=1e-9)  # each rank has the same sentences
    for of_all, own in norms(tmp_path / "other"):
        assert len(own) == 2
        assert 0 < of_all <= sum(own) / 2 * (1 + 1e-9)

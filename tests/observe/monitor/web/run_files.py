"""Run directories as trainings write them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAN = {
    "event": "RunStarted", "task": "sketch", "run_dir": "r", "config_hash": "c", "total_steps": 40,
    "steps_per_epoch": 3, "num_samples": 30, "num_parameters": 5, "world_size": 3,
    "transport": "gloo", "launcher": "local", "device": "cpu", "threads": 1, "num_microbatches": 6,
    "batch_size": 10,
}  # fmt: skip


def joined(rank: int, step: int = 0) -> dict[str, Any]:
    return {
        "event": "Joined", "step": step, "slot": rank, "rank": rank, "host": f"node{rank}",
        "pid": 70 + rank, "local_rank": rank, "device": "cpu", "threads": 1,
        "microbatches": [2 * rank, 2 * rank + 2],
    }  # fmt: skip


def done(step: int, loss: Any, ranks: int = 3, **metrics: Any) -> dict[str, Any]:
    times = [
        {"rank": r, "compute_s": 1.0 + r, "communication_s": 0.5, "data_s": 0.25,
         "checkpoint_s": 0.1, "peak_bytes": (r + 1) << 28}
        for r in range(ranks)
    ]  # fmt: skip
    return {
        "event": "StepDone", "step": step, "num_steps": 1, "epoch": 0, "loss": loss, "lr": 0.1,
        "metrics": metrics, "grad_norm": 1.0, "loss_scale": 1.0, "samples": 10, "seconds": 0.5,
        "ranks": times,
    }  # fmt: skip


def append(folder: Path, rows: list[dict[str, Any]], start: float = 1_700_000_000.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"task": "sketch"}))
    with (folder / "events.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps({"time": start + row.get("step", 0), "step": 0, **row}) + "\n")


def begin(folder: Path, steps: int = 20, factor: float = 1.0, **config: Any) -> None:
    """A run that is killed after some steps."""
    rows = [*map(joined, range(3)), PLAN]
    rows += [done(s, factor / s, accuracy=s / 40) for s in range(1, steps + 1)]
    append(folder, rows)
    (folder / "config.yaml").write_text(json.dumps({"lr": 0.1, **config}))


def finish(folder: Path, sha256: str = "ab" * 32, step: int = 20) -> None:
    """The end of a run, as it is told by events and by the result."""
    metrics = {"val/loss": 0.25}
    end = {
        "event": "Finished", "step": step, "status": "completed", "reason": "all steps done",
        "params_sha256": sha256, "metrics": metrics, "world_size": 3, "wall_s": 20.0,
    }  # fmt: skip
    append(folder, [end])
    rest = {"arrays": {}, "exit_code": 0, "error": None, "checkpoint": "", "test_step": None}
    result = {**{key: value for key, value in end.items() if key != "event"}, **rest}
    (folder / "result.json").write_text(json.dumps(result))


def is_free(lock: Any) -> bool:
    """Whether nobody holds a lock for long; to be asked in another thread."""
    if not lock.acquire(timeout=1.0):
        return False
    lock.release()
    return True

"""`lockstep quantum`: what to do with a trained quantum transformer."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config import load
from lockstep.engine.checkpoint.choice import find_snapshot
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import RunStarted, StepDone
from lockstep.engine.snapshot.fits import check_fits
from lockstep.engine.snapshot.restore import load_model
from lockstep.engine.step.model import build_model
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import replacing, replacing_binary
from lockstep.observe import event_from_row, read_events
from lockstep.parsing import parse_int
from lockstep.quantum.interop import drawing
from lockstep.quantum.transformer.model import QuantumTransformer
from lockstep.recipes.quantum.comparison import baselines, of_model, table
from lockstep.recipes.quantum.config import QuantumConfig
from lockstep.recipes.quantum.task import Quantum

_CSV_COLUMNS = ("epoch", "loss", "grad_norm", "seconds")


def predict(run_dir: Path, prefix: str, which: str, top: int) -> list[str]:
    """The training vocabulary ranked as next word, with the model's and a bigram's probabilities.

    Raises:
        LockstepError: there is no such run or checkpoint, or a word has no vector.
    """
    task, model, snapshot = _trained(run_dir, which)
    ranked = task.predict(model, prefix, _best_restart(snapshot))
    width = max(len(each.word) for each in ranked[:top])
    return [f"{'':{width}}   model  bigram"] + [
        f"{each.word:{width}}  {each.probability:.4f}  {each.bigram:.4f}" for each in ranked[:top]
    ]


def compare(run_dir: Path, which: str) -> list[str]:
    """How well next words of the held-out sentences are predicted: lines of a table.

    Raises:
        LockstepError: there is no such run or checkpoint, or it has no held-out sentences.
    """
    task, model, snapshot = _trained(run_dir, which)
    scores = baselines(task)
    scores["the model"] = of_model(task, model, _best_restart(snapshot))
    held_out = task.sentences["test"]
    again = len(set(held_out) & set(task.sentences["train"]))
    remark = f"; {again} of them are training sentences, too" if again else ""
    return [f"next words of {len(held_out)} held-out sentences{remark}", *table(scores)]


def export(run_dir: Path, output: Path | None, which: str) -> list[str]:
    """Write `params`, `epoch`, `lr` and `seed` of a checkpoint as .npz, and the log as CSV.

    The .npz has also `embeddings`, `words` and all restarts' angles as `restarts`; `params` are
    those of the best restart, flat, V before W.

    Returns:
        Lines that say what was written.

    Raises:
        LockstepError: there is no such run or checkpoint, or a file cannot be written.
    """
    task, model, snapshot = _trained(run_dir, which)
    path = output or run_dir / f"quantum_epoch{snapshot.meta['sampler']['epoch']}.npz"
    if path.suffix != ".npz":
        raise ConfigError(f"--output {path}: must end in .npz")
    angles = model.angles.detach().flatten(1).numpy()
    log = path.with_suffix(".csv")
    try:
        with replacing_binary(path) as file:
            np.savez(
                file,
                params=angles[_best_restart(snapshot)],
                restarts=angles,
                epoch=snapshot.meta["sampler"]["epoch"],
                lr=task.config.lr,
                seed=task.config.seed,
                embeddings=model.embeddings.detach().numpy(),
                words=np.array(model.words),
            )
        rows = training_log(read_events(run_dir / "events.jsonl"))
        with replacing(log) as text:
            text.write(rows)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
    return [str(path), str(log)]


def draw(run_dir: Path, sentence: str, which: str) -> list[str]:
    """The superposition circuit of a sentence, as Qiskit draws it.

    Raises:
        LockstepError: there is no such run or checkpoint, a word has no vector, there are fewer
            than two, or Qiskit is not installed.
    """
    task, model, _ = _trained(run_dir, which)
    rows = task.rows(model, sentence)
    if len(rows) < 2:
        raise ConfigError(f"{sentence!r}: a sentence needs at least two words")
    return drawing(model.circuit(rows), fold=100).split("\n")


def training_log(events: list[dict[str, Any]]) -> str:
    """A CSV of epoch (from 1), mean loss, gradient norm and seconds, one row for each epoch.

    What was computed again after a resume is there once. The gradient norm is the last one's.
    """
    steps: list[StepDone] = []
    for event in map(event_from_row, events):
        if isinstance(event, RunStarted) and not event.continued:
            steps = [step for step in steps if step.step <= event.step]
        elif isinstance(event, StepDone):
            steps.append(event)
    epochs: dict[int, list[StepDone]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(step)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for epoch, of_epoch in epochs.items():
        samples = sum(step.samples for step in of_epoch)
        mean = sum(step.loss * step.samples for step in of_epoch) / samples if samples else math.nan
        seconds = sum(step.seconds for step in of_epoch)
        writer.writerow([epoch + 1, repr(mean), repr(of_epoch[-1].grad_norm), f"{seconds:.6f}"])
    return text.getvalue()


def _trained(run_dir: Path, which: str) -> tuple[Quantum, QuantumTransformer, Snapshot]:
    directory = RunDirectory(run_dir)
    target = directory.identity().target
    if target != "quantum":
        raise ConfigError(f"{run_dir}: is a run of {target or 'a script'}, not of quantum")
    config = load(QuantumConfig, run_dir / "config.yaml")
    task = Quantum(config)
    model = build_model(task, config, torch.device("cpu"))
    assert isinstance(model, QuantumTransformer)
    snapshot = find_snapshot(directory.checkpoints, which)
    check_fits(snapshot, model, str(directory.checkpoints))
    load_model(snapshot, model)
    return task, model, snapshot


def _best_restart(snapshot: Snapshot) -> int:
    """The restart with the least loss in the last evaluation; 0 if there was none."""
    metrics = snapshot.meta["progress"]["metrics"]
    losses = {k: v for k, v in metrics.items() if k.startswith("val/restart_")}
    number = min(losses, key=losses.__getitem__).rpartition("_")[2] if losses else "0"
    try:
        return parse_int(number, most=len(snapshot.model["angles"]) - 1)
    except ValueError as error:
        raise CheckpointError(
            f"step {snapshot.step}: progress.metrics has no such restart: {error}"
        ) from None

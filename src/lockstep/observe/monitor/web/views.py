"""Runs as plain data for the page, with the ends of their logs."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lockstep.config.files import open_to_read, read_text
from lockstep.config.parsing import parse_object
from lockstep.engine import events
from lockstep.engine.checkpoint.listing import files_with, folders, step_of
from lockstep.errors import RunDirectoryError, file_errors
from lockstep.observe import text
from lockstep.observe.reading.diagnosis import Calls
from lockstep.observe.reading.diagnosis.verdict import causes, healthy
from lockstep.observe.reading.history import KINDS, Happening, History
from lockstep.observe.reading.large.envelopes import Envelope
from lockstep.observe.reading.large.run import LargeRun
from lockstep.observe.reading.listing import Summary

E = TypeVar("E", bound=events.Event)

_MAX_METRICS = 8
_MAX_EVENTS = 300
_MAX_ROWS = 100
_MAX_NAME = 200
_MAX_TEXT = 4000
_MAX_PROCESSES = 256
_TAIL_BYTES = 64 << 10
_OUTPUT = "ranks.log"
_HANG = re.compile(r"hang_of_slot_[0-9]{1,9}\.json")


def run_id(path: Path) -> str:
    """The public name of a run, made of its path so that no path ever comes from outside."""
    return hashlib.sha256(bytes(path)).hexdigest()[:16]


_SUMMARY = ("state", "step", "total_steps", "ranks", "started", "newest")


def in_list(summary: Summary) -> dict[str, Any]:
    """What the list shows of a run."""
    names = sorted(summary.metrics, key=lambda name: (name != "train/loss", name))
    others = [name for name in names if not name.startswith("train/")][: _MAX_METRICS - 1]
    training = [name for name in names if name.startswith("train/")]
    shown = [*others, *training][:_MAX_METRICS]
    return {
        "id": run_id(summary.path),
        "name": short(summary.path.name or str(summary.path)),
        "path": short(str(summary.path), _MAX_TEXT),
        "task": short(summary.task),
        **{key: getattr(summary, key) for key in _SUMMARY},
        "sha256": short(summary.sha256),
        "metrics": {short(name): as_json(summary.metrics[name]) for name in shown},
        "tags": [short(tag) for tag in summary.tags],
        "problems": [short(problem, _MAX_TEXT) for problem in summary.problems],
    }


def in_whole(
    summary: Summary, run: LargeRun, digests: Mapping[int, ModelFiles], calls: Calls
) -> dict[str, Any]:
    """What the page of a run shows, but for curves, config and logs.

    Args:
        summary: summary of the run.
        run: the events of the run; its lock must be held.
        digests: digests of its checkpoints by step, as from `model_digests`.
        calls: the newest calls of its ranks.
    """
    history = run.history
    problems = [p for p in (run.problem, *summary.problems, *history.problems) if p]
    return in_list(summary) | {
        "newest": max(summary.newest, history.newest),
        "plan": _plan(history.plan),
        "end": _end(history.end),
        "diagnosis": _diagnosis(summary, run, calls),
        "reading": {
            "offset": run.offset, "size": run.size, "is_whole": run.is_whole,
            "sampled_of": run.sampled_of,
        },
        "curves": {"generation": run.generation, "names": [short(name) for name in run.names]},
        "processes": list(_processes(history, run)),
        "happenings": [_happening(h) for h in history.happenings if _is_shown(h)][-_MAX_EVENTS:],
        "checkpoints": list(_checkpoints(history, digests)),
        "evaluations": list(_evaluations(history)),
        "problems": [short(problem, _MAX_TEXT) for problem in problems],
        "num_problems": max(history.num_problems, len(problems)),
    }  # fmt: skip


def curves_of(
    run: LargeRun, numbers: Sequence[int], first: int, last: int, most: int
) -> dict[str, Any]:
    """Parts of curves, by their numbers in `run.names`; unknown ones are left out."""
    with run.lock:
        known = [number for number in dict.fromkeys(numbers) if 0 <= number < len(run.names)]
        names, generation = [run.names[number] for number in known], run.generation
    found = run.curves(names, first, last, most)
    if run.generation != generation:  # the numbers may mean other curves now
        return {"generation": run.generation, "curves": {}}
    curves = {str(n): _curve(one) for n, one in zip(known, found, strict=True)}
    return {"generation": generation, "curves": curves}


def _curve(envelope: Envelope) -> dict[str, Any]:
    """A curve as lists; values that are not finite become null in JSON."""
    low, high = envelope.low.tolist(), envelope.high.tolist()
    return {
        "step": envelope.step.tolist(),
        "value": envelope.value.tolist(),
        "num_odd": int(np.count_nonzero(envelope.odd)),
    } | ({"low": low, "high": high} if low != high else {})


def log_names(run_dir: Path) -> list[str]:
    """The logs of a run: the output of its ranks, and the stacks of those that hung."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return []
    logs = [name for name in names if name == _OUTPUT or _HANG.fullmatch(name)]
    return sorted(logs, key=lambda name: (name != _OUTPUT, len(name), name))


def read_log(run_dir: Path, name: str) -> dict[str, Any]:
    """The end of a log.

    Args:
        run_dir: run directory.
        name: one of `log_names`; anything else is refused.

    Raises:
        RunDirectoryError: there is no such log, or it cannot be read.
    """
    if name not in log_names(run_dir):
        raise RunDirectoryError("there is no such log")
    path = run_dir / name
    with file_errors(RunDirectoryError, path, "read"), open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        data = file.read(_TAIL_BYTES)
    if start:
        data = data.partition(b"\n")[2] or data
    return {"name": name, "size": size, "is_cut": start > 0, "text": data.decode(errors="replace")}


def short(name: str, most: int = _MAX_NAME) -> str:
    """A name to show: of a long one the beginning, and a digest that tells it from others."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()
    return f"{name[: most - 20]}… ({digest[:12]})"


def as_json(value: float) -> float | str:
    """A number; the name of one that is not finite, for which JSON has no number."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


_PLAN = (
    "world_size", "transport", "launcher", "device", "threads", "batch_size", "num_microbatches",
    "num_parameters", "num_samples", "total_steps",
)  # fmt: skip


def _plan(plan: events.RunStarted | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {key: getattr(plan, key) for key in _PLAN} | {"config_hash": short(plan.config_hash)}


def _end(end: events.Finished | events.Failed | None) -> dict[str, Any] | None:
    if isinstance(end, events.Failed):
        return {"error": short(end.error), "message": short(end.message, _MAX_TEXT)}
    if end is None:
        return None
    digests = {
        "parameters": end.params_sha256, "carry": end.carry_sha256, "tables": end.tables_sha256,
    }  # fmt: skip
    return {
        "status": short(end.status),
        "reason": short(end.reason, _MAX_TEXT),
        "wall_s": as_json(end.wall_s),
        "digests": {name: short(digest) for name, digest in digests.items() if digest},
    }


def _diagnosis(summary: Summary, run: LargeRun, calls: Calls) -> dict[str, Any]:
    if not run.is_whole:
        return {"causes": (), "healthy": "Not judged yet: the events are still being read."}
    found = causes(summary, run.history, calls)
    return {
        "healthy": "" if found else healthy(summary, run.history),
        "causes": [
            {
                "name": cause.name,
                "lost": None if cause.lost is None else as_json(cause.lost),
                "sentence": short(cause.sentence, _MAX_TEXT),
                "evidence": [short(line, _MAX_TEXT) for line in cause.evidence],
                "advice": short(cause.advice, _MAX_TEXT),
            }
            for cause in found
        ],
    }


def _processes(history: History, run: LargeRun) -> Iterator[dict[str, Any]]:
    newest = {times.rank: times for times in run.newest.ranks} if run.newest else {}
    for process in history.processes[-_MAX_PROCESSES:]:
        joined, is_living = process.joined, process.until is None
        times = newest.get(process.rank) if is_living else None
        yield {
            "slot": joined.slot,
            "rank": process.rank,
            "host": short(joined.host),
            "pid": joined.pid,
            "device": short(joined.device),
            "since": process.since,
            "until": process.until,
            "reason": short(process.reason.partition(";")[0], _MAX_TEXT),
            "is_late": history.plan is not None and joined.step > max(0, history.plan.step),
            "seconds": {kind: as_json(process.seconds[kind]) for kind in KINDS},
            "now": times and {kind: as_json(getattr(times, kind)) for kind in KINDS},
            "peak_bytes": process.times.memory_bytes,
            "device_busy": as_json(process.times.device_busy),
            "num_microbatches": as_json(process.num_microbatches) if is_living else 0,
        }


_KINDS: Mapping[type, str] = {
    events.RunStarted: "start", events.Joined: "joined", events.RankLost: "lost",
    events.Recovered: "recovered", events.Rebalanced: "rebalanced", events.Resumed: "resumed",
    events.Warned: "warning", events.Failed: "error", events.Finished: "end",
}  # fmt: skip


def _is_shown(happening: Happening) -> bool:
    quiet = (events.Evaluated, events.Improved, events.Checkpointed)
    return not isinstance(happening.event, quiet)


def _happening(happening: Happening) -> dict[str, Any]:
    event = happening.event
    if isinstance(event, events.RunStarted):
        line = f"step {event.step:,}: {text.count(event.world_size, 'rank')} begin"
    elif isinstance(event, events.Finished):
        line = f"step {event.step:,}: {event.status}" + (f": {event.reason}" * bool(event.reason))
    else:
        line = text.line(event)
    return {
        "time": happening.time,
        "step": event.step,
        "kind": _KINDS.get(type(event), "other"),
        "text": short(line, _MAX_TEXT),
        "slot": getattr(event, "slot", None),
    }


def _newest(history: History, kind: type[E]) -> Iterator[tuple[float, E]]:
    """The newest events of a kind with their times, the last one first."""
    found = [(h.time, h.event) for h in history.happenings if isinstance(h.event, kind)]
    return reversed(found[-_MAX_ROWS:])


def _checkpoints(history: History, digests: Mapping[int, ModelFiles]) -> Iterator[dict[str, Any]]:
    for time, event in _newest(history, events.Checkpointed):
        yield {
            "step": event.step,
            "time": time,
            "num_bytes": event.num_bytes,
            "stall_s": as_json(event.stall_s),
            "write_s": as_json(event.write_s),
            **digests.get(event.step, ModelFiles())._asdict(),
        }


def _evaluations(history: History) -> Iterator[dict[str, Any]]:
    for time, event in _newest(history, events.Evaluated):
        few = list(event.metrics.items())[:_MAX_METRICS]
        yield {
            "step": event.step if event.model_step is None else event.model_step,
            "split": short(event.split),
            "time": time,
            "seconds": as_json(event.seconds),
            "metrics": {short(name): as_json(value) for name, value in few},
        }


class ModelFiles(NamedTuple):
    """The files with the model in a checkpoint.

    Attributes:
        sha256: one digest of all; empty, like `cut`, if they are not known.
        cut: size of each: digests of a model in other files say nothing of its bits.
    """

    sha256: str = ""
    cut: Sequence[int] = ()


def model_digests(run_dir: Path) -> dict[int, ModelFiles]:
    """The files with the model in each of the newest checkpoints that exist, by step."""
    try:
        checkpoints = folders(run_dir / "checkpoints")[:_MAX_ROWS]
    except OSError:
        return {}
    return {step_of(folder): _model_digest(folder) for folder in checkpoints}


def _model_digest(folder: Path) -> ModelFiles:
    """The files with the model in a checkpoint by its manifest; none if that cannot be read."""
    try:
        manifest = parse_object(read_text(folder / "manifest.json"))
        files = manifest["files"]
        names = files_with("model.safetensors", files)
        digests = [str(files[name]["sha256"]) for name in names]
        joined = hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""
        cut = [int(files[name]["bytes"]) for name in names]
        return ModelFiles(short(digests[0] if len(digests) == 1 else joined), cut)
    except (OSError, ValueError, KeyError, TypeError):
        return ModelFiles()

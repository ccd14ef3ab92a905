"""Runs as plain data for the page, with the ends of their logs."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lockstep.config.files import open_to_read, read_text
from lockstep.config.parsing import parse_object
from lockstep.engine.checkpoint.listing import folders, step_of
from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Failed,
    Finished,
    Improved,
    Joined,
    RankLost,
    Rebalanced,
    Recovered,
    Resumed,
    RunStarted,
    Warned,
)
from lockstep.errors import RunDirectoryError
from lockstep.observe import text
from lockstep.observe.reading.diagnosis.facts import Calls
from lockstep.observe.reading.diagnosis.verdict import causes, told
from lockstep.observe.reading.history import KINDS, Happening, History
from lockstep.observe.reading.large.envelopes import Envelope
from lockstep.observe.reading.large.run import LargeRun
from lockstep.observe.reading.listing import Summary

_TAIL_BYTES = 64 << 10
_OUTPUT = "ranks.log"
_HANG = re.compile(r"hang_of_slot_[0-9]{1,9}\.json")


def log_names(run_dir: Path) -> list[str]:
    """The logs that are there: what ranks said, and where those that hung stood."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        return []
    return sorted((n for n in names if n == _OUTPUT or _HANG.fullmatch(n)), key=_place)


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
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read(_TAIL_BYTES)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None
    if start:
        data = data.partition(b"\n")[2] or data
    return {"name": name, "size": size, "is_cut": start > 0, "text": data.decode(errors="replace")}


def _place(name: str) -> tuple[bool, int, str]:
    return name != _OUTPUT, len(name), name


_MOST_METRICS = 8
_MOST_HAPPENINGS = 300
_MOST_TABLE = 100
_LONGEST_NAME = 200
_LONGEST_TEXT = 4000
_MOST_PROCESSES = 256
_NOT_YET: Mapping[str, Any] = MappingProxyType(
    {"causes": (), "healthy": "Not judged yet: the events are still being read."}
)


def in_list(number: str, summary: Summary) -> dict[str, Any]:
    """What the list shows of a run."""
    names = sorted(summary.metrics, key=lambda name: (name != "train/loss", name))
    first = [name for name in names if not name.startswith("train/")][: _MOST_METRICS - 1]
    rest = [name for name in names if name.startswith("train/")]
    shown = [*first, *rest][:_MOST_METRICS]
    return {
        "id": number,
        "name": short(summary.path.name or str(summary.path)),
        "path": short(str(summary.path), _LONGEST_TEXT),
        "task": short(summary.task),
        "state": summary.state,
        "step": summary.step,
        "total_steps": summary.total_steps,
        "ranks": summary.ranks,
        "started": summary.started,
        "newest": summary.newest,
        "sha256": short(summary.sha256),
        "metrics": {short(name): number_of(summary.metrics[name]) for name in shown},
        "tags": [short(tag) for tag in summary.tags],
        "problems": [short(problem, _LONGEST_TEXT) for problem in summary.problems],
    }


def in_whole(
    number: str, summary: Summary, run: LargeRun, digests: Mapping[int, str], calls: Calls
) -> dict[str, Any]:
    """What the page of a run shows, but for curves, config and logs.

    Args:
        number: of the run.
        summary: of it.
        run: what its events tell; to be called with its lock.
        digests: of its checkpoints, as `model_digests` finds them.
        calls: of its ranks.
    """
    history = run.history
    problems = [p for p in (run.problem, *summary.problems, *history.problems) if p]
    return in_list(number, summary) | {
        "newest": max(summary.newest, history.newest),
        "plan": _plan(history.plan),
        "end": _end(history.end),
        "diagnosis": _diagnosis(summary, history, calls) if run.is_whole else dict(_NOT_YET),
        "reading": {
            "offset": run.offset, "size": run.size, "is_whole": run.is_whole,
            "sampled_of": run.sampled_of,
        },
        "curves": {"generation": run.generation, "names": [short(name) for name in run.names]},
        "processes": list(_processes(history, run)),
        "happenings": [_happening(h) for h in _told(history)],
        "checkpoints": list(_checkpoints(history, digests)),
        "evaluations": list(_evaluations(history)),
        "problems": [short(problem, _LONGEST_TEXT) for problem in problems],
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
    if run.generation != generation:  # the numbers may mean others now
        return {"generation": run.generation, "curves": {}}
    curves = {str(n): _curve(one) for n, one in zip(known, found, strict=True)}
    return {"generation": generation, "curves": curves}


def _curve(envelope: Envelope) -> dict[str, Any]:
    """What is drawn; what is not finite becomes null in JSON."""
    low, high = envelope.low.tolist(), envelope.high.tolist()
    return {
        "step": envelope.step.tolist(),
        "value": envelope.value.tolist(),
        "num_odd": int(np.count_nonzero(envelope.odd)),
    } | ({"low": low, "high": high} if low != high else {})


def short(name: str, most: int = _LONGEST_NAME) -> str:
    """A name that is shown; of a long one the beginning, and a digest that tells it apart."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()
    return f"{name[: most - 20]}… ({digest[:12]})"


def number_of(value: float) -> float | str:
    """A number; one that is not finite by its name, which JSON has no number for."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _plan(plan: RunStarted | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "world_size": plan.world_size, "transport": plan.transport, "launcher": plan.launcher,
        "device": plan.device, "threads": plan.threads, "batch_size": plan.batch_size,
        "num_microbatches": plan.num_microbatches, "num_parameters": plan.num_parameters,
        "num_samples": plan.num_samples, "config_hash": short(plan.config_hash),
        "total_steps": plan.total_steps,
    }  # fmt: skip


def _end(end: Finished | Failed | None) -> dict[str, Any] | None:
    if isinstance(end, Failed):
        return {"error": short(end.error), "message": short(end.message, _LONGEST_TEXT)}
    if isinstance(end, Finished):
        digests = {
            "parameters": end.params_sha256,
            "carry": end.carry_sha256,
            "tables": end.tables_sha256,
        }
        return {
            "status": short(end.status),
            "reason": short(end.reason, _LONGEST_TEXT),
            "wall_s": number_of(end.wall_s),
            "digests": {name: short(digest) for name, digest in digests.items() if digest},
        }
    return None


def _diagnosis(summary: Summary, history: History, calls: Calls) -> dict[str, Any]:
    found = causes(summary, history, calls)
    return {
        "healthy": "" if found else next(iter(told(summary, history, [])), ""),
        "causes": [
            {
                "name": cause.name,
                "lost": None if cause.lost is None else number_of(cause.lost),
                "sentence": short(cause.sentence, _LONGEST_TEXT),
                "evidence": [short(line, _LONGEST_TEXT) for line in cause.evidence],
                "advice": short(cause.advice, _LONGEST_TEXT),
            }
            for cause in found
        ],
    }


def _processes(history: History, run: LargeRun) -> Iterator[dict[str, Any]]:
    now = {times.rank: times for times in run.newest.ranks} if run.newest else {}
    for process in history.processes[-_MOST_PROCESSES:]:
        joined, times = process.joined, now.get(process.rank)
        is_living = process.until is None
        yield {
            "slot": joined.slot,
            "rank": process.rank,
            "host": short(joined.host),
            "pid": joined.pid,
            "device": short(joined.device),
            "since": process.since,
            "until": process.until,
            "reason": short(process.reason.partition(";")[0], _LONGEST_TEXT),
            "is_late": joined.step > 0 and history.plan is not None
            and joined.step > history.plan.step,
            "seconds": {kind: number_of(process.seconds[kind]) for kind in KINDS},
            "now": {kind: number_of(getattr(times, kind)) for kind in KINDS}
            if times is not None and is_living
            else None,
            "peak_bytes": int(process.times.peak_bytes),
            "num_microbatches": number_of(process.num_microbatches) if is_living else 0,
        }  # fmt: skip


_TOLD: Mapping[type, str] = {
    RunStarted: "start", Joined: "joined", RankLost: "lost", Recovered: "recovered",
    Rebalanced: "rebalanced", Resumed: "resumed", Warned: "warning", Failed: "error",
    Finished: "end",
}  # fmt: skip


def _told(history: History) -> list[Happening]:
    quiet = (Evaluated, Improved, Checkpointed)
    return [h for h in history.happenings if not isinstance(h.event, quiet)][-_MOST_HAPPENINGS:]


def _happening(happening: Happening) -> dict[str, Any]:
    event = happening.event
    kind = _TOLD.get(type(event), "other")
    if isinstance(event, RunStarted):
        line = f"step {event.step:,}: {text.count(event.world_size, 'rank')} begin"
    elif isinstance(event, Finished):
        line = f"step {event.step:,}: {event.status}" + (f": {event.reason}" * bool(event.reason))
    else:
        line = text.line(event)
    return {
        "time": happening.time,
        "step": event.step,
        "kind": kind,
        "text": short(line, _LONGEST_TEXT),
        "slot": getattr(event, "slot", None),
    }


def _checkpoints(history: History, digests: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    saved = [h for h in history.happenings if isinstance(h.event, Checkpointed)][-_MOST_TABLE:]
    for happening in reversed(saved):
        event = happening.event
        assert isinstance(event, Checkpointed)
        yield {
            "step": event.step,
            "time": happening.time,
            "num_bytes": event.num_bytes,
            "stall_s": number_of(event.stall_s),
            "write_s": number_of(event.write_s),
            "sha256": digests.get(event.step, ""),
        }


def model_digests(run_dir: Path) -> dict[int, str]:
    """The SHA-256 of the model in each checkpoint that is there, the newest ones, by step."""
    try:
        there = folders(run_dir / "checkpoints")[:_MOST_TABLE]
    except OSError:
        return {}
    return {step_of(folder): _model_digest(folder) for folder in there}


def _model_digest(folder: Path) -> str:
    """The SHA-256 of the model in a checkpoint, as its manifest says."""
    try:
        manifest = parse_object(read_text(folder / "manifest.json"))
        return short(str(manifest["files"]["model.safetensors"]["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _evaluations(history: History) -> Iterator[dict[str, Any]]:
    found = [h for h in history.happenings if isinstance(h.event, Evaluated)][-_MOST_TABLE:]
    for happening in reversed(found):
        event = happening.event
        assert isinstance(event, Evaluated)
        few = list(event.metrics.items())[:_MOST_METRICS]
        yield {
            "step": event.step if event.model_step is None else event.model_step,
            "split": short(event.split),
            "time": happening.time,
            "seconds": number_of(event.seconds),
            "metrics": {short(name): number_of(value) for name, value in few},
        }

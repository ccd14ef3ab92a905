"""The training that `lockstep verify` repeats, and where two of its runs part."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lockstep.commands import evaluations
from lockstep.commands.verify.legs import Leg
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.digests import tensor_digest
from lockstep.engine.tables.files import read_rows
from lockstep.front import Sitting
from lockstep.launching.ending import Ended
from lockstep.launching.start import rank_command, start
from lockstep.observe import read_events, read_result
from lockstep.targets import absolute, configured, is_script

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


@dataclass(frozen=True)
class Run:
    """One training of the config.

    Attributes:
        legs: launcher and number of ranks of each sitting, in order.
        sha256: SHA-256 of the final parameters in hexadecimal; empty if the run failed.
        step: number of committed optimizer steps.
        wall_s: wall time of training in seconds.
        error: message of the error that ended it; empty if there was none.
        carry_sha256: SHA-256 of what microbatches carry in the end; empty if they carry nothing.
        tables_sha256: SHA-256 of the rows of tables in the end; empty without tables.
        evaluations: rows of its evaluations, as it has written them.
    """

    legs: tuple[Leg, ...]
    sha256: str = ""
    step: int = 0
    wall_s: float = 0.0
    error: str = ""
    carry_sha256: str = ""
    tables_sha256: str = ""
    evaluations: tuple[evaluations.Row, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """What must be equal: of parameters, of what microbatches carry, and of tables."""
        return self.sha256, self.carry_sha256, self.tables_sha256

    def parting(self, other: Run) -> str:
        """Where the evaluations of two runs first differ; empty if they do not."""
        names, rows = (self.name, other.name), (self.evaluations, other.evaluations)
        return evaluations.first_difference(names, rows)

    def is_like(self, other: Run) -> bool:
        """Whether digests and evaluations of two runs are equal."""
        return self.digests == other.digests and not self.parting(other)

    @property
    def half(self) -> int:
        """The step after which it is stopped if it is to be resumed."""
        return self.step // 2

    @property
    def name(self) -> str:
        """A name for people, made of its legs."""
        return ", resumed: ".join(leg.name for leg in self.legs)


@dataclass(frozen=True)
class Training:
    """The training that is repeated on other ranks."""

    target: str
    overrides: Sequence[str]
    folder: Path

    def run(self, legs: tuple[Leg, ...], stop: int = 0, more: Sequence[str] = ()) -> Run:
        """Train to the end; if there is a second leg, stop after a step and go on with it."""
        path = self.path(legs, more)
        wall_s = 0.0
        for number, leg in enumerate(legs, 1):
            until = [f"stop_at_step={stop}"] if number < len(legs) else []
            overrides = [*self.overrides, *leg.overrides, *more, *until]
            ended = self._start(leg, path, overrides, resume=number > 1)
            if ended.exit_code in _STOPPED:
                raise SystemExit(ended.exit_code)  # else a signal would end this one run only
            if ended.exit_code:
                return Run(legs, error=ended.message or f"exit code {ended.exit_code}")
            result = read_result(path / "result.json")
            wall_s += float(result["wall_s"])
        return Run(
            legs,
            result["params_sha256"],
            result["step"],
            wall_s,
            carry_sha256=result.get("carry_sha256", ""),
            tables_sha256=result.get("tables_sha256", ""),
            evaluations=evaluations.evaluated(read_events(path / "events.jsonl")),
        )

    def path(self, legs: tuple[Leg, ...], more: Sequence[str] = ()) -> Path:
        """The run directory."""
        name = "-".join(
            "-".join(filter(None, [leg.launcher, str(leg.num_ranks), leg.mesh])) for leg in legs
        )
        return self.folder / (f"steps-{name}" if more else name)

    def _start(self, leg: Leg, path: Path, overrides: Sequence[str], resume: bool) -> Ended:
        where = absolute(self.target)
        script = is_script(self.target)
        sitting = Sitting(str(path), resume, tuple(overrides) if script else (), False, where)
        threads = 1 if script else configured(self.target, overrides)[1].threads
        command = rank_command(leg.launcher, leg.num_ranks, where, overrides)
        return start(command, sitting, threads, on_row=_ignore, on_line=_ignore)


def first_difference(training: Training, runs: tuple[Run, Run]) -> str:
    """Where two runs part: train both again with a checkpoint at each step, and compare these."""
    every = ["checkpoint.every=1", f"checkpoint.keep={max(r.step for r in runs)}"]
    roots = []
    for run in runs:
        again = training.run(run.legs, runs[0].half, every)
        if again.error:
            return f"could not be traced: {again.error}"
        roots.append(training.path(run.legs, every) / "checkpoints")
    names = " and ".join(r.name for r in runs)
    for step in range(1, runs[0].step + 1):
        read = [checkpoint.read(r / listing.folder_name(step)) for r in roots]
        first, second = (_tensors(snapshot) for snapshot in read)
        for name, tensor in first.items():
            other = second[name]
            if tensor_digest(name, tensor) != tensor_digest(name, other):
                gap = (tensor.double() - other.double()).abs().max().item()
                return f"{names} first differ after step {step}, in {name} (by up to {gap:.3g})"
    return f"{names} agreed when they were run again: the difference comes and goes"


def _tensors(snapshot: checkpoint.Snapshot) -> dict[str, Tensor]:
    """What must be equal in two runs, by a name for people."""
    carried = {f"the carry of microbatch {name}": t for name, t in snapshot.carry.items()}
    rows = {
        f"{key} of {name} from row {first} on": tensor
        for name, first, key, tensor in read_rows(snapshot)
    }
    return snapshot.model | snapshot.buffers | carried | rows


def _ignore(_: object) -> None:
    """Runs being compared are not shown."""

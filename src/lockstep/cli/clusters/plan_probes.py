"""Short trainings of a task on this host, alone and at the same time, which measure steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import TrainConfig
from lockstep.errors import LaunchError, LockstepError, RankFailure
from lockstep.launching.api import Session
from lockstep.launching.job.commands import rank_environment
from lockstep.launching.job.run import capture
from lockstep.launching.start import rank_command
from lockstep.observe import read_events, read_result
from lockstep.observe.text import count
from lockstep.planning.measurements import Timed

_NEVER = 1_000_000_000
"""Steps between evaluations of a training that is to have none."""
_TIMEOUT_S = 900.0
_LEAST_REPORTS = 6
_MOST_STEPS = 20_000
_TAIL = 0.02
"""Part of the single steps, the slowest, that are dropped as disturbances of the machine."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """What a training computes, and how many of it there are at the same time.

    Attributes:
        num_microbatches: microbatches of a step, each as large as those of the task.
        num_copies: trainings at the same time.
        pp: stages of each.
        tp: ranks that share the layers of a stage.
        num_replicas: replicas of each training, which then talk to each other.
    """

    num_microbatches: int
    num_copies: int = 1
    pp: int = 1
    tp: int = 1
    num_replicas: int = 1

    @property
    def name(self) -> str:
        """A name for people."""
        ranks = self.num_replicas * self.pp * self.tp
        many = f"{self.num_copies} times at once, " if self.num_copies > 1 else ""
        mesh = f" ({self.num_replicas}x{self.pp}x{self.tp})" if ranks > 1 else ""
        microbatches = f"{self.num_microbatches} of the microbatches"
        return f"{many}{count(ranks, 'rank')}{mesh}, {microbatches}"


@dataclass(frozen=True)
class Probe:
    """The results of short trainings.

    Attributes:
        reports: rows of the events of steps, of each copy, without the first one.
        started_s: seconds from the command to the end of the first step.
        checkpoints: rows of the events of checkpoints, of the first copy.
        plan: row of the event `RunStarted` of the first copy.
        device_bytes: memory of a rank's device in all; 0 on CPUs.
    """

    reports: tuple[tuple[Row, ...], ...]
    started_s: float
    checkpoints: tuple[Row, ...]
    plan: Row
    device_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median of reports, of the slowest copy."""
        return max(statistics.median(map(_seconds, rows)) for rows in self.reports)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank had."""
        ranks = [r for rows in self.reports for r in rows[-1]["ranks"]]
        return max(int(r.get("device_bytes") or r["peak_bytes"]) for r in ranks)

    @property
    def sent_bytes(self) -> float:
        """Bytes that all ranks of a copy sent in a step."""
        rows = self.reports[0]
        num_steps = sum(row["num_steps"] for row in rows)
        return float(sum(r["sent_bytes"] for row in rows for r in row["ranks"]) / num_steps)

    @property
    def jitter(self) -> tuple[float, ...]:
        """Seconds of single steps over the mean of their copy, without the slowest few."""
        found: list[float] = []
        for rows in self.reports:
            seconds = sorted(map(_seconds, rows))
            seconds = seconds[: len(seconds) - int(_TAIL * len(seconds))]
            mean = statistics.fmean(seconds)
            found += [each / mean for each in seconds]
        return tuple(sorted(found))


class Prober:
    """Trains a task in a folder of its own, again and again.

    Args:
        target: recipe, or `file.py:Task` with the whole path.
        config: its config.
        overrides: `key=value` items that made it.
        folder: folder for run directories.
        launcher: what starts several ranks.
        seconds: time that steps of a training are measured for, about.
        server: the warm server that several ranks are forked from, as those of `lockstep train`;
            empty if there is none.
    """

    def __init__(
        self,
        target: str,
        config: TrainConfig,
        overrides: Sequence[str],
        folder: Path,
        launcher: str,
        seconds: float,
        server: str = "",
    ) -> None:
        self._target, self._config, self._overrides = target, config, overrides
        self._folder, self._launcher, self._seconds = folder, launcher, seconds
        self._server = server
        self._number = 0
        self._microbatch_s = 0.0
        self._step_size = config.batch_size
        """Samples of a full step; corrected by the first training."""

    def first(self, num_ranks: int) -> Probe:
        """Measure a few steps of one microbatch on each of some ranks, to size the later trainings.

        These ranks start interpreters of their own, as on several hosts.
        """
        shape = Shape(num_ranks, num_replicas=num_ranks)
        probe = self._train(shape, 5, log_every=1, server="")
        num_samples = int(probe.plan.get("num_samples", 0)) or self._step_size
        if num_samples < self._step_size:  # the microbatches were larger than those of the run are
            self._step_size = num_samples
            probe = self._train(shape, 5, log_every=1, server="")
        self._microbatch_s = probe.step_s
        return probe

    def timed(self, shape: Shape, single: bool = False) -> tuple[Probe, Timed]:
        """Train for about the requested time.

        Args:
            shape: what is trained.
            single: whether each step is reported by itself.
        """
        assert self._microbatch_s, "first has been called"
        num_steps = self._steps_for(shape)
        probe = self._tried(shape, num_steps, single)
        # Too few: the earlier steps were slow, as the first ones of a process are.
        if self._steps_for(shape) > 2 * num_steps:
            probe = self._tried(shape, self._steps_for(shape), single)
        return probe, Timed(
            num_microbatches=shape.num_microbatches,
            num_copies=shape.num_copies,
            pp=shape.pp,
            tp=shape.tp,
            step_s=probe.step_s,
            peak_bytes=probe.peak_bytes,
            jitter=probe.jitter if single else (),
            sent_bytes=probe.sent_bytes,
        )

    def _steps_for(self, shape: Shape) -> int:
        """The number of steps for the requested time, estimated from earlier steps."""
        guess = self._microbatch_s * shape.num_microbatches / shape.num_replicas
        return int(min(max(self._seconds / guess, _LEAST_REPORTS + 1), _MOST_STEPS))

    def _tried(self, shape: Shape, num_steps: int, single: bool) -> Probe:
        most = max(1, num_steps // (_LEAST_REPORTS + 1))
        log_every = 1 if single else min(self._config.log_every, most)
        num_steps = max(2, num_steps // log_every) * log_every
        probe = self._train(shape, num_steps, log_every, self._server)
        self._microbatch_s = probe.step_s * shape.num_replicas / shape.num_microbatches
        return probe

    def _train(self, shape: Shape, num_steps: int, log_every: int, server: str) -> Probe:
        self._number += 1
        folders = [
            self._folder / f"{self._number}-{copy}" / "run" for copy in range(shape.num_copies)
        ]
        overrides = [*self._overrides, *self._keys(shape, num_steps, log_every)]
        since = time.time()
        with ThreadPoolExecutor(len(folders)) as pool:
            list(pool.map(lambda folder: self._start(shape, folder, overrides, server), folders))
        return probe_of(folders, since)

    def _keys(self, shape: Shape, num_steps: int, log_every: int) -> list[str]:
        size = -(-self._step_size // self._config.num_microbatches)
        return [
            f"batch_size={size * shape.num_microbatches}",
            f"num_microbatches={shape.num_microbatches}",
            f"steps={2 * num_steps}",
            f"stop_at_step={num_steps}",
            f"log_every={log_every}",
            f"eval_every={_NEVER}",
            # One on the way, so that its memory is measured too.
            f"checkpoint.every={max(1, num_steps // 2)}",
            f"mesh.pp={shape.pp}",
            f"mesh.tp={shape.tp}",
            "sharding=none",
            "optimizer.sharded=false",
            "trackers=[]",
            "tensorboard=false",
            "hang_timeout_s=0",
        ]

    def _start(self, shape: Shape, folder: Path, overrides: Sequence[str], server: str) -> None:
        """Run a training to its end.

        Raises:
            LockstepError: it failed.
        """
        session = Session(str(folder), console=False, target=self._target)
        num_ranks = shape.num_replicas * shape.pp * shape.tp
        if num_ranks > 1:
            command = rank_command(
                self._launcher, num_ranks, self._target, overrides, server=server
            )
        else:
            command = rank_command("python", 1, self._target, overrides)
        env = rank_environment(self._config.threads) | session.to_env()
        ended = capture(command, env, _TIMEOUT_S)
        if ended.exit_code == 0:
            return
        if ended.exit_code is None:
            raise RankFailure(
                f"plan: a training of a few steps ({shape.name}) was not done after "
                f"{_TIMEOUT_S:.0f} s; give it smaller steps, or fewer ranks"
            )
        raise LaunchError(f"plan: a short training ({shape.name}) failed: {_reason(folder, ended)}")


def _reason(folder: Path, ended: Any) -> str:
    """Why a training has failed, in a line."""
    try:
        return str(read_result(folder)["reason"])
    except LockstepError:
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {ended.exit_code}"


def probe_of(folders: Sequence[Path], since: float) -> Probe:
    """The results of trainings that were started at the same time, from their run directories.

    Args:
        folders: a run directory for each.
        since: Unix time of their start.
    """
    rows = [read_events(folder / "events.jsonl") for folder in folders]
    steps = [[row for row in of if row["event"] == "StepDone"] for of in rows]
    started_s = max(of[0]["time"] for of in steps) - since
    return Probe(
        reports=tuple(map(tuple, _together([of[1:] or of for of in steps]))),
        started_s=started_s,
        checkpoints=tuple(row for row in rows[0] if row["event"] == "Checkpointed"),
        plan=next(row for row in rows[0] if row["event"] == "RunStarted"),
        device_bytes=min((r["device_bytes"] for r in rows[0] if r["event"] == "Joined"), default=0),
    )


def _together(copies: Sequence[Sequence[Row]]) -> Sequence[Sequence[Row]]:
    """The reports of the time in which all copies trained; all, if that is too short."""
    begin = max(rows[0]["time"] - rows[0]["seconds"] for rows in copies)
    end = min(rows[-1]["time"] for rows in copies)
    common = [
        [row for row in rows if row["time"] - row["seconds"] >= begin and row["time"] <= end]
        for rows in copies
    ]
    return common if min(map(len, common)) >= 2 else copies


def _seconds(row: Row) -> float:
    return float(row["seconds"] / row["num_steps"])

"""One session of a run: what it is asked to do, what a plan predicts for it, and its result."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.config.parsing import as_type, parse_object, shown
from lockstep.engine.runtime import on_first
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError, EnvironError, LockstepError
from lockstep.observe import Predicted, StepCost, text

if TYPE_CHECKING:
    from lockstep.planning.prediction import Layout

SESSION = "LOCKSTEP_SESSION"
"""Environment variable by which a launcher passes a `Session` to its ranks, as JSON."""


@dataclass(frozen=True)
class Session:
    """The request for one session of a run; nothing in it changes the result.

    Attributes:
        run_dir: the run directory; None makes a new one below `runs/`.
        resume: go on from the newest valid checkpoint.
        overrides: `key=value` items for the config.
        console: show progress on standard output.
        target: what `lockstep resume` has to load to get the task; empty for a task that is in no
            file. None takes the script that this process runs.
        quiet: show warnings and how the run ended only, rather than progress.
        profile: first and last step of this session that each rank records, if it is to.
        per_rank: show with each report what each rank has done with its time.
        verbose: show checkpoints, all evaluations and how work is shared out, too.
        url: what the run directory is a copy of, if rank 0 carries it over to a URL.
        search_path: folders of `sys.path` of the program that has started the ranks.
    """

    run_dir: str | None = None
    resume: bool = False
    overrides: tuple[str, ...] = ()
    console: bool = True
    target: str | None = None
    quiet: bool = False
    profile: tuple[int, int] | None = None
    search_path: tuple[str, ...] = ()
    per_rank: bool = False
    verbose: bool = False
    url: str = ""

    @property
    def resumed(self) -> Path | None:
        """The run directory, if the run is to be resumed."""
        return Path(self.run_dir) if self.resume and self.run_dir else None

    def to_env(self) -> dict[str, str]:
        """The environment variable that `from_env` reads."""
        return {SESSION: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Session | None:
        """The request of the launcher that has started this process, if one has.

        Raises:
            EnvironError: the variable holds something else.
        """
        text = os.environ.get(SESSION)
        if text is None:
            return None
        try:
            return as_type(cls, parse_object(text))
        except ValueError as error:
            raise EnvironError(
                f"environment variable {SESSION}: is not what a launcher writes ({error}); unset it"
            ) from None

    def extend_search_path(self) -> None:
        """Let this process import the modules that the program that started the ranks can import.

        The added folders come last, so they hide none of the modules that are found anyway.
        """
        sys.path.extend(folder for folder in self.search_path if folder not in sys.path)


def check_names_run(run_dir: str | Path | None, resume: bool) -> None:
    """Refuse to go on with a run that nobody names: it would be a new one.

    Raises:
        ConfigError: `run_dir` is missing.
    """
    if resume and run_dir is None:
        raise ConfigError("resume=True: names no run to go on with; give its run_dir too")


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it has produced; the same on every rank.

    Attributes:
        status: `completed`, or `stopped` where it ended before its last step on request.
        reason: why it ended, in words.
        step: number of optimizer steps that the run has done.
        model: the trained model, in evaluation mode, with the parameters of the last step.
        task: the task, with its own state after the last step.
        config: the config that the run had.
        metrics: the newest training and evaluation metrics by "split/name".
        arrays: the newest metrics of more than one number, as nested lists by "split/name".
        params_sha256: SHA-256 of the parameters and buffers, 64 hex digits.
        run_dir: the run directory.
        best_checkpoint: folder of the checkpoint with the best `config.watch`; None where there
            was no evaluation.
        checkpoint: folder of the newest checkpoint.
        world_size: number of ranks at the end.
        wall_s: seconds that this session took.
    """

    status: str
    reason: str
    step: int
    model: nn.Module = field(repr=False)
    task: Task = field(repr=False)
    config: TrainConfig = field(repr=False)
    metrics: dict[str, float]
    arrays: dict[str, Any]
    params_sha256: str
    run_dir: Path
    best_checkpoint: Path | None
    checkpoint: Path | None
    world_size: int
    wall_s: float


class Stopped(LockstepError):
    """A run was asked to stop before its end, or too few ranks were left; it can be resumed.

    Attributes:
        exit_code: exit code of a program that ends for this: 130 after Ctrl-C, 143 after SIGTERM
            or a preemption, 75 where too few ranks are left.
        result: how far the run has come.
    """

    is_shared = True
    is_told = True

    def __init__(self, result: Result, exit_code: int) -> None:
        super().__init__(
            f"stopped after step {result.step}: {result.reason}; go on with "
            f"`lockstep resume {result.run_dir}`, or resume=True"
        )
        self.result = result
        self.exit_code = exit_code


def own_script() -> str:
    """The script this process runs; empty in a notebook, Ray's workers, and for `-c`."""
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_own = Path(path).is_file() and not path.endswith("ray/_private/workers/default_worker.py")
    return str(Path(path).resolve()) if is_own else ""


def predicted(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """The prediction of the config's plan for a step; None without a plan.

    Args:
        config: config of the run, with the mesh that its ranks fill.
        num_ranks: number of ranks that the run starts on.

    Raises:
        ConfigError: there is no such file, or it is no plan.
    """
    if not config.plan:
        return None
    from lockstep.planning.plan import read_plan

    try:
        plan = read_plan(Path(config.plan).expanduser())
    except DataError as error:
        raise ConfigError(
            f"plan={shown(config.plan)}: {error}, or train without one (plan='\"\"')"
        ) from None
    if plan.facts.config_hash != config.hash:
        reason = (
            f"{config.plan} is of config {shown(plan.facts.config_hash)[1:-1]}, and this run is of "
            f"{config.hash}: its first reports predict the later ones"
        )
        return Predicted(step=0, by="", cost=None, reason=reason)
    layout = _layout(config, num_ranks)
    row = plan.find(layout)
    if row is None:
        ranks = text.count(num_ranks, "rank")
        reason = f"{config.plan} has no row for {ranks} (mesh {layout.name})"
        return Predicted(step=0, by=config.plan, cost=None, reason=reason)
    cost = StepCost(row.prediction.step_s, row.prediction.peak_bytes)
    return Predicted(step=0, by=config.plan, cost=cost)


def predicted_for_all(config: TrainConfig, transport: Transport) -> Predicted | None:
    """The result of `predicted` on rank 0, for all ranks: each of them may become rank 0.

    Only rank 0 needs the file.

    Raises:
        ConfigError: on all ranks, as for `predicted`.
        GroupBroken: a rank has died.
    """
    if not config.plan:
        return None

    def found() -> dict[str, object]:
        prediction = predicted(config, transport.size)
        assert prediction is not None
        return asdict(prediction)

    row = on_first(transport, found)
    return Predicted(**row | {"cost": StepCost(**row["cost"]) if row["cost"] else None})


def predicted_for_joiner(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """As `predicted`, for a joining rank: a file that cannot be used is no error there."""
    try:
        return predicted(config, num_ranks)
    except ConfigError as error:
        return Predicted(step=0, by="", cost=None, reason=str(error))


def _layout(config: TrainConfig, num_ranks: int) -> Layout:
    """The layout of the run, as plans name it."""
    from lockstep.planning.prediction import Layout

    if num_ranks == 1:  # it holds everything, whatever the config says
        return Layout(1)
    sharding = config.sharding
    if sharding == "none" and config.optimizer.sharded:
        sharding = "optimizer"
    return Layout(num_ranks, config.mesh.pp, config.mesh.tp, sharding)

"""`lockstep.launch`: ranks from a script, a prompt or a notebook."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep import errors
from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.kept_directory import kept_if_refused
from lockstep.engine.checkpoint.listing import read_hint
from lockstep.engine.checkpoint.origin import settled
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.engine.task import Task
from lockstep.engine.task_config import with_config
from lockstep.errors import CheckpointError, LaunchError, LockstepError, RankFailure, TaskFailure
from lockstep.launching.api import Result, Session, Stopped, claim, find_device, new_run_dir
from lockstep.launching.api.session import check_names_run
from lockstep.launching.api.trained import restored
from lockstep.launching.api.training import config_of
from lockstep.launching.job.commands import local_command
from lockstep.launching.job.ending import Ended
from lockstep.launching.rank.early import INTERRUPTED
from lockstep.launching.rank.environment import Environment, detect
from lockstep.launching.remote import carried
from lockstep.launching.start import (
    REPLACING,
    RayCluster,
    check_ray_address,
    rank_command,
    ray_command,
    start_shown,
)
from lockstep.launching.transfer import copied, target_of
from lockstep.launching.warm.proxy import through_proxy
from lockstep.launching.warm.starting import new_server


class NothingSaved(KeyboardInterrupt):
    """Ctrl-C has ended ranks that had nothing to save, or were not given the time."""

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show: the message."""
        return [f"KeyboardInterrupt: {self}"]


def launch(
    task: Task,
    config: TrainConfig | None = None,
    *,
    num_ranks: int,
    run_dir: str | Path | None = None,
    resume: bool = False,
    launcher: Literal["local", "mpi", "ray"] | None = None,
    replacements: int = 0,
    quiet: bool = False,
    ray_address: str | None = None,
    **keys: Any,
) -> Result:
    """Train a task on ranks that are started for it, on this host or on a Ray cluster.

    The run directory, and the bits of the result, are those of `lockstep train`. Ctrl-C, and the
    interruption of a notebook's cell, stop the run at the next step boundary with a checkpoint; a
    second one ends the ranks at once.

    Ranks import the task's class from its file, if it is at the top level of one and its config
    alone makes this task; a script must then call `launch` below `if __name__ == "__main__":`.
    Otherwise they get a copy of the task.

    Args:
        task: the task.
        config: how it is to be trained; the task's own config by default.
        num_ranks: number of ranks to start.
        run_dir: where files go; a new folder below `runs/` by default.
        resume: whether to go on from the newest valid checkpoint in `run_dir`.
        launcher: `local` (gloo or NCCL, under Lockstep's own supervisor; the default), `mpi` or
            `ray`.
        replacements: greatest number of processes to start in the place of killed ranks.
        quiet: whether to show warnings and how the run ended only, rather than progress.
        ray_address: of the Ray cluster, as `HOST:PORT`; by default that of this host.
        keys: values for keys of the config, such as `batch_size=64, epochs=5`.

    Returns:
        How the run ended. Its task is the one given, with its state after the last step; its model
        is a new one in this process, on the CPU.

    Raises:
        Stopped: the run was asked to stop before its end; it can be resumed.
        LockstepError: the task, the config or the data do not work, or the ranks could not be
            started; of the class that the ranks raised.
        KeyboardInterrupt: Ctrl-C came before there was anything to save, or a second time.
    """
    chosen = _check(num_ranks, launcher, replacements)
    if ray_address is not None and chosen != "ray":
        raise LaunchError(f"ray_address={shown(ray_address)}: is for launcher='ray'; add that")
    check_ray_address(chosen, ray_address)
    config = config_of(task, config, keys, "launch")
    check_names_run(run_dir, resume)
    wanted = Session(str(run_dir) if run_dir else None, resume, console=False, quiet=quiet)
    with carried(wanted) as session:
        return _launch(task, config, num_ranks, session, chosen, replacements, ray_address)


def _launch(
    task: Task,
    config: TrainConfig,
    num_ranks: int,
    session: Session,
    chosen: str,
    replacements: int,
    ray_address: str | None,
) -> Result:
    config = settled(config, session.resumed)
    task = with_config(task, config)
    if chosen == "local":  # mpirun may have several hosts
        # Checked here, since ranks fail before they can write down the class of their error.
        last = num_ranks - 1
        find_device(config.device, Environment("local", last, num_ranks, last, num_ranks))
    path = Path(session.run_dir) if session.run_dir else new_run_dir(task.name)
    directory = RunDirectory(path, session.url)
    target, reason = target_of(task, session.resume)
    if chosen == "mpi" and not target:
        raise LaunchError(
            f"launcher='mpi': {reason}, so ranks have to inherit a copy of the task, and mpirun "
            "hands none on; use launcher='local', or a class that a file defines"
        )
    session = replace(
        session,
        run_dir=str(directory.path),
        target=target,
        search_path=tuple(map(os.path.abspath, sys.path)),
    )
    with ExitStack() as stack:
        kept = stack.enter_context(kept_if_refused(directory.path))
        server = stack.enter_context(new_server(chosen, config.threads))
        cluster = RayCluster.of(ray_address, config)
        if target:
            arguments = ["--config", str((directory.path / "config.yaml").resolve())]
            if config.stop_at_step is not None:  # it belongs to a session, so is not in the file
                arguments.append(f"stop_at_step={config.stop_at_step}")
            command = rank_command(
                chosen, num_ranks, target, arguments, replacements, server, config.hang_timeout_s,
                cluster,
            )  # fmt: skip
        else:
            fd = stack.enter_context(copied(task, config))
            argv = [sys.executable, "-m", "lockstep.launching.transfer"]
            if chosen == "ray":
                command = ray_command(num_ranks, argv, cluster, replacements, (fd,))
            else:
                argv = through_proxy([*argv, str(fd)], server)
                command = local_command(num_ranks, argv, replacements, (fd,), server)
        # Here, so that its errors come before any rank starts.
        claim(directory, task, config, session)
        directory.close()
        command = replace(command, start_timeout_s=config.start_timeout_s)
        ended = start_shown(command, session, config.threads, kept.note_started)
        return _outcome(ended, task, config, directory)


def _check(num_ranks: int, launcher: str | None, replacements: int) -> str:
    """The launcher to use.

    Raises:
        LaunchError: an argument does not work, or this process is a rank itself.
    """
    if Session.from_env() is not None or detect(os.environ).launcher != "python":
        raise LaunchError(
            "launch: this process is already a rank; in a script, call it below "
            '`if __name__ == "__main__":`, for ranks import the script to get its task. Under '
            "mpirun, torchrun or srun use train or main"
        )
    for name, value, least in (("num_ranks", num_ranks, 1), ("replacements", replacements, 0)):
        if type(value) is not int or value < least:
            raise LaunchError(f"{name}={shown(value)}: must be an integer of at least {least}")
    if launcher is not None and launcher not in REPLACING:
        raise LaunchError(f"launcher={shown(launcher)}: must be one of {', '.join(REPLACING)}")
    return launcher or "local"


def _outcome(ended: Ended, task: Task, config: TrainConfig, directory: RunDirectory) -> Result:
    """The result of a run that has ended.

    Raises:
        Stopped: it was asked to stop before its end.
        LockstepError: it has failed.
    """
    row = ended.last
    if row is None or row["event"] == "Failed":
        raise _error(ended)
    snapshot = find_snapshot(directory.checkpoints, "latest")
    if snapshot.step != row["step"]:
        raise CheckpointError(
            f"{directory.checkpoints}: the newest valid checkpoint is of step {snapshot.step}, but "
            f"the run has done {row['step']}; go on with resume=True"
        )
    with kept_generators():
        cpu = torch.device("cpu")
        model = restored(task, config, snapshot, cpu, str(directory.checkpoints))
    result = Result(
        status=row["status"],
        reason=row["reason"],
        step=row["step"],
        model=model.eval(),
        task=task,
        config=config,
        metrics={name: float(value) for name, value in row["metrics"].items()},
        arrays=row.get("arrays", {}),
        params_sha256=row["params_sha256"],
        run_dir=directory.path,
        best_checkpoint=read_hint(directory.checkpoints, "best"),
        checkpoint=Path(row["checkpoint"]) if row["checkpoint"] else None,
        world_size=row["world_size"],
        wall_s=row["wall_s"],
    )
    if ended.exit_code:
        raise Stopped(result, ended.exit_code)
    return result


def _error(ended: Ended) -> BaseException:
    """The error of ranks that have no result, of the class that they raised."""
    row: dict[str, Any] = ended.last or {}
    if not row and ended.exit_code == INTERRUPTED:
        return NothingSaved(ended.message)
    kind: Any = vars(errors).get(row.get("error", ""))
    if not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        # Without an event, ranks have died, or never began. Other kinds are of the task's code.
        kind = TaskFailure if row else RankFailure if ended.again else LaunchError
    error: LockstepError = kind(ended.message)
    error.exit_code = ended.exit_code
    return error

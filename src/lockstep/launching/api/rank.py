"""One rank of a run, from meeting the others to leaving them."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.comm.host import collect_as_usual, skip_last_collection
from lockstep.comm.shared_memory import are_on_one_host
from lockstep.comm.transport import GroupBroken, Transport
from lockstep.config import TrainConfig, override
from lockstep.config.parsing import flattened
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.copies import open_directories
from lockstep.engine.checkpoint.kept_directory import KeptDirectory, kept_if_refused
from lockstep.engine.checkpoint.listing import folder_name
from lockstep.engine.checkpoint.origin import settled
from lockstep.engine.checkpoint.run_directory import DirectoryWatch, Identity, RunDirectory
from lockstep.engine.events import Event, Finished, Warned
from lockstep.engine.faults import At, edited, injector
from lockstep.engine.run.loop import Trainer, exhausted
from lockstep.engine.run.microbatches import check_enough_left
from lockstep.engine.run.own_loop import Step
from lockstep.engine.runtime import Heartbeat, Runtime, agreed, check_can_regroup, on_first
from lockstep.engine.task import Task
from lockstep.engine.task_config import with_watched_config
from lockstep.errors import LockstepError, RankFailure, shortened
from lockstep.launching.api.device import advised, on_device
from lockstep.launching.api.session import (
    SESSION,
    Result,
    Session,
    Stopped,
    failed,
    new_run_dir,
    own_script,
    predicted_for_all,
    predicted_for_joiner,
)
from lockstep.launching.host.output_pump import pumped_output
from lockstep.launching.host.parent_watch import end_with_launcher
from lockstep.launching.host.processes import MARK
from lockstep.launching.host.supervisor import RESUMES
from lockstep.launching.rank.early import tell_on_each_rank
from lockstep.launching.rank.environment import Environment, detect
from lockstep.launching.rank.join import open_transport
from lockstep.launching.rank.process import StopRequest, cores_of_host, num_threads, whole_lines
from lockstep.launching.rank.watchdog import Watchdog
from lockstep.launching.remote import carried
from lockstep.observe import EventHub, open_sinks
from lockstep.parallel.mesh import fitting

TIMEOUT_S = 600.0
"""Seconds that ranks wait for one another over gloo or NCCL."""

TAKE_OVER_S = 30.0
"""Seconds that a new rank 0 waits for the kernel to remove the process that holds the lock."""
_LOST_HOST_S = 120.0
"""The same where that process may be on a lost host: NFS takes 90 s."""


def run(task: Task, config: TrainConfig, session: Session) -> Result:
    """Train a task as one rank, as the session requests.

    Raises:
        Stopped: the run was asked to stop before its end, on every rank.
        LockstepError: on every rank.
    """
    return exhausted(steps(task, config, session, is_driven=False))


def steps(
    task: Task, config: TrainConfig, session: Session, is_driven: bool = True
) -> Generator[Step, bool | None, Result]:
    """As `run`, one step at a time.

    Args:
        task: the task.
        config: its config, without the session's overrides.
        session: what is asked for.
        is_driven: whether to yield steps.

    Yields:
        Each step; the generator has to be sent whether the loop over them is left.

    Raises:
        Stopped: the run was asked to stop before its end, on every rank.
        LockstepError: on every rank.
    """
    collect_as_usual()
    skip_last_collection()
    environment = detect(os.environ)
    session = replace(session, resume=session.resume or RESUMES in os.environ)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        session = stack.enter_context(carried(session))
        config = settled(override(config, session.overrides), session.resumed)
        task = with_watched_config(task, config)
        # Ranks that Lockstep starts end with its launcher, which always reads their output.
        if environment.world_size > 1 and MARK not in os.environ:
            end_with_launcher()
            stack.enter_context(pumped_output())
        stack.enter_context(whole_lines())
        hints = stack.enter_context(num_threads(config.threads, environment))
        stack.enter_context(kept_generators())
        device = stack.enter_context(on_device(config, environment))
        at = injector(os.environ, environment.rank)
        at("start", 0)
        transport = open_transport(environment, device, TIMEOUT_S, config.start_timeout_s)
        if environment.world_size > 1:
            tell_on_each_rank()
        try:
            result, exit_code = yield from _steps(
                task, config, session, environment, device, transport, stop, hints, at, is_driven,
            )  # fmt: skip
        except LockstepError as error:
            if transport.size > 1 and not error.is_shared:
                print(f"error: {error} (on rank {transport.rank})", file=sys.stderr, flush=True)
                transport.abort(error.exit_code)
            error.rank = transport.rank
            transport.close()
            raise
        except BaseException:
            if transport.size == 1:
                raise
            trace = shortened(traceback.format_exc())
            print(f"rank {transport.rank}:\n{trace}", file=sys.stderr, flush=True)
            transport.abort(1)
            raise
        transport.close()
        if exit_code:
            stopped = Stopped(result, exit_code)
            stopped.rank = transport.rank
            raise stopped
        return result


def _steps(
    task: Task,
    config: TrainConfig,
    session: Session,
    environment: Environment,
    device: torch.device,
    transport: Transport,
    stop: StopRequest,
    hints: list[str],
    at: At,
    is_driven: bool,
) -> Generator[Step, bool | None, tuple[Result, int]]:
    """The run itself, from after the ranks have met to before they part, and its exit code."""
    own_path = session.run_dir or agreed(
        transport, lambda t: on_first(t, lambda: str(new_run_dir(task.name)))
    )
    directory = RunDirectory(Path(own_path), session.url)
    path = directory.path
    is_one_host = environment.is_one_host
    if environment.launcher in ("slurm", "torchrun"):  # by hand, a rank may not know who is there
        is_one_host = agreed(transport, are_on_one_host)
    if session.target is None:
        session = replace(session, target=own_script())
    heartbeat = Heartbeat()
    transport.observer = heartbeat
    with ExitStack() as stack:
        kept: KeptDirectory | None = None
        # Under Lockstep's launcher, the launcher does this.
        if transport.rank == 0 and not transport.is_joining and SESSION not in os.environ:
            kept = stack.enter_context(kept_if_refused(directory.path))
        stack.callback(directory.close)
        hub = EventHub(
            lambda shows: open_sinks(
                directory.path,
                tensorboard=config.tensorboard and shows,
                trackers=config.trackers if shows else (),
                params=flattened(config.model_dump(mode="json")),
                console=session.console and shows,
                quiet=session.quiet,
                resumable=bool(session.target),
                per_rank=session.per_rank,
                verbose=session.verbose,
            )
        )
        stack.callback(hub.close)
        patience_s = TAKE_OVER_S if is_one_host else _LOST_HOST_S
        is_apart = not (is_one_host or session.url)

        def claimed(patience_s: float) -> None:
            directory.lock(patience_s, heartbeat.beat)
            claim(directory, task, config, session)

        def prepare() -> None:
            if session.url and environment.rank and SESSION not in os.environ:
                raise RankFailure(
                    "the rank is lost that carries the run directory over to its URL; start again "
                    "with --resume"
                )
            if not directory.is_gone():  # else `watch` ends the run, which is saved beside it
                directory.lock(TAKE_OVER_S if transport.rank else patience_s, heartbeat.beat)
                if not directory.stores and (transport.rank or is_apart):  # may be another run's
                    own = replace(session, resume=True)
                    claim(directory, task, config, own, trains=transport.rank == 0)

        def store() -> None:
            if not directory.is_gone():
                hub.open(shows=transport.rank == 0)

        opened = partial(
            open_directories, directory=directory, copies=config.checkpoint.copies, store=store,
            is_apart=is_apart,
        )  # fmt: skip

        told: list[str] = []

        def take_over() -> list[str]:
            new = [text for text in opened(runtime, prepare=prepare) if text not in told]
            told.extend(new)
            return new

        def listen(event: Event) -> None:
            with heartbeat.on_disk():
                hub(event)

        on_step: Callable[[int], None] = Runtime.on_step
        if session.profile:
            from lockstep.launching.rank.process import Profiler

            folder = directory.path / "profile"
            on_step = stack.enter_context(Profiler(session.profile, folder, environment.rank, hub))

        watch = DirectoryWatch(directory)
        planned, hints_of_mesh = _planned(config, environment.world_size)
        runtime = Runtime(
            transport=transport,
            device=device,
            slot=environment.rank,
            launcher=environment.launcher,
            local_rank=environment.local_rank,
            listen=listen,
            take_over=take_over,
            stop_reason=lambda: (transport.rank == 0 and watch.reason()) or stop.reason(),
            at=at,
            on_step=on_step,
            heartbeat=heartbeat,
            backlog=hub,
            cores=cores_of_host(environment),
            is_one_host=is_one_host,
        )
        if environment.world_size > 1 and config.hang_timeout_s:
            stack.enter_context(
                Watchdog(
                    heartbeat.fd,
                    config.hang_timeout_s,
                    directory.hang_report(environment.rank),
                    transport.call_ring.fd,
                    directory.flight.lost_file(environment.rank),
                    directory.flight.waiting_file(environment.rank),
                    _watched_name(environment),
                    stays=MARK in os.environ,
                )
            )
            stack.callback(heartbeat.disarm)
        try:
            if transport.is_joining:
                task = edited(task, os.environ, environment.rank)
                predicted = predicted_for_joiner(planned, environment.world_size)
                if predicted is not None:
                    runtime.emit(predicted)
                trainer = Trainer(task, planned, runtime, directory, True, is_driven)
            else:
                trainer, hints_of_plan = _assembled(
                    task, planned, claimed, opened, runtime, directory, environment.world_size,
                    is_driven,
                )  # fmt: skip
                told.extend(hints_of_plan)
                hints_of_mesh += hints_of_plan
            if kept is not None:
                kept.note_started()
            for hint in (*hints, *hints_of_mesh):
                runtime.emit(Warned(step=0, message=hint))
            directory.describe(config, _identity(task, config, session))
            finished = yield from trainer.steps()
            return _result(trainer, finished, config, directory), finished.exit_code
        except BaseException as raised:
            error = advised(raised, transport.rank)
            if directory.path != path and runtime.is_first:  # nothing may be written to the old one
                hub.close()
                hub.open()
            runtime.emit(failed(error))
            if error is raised:
                raise
            raise error from raised


def _result(
    trainer: Trainer, finished: Finished, config: TrainConfig, directory: RunDirectory
) -> Result:
    """The result of a run that has ended normally."""
    best = trainer.progress.best_step
    return Result(
        status=finished.status,
        reason=finished.reason,
        step=finished.step,
        model=trainer.model.eval(),
        task=trainer.task,
        config=config,
        metrics=finished.metrics,
        arrays=finished.arrays,
        params_sha256=finished.params_sha256,
        run_dir=directory.path,
        best_checkpoint=directory.checkpoints / folder_name(best) if best else None,
        checkpoint=Path(finished.checkpoint) if finished.checkpoint else None,
        world_size=finished.world_size,
        wall_s=finished.wall_s,
    )


def _planned(config: TrainConfig, num_ranks: int) -> tuple[TrainConfig, list[str]]:
    """The config, with another mesh if the ranks cannot fill its own and may change it; and hints.

    It depends on the number of ranks that were started, which joining ranks know too.
    """
    mesh = config.mesh
    pp, tp = fitting(num_ranks, mesh.pp, mesh.tp)
    if mesh.shrink != "replan" or (pp, tp) == (mesh.pp, mesh.tp):
        return config, []
    hint = (
        f"a replica of mesh.pp={mesh.pp}, mesh.tp={mesh.tp} needs {mesh.pp * mesh.tp} ranks, and "
        f"{num_ranks} were started: computed with mesh.pp={pp}, mesh.tp={tp} (mesh.shrink=replan)"
    )
    mesh = mesh.model_copy(update={"pp": pp, "tp": tp})
    return config.model_copy(update={"mesh": mesh}), [hint]


def _assembled(
    task: Task,
    config: TrainConfig,
    claimed: Callable[[float], None],
    opened: Callable[..., list[str]],
    runtime: Runtime,
    directory: RunDirectory,
    world_size: int,
    is_driven: bool,
) -> tuple[Trainer, list[str]]:
    """Everything before the first step; repeated if a rank dies meanwhile.

    Args:
        task: task to train.
        config: its config.
        claimed: function that claims the run directory for this run, after some patience.
        opened: function that opens all run directories.
        runtime: what this process trains with; ranks may have died while they met.
        directory: run directory.
        world_size: number of ranks that were started.
        is_driven: whether the body of a user's own loop gets each step.

    Returns:
        The trainer; and hints about run directories, and if a plan does not cover this run.
    """
    transport = runtime.transport
    patience_s = 0.0
    while True:
        if transport.size < world_size:
            check_enough_left(config, transport.size)
        try:
            predicted = predicted_for_all(config, transport)
            hints = opened(runtime, prepare=partial(claimed, patience_s), is_start=True)
            if predicted is not None:
                runtime.emit(predicted)
            trainer = Trainer(task, config, runtime, directory, is_driven=is_driven)
            return trainer, hints + ([predicted.reason] if predicted and predicted.reason else [])
        except GroupBroken as loss:
            check_can_regroup(transport, loss)
            transport.regroup()
            patience_s = TAKE_OVER_S if runtime.is_one_host else _LOST_HOST_S


def claim(
    directory: RunDirectory, task: Task, config: TrainConfig, session: Session, trains: bool = False
) -> None:
    """Claim a run directory for a session; see `RunDirectory.open`."""
    directory.open(config, _identity(task, config, session), session.resume, trains)


def _identity(task: Task, config: TrainConfig, session: Session) -> Identity:
    overrides = tuple(o for o in session.overrides if not o.startswith("stop_at_step="))
    length = config.epochs, config.steps
    return Identity(task.name, config.hash, session.target or "", overrides, *length)


def _watched_name(environment: Environment) -> str:
    """The name by which one rank of each host reports a long wait; "" for the other ranks."""
    name = f"rank {environment.rank} on {socket.gethostname()}"
    return "" if environment.local_rank else name

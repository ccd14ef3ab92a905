"""`lockstep train` and `lockstep resume`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.parsing import parse_int, shown
from lockstep.config.reading import read_keys
from lockstep.engine.checkpoint.kept_directory import KeptDirectory, kept_if_refused
from lockstep.engine.checkpoint.origin import asked_items, items
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.task_config import LengthReads, watched
from lockstep.errors import ConfigError, LaunchError, LockstepError
from lockstep.launching.api import Session, claim, leave, new_run_dir, predicted, run
from lockstep.launching.host.output_pump import pumped_output
from lockstep.launching.job.commands import RankCommand
from lockstep.launching.rank.environment import detect
from lockstep.launching.start import (
    TRAIN_LAUNCHERS,
    RayCluster,
    check_ray_address,
    check_replacements,
    choose_launcher,
    rank_command,
    start_shown,
)
from lockstep.launching.targets import (
    absolute,
    completed_items,
    configured,
    is_script,
    make_task,
    trusted_target,
)
from lockstep.launching.warm.starting import fork_server

_PROFILED = (10, 13)
"""Steps that `--profile` records: after memory and caches have warmed up."""


def train(
    target: str,
    overrides: Sequence[str],
    session: Session,
    config_file: Path | None = None,
    *,
    ranks: int | None,
    launcher: str | None,
    replacements: int,
    ray_address: str | None = None,
) -> int:
    """Train a target in this process, if that is a rank or the only process; otherwise start ranks.

    Args:
        target: recipe, file or script to train.
        overrides: `key=value` items for the config.
        session: how to train; in a rank that a launcher has started, that launcher's request.
        config_file: path of a YAML file with the config, if there is one.
        ranks: number of ranks to start; None for one, or where this process is a rank.
        launcher: name of the launcher; None chooses one.
        replacements: greatest number of processes to start in the place of killed ranks.
        ray_address: of the Ray cluster, for the launcher `ray`.

    Returns:
        The exit code.

    Raises:
        LockstepError: an argument cannot be used; no rank was started.
    """
    environment = detect(os.environ)
    given = Session.from_env()
    if session.resume and session.run_dir is None and given is None:
        raise ConfigError(
            "--resume: names no run to go on with; add --run-dir RUN, or use `lockstep resume RUN` "
            "(`lockstep runs` lists the runs)"
        )
    if given is not None or environment.launcher != "python":
        if ranks is not None:
            raise LaunchError(f"-n {ranks}: this process is already a rank; leave out -n")
        if is_script(target):
            raise LaunchError(
                f"{target}: this process is already a rank; start `python {target}` itself under "
                f"{environment.launcher}"
            )
        session = replace(given or session, target=absolute(target))
        session.extend_search_path()
        return _train_here(target, overrides, session, config_file)

    num_ranks = 1 if ranks is None else ranks
    chosen = choose_launcher(launcher, num_ranks, TRAIN_LAUNCHERS)
    check_replacements(chosen, replacements)
    check_ray_address(chosen, ray_address)
    where = absolute(target)
    session = replace(session, target=where)
    if is_script(target) and config_file is not None:
        raise ConfigError(
            f"--config {config_file}: {target} is a script, which brings its own config; set "
            "single keys with key=value"
        )
    if chosen == "python" and not is_script(target):
        return _train_here(target, overrides, session, config_file)
    with fork_server(chosen, target) as server:
        start = partial(rank_command, chosen, num_ranks, where, server=server)
        session = replace(session, console=False)
        if is_script(target):
            path = session.run_dir or new_run_dir(Path(target).stem)
            session = replace(session, run_dir=str(path), overrides=tuple(overrides))
            with kept_if_refused(Path(path)) as kept:
                cluster = RayCluster.of_script(ray_address, overrides)
                command = start((), replacements, cluster=cluster)
                return _start(command, session, 1, kept)
        kind, config = configured(target, overrides, config_file, session.resumed)
        task = make_task(kind, config)
        predicted(config, num_ranks)  # here, so that an unusable plan fails before ranks start
        session = replace(session, run_dir=session.run_dir or str(new_run_dir(task.name)))
        directory = RunDirectory(Path(str(session.run_dir)), session.url)
        # Fixed for ranks that start later, and found once.
        arguments = [*overrides, *items(config.weights_from), *completed_items(config)]
        if config_file:
            arguments += ["--config", str(config_file.resolve())]
        cluster = RayCluster.of(ray_address, config)
        command = start(arguments, replacements, silence_s=config.hang_timeout_s, cluster=cluster)
        command = replace(command, start_timeout_s=config.start_timeout_s)
        with kept_if_refused(directory.path) as kept:
            claim(directory, task, config, session)  # here, so that it fails before ranks start
            directory.close()
            return _start(command, session, config.threads, kept)


def resume(
    overrides: Sequence[str],
    session: Session,
    *,
    ranks: int | None,
    launcher: str | None,
    replacements: int,
    ray_address: str | None = None,
) -> int:
    """Resume the run in a directory; overrides may change only keys that cannot change the result.

    Args:
        overrides: `key=value` items for the config.
        session: names the run.
        ranks: number of ranks to start; None for one.
        launcher: name of the launcher; None chooses one.
        replacements: greatest number of processes to start in the place of killed ranks.
        ray_address: of the Ray cluster, for the launcher `ray`.

    Returns:
        The exit code.

    Raises:
        LockstepError: it is no run directory, or an argument cannot be used.
    """
    directory = RunDirectory(Path(str(session.run_dir)), session.url)
    known, target = directory.identity(), trusted_target(directory)
    if is_script(target):
        overrides, file = [*known.overrides, *overrides], None
    else:
        file = directory.path / "config.yaml"
    return train(
        target,
        overrides,
        session,
        file,
        ranks=ranks,
        launcher=launcher,
        replacements=replacements,
        ray_address=ray_address,
    )


def start_items(
    target: str,
    from_run: Path | None,
    only: Sequence[str],
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    file: Path | None = None,
) -> list[str]:
    """The `key=value` items of a run with the options `--from` and `--from-only`.

    A file of another program is imported first. Where its settings are not given, they are its own.

    Args:
        target: what is trained.
        from_run: the run or file to start from, if there is one.
        only: patterns of the names of its tensors.
        overrides: `key=value` items that are given.
        run_dir: directory of the run, if it is resumed.
        file: config file that is given.

    Returns:
        All items, `overrides` among them.

    Raises:
        LockstepError: there is no such checkpoint, or only the second option is given.
    """
    if from_run is None:
        if only:
            raise ConfigError(f"--from-only {only[0]}: give the run with --from too")
        return [*overrides]
    own: list[str] = []
    if from_run.is_file():
        from lockstep.launching.api.originals import imported_for

        from_run, own = imported_for(target, from_run, overrides)
        given = {*_dotted(read_keys(file))} if file else set()
        own = [item for item in own if item.partition("=")[0] not in given]
    return [*own, *overrides, *asked_items(from_run, only, run_dir)]


def _dotted(keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of the values in nested keys."""
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def steps_to_profile(is_wanted: bool, text: str | None) -> tuple[int, int] | None:
    """The first and the last step to record with torch's profiler; None for no recording.

    Args:
        is_wanted: whether to record some steps.
        text: first and last step as `FIRST:LAST`; None is `10:13`.

    Raises:
        ConfigError: `text` is something else, or the first step is less than 2: what the first step
            of a process costs says nothing about the others.
    """
    if text is None:
        return _PROFILED if is_wanted else None
    first, _, last = text.partition(":")
    try:
        steps = parse_int(first), parse_int(last)
    except ValueError:
        steps = (0, 0)
    if not 2 <= steps[0] <= steps[1]:
        raise ConfigError(
            f"--profile-steps {shown(text)[1:-1]}: must be FIRST:LAST with 2 <= FIRST <= LAST, "
            "counted from the start of this session"
        )
    return steps


def _train_here(
    target: str, overrides: Sequence[str], session: Session, config_file: Path | None
) -> int:
    """Train as a rank, or as the only process."""
    kind, config = configured(target, overrides, config_file, session.resumed)
    try:
        run(make_task(kind, watched(config, LengthReads())), config, session)
    except LockstepError as error:
        leave(error)
    return 0


def _start(command: RankCommand, session: Session, threads: int, kept: KeptDirectory) -> int:
    with pumped_output():
        ended = start_shown(command, session, threads, kept.note_started)
        if ended.message:
            print(f"error: {ended.message}", file=sys.stderr, flush=True)
    return ended.exit_code

"""`lockstep sweep`: finds the points of a grid that are not trained yet, and trains them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.cli.clusters.slurm import JobFile, array, deliver, with_threads
from lockstep.cli.start.sweep_grid import Grid, Point, grid, state_of
from lockstep.cli.start.sweep_pool import (
    Job,
    ordered_by,
    print_outcome,
    run_jobs,
    try_to_draw,
    unknown,
)
from lockstep.config import TrainConfig
from lockstep.config.files import read_text, replacing
from lockstep.config.parsing import parse_object
from lockstep.engine.checkpoint.origin import items as items_of
from lockstep.errors import ConfigError, LaunchError, RunDirectoryError, file_errors
from lockstep.launching.start import TRAIN_LAUNCHERS, choose_launcher
from lockstep.launching.targets import absolute, configured, is_script
from lockstep.observe.reading.listing import Summary, is_run, summarise

_FILE = "sweep.json"

_NOTHING_TO_DO = ("completed", "failed", "running")
"""States of runs that are not trained on: over, waiting for `--retry`, or in use."""


@dataclass(frozen=True)
class Options:
    """The options of a sweep.

    Attributes:
        folder: path of the folder with all runs; None for `sweeps/TASK`.
        ranks: number of ranks of each run; None for one in a process.
        launcher: name of the launcher of each run; None chooses.
        at_once: greatest number of runs at a time; None for one here, and all of an array's.
        retry: whether runs that have failed are tried again.
        dry_run: whether only to show what would be done.
        metric: key that runs are sorted by, descending behind a `-`; None for what they watch.
        job: options of a SLURM job array that is to train; None trains here.
        submit: whether to submit its script to SLURM.
    """

    folder: Path | None = None
    ranks: int | None = None
    launcher: str | None = None
    at_once: int | None = None
    retry: bool = False
    dry_run: bool = False
    metric: str | None = None
    job: JobFile | None = None
    submit: bool = False


@dataclass(frozen=True)
class Plan:
    """A checked sweep.

    Attributes:
        target: what is trained, with an absolute path.
        grid: its points.
        configs: config of each point; none for a script, whose config is known when it runs.
        folder: folder with all runs.
    """

    target: str
    grid: Grid
    configs: tuple[TrainConfig, ...]
    folder: Path

    def run_dir(self, point: Point) -> Path:
        """The run directory of a point."""
        return self.folder / point.name


def plan(target: str, items: Sequence[str], folder: Path | None) -> Plan:
    """Check the whole sweep before anything is trained or written.

    Raises:
        LockstepError: a point's config does not work, two points are the same, or the folder holds
            another target's sweep.
    """
    where = absolute(target)
    name = re.sub(r"[^\w.-]", "_", Path(target.rpartition(":")[2]).stem, flags=re.ASCII)
    folder = folder or Path("sweeps") / name
    points = grid(items)
    configs: list[TrainConfig] = []
    if not is_script(target):
        for point in points.points:
            config = configured(where, point.items, run_dir=folder / point.name)[1]
            if config in configs:
                other = points.points[configs.index(config)].name
                raise ConfigError(f"{point.name}: is the same config as {other}; leave one out")
            configs.append(config)
        # Points that start from another run name its exact weights.
        pairs = zip(points.points, configs, strict=True)
        exact = (replace(p, items=(*p.items, *items_of(c.weights_from))) for p, c in pairs)
        points = replace(points, points=tuple(exact))
    made = Plan(where, points, tuple(configs), folder)
    _check_folder(made)
    return made


def sweep(target: str, items: Sequence[str], options: Options) -> int:
    """Train every point of a grid that is not trained yet, and show all runs.

    Returns:
        The exit code: 0 if all runs are complete, 1 if not, 130 if Ctrl-C has stopped it.

    Raises:
        LockstepError: an argument cannot be used; nothing was trained.
    """
    sbatch = [item for item in items if item.startswith("-")]
    items = [item for item in items if not item.startswith("-")]
    if options.job is not None:
        items = with_threads([*options.job.overrides, *items], options.job.cpus_per_task, None)
    if sbatch and options.job is None:
        raise LaunchError(f"{sbatch[0]}: options for sbatch need --slurm")
    if options.submit and options.job is None:
        raise LaunchError("--submit: needs --slurm")
    if options.at_once is not None and options.at_once < 1:
        raise LaunchError(f"--jobs {options.at_once}: must be at least 1")
    num_ranks = 1 if options.ranks is None else options.ranks
    choose_launcher(options.launcher, num_ranks, TRAIN_LAUNCHERS)
    made = plan(target, items, options.folder)
    left: list[Point] = []
    for point, state in zip(made.grid.points, _states(made), strict=True):
        is_left = state not in _NOTHING_TO_DO or (state == "failed" and options.retry)
        if is_left:
            left.append(point)
        if options.dry_run or not is_left:
            print(f"{'to train' if is_left else 'left alone'}: {point.name} ({state})", flush=True)
    if options.dry_run:
        return 0
    if options.job is not None:
        return _as_array(made, left, sbatch, options.job, options)
    begin(made)
    failed: set[str] = set()

    def on_end(job: Job, code: int) -> None:
        if code:
            failed.add(job.name)
        print(f"{f'exit code {code}, see {job.log}' if code else 'done'}: {job.name}", flush=True)

    jobs = [_job(made, point, options) for point in left]
    is_complete = run_jobs(
        jobs, options.at_once or 1, lambda job: print(f"training: {job.name}", flush=True), on_end
    )
    runs = show(made, options.metric)
    if not is_complete:
        print("interrupted; the same command goes on", file=sys.stderr, flush=True)
        return 130
    incomplete = [run for run in runs if run.state != "completed"]
    return 1 if failed or incomplete or len(runs) < len(made.grid.points) else 0


def _as_array(
    made: Plan, left: Sequence[Point], sbatch: Sequence[str], job: JobFile, options: Options
) -> int:
    """Write the script of a job array that trains some points, and submit it if asked to."""
    if options.ranks is not None or options.launcher is not None:
        raise LaunchError("-n, --launcher: with --slurm, the job's file says nodes and ranks")
    if not left:
        show(made, options.metric)
        return 0
    folder = made.folder.absolute()
    points = [(folder / point.name, point.items) for point in left]
    batch = array(folder.name, made.target, points, job, sbatch, folder, options.at_once)
    begin(made)
    deliver(batch, folder / "sweep.sbatch", options.submit)
    return 0


def show(made: Plan, metric: str | None) -> list[Summary]:
    """Print the runs of a sweep, the best first, and draw them."""
    run_dirs = [path for path in map(made.run_dir, made.grid.points) if is_run(path)]
    runs = [summarise(path) for path in run_dirs]
    key, is_more_better = ordered_by(runs, metric)
    print_outcome(runs, made.grid, key, is_more_better, made.folder)
    picture = try_to_draw(runs, made.grid, key, made.folder / "sweep.png")
    for line in filter(None, (unknown(runs, key), picture)):
        print(line, flush=True)
    return runs


def begin(made: Plan) -> None:
    """Make the folder of a sweep, with a file that describes it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    with file_errors(RunDirectoryError, made.folder, advice="choose another with --dir"):
        made.folder.mkdir(parents=True, exist_ok=True)
        with replacing(made.folder / _FILE) as file:
            file.write(json.dumps({"target": made.target, "keys": made.grid.keys}) + "\n")


def _check_folder(made: Plan) -> None:
    path = made.folder / _FILE
    try:
        target = parse_object(read_text(path)).get("target")
    except FileNotFoundError:
        if is_run(made.folder):
            raise RunDirectoryError(
                f"{made.folder}: is the directory of a run; choose another with --dir"
            ) from None
        return
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}; move it away") from None
    if target != made.target:
        raise RunDirectoryError(
            f"{made.folder}: holds a sweep of {target}, this is one of {made.target}; choose "
            "another with --dir"
        )


def _states(made: Plan) -> list[str]:
    """The state of each point's run.

    Raises:
        RunDirectoryError: a run has trained with other values than its point has.
    """
    configs: Sequence[TrainConfig | None] = made.configs or [None] * len(made.grid.points)
    pairs = zip(made.grid.points, configs, strict=True)
    return [state_of(made.run_dir(point), point.items, config) for point, config in pairs]


def _job(made: Plan, point: Point, options: Options) -> Job:
    argv = [sys.executable, "-m", "lockstep", "train", made.target, *point.items]
    argv += ["--run-dir", str(made.run_dir(point)), "--resume", "--quiet"]
    if options.ranks is not None:
        argv += ["-n", str(options.ranks)]
    if options.launcher is not None:
        argv += ["--launcher", options.launcher]
    return Job(point.name, tuple(argv), log_of(made, point))


def log_of(made: Plan, point: Point) -> Path:
    """The file that gets the output of a point's training, beside its run directory."""
    return made.folder / f"{point.name}.log"

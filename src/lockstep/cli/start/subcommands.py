"""Subcommands that write a task, train it, and use the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import (
    Checkpoint,
    Overrides,
    PerRank,
    Profile,
    ProfileSteps,
    Quiet,
    Ranks,
    RayAddress,
    Replace,
    RunDir,
    Target,
    TrainLauncher,
    Verbose,
    importing,
    leave,
)
from lockstep.errors import ConfigError
from lockstep.launching.rank.early import ending_at_interrupt
from lockstep.launching.systems import recipe_names, summary
from lockstep.launching.warm import foresee_ranks


def recipes() -> None:
    """List what can be trained by name: of Lockstep, and of other installed packages."""
    for name in recipe_names():
        try:
            print(f"{name:12} {summary(name)}")
        except ConfigError as error:  # a broken package must not hide the others
            print(f"{name:12} cannot be used: {error}")


def config(
    target: Target,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="As a YAML file for the option --config of train.")
    ] = False,
) -> None:
    """List the keys of a recipe or Task: default, type and meaning."""
    with ending_at_interrupt():
        from lockstep.cli.start import init as command
    for line in command.as_yaml(target) if yaml else command.keys(target):
        print(line)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("task.py"),
) -> None:
    """Write a task to start from: a commented script that trains at once, and its config."""
    with ending_at_interrupt():
        from lockstep.cli.start import init as command
    for line in command.init(file):
        print(line)


def train(
    target: Target,
    overrides: Overrides = None,
    ranks: Ranks = None,
    launcher: TrainLauncher = None,
    ray_address: RayAddress = None,
    run_dir: RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run ended.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="A YAML config file.")] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A run, RUN/CHECKPOINT or a file as for import, with the weights to start from.",
        ),
    ] = None,
    from_only: Annotated[
        list[str] | None,
        typer.Option("--from-only", help="Of these, only those whose names match: 'encoder.*'."),
    ] = None,
    replace: Replace = 0,
    quiet: Quiet = False,
    per_rank: PerRank = False,
    verbose: Verbose = False,
    profile: Profile = False,
    profile_steps: ProfileSteps = None,
) -> None:
    """Train a recipe, a Task, or a script, on any number of ranks."""
    if (ranks or 1) > 1 or target.endswith(".py"):
        foresee_ranks(overrides or [])
    with importing(quiet):
        from lockstep.cli.start import train as command
        from lockstep.launching.api import Session
        from lockstep.launching.remote import carried, local_copy
    steps = command.steps_to_profile(profile, profile_steps)
    wanted = Session(
        str(run_dir) if run_dir else None,
        resume,
        quiet=quiet,
        profile=steps,
        per_rank=per_rank,
        verbose=verbose,
    )
    with carried(wanted) as session:
        source = local_copy(from_run) if from_run else None
        code = command.train(
            target,
            command.start_items(
                target, source, from_only or [], overrides or [], session.resumed, config
            ),
            session,
            config,
            ranks=ranks,
            launcher=launcher,
            replacements=replace,
            ray_address=ray_address,
        )
    leave(code)


def resume(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.")],
    overrides: Overrides = None,
    ranks: Ranks = None,
    launcher: TrainLauncher = None,
    ray_address: RayAddress = None,
    replace: Replace = 0,
    quiet: Quiet = False,
    per_rank: PerRank = False,
    verbose: Verbose = False,
    profile: Profile = False,
    profile_steps: ProfileSteps = None,
) -> None:
    """Go on with a run from its newest valid checkpoint, on any number of ranks.

    This runs the code that run.json in the directory names as target.
    """
    if (ranks or 1) > 1:
        foresee_ranks(overrides or [])
    with importing(quiet):
        from lockstep.cli.start import train as command
        from lockstep.launching.api import Session
        from lockstep.launching.remote import carried
    steps = command.steps_to_profile(profile, profile_steps)
    wanted = Session(
        str(run_dir), True, quiet=quiet, profile=steps, per_rank=per_rank, verbose=verbose
    )
    with carried(wanted) as session:
        code = command.resume(
            overrides or [],
            session,
            ranks=ranks,
            launcher=launcher,
            replacements=replace,
            ray_address=ray_address,
        )
    leave(code)


def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.")],
    overrides: Overrides = None,
    split: Annotated[
        str, typer.Option("--split", help="train, val, test, or another that the task names.")
    ] = "test",
    checkpoint: Checkpoint = "latest",
    report: Annotated[
        Path | None, typer.Option("--report", help="A folder for tables and pictures.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Measure simple models on the split as well.")
    ] = False,
) -> None:
    """Evaluate a checkpoint of a run on a split.

    This runs the code that run.json in the directory names as target.
    """
    with ending_at_interrupt():
        from lockstep.cli.start import evaluate as command
    found = command.evaluate(run_dir, split, checkpoint, report, overrides or [], baselines)
    for line in command.lines(*found):
        print(line)


def export(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.")],
    path: Annotated[
        Path, typer.Argument(help="The file, or the folder for a task's own forms, to write.")
    ],
    overrides: Overrides = None,
    checkpoint: Checkpoint = "latest",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="safetensors, dcp, torch.export, torchscript or onnx; by PATH if left out.",
        ),
    ] = None,
) -> None:
    """Write a trained model for programs without Lockstep.

    With key=value items a task's own forms predict on the data that these name.
    The formats' files end in .safetensors (weights), .pt2 (torch.export), .ts and .onnx.
    dcp is a folder of torch.distributed.checkpoint.
    This runs the code that run.json in the directory names as target.
    """
    with ending_at_interrupt():
        from lockstep.cli.start import evaluate as command
    for line in command.export(run_dir, path, checkpoint, format, overrides or []):
        print(line)


def sweep(
    target: Target,
    values: Annotated[
        list[str], typer.Argument(metavar="key=value,value...", help="Keys, and their values.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The folder with all runs; sweeps/TASK.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("-j", "--jobs", help="Runs at a time; 1, or with --slurm as many as can."),
    ] = None,
    ranks: Ranks = None,
    launcher: TrainLauncher = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Sort by this, downwards behind a -; `watch` if left out."),
    ] = None,
    slurm: Annotated[
        Path | None,
        typer.Option("--slurm", help="A YAML file with a job's options: train as a job array."),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the array to SLURM.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try runs again that failed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained only.")
    ] = False,
) -> None:
    """Train a grid of configs: a run for each combination of values, and a table at the end.

    The same command goes on: runs that are complete are left alone. With --slurm, what stands
    behind `--` is passed on to sbatch.
    """
    with ending_at_interrupt():
        from lockstep.cli.clusters.slurm import job_file
        from lockstep.cli.start import sweep as command
    job = None if slurm is None else job_file(slurm, {})
    options = command.Options(folder, ranks, launcher, jobs, retry, dry_run, metric, job, submit)
    leave(command.sweep(target, values, options))


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file or folder.")],
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="What to write; a new name if left out.")
    ] = None,
) -> None:
    """Say what another program's file has, and convert it for a recipe.

    Known are files of the programs that the systems follow: checkpoints, state dicts, configs,
    statistics and datasets. Weights become a run directory, settings a config. key=value items set
    keys of its config, such as where the data is.
    Nothing that is in a file is run.
    """
    with ending_at_interrupt():
        from lockstep.launching.api.originals import import_original
    for line in import_original(path, to, overrides or []):
        print(line)

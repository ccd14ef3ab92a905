"""The `lockstep` command: one function for each subcommand, no logic."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lockstep.commands.groups import (
    contributed,
    contributed_command,
    show_help,
    show_version,
)
from lockstep.commands.runs import app as runs
from lockstep.commands.waiting import importing
from lockstep.errors import LockstepError
from lockstep.launchers.rank.early import INTERRUPTED, Interrupted, ending_at_interrupt, interrupts
from lockstep.recipes import command_groups, recipe_names, summary

app = typer.Typer(
    name="lockstep",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Target = Annotated[str, typer.Argument(help="A recipe's name, file.py, or file.py:Task.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="Config keys and values.")
]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks to start.")]
LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", help="python, mpi, local or torchrun; chosen if left out."),
]
Replace = Annotated[
    int,
    typer.Option(
        "--replace", min=0, help="Start this many new processes at most for killed ranks."
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show warnings, errors and the last line only.")
]
QuietVerdict = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show failures and the verdict only.")
]
PerRank = Annotated[
    bool, typer.Option("--per-rank", help="Show what each rank does with its time.")
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Each rank records some steps with torch's profiler.")
]
ProfileSteps = Annotated[
    str | None,
    typer.Option("--profile-steps", metavar="FIRST:LAST", help="Which steps it records; 10:13."),
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a step's number.")]
Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=show_version, help="Show the version."),
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Where the run's files go.")]


@app.callback(invoke_without_command=True)
def lockstep(context: typer.Context, version: Version = False) -> None:
    """Distributed training that gives the same answer on any number of processes."""
    show_help(context)


@app.command()
def recipes() -> None:
    """List the recipes that come with Lockstep."""
    for name in recipe_names():
        print(f"{name:12} {summary(name)}")


@app.command()
def config(
    target: Target,
    yaml: Annotated[
        bool, typer.Option("--yaml", help="As a YAML file for the option --config of train.")
    ] = False,
) -> None:
    """List the keys of a recipe or Task: default, type and meaning."""
    with ending_at_interrupt():
        from lockstep.commands import config as command
    for line in command.as_yaml(target) if yaml else command.keys(target):
        print(line)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("task.py"),
) -> None:
    """Write a task to start from: a commented script that trains at once."""
    with ending_at_interrupt():
        from lockstep.commands import init as command
    for line in command.init(file):
        print(line)


@app.command()
def train(
    target: Target,
    overrides: Overrides = None,
    ranks: Ranks = None,
    launcher: LauncherOption = None,
    run_dir: RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run ended.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="A YAML config file.")] = None,
    replace: Replace = 0,
    quiet: Quiet = False,
    per_rank: PerRank = False,
    profile: Profile = False,
    profile_steps: ProfileSteps = None,
) -> None:
    """Train a recipe, a Task, or a script, on any number of ranks."""
    with importing(quiet):
        from lockstep.commands import train as command
    steps = command.steps_to_profile(profile, profile_steps)
    _exit(
        command.train(
            target,
            overrides or [],
            ranks,
            launcher,
            run_dir,
            resume,
            config,
            replace,
            quiet,
            steps,
            per_rank,
        )
    )


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.")],
    overrides: Overrides = None,
    ranks: Ranks = None,
    launcher: LauncherOption = None,
    replace: Replace = 0,
    quiet: Quiet = False,
    per_rank: PerRank = False,
    profile: Profile = False,
    profile_steps: ProfileSteps = None,
) -> None:
    """Go on with a run from its newest valid checkpoint, on any number of ranks.

    This runs the code that run.json in the directory names as target.
    """
    with importing(quiet):
        from lockstep.commands import train as command
    steps = command.steps_to_profile(profile, profile_steps)
    _exit(
        command.resume(run_dir, overrides or [], ranks, launcher, replace, quiet, steps, per_rank)
    )


@app.command("eval")
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
) -> None:
    """Evaluate a checkpoint of a run on a split.

    This runs the code that run.json in the directory names as target.
    """
    with ending_at_interrupt():
        from lockstep.commands import evaluate as command
    for line in command.lines(run_dir, split, checkpoint, report, overrides or []):
        print(line)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.")],
    path: Annotated[
        Path, typer.Argument(help="The file, or the folder for a task's own forms, to write.")
    ],
    checkpoint: Checkpoint = "latest",
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="safetensors, torch.export, torchscript or onnx; by PATH if left out."
        ),
    ] = None,
) -> None:
    """Write a trained model for programs without Lockstep.

    The formats' files end in .safetensors (weights), .pt2 (torch.export), .ts and .onnx.
    This runs the code that run.json in the directory names as target.
    """
    with ending_at_interrupt():
        from lockstep.commands import export as command
    for line in command.export(run_dir, path, checkpoint, format):
        print(line)


@app.command()
def verify(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks.")] = "1,2,3,4",
    meshes: Annotated[
        str,
        typer.Option(
            "--meshes",
            help="Meshes instead, data x depth x features: 1x1x1,2x2x1+optimizer.",
        ),
    ] = "",
    launchers: Annotated[str, typer.Option("--launchers", help="Launchers to try.")] = "python,mpi",
    resumes: Annotated[
        int, typer.Option("--resumes", help="Runs to stop half way and resume on other ranks.")
    ] = 1,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep all runs here.")] = None,
    quiet: QuietVerdict = False,
) -> None:
    """Train the same config on each number of ranks and compare the final SHA-256s."""
    with importing(quiet):
        from rich.console import Console

        from lockstep.commands import verify as command
    console = Console()
    _exit(
        command.verify(
            target, overrides or [], ranks, launchers, keep, console, quiet, meshes, resumes
        )
    )


@app.command()
def chaos(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks to start.")] = 4,
    faults: Annotated[int, typer.Option("--faults", help="How many things go wrong.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Which ones.")] = 0,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep the runs here.")] = None,
    launcher: Annotated[str, typer.Option("--launcher", help="mpi or local.")] = "mpi",
    replace: Replace = 0,
    quiet: QuietVerdict = False,
) -> None:
    """Train with random faults (killed, stopped, slow ranks, …) and compare the final SHA-256."""
    with importing(quiet):
        from rich.console import Console

        from lockstep.commands.chaos import command
    victims = command.Ranks(ranks, launcher, replace)
    _exit(command.chaos(target, overrides or [], victims, faults, seed, keep, Console(), quiet))


@app.command()
def slurm(
    target: Target,
    overrides: Overrides = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="A YAML file with the options below.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", help="Time limit such as 1:30:00; needed, here or in --job's file."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes; 1.")] = None,
    tasks: Annotated[
        int | None, typer.Option("--ntasks-per-node", help="Ranks on each node; 1.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-task", help="Cores of a rank; threads if left out.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Where to run.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Who pays.")] = None,
    signal_before: Annotated[
        int | None,
        typer.Option("--signal-before", help="Seconds for a checkpoint at the time limit; 120."),
    ] = None,
    replace: Annotated[
        int | None,
        typer.Option("--replace", min=0, help="New processes at most for killed ranks; 0."),
    ] = None,
    run_dir: RunDir = None,
    output: Annotated[Path | None, typer.Option("--output", help="The script to write.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to SLURM.")] = False,
) -> None:
    """Write a SLURM job script that trains, stops in time, and goes on after a requeue.

    The target `doctor` makes one that tests the nodes' communication.
    """
    with ending_at_interrupt():
        from lockstep.commands import slurm as command
    given = {
        "nodes": nodes, "ntasks_per_node": tasks, "cpus_per_task": cpus, "time": time,
        "partition": partition, "account": account, "signal_before": signal_before,
        "replace": replace,
    }  # fmt: skip
    options = command.job_file(job, given)
    request = command.Request(options, run_dir, output, submit)
    _exit(command.slurm(target, overrides or [], request))


@app.command()
def doctor(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks to start for tests.")] = 2,
    run_dir: RunDir = None,
) -> None:
    """Check what this machine has, and say how to mend what is missing."""
    with ending_at_interrupt():
        from rich.console import Console

        from lockstep.commands.doctor import command
    console = Console()
    with console.status("checking") as status:
        checks = command.run_doctor(
            ranks, run_dir or Path(), on_check=lambda check: status.update(f"checked {check.name}")
        )
    console.print(command.render(checks))
    _exit(command.exit_code(checks))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="One run, or several.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; report.html in the run.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, with its pictures beside it.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Pictures as SVG and PNG too.")
    ] = None,
) -> None:
    """Write one page about a run, or about how several differ."""
    with importing():
        from lockstep.commands import report as command
    print("\n".join(command.report(runs, output, markdown, figures)))


@app.command()
def diagnose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each cause.")] = False,
) -> None:
    """Say why a run is slow, or has ended: what costs most first, and what to do."""
    with ending_at_interrupt():
        from lockstep.commands import diagnose as command
    for line in command.diagnose(run_dir, as_json):
        print(line)


app.add_typer(runs, name="runs", help="List, compare, tag and remove runs.")

for _group in command_groups():
    if _group.is_command:
        app.command(_group.name, cls=contributed_command(_group), help=_group.summary)(lambda: None)
    else:
        app.add_typer(contributed(_group))


def main() -> NoReturn:
    """Run the command; errors meant for the user are one message and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A sign such as ≥ that the terminal's encoding lacks must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts():
            app(prog_name="lockstep", standalone_mode=True)
    except Interrupted:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os._exit(141)
    sys.exit(0)


def _exit(code: int) -> None:
    if code:
        raise typer.Exit(code)

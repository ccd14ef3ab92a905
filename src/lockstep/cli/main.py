"""The `lockstep` command: its subcommands, its answer to options of other programs, how it ends."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from lockstep.cli.clusters import subcommands as clusters
from lockstep.cli.look import subcommands as look
from lockstep.cli.options import contributed, contributed_command, show_help, show_version
from lockstep.cli.prove import subcommands as prove
from lockstep.cli.start import subcommands as start
from lockstep.errors import ConfigError, LaunchError, LockstepError
from lockstep.launching.job.preflight import devices, resource_error, working_directory
from lockstep.launching.rank.early import Interrupted, interrupts
from lockstep.launching.systems import command_groups

if TYPE_CHECKING:
    from lockstep.config import TrainConfig


_ALIKE = 0.8
"""How like an option of the command a name must be to be taken for that one, mistyped."""
_SIMILAR = 0.6
"""How like a config key a name must be, where all keys are known."""
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def takes_items(command: Callable[..., None]) -> bool:
    """Whether a subcommand takes `key=value` items."""
    return not {"overrides", "values"}.isdisjoint(inspect.signature(command).parameters)


class TakesItems(TyperCommand):
    """A subcommand with `key=value` items, which are expected to be written as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of any command; for an option that is a config key, the error names the item.

        Raises:
            ConfigError: there is such an option.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: some versions of typer have a copy of click, whose classes are others.
            if type(error).__name__ != "NoSuchOption":
                raise
            options = [name.lstrip("-") for p in self.get_params(ctx) for name in p.opts]
            hint = meant(str(getattr(error, "option_name", "")), given, options)
            if not hint:
                raise
            raise ConfigError(hint) from None


def meant(option: str, args: Sequence[str], options: Sequence[str]) -> str:
    """The message for an option that a subcommand does not have; empty if it is no config key.

    Args:
        option: the option as the parser names it, which of `-lr` is `-l`.
        args: the subcommand's arguments.
        options: names of its options, without dashes.
    """
    from lockstep.config import TrainConfig
    from lockstep.config.section import keys, nearest_key, plain_key

    shown, name, value = _written(option, args)
    plain = plain_key(name)
    if not plain:
        return ""
    kind = TrainConfig
    is_key = plain in keys(kind)
    if not is_key:
        if difflib.get_close_matches(name, options, n=1, cutoff=_ALIKE):
            return ""
        kind = _own_config(args) or kind
        is_key = plain in keys(kind)
    of_script = any(arg.endswith(".py") for arg in args)  # whose own keys are not known
    cutoff = _ALIKE if of_script else _SIMILAR
    key = plain if is_key else nearest_key(kind, name, cutoff)
    if key is None and not of_script:
        return ""
    if key is None:
        return f"{shown}: no such option; if it is a config key of the script: {plain}={value}"
    if _is_switch(kind, key) and value.lower() not in _BOOLEANS:
        shown, value = f"--{name}", "true"  # what stands behind it is something else
    if is_key:
        return f"{shown}: config keys are written without dashes: {key}={value}"
    return f"{shown}: no such option; did you mean the config key {key}={value}?"


def _written(option: str, args: Sequence[str]) -> tuple[str, str, str]:
    """An option as it was written, its name without dashes, and its value, or VALUE if none is."""
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        is_short = len(option) == 2 and name[:2] == option
        if not (name == option or is_short):
            continue
        if equals:
            return arg, name.lstrip("-"), value
        behind = args[position + 1] if position + 1 < len(args) else "-"
        if behind.startswith("--") or behind == "-" or "=" in behind or ".py" in behind:
            return arg, name.lstrip("-"), "VALUE"
        return f"{arg} {behind}", name.lstrip("-"), behind
    return option, option.lstrip("-"), "VALUE"


def _own_config(args: Sequence[str]) -> type[TrainConfig] | None:
    """The config class of the recipe, Task or run that is named; None where that fails.

    A script is not imported, for it may train as soon as it is.
    """
    from lockstep.engine.checkpoint.run_directory import RunDirectory
    from lockstep.launching.systems import recipe_names
    from lockstep.launching.targets import is_script, task_class, trusted_target

    for arg in args:
        with suppress(Exception):  # what is wrong with it is said once the option is right
            is_run = (Path(arg) / "run.json").is_file()
            target = trusted_target(RunDirectory(Path(arg))) if is_run else arg
            if not is_script(target) and (target in recipe_names() or ".py:" in target):
                return task_class(target).Config
    return None


def _is_switch(kind: type[TrainConfig], key: str) -> bool:
    """Whether a key outside of sections is true or false."""
    field = kind.model_fields.get(key)
    return field is not None and field.annotation is bool


class _Ended(BaseException):
    """Carries an `EOFError` past typer, which takes it for the end of what a prompt reads."""

    def __init__(self, error: EOFError) -> None:
        super().__init__()
        self.error = error


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise _Ended(error) from None


app = typer.Typer(
    name="lockstep",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=show_version, help="Show the version."),
]


@app.callback(invoke_without_command=True)
def lockstep(context: typer.Context, version: Version = False) -> None:
    """Distributed training that gives the same answer on any number of processes."""
    show_help(context)
    if obstacle := working_directory() or devices():
        raise LaunchError(str(obstacle))


_READS_BYTECODE = "_compile_bytecode"
"""The function of importlib that fails at bytecode that is cut off, as on a disk that was full."""

_COMMANDS: dict[str, dict[str, tuple[Callable[..., None], str]]] = {
    "Start": {
        "init": (start.init, "Write a task and a config to start from."),
        "recipes": (start.recipes, "List what can be trained by name."),
        "config": (start.config, "List the config keys of a recipe or task."),
        "train": (start.train, "Train a recipe, a task or a script on any number of ranks."),
        "resume": (start.resume, "Go on with a run that was stopped."),
        "sweep": (start.sweep, "Train a grid of configs."),
        "eval": (start.evaluate, "Evaluate a checkpoint on a split."),
        "export": (start.export, "Write a trained model for other programs."),
        "import": (start.import_, "Take over what another program has trained or configured."),
    },
    "Look": {
        "monitor": (look.monitor, "Watch runs: terminal, browser, Prometheus, alerts."),
        "report": (look.report, "Write a page about runs, with pictures."),
        "diagnose": (look.diagnose, "Say why a run is slow, or why it ended."),
    },
    "Prove": {
        "verify": (prove.verify, "Compare the results of different numbers of ranks."),
        "chaos": (prove.chaos, "Kill and stop ranks at random, and compare the results."),
    },
    "Clusters": {
        "doctor": (clusters.doctor, "Check whether this machine has all that is needed."),
        "agent": (clusters.agent, "Train on several hosts, and survive the loss of one."),
        "slurm": (clusters.slurm, "Write a job script for SLURM."),
        "kubernetes": (clusters.kubernetes, "Write a Job for Kubernetes."),
        "plan": (clusters.plan, "Predict time and memory on other numbers of ranks."),
        "comm-profile": (clusters.comm_profile, "Measure what communication costs here."),
    },
}
"""The subcommands by group, each with its line in the list of all of them."""

for _panel, _commands in _COMMANDS.items():
    for _name, (_command, _line) in _commands.items():
        _kind = TakesItems if takes_items(_command) else None
        app.command(_name, cls=_kind, rich_help_panel=_panel, short_help=_line)(_command)
app.add_typer(
    look.app, name="runs", rich_help_panel="Look", help="List, compare, tag and remove runs."
)

_taken = {"runs", *(name for commands in _COMMANDS.values() for name in commands)}
for _group in command_groups():
    if _group.name in _taken:
        continue  # a package replaces no subcommand that is there
    _taken.add(_group.name)
    if _group.is_command:
        _contributed = contributed_command(_group)
        app.command(_group.name, cls=_contributed, rich_help_panel="Systems", help=_group.summary)(
            lambda: None
        )
    else:
        app.add_typer(contributed(_group), rich_help_panel="Systems")

_COMMAND = get_command(app)
"""Made once, before ranks are forked: it takes 30 ms."""


def main() -> NoReturn:
    """Run the command; errors meant for the user are one message and exit code 2."""
    _open_missing_files()
    _hear_signals()
    if isinstance(sys.stdout, TextIOWrapper):
        # A sign such as ≥ that the terminal's encoding lacks must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts():
            _COMMAND(prog_name="lockstep", standalone_mode=True)
    except Interrupted as stop:
        _say("interrupted")
        sys.exit(stop.exit_code)
    except LockstepError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except _Ended as ended:
        message = _cut_off(ended.error)
        if not message:
            raise ended.error from None
        _say(f"error: {message}")
        sys.exit(LockstepError.exit_code)
    except BrokenPipeError:
        os._exit(141)
    except (ImportError, OSError) as error:
        message = resource_error(error) if isinstance(error, OSError) else _hidden(error)
        if not message:
            raise
        _say(f"error: {message}")
        sys.exit(LockstepError.exit_code)
    finally:
        _give_up_output()
    sys.exit(0)


def _cut_off(error: EOFError) -> str:
    """What to say of an import that found bytecode cut off; empty if the error is another one."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    if last.f_code.co_name != _READS_BYTECODE:
        return ""
    path = last.f_locals.get("bytecode_path")
    return f"{path}: Python's copy of a module is cut off; delete this file and start again"


def _hidden(error: ImportError) -> str:
    """What to say of an import that found a file of the user's; empty if the error is another one.

    Modules of the folders of PYTHONPATH, and with `-m` of the working directory, are found before
    those that are installed.
    """
    name = (error.name or "").partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    folders = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), os.curdir]
    is_there = any(file.startswith(os.path.join(os.path.abspath(f), name)) for f in folders)
    if not is_there or name not in {*sys.stdlib_module_names, *packages_distributions()}:
        return ""
    return (
        f"{file}: is imported in place of the module {name} that is installed ({error}); rename "
        "this file, or start elsewhere and take its folder out of PYTHONPATH"
    )


def _say(message: str) -> None:
    """Show a message, where it can be written: the exit code tells in any case."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _give_up_output() -> None:
    """Drop what cannot be written, on a full disk: the interpreter would leave with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _hear_signals() -> None:
    """Block no signal, and have the system keep the exit codes of ranks: a parent may do neither.

    The system does not keep them where SIGCHLD is ignored.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _open_missing_files() -> None:
    """Have what this process was started without (`lockstep train >&-`) lead to nowhere.

    Else the next file that is opened gets the number, and what libraries print.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, nowhere == number)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))

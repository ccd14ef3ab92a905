"""The console that commands and runs print on, and the lines that a run begins with."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from lockstep.engine.events import Joined, RunStarted
from lockstep.observe.text import Pairs, count
from lockstep.parallel.layout import split


class _SteadyConsole(Console):
    """A console whose reader may go away (`lockstep train | head`) without ending training."""

    def on_broken_pipe(self) -> None:
        """Print to nowhere from now on, instead of leaving the process as the base class does.

        Raises:
            BrokenPipeError: this once, for `Sinks` to make a warning of.
        """
        # Else what is still buffered would make the interpreter exit with an error.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)
        raise BrokenPipeError(errno.EPIPE, "whoever read the console's output is gone")


def stdout_console() -> Console:
    """A console on standard output: interactive only where that is a terminal.

    FORCE_COLOR gives colours to a log file too, but no progress bar.
    """
    shown = sys.stdout is not None and sys.stdout.isatty() and _reaches_terminal()
    capable = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if not shown and not os.environ.get("FORCE_COLOR"):
        return _SteadyConsole(force_terminal=False, force_interactive=False, highlight=False)
    return _SteadyConsole(force_interactive=shown and capable, highlight=False)


def styled(console: Console, line: str, style: str = "") -> Text:
    """Text the console can encode, whatever a path or a metric's name holds."""
    encoding = console.encoding
    return Text(line.encode(encoding, "backslashreplace").decode(encoding), style)


def spinner_name(console: Console) -> str:
    """The name of a spinner of `rich` that the console can encode."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _reaches_terminal() -> bool:
    """Whether a terminal that is this process's standard output is one that people look at.

    Open MPI gives each rank a terminal of its own, and passes on what it shows to wherever its own
    standard output goes, which may be a pipe or a log file.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def banner(plan: RunStarted, joined: Sequence[Joined], verbose: bool = False) -> Pairs:
    """What a run is about to do, and on which ranks.

    Args:
        plan: the start of the run.
        joined: the ranks, as far as they have come.
        verbose: whether to show what each rank computes, and with what.
    """
    samples = count(plan.num_samples, "sample") if plan.num_samples else "a stream of samples"
    microbatches = count(plan.num_microbatches, "microbatch", "microbatches")
    threads = count(plan.threads, "thread")
    going_on = f", going on from step {plan.step:,}" if plan.step else ""
    epoch = f", {plan.steps_per_epoch:,} an epoch" if plan.steps_per_epoch else ""
    steps = count(plan.total_steps, "step") + epoch + going_on
    batch = f"{count(plan.batch_size, 'sample')} in {microbatches}"
    who = f"{_who(plan, joined)} ({plan.launcher}, {plan.transport})"
    task = ("task", f"{plan.task}, {count(plan.num_parameters, 'parameter')}, {samples}")
    run = ("run", f"{plan.run_dir} (config {plan.config_hash})")
    if not verbose:
        ranks = ("ranks", f"{who}, {plan.device}, {threads} a rank")
        return [task, ranks, ("plan", f"{steps}; a step: {batch}"), run]
    return [
        task,
        ("ranks", who),
        ("device", f"{plan.device}, {threads} a rank"),
        ("batch", batch + _share(joined)),
        *_samples(plan, joined),
        ("plan", steps),
        run,
    ]


def _who(plan: RunStarted, joined: Sequence[Joined]) -> str:
    ranks = count(plan.world_size, "rank")
    if not joined:
        return ranks
    return f"{ranks} on {count(len({process.host for process in joined}), 'host')}"


def _samples(plan: RunStarted, joined: Sequence[Joined]) -> Pairs:
    """The samples of a step that each of several ranks computes; like neighbours as one.

    Ranks with the same microbatches are a replica, and compute them together.
    """
    if len(joined) < 2:
        return []
    sizes = [len(part) for part in split(plan.batch_size, plan.num_microbatches)]
    replicas: list[tuple[int, list[int]]] = []
    in_order = sorted(joined, key=lambda process: process.rank)
    for own, alike in groupby(in_order, key=lambda process: process.microbatches):
        num, ranks = sum(sizes[i] for i in range(*own)), [process.rank for process in alike]
        replicas += [(num, ranks)] if num else [(0, [rank]) for rank in ranks]
    parts = []
    for (num, size), equal in groupby(replicas, key=lambda one: (one[0], len(one[1]))):
        ranks = [rank for _, members in equal for rank in members]
        who = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        how = ", together" if len(ranks) == size else f", each {size} together"
        if size == 1:
            how = ", each" if len(ranks) > 1 else ""
        parts.append(f"{who}{how} {num:,}")
    return [("samples", f"of a step: {'; '.join(parts)}")]


def _share(joined: Sequence[Joined]) -> str:
    shares = [len(range(*process.microbatches)) for process in joined]
    if not shares:
        return ""
    least, most = min(shares), max(shares)
    return f", {most} a rank" if least == most else f", {least} to {most} a rank"

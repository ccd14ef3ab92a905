"""The console that commands and runs print on, the lines that a run begins with, evaluations'."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from lockstep.comm.host import forget_empty_window
from lockstep.engine.events import Evaluated, Joined, RunStarted
from lockstep.observe import text
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
    forget_empty_window()
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


@dataclass
class _Evaluation:
    """An evaluation whose line may still be completed.

    Attributes:
        event: the evaluation.
        loss: training loss up to its step, if that is known.
        is_best: whether the watched metric was better than ever.
    """

    event: Evaluated
    loss: float | None
    is_best: bool = False


class EvaluationLine:
    """One line for an evaluation, and that it was the best.

    Whether it was follows in an event of its own. So the line waits for the next event, for some
    seconds at most; a timer's thread prints it then.

    Args:
        write: function that prints a line in a style of `rich`.
        width: function that returns the columns of the console.
        lock: lock that is held while a line is printed by the timer's thread.
        wait_s: most seconds to wait.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        width: Callable[[], int],
        lock: threading.RLock,
        wait_s: float,
    ) -> None:
        self._write = write
        self._width = width
        self._lock = lock
        self._wait_s = wait_s
        self._waiting: _Evaluation | None = None
        self._timer: threading.Timer | None = None
        self._late_error: OSError | None = None
        self._hidden_best: int | None = None

    def raise_late(self) -> None:
        """Raise what the timer's thread has met, once.

        Raises:
            OSError: the line could not be printed.
        """
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def wait(self, event: Evaluated, loss: float | None) -> None:
        """Print an evaluation's line with the next event.

        Args:
            event: the evaluation.
            loss: training loss up to its step, if that is known.
        """
        self._waiting = _Evaluation(event, loss)
        self._timer = threading.Timer(self._wait_s, self._show_late, (event,))
        self._timer.daemon = True
        self._timer.start()

    def improve(self, step: int) -> None:
        """Say of the line that waits, or else of the next one, that this step is the best."""
        if self._waiting and self._waiting.event.step == step:
            self._waiting.is_best = True
        else:
            self._hidden_best = step

    def show(self) -> None:
        """Print the line, if there is one."""
        shown, self._waiting = self._waiting, None
        timer, self._timer = self._timer, None
        if timer:
            timer.cancel()
        if shown is None:
            return
        notes = ["best"] * shown.is_best
        if self._hidden_best is not None and not shown.is_best:
            notes = [f"best at {self._hidden_best:,}"]
        self._hidden_best = None
        line = text.evaluation(shown.event, shown.loss, notes, self._width())
        self._write(line, "green" if shown.is_best else "")

    def _show_late(self, event: Evaluated) -> None:
        """In the timer's thread: print an evaluation that no event has followed."""
        with self._lock:
            if self._waiting is None or self._waiting.event is not event:
                return
            try:
                self.show()
            except OSError as error:
                self._late_error = error  # for the thread that brings the next event

"""`metrics.csv`: the curves of a run, a row for each `StepDone` and `Evaluated`.

Scalars that `lockstep.log` has logged at a step are a row of the split `log`, which is written
with the next event of another kind. So it is in the file before a checkpoint of its step is on
disk, for a `StepDone` comes before that; what is logged at that step later is a further row.

Numbers have full precision (`repr`), so that two runs can be compared to the bit; what an event
does not know is empty. Times are in seconds, summed over ranks. Epochs count from 0; a step
belongs to the epoch its samples are from.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

from lockstep.config.files import open_text, replacing
from lockstep.config.parsing import parse_int, shown
from lockstep.engine.events import Evaluated, Event, Logged, RunStarted, StepDone
from lockstep.errors import RunDirectoryError
from lockstep.observe.sink import RowsLeftOut, Sink
from lockstep.observe.storing.files import AppendFile, opening


class RepeatCounts:
    """How often each name has taken each of its values, in the order in which these are added.

    Work that is repeated after a fault gives each name the same values in the same order. So the
    count tells a value that a file has from one that it lacks, even if a value returns (1, 2, 1).
    """

    def __init__(self) -> None:
        self._last: dict[str, Hashable] = {}
        self._counts: dict[str, Counter[Hashable]] = {}

    def add(self, name: str, value: Hashable) -> int:
        """Count the next value of a name; returns how often the name has taken it."""
        counts = self._counts.setdefault(name, Counter())
        counts[value] += name not in self._last or self._last[name] != value
        self._last[name] = value
        return counts[value]

    def lacks(self, name: str, value: Hashable, count: int) -> bool:
        """Whether a name has another value now, and has taken this one fewer than `count` times."""
        known = self._counts.get(name, Counter())[value]
        return known < count and (name not in self._last or self._last[name] != value)

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Start some names' counts from 0, or all; the last value of each stays."""
        for name in list(self._counts) if names is None else names:
            self._counts.pop(name, None)


_INDEX = ("step", "epoch", "split")
_OF_STEP = ("loss", "lr", "grad_norm", "samples_per_s", "compute_efficiency")
_OF_RANKS = ("compute_s", "communication_s", "data_s", "checkpoint_s")
COLUMNS = (*_INDEX, *_OF_STEP, *_OF_RANKS)
"""The columns of every file; those of the task's metrics follow. A metric with the name of one
of these is called `metric_<name>`, but for an evaluation's `loss`; unprintable characters in names
are escaped."""

_MOST_WAITING = 1 << 16
"""Cells that wait at most for a file that cannot be rewritten: about `MOST_WAITING` bytes."""

_LOG = "log"
"""The split of what was logged."""

Row = dict[str, str]
_Counts = dict[str, int]
"""By column, how often what was logged had taken the cell's value by then."""


class MetricsCsv(Sink):
    """Appends rows; the header grows when a metric appears for the first time.

    When a run resumes from step k, as `RunStarted` says, the rows of later steps are removed: they
    come again. A second row for the same step and split is not written, since work that is repeated
    after a fault gives the same values; nor is one of a step before the last. In the split `log`
    this holds for each cell, and for each time that a name takes a value: of 1, 2, 1 all three are
    written, for the last one counts. Where the file cannot be written for long, rows are left out.

    Args:
        path: path of the file; created if it does not exist, else appended to.

    Raises:
        RunDirectoryError: the file cannot be opened, or is not a metrics file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = list(COLUMNS)
        self._queue: list[tuple[Row, _Counts]] = []
        self._num_waiting = self._num_left_out = 0
        self._logged: tuple[Row, _Counts] = ({}, {})
        self._logged_step, self._logged_at_step = -1, RepeatCounts()
        self._cut_after: int | None = None
        self._steps_per_epoch: int | None = None
        self._step = -1
        self._splits: set[str] = set()
        self._written_at_step = RepeatCounts()
        """What the file has of its last step, `_step`: of the split `log`, its cells."""
        with opening(path):
            self._file = AppendFile(path)
            try:
                self._cut(sys.maxsize)
            except BaseException:
                self._file.close()
                raise

    def __call__(self, event: Event) -> None:
        """Append the row of a `StepDone` or `Evaluated`; with `RunStarted`, remove later steps."""
        if not isinstance(event, Logged) or self._logged[0].get("step") != str(event.step):
            self._end_logged()
        if isinstance(event, RunStarted):
            self._steps_per_epoch = event.steps_per_epoch
            if not event.continued:
                self.truncate_after(event.step)
        elif isinstance(event, Logged):
            self._log(event)
        elif isinstance(event, StepDone):
            self._enqueue(_step_row(event), {})
        elif isinstance(event, Evaluated):
            self._enqueue(_evaluation_row(event, self._steps_per_epoch), {})
        self._drain()

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, all at once.

        Raises:
            OSError: the file cannot be rewritten now and is as before. No row is written before
                that has worked, so none will be there twice.
            RunDirectoryError: the file is not a metrics file.
        """
        self._queue = [(row, counts) for row, counts in self._queue if int(row["step"]) <= step]
        self._num_waiting = sum(len(row) for row, _ in self._queue)
        self._cut_after = step
        self._drain()

    def close(self) -> None:
        """Write what is kept and close the file."""
        try:
            self._end_logged()
            try:
                self._drain()
            except RowsLeftOut as gap:  # said when the rest is written, too
                self._num_left_out += gap.number
                self._drain()
        finally:
            self._file.close()

    def _log(self, event: Logged) -> None:
        if event.kind != "scalar":
            return
        row, counts = self._logged
        if not row:
            row |= _row(event, _LOG, self._steps_per_epoch)
        if self._logged_step != event.step:
            self._logged_step, self._logged_at_step = event.step, RepeatCounts()
        column, cell = _column(event.name), _number(event.value)
        row[column], counts[column] = cell, self._logged_at_step.add(column, cell)

    def _end_logged(self) -> None:
        """Queue what was logged at a step."""
        logged, self._logged = self._logged, ({}, {})
        if logged[0]:
            self._enqueue(*logged)

    def _enqueue(self, row: Row, counts: _Counts) -> None:
        if self._queue and self._num_waiting + len(row) > _MOST_WAITING:
            try:
                self._drain()
            except RowsLeftOut as gap:  # said when all is written
                self._num_left_out += gap.number
            except OSError:
                self._num_left_out += 1
                return
        self._num_waiting += len(row)
        self._queue.append((row, counts))

    def _drain(self) -> None:
        """Cut and write what is pending, in order; what cannot be done now stays pending."""
        if self._cut_after is not None:
            self._cut(self._cut_after)
            self._cut_after = None
            self._written_at_step.forget()  # what is logged from now on is no repetition
        while self._queue:
            missing = self._missing(*self._queue[0])
            if missing:
                self._write(missing)
            self._num_waiting -= len(self._queue.pop(0)[0])
        self._file.num_left_out += self._num_left_out
        self._num_left_out = 0
        self._file.flush()

    def _missing(self, row: Row, counts: _Counts) -> Row:
        """The part of a row that the file lacks; empty if there is none."""
        if int(row["step"]) != self._step:
            return row if int(row["step"]) > self._step else {}
        if row["split"] != _LOG:
            return {} if row["split"] in self._splits else row
        there = self._written_at_step
        new = [name for name, count in counts.items() if there.lacks(name, row[name], count)]
        return {name: row[name] for name in row if name in new or name in _INDEX} if new else {}

    def _write(self, row: Row) -> None:
        late = [name for name in row if name not in self._columns]
        if late:
            self._rewrite([*self._columns, *late], keep=lambda row: True)
        self._note(row)  # before writing: the file keeps what it cannot write
        if row["split"] == _LOG:
            self._written_at_step.forget(row)
        self._file.append(_line(row.get(name, "") for name in self._columns))

    def _note(self, row: Row) -> None:
        if int(row["step"]) != self._step:
            self._step, self._splits = int(row["step"]), set()
            self._written_at_step = RepeatCounts()
        self._splits.add(row["split"])
        if row["split"] == _LOG:
            for name, cell in row.items():
                if cell and name not in _INDEX:
                    self._written_at_step.add(name, cell)

    def _cut(self, last_step: int) -> None:
        """Remove rows after `last_step` and give the file all columns it must have."""
        self._file.flush()
        if not self._path.stat().st_size:
            self._rewrite(self._columns, keep=lambda row: True)
            return
        self._step = -1
        try:
            header, kept = self._read(last_step)
        except (UnicodeDecodeError, csv.Error) as error:
            raise RunDirectoryError(f"{self._path}: is damaged: {error}; move it away") from error
        columns = [*COLUMNS, *(name for name in header if name not in COLUMNS)]
        if columns != header or not all(kept):
            self._rewrite(columns, keep=lambda row: int(row["step"]) <= last_step)
        self._columns = columns

    def _read(self, last_step: int) -> tuple[list[str], list[bool]]:
        """The file's header, and for each row whether it stays; what stays is noted as written."""
        stays: list[bool] = []
        with open_text(self._path) as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or ())
            twice = next((name for name in header if header.count(name) > 1), None)
            lacking = next((name for name in ("step", "split") if name not in header), None)
            if lacking is not None:
                raise self._damage(1, f"has no column {lacking!r}")
            if twice is not None:
                raise self._damage(1, f"has the column {shown(twice)} twice")
            for row in reader:
                try:
                    stays.append(parse_int(row["step"]) <= last_step)
                except (KeyError, AttributeError, ValueError):
                    raise self._damage(reader.line_num, "has no step") from None
                if None in row or None in row.values():
                    raise self._damage(reader.line_num, "does not have a cell for each column")
                if stays[-1]:
                    self._note(row)
        return header, stays

    def _damage(self, line: int, problem: str) -> RunDirectoryError:
        return RunDirectoryError(f"{self._path}: line {line}: {problem}; move the file away")

    def _rewrite(self, columns: list[str], keep: Callable[[Row], bool]) -> None:
        """Replace the file by one with these columns and the rows to keep."""
        self._file.flush()
        with open_text(self._path) as old, replacing(self._path) as new:
            writer = csv.DictWriter(new, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row in csv.DictReader(old) if keep(row))
        file = AppendFile(self._path)
        self._file.close()
        self._file, self._columns = file, columns


def _step_row(event: StepDone) -> Row:
    sums = {name: sum(getattr(rank, name) for rank in event.ranks) for name in _OF_RANKS}
    return {
        "step": str(event.step),
        "epoch": str(event.epoch),
        "split": "train",
        **{name: _number(getattr(event, name)) for name in _OF_STEP},
        **{name: _number(value) for name, value in sums.items()},
        **{_column(name): _number(value) for name, value in event.metrics.items()},
    }


def _evaluation_row(event: Evaluated, steps_per_epoch: int | None) -> Row:
    metrics = dict(event.metrics)
    row = _row(event, event.split, steps_per_epoch)
    if "loss" in metrics:
        row["loss"] = _number(metrics.pop("loss"))
    return row | {_column(name): _number(value) for name, value in metrics.items()}


def _row(event: Event, split: str, steps_per_epoch: int | None) -> Row:
    row = {"step": str(event.step), "split": split}
    if steps_per_epoch:
        row["epoch"] = str(max(event.step - 1, 0) // steps_per_epoch)
    return row


def _column(metric: str) -> str:
    if metric in COLUMNS:
        return f"metric_{metric}"
    # A line end or NUL in the header would make it unreadable.
    return metric if metric.isprintable() else metric.encode("unicode_escape").decode("ascii")


def _number(value: float) -> str:
    return repr(float(value))


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")

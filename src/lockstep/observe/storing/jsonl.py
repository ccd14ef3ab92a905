"""`events.jsonl`: every event of a run as it happens, a line of strict JSON for each.

A resumed run appends to the same file, so the file also records interruptions.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from pydantic import TypeAdapter, ValidationError

from lockstep.config.files import MAX_TEXT_BYTES, open_to_read
from lockstep.config.parsing import parse_object, shown
from lockstep.engine.events import Evaluated, Event, Logged, RunStarted, StepDone, Warned
from lockstep.errors import RunDirectoryError, file_errors
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import AppendFile, end_of_rows, opening
from lockstep.observe.storing.metrics_csv import RepeatCounts


def scalars_of(event: Event) -> dict[str, float]:
    """The values of a `StepDone`, an `Evaluated` or a `Logged` scalar, by name; else none."""
    if isinstance(event, StepDone):
        return {
            "train/loss": event.loss,
            **{f"train/{name}": value for name, value in event.metrics.items()},
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "time/samples_per_s": event.samples_per_s,
            "time/compute_efficiency": event.compute_efficiency,
        }
    if isinstance(event, Evaluated):
        return {f"{event.split}/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, Logged) and event.kind == "scalar":
        return {f"log/{event.name}": event.value}
    return {}


def row_of(event: Event, time: float) -> dict[str, Any]:
    """The event's class name as `event`, `time` (Unix seconds), then its fields.

    That of a `StepDone` also has its derived `samples_per_s` and `compute_efficiency`. That of a
    `Logged` has `value` or `text`, but not the content of its picture.
    """
    row = {"event": type(event).__name__, "time": time, **vars(event)}
    if isinstance(event, StepDone):
        row["samples_per_s"] = event.samples_per_s
        row["compute_efficiency"] = event.compute_efficiency
    elif isinstance(event, Logged):
        del row["png"], row["value" if event.kind == "text" else "text"]
    return row


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event that a row was made of; keys that are not fields of it are ignored.

    Raises:
        RunDirectoryError: the row names no known event or lacks a field: another version
            wrote it.
    """
    name = row.get("event")
    kinds: dict[str, type] = {kind.__name__: kind for kind in _kinds(Event)}
    kind = kinds.get(str(name))
    if kind is None:
        raise RunDirectoryError(f"event {name!r} is not known to this version of lockstep")
    if "png" in row:
        raise RunDirectoryError(f"event {name}: png: a row must not hold a picture")
    values = {**row, **{key: _numbers(row[key]) for key in _OF_ANY_TYPE & row.keys()}}
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise RunDirectoryError(
            f"event {name}: field missing or wrong: {field}: {first['msg']}"
        ) from None


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


_OF_ANY_TYPE = {"arrays", "value"}
"""Fields of events in which numbers that are not finite may be anywhere."""


def _numbers(value: Any) -> Any:
    """Nested lists and objects with numbers for the names of those that are not finite."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


@cache
def _adapter(kind: type) -> TypeAdapter[Event]:
    """Makes events of a kind; cached, since it takes milliseconds to build."""
    return TypeAdapter(kind)


def dumps(value: Any) -> str:
    """Strict JSON in ASCII, on one line.

    NaN and infinities, which JSON lacks, become the strings "NaN", "Infinity" and "-Infinity",
    which `float` reads. Dataclasses become objects of their fields.
    """
    try:
        return json.dumps(value, allow_nan=False, default=vars)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


_IDENTITY: dict[str, tuple[str, ...]] = {
    "StepDone": (),
    "Evaluated": ("split",),
    "Improved": ("metric",),
    "Logged": ("name", "value", "text"),
    "Warned": ("message",),
    "Checkpointed": ("path",),
    "Joined": ("slot", "pid"),
    "Profiled": ("path",),
    "Resumed": ("path",),
    "Rebalanced": (),
    "RankLost": ("slot",),
    "Recovered": ("world_size",),
    "ExchangeChosen": ("way",),
    "Measured": (),
    "Finished": (),
}
"""Events that come again when work is repeated after a fault, and the fields that, beside the
step, tell one from another."""
_OF_TRAINING = ("StepDone", "Evaluated", "Improved", "Logged")

_ADVICE = "remove the line, or move the file away: the run can go on without it"

_NUM_KEYS = 256
"""Keys that are remembered, unless two steps alone have more events."""
_TAIL_BYTES = 1 << 18

_Key: TypeAlias = "tuple[Any, ...]"


class EventsJsonl(Sink):
    """Appends a row for each event, which others can read as soon as the call returns.

    An event that comes again after a fault is not written again, even if another process has
    written it. `ran_s` of a row is the time of the run up to it in seconds, without the pauses
    between its sessions.

    Args:
        path: path of the file; created if it does not exist, else appended to.
        clock: function that returns the Unix time in seconds.

    Raises:
        RunDirectoryError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        with opening(path):
            self._file = AppendFile(path)
        self._clock = clock
        self._since: float | None = None  # Unix time of the first row that is written here
        self._earlier_s = 0.0
        self._written: dict[_Key, None] = {}
        self._known_from = -1
        self._keys = _Keys()

    def __call__(self, event: Event) -> None:
        """Append the event's row, once."""
        if isinstance(event, RunStarted):
            if not (event.continued and self._file.is_waiting):
                self._written.clear()
            self._keys, self._known_from = _Keys(), -1
            if event.continued:
                self._know(event.step)
        if event.step < self._known_from and not isinstance(event, Warned):
            self._know(event.step)  # rank 0 was lost when its disk had been full for long
        key = self._keys.of(type(event).__name__, vars(event))
        if key in self._written:
            return
        if key is not None:
            self._remember(key)
        now = self._clock()
        if self._since is None:  # not before: another process may have written until now
            self._since, self._earlier_s = now, _ran_seconds(self._file.path)
        row = row_of(event, now) | {"ran_s": self._earlier_s + max(0.0, now - self._since)}
        self._file.append(dumps(row).encode() + b"\n")

    def _know(self, step: int) -> None:
        """Read which events of the session the file has, from that of the step before on."""
        self._known_from = step - 1
        self._written |= dict.fromkeys(_keys_of_session(newest_rows(self._file.path, step - 1)))

    def _remember(self, key: _Key) -> None:
        """Note what is written; of too many keys, those older than a step are forgotten."""
        newest = next(reversed(self._written), key)
        if len(self._written) >= _NUM_KEYS and newest[1] != key[1]:
            old = [known for known in self._written if known[1] < key[1] - 1]
            for known in old[: len(self._written) - _NUM_KEYS + 1]:
                del self._written[known]
        self._written[key] = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, without a last line that is not yet complete.

    Raises:
        RunDirectoryError: the file cannot be read, or a whole line is not a JSON object.
    """
    with _reading(path), open_to_read(path) as file:
        return [
            _parse(line, f"{path}: line {number}")
            for number, line in enumerate(_whole_lines(file, path), 1)
        ]


def end_of_events(path: Path) -> int:
    """The offset in bytes at which new rows will start: `start` for `follow_events`.

    Raises:
        RunDirectoryError: the file exists but cannot be read.
    """
    with _reading(path):
        return end_of_rows(path)


def follow_events(
    path: Path, stop: Callable[[], bool], *, start: int = 0, poll_s: float = 0.1
) -> Iterator[dict[str, Any]]:
    """The rows of a file that another process writes, each as soon as its line is complete.

    A file that is moved or deleted is still read, until another one replaces it.

    Args:
        path: path of the file, which need not exist yet.
        stop: function that returns True when nothing more will be written; rows written before are
            still yielded.
        start: number of bytes to skip, see `end_of_events`.
        poll_s: seconds between two reads of the file.

    Raises:
        RunDirectoryError: the file cannot be read, or a whole line is not a JSON object.
    """
    file: BinaryIO | None = None
    try:
        while True:
            stopped = stop()  # called before reading, so that nothing written until then is missed
            newest = _newest(path, file)
            if file is not None and newest is not file:
                start = 0  # it was counted in another file
            file = newest
            if file is not None:
                for line in _whole_lines(file, path, start):
                    start += len(line)
                    yield _parse(line, f"{path}: byte {start - len(line)}")
            if stopped:
                return
            time.sleep(poll_s)
    finally:
        if file is not None:
            file.close()


def _newest(path: Path, file: BinaryIO | None) -> BinaryIO | None:
    """The file that exists now, opened; the previous one if there is none."""
    with _reading(path), suppress(FileNotFoundError):
        if file is not None and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        newest = open_to_read(path)
        if file is not None:
            file.close()
        return newest
    return file


def _reading(path: Path) -> AbstractContextManager[None]:
    return file_errors(RunDirectoryError, path, "read")


def _whole_lines(file: BinaryIO, path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a file from byte `start` on, without a torn one at the end.

    That one is read again next time: its writer may die, and the next writer truncates it.
    """
    with _reading(path):
        file.seek(start)
        while (line := file.readline(MAX_TEXT_BYTES)).endswith(b"\n"):
            yield line
    if len(line) == MAX_TEXT_BYTES:
        raise RunDirectoryError(f"{path}: a line has more than {MAX_TEXT_BYTES:,} bytes; {_ADVICE}")


class _Keys:
    """Keys of the events of a session, in their order.

    A value that a name returns to in a step (1, 2, 1) is another event: readers would else take the
    one in between for the last.
    """

    def __init__(self) -> None:
        self._step = -1
        self._repeats = RepeatCounts()

    def of(self, kind: str, values: Mapping[str, Any]) -> _Key | None:
        """The key of the next event; None for one that does not come again."""
        fields = _IDENTITY.get(kind)
        if fields is None:
            return None
        if kind != "Logged":
            return kind, values["step"], *(values.get(name) for name in fields)
        if values["step"] != self._step:
            self._step, self._repeats = values["step"], RepeatCounts()
        # As text, since values of rows cannot all be hashed, and are text where not finite.
        key = kind, values["step"], *(dumps(values.get(name) or "") for name in fields)
        return *key, self._repeats.add(key[2], key)


def _keys_of_session(rows: Iterable[Mapping[str, Any]]) -> list[_Key]:
    """The keys of the rows since the start of the current session."""
    keys: list[_Key] = []
    known, begins = _Keys(), False
    for row in rows:
        # Slot 0 joins at the start of a session, and never again.
        begins |= row["event"] == "Joined" and row.get("slot") == 0
        if row["event"] == "RunStarted" and not row.get("continued"):
            # If it goes back to a checkpoint within a session, this is not done again.
            kinds = _OF_TRAINING if begins else _IDENTITY
            keys = [k for k in keys if k[0] in kinds and k[1] <= row["step"]]
            known, begins = _Keys(), False
        if (key := known.of(row["event"], row)) is not None:
            keys.append(key)
    return keys


def _ran_seconds(path: Path) -> float:
    """The seconds that a run has taken by the newest row of its file; 0.0 if unknown."""
    with suppress(OSError, RunDirectoryError, KeyError, TypeError, ValueError):
        newest = newest_rows(path)[-1:]
        if newest and "ran_s" not in newest[0]:  # an earlier version has written it
            with open_to_read(path) as file:
                first = parse_object(file.readline(MAX_TEXT_BYTES))
            return max(0.0, float(newest[0]["time"]) - float(first["time"]))
        return max(0.0, float(newest[0]["ran_s"])) if newest else 0.0
    return 0.0


def newest_rows(path: Path, step: int = sys.maxsize) -> list[dict[str, Any]]:
    """The newest rows of a file: at least those of the last two steps, and of `step` and later.

    Raises:
        RunDirectoryError: the file cannot be read, or is damaged.
    """
    end, size = end_of_rows(path), _TAIL_BYTES
    while True:
        start = max(0, end - size)
        lines: list[bytes] = []
        with _reading(path), suppress(FileNotFoundError), open_to_read(path) as file:
            lines = list(_whole_lines(file, path, start))
        # In the middle of a file, the first line may be the end of one.
        rows = [_parse(line, str(path)) for line in lines[start > 0 :]]
        if start == 0 or (rows and rows[0]["step"] < min(step, rows[-1]["step"] - 1)):
            return rows
        size *= 4


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_object(line)
    except ValueError as error:
        raise RunDirectoryError(f"{where}: is not JSON: {error}; {_ADVICE}") from None
    for key, kind in (("event", str), ("step", int)):
        if not isinstance(row.get(key), kind):
            raise RunDirectoryError(
                f"{where}: is not an event: {key}={shown(row.get(key))}; {_ADVICE}"
            )
    return row

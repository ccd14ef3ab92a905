"""A communication profile, and its file.

The file is a JSON object; `format` names it and `version` says how its fields are to be read.
Bytes are bytes and times seconds, also where people are shown other units.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lockstep.config.files import MAX_TEXT_BYTES, read_text, replacing
from lockstep.config.parsing import as_type, parse_object, shown
from lockstep.errors import DataError, file_errors
from lockstep.planning.operations import MOST_BYTES, OPERATIONS, Fit, Layer, Point

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")


def write_json(path: Path, value: DataclassInstance) -> None:
    """Write a profile or a plan to a file.

    Raises:
        DataError: it cannot be written.
    """
    text = json.dumps(asdict(value), indent=1, allow_nan=False)
    with file_errors(DataError, path), replacing(path) as file:
        file.write(f"{text}\n")


def read_json(path: Path, parse: Callable[[str], T], what: str, command: str) -> T:
    """The profile or plan in a file.

    Args:
        path: path of the file.
        parse: function of the file's text; raises ValueError if that is something else.
        what: what the file should hold, for messages.
        command: command that writes such a file.

    Raises:
        DataError: the file cannot be read, is damaged, or is something else.
    """
    advice = f"write one with `{command}`"
    try:
        return parse(read_text(path, MAX_TEXT_BYTES, follow_links=True))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; {advice}") from None
    except ValueError as error:
        raise DataError(f"{path}: is no {what}: {error}; {advice}") from None


def check_format(values: dict[str, Any], name: str, version: int) -> None:
    """Refuse an object of another kind, or of another version.

    Raises:
        ValueError: it is one.
    """
    if values.get("format") != name:
        raise ValueError(f"format={shown(values.get('format'))}: must be {name!r}")
    if values.get("version") != version:
        found = shown(values.get("version"))
        raise ValueError(f"version={found}: this Lockstep reads version {version}")


FORMAT = "lockstep comm-profile"
VERSION = 1

Scope = Literal["inside", "between", "all"]
"""Which ranks took part: those of one host, one of each host, or all of several hosts."""

_CLOSE = 1e-6
_MOST_PARTICIPANTS = 1 << 24


@dataclass(frozen=True)
class Skipped:
    """A size that was not measured.

    Attributes:
        num_bytes: the size.
        reason: why not.
    """

    num_bytes: int
    reason: Literal["time", "memory"]


@dataclass(frozen=True)
class Measurement:
    """One operation among some ranks.

    Attributes:
        layer: who was called, see `Operation`.
        operation: name of what was called.
        scope: which ranks took part. With `inside`, hosts were measured at the same time, and a
            time is that of the slowest.
        num_ranks: number of ranks that took part; with `inside`, on the host with most of them.
        points: what was measured, by ascending size.
        skipped: sizes that were not measured.
        fit: time by size; None where there are fewer than two sizes.
    """

    layer: Layer
    operation: str
    scope: Scope
    num_ranks: int
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    fit: Fit | None


@dataclass(frozen=True)
class Host:
    """A machine of the profile.

    Attributes:
        name: its host name.
        processor: model name of its processor.
        cores: number of cores that its ranks could use.
        ranks: ranks that ran on it.
        load: mean number of its busy processes in the minute before.
    """

    name: str
    processor: str
    cores: int
    ranks: tuple[int, ...]
    load: float


@dataclass(frozen=True)
class Profile:
    """What communication costs among some ranks.

    Attributes:
        format: always `FORMAT`.
        version: version of the format.
        measured_at: Unix seconds.
        date: the same for people, in ISO 8601.
        launcher: launcher that started the ranks.
        transport: name of the engine's transport.
        torch_backend: name of the backend of `torch.distributed` that was measured.
        device: kind of device that tensors were on.
        num_ranks: number of ranks in all.
        hosts: machines, in the order of their first ranks.
        versions: versions of programs, by name.
        seconds: time that the measurement took.
        warnings: reasons why the numbers may be unreliable.
        measurements: what was measured.
    """

    format: str
    version: int
    measured_at: float
    date: str
    launcher: str
    transport: str
    torch_backend: str
    device: str
    num_ranks: int
    hosts: tuple[Host, ...]
    versions: dict[str, str]
    seconds: float
    warnings: tuple[str, ...]
    measurements: tuple[Measurement, ...]

    def find(self, layer: Layer, operation: str, scope: Scope) -> Measurement | None:
        """A measurement, or None if there is none."""
        wanted = (layer, operation, scope)
        of = (m for m in self.measurements if (m.layer, m.operation, m.scope) == wanted)
        return next(of, None)


def from_json(text: str) -> Profile:
    """The profile in a JSON text.

    Raises:
        ValueError: it is no such JSON, or what it says cannot be.
    """
    values = parse_object(text)
    check_format(values, FORMAT, VERSION)
    profile = as_type(Profile, values)
    for problem in _problems(profile):
        raise ValueError(problem)
    return profile


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        DataError: the file cannot be read, is damaged, or is something else.
    """
    return read_json(path, from_json, "communication profile", "lockstep comm-profile --json FILE")


def _problems(profile: Profile) -> Iterator[str]:
    """Errors in a profile: what no measurement can have written."""
    if not all(map(math.isfinite, _numbers(asdict(profile)))):
        yield "a number is not finite"
    if not 2 <= profile.num_ranks <= _MOST_PARTICIPANTS:
        yield f"num_ranks={profile.num_ranks}: must be 2 or more"
    ranks = sorted(rank for host in profile.hosts for rank in host.ranks)
    if len(ranks) != profile.num_ranks or ranks != [*range(len(ranks))]:
        yield "hosts: each rank must be on one of them"
    if not profile.measurements:
        yield "measurements: there are none"
    keys = [(m.layer, m.operation, m.scope) for m in profile.measurements]
    if len(set(keys)) < len(keys):
        yield "measurements: one comes twice"
    for number, measurement in enumerate(profile.measurements):
        for problem in _problems_of(measurement, profile.num_ranks):
            yield f"measurements[{number}]: {problem}"


def _problems_of(measurement: Measurement, most_ranks: int) -> Iterator[str]:
    operation = OPERATIONS.get(f"{measurement.layer}/{measurement.operation}")
    if operation is None:
        yield f"operation={shown(measurement.operation)}: is not known"
        return
    if not 2 <= measurement.num_ranks <= most_ranks:
        yield f"num_ranks={measurement.num_ranks}: must be between 2 and {most_ranks}"
    sizes = [point.num_bytes for point in measurement.points]
    if not sizes or any(a >= b for a, b in pairwise(sizes)):
        yield "points: there must be some, of ascending num_bytes"
    for point in measurement.points:
        yield from _problems_at(point, operation.factor(measurement.num_ranks))
    if measurement.fit is not None:
        yield from _problems_of_fit(measurement.fit)


def _problems_at(point: Point, factor: float) -> Iterator[str]:
    times = (0.0, point.min_s, point.median_s, point.p99_s, point.max_s)
    where = f"num_bytes={point.num_bytes}"
    if not 0 <= point.num_bytes <= MOST_BYTES or point.num_samples < 1:
        yield f"{where}, num_samples={point.num_samples}: cannot be"
    if point.min_s <= 0 or list(times) != sorted(times):
        yield f"{where}: times must be greater than 0 and ascend from min_s to max_s"
        return
    speed = point.num_bytes / point.median_s
    for name, found, expected in (
        ("algorithm_bytes_per_s", point.algorithm_bytes_per_s, speed),
        ("bus_bytes_per_s", point.bus_bytes_per_s, speed * factor),
    ):
        if not math.isclose(found, expected, rel_tol=_CLOSE):
            yield f"{where}, {name}={found}: does not go with median_s"


def _problems_of_fit(fit: Fit) -> Iterator[str]:
    if not fit.pieces:
        yield "fit: has no pieces"
    if any(min(p.alpha_s, p.beta_s_per_byte, p.first_bytes) < 0 for p in fit.pieces):
        yield "fit: alpha_s and beta_s_per_byte must be 0 or more"
    limits = [limit for piece in fit.pieces for limit in (piece.first_bytes, piece.last_bytes)]
    if limits != sorted(limits):
        yield "fit: pieces must ascend"


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in nested dicts and sequences."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value

"""Every error a user can cause or must act on.

All of them are `ValueError`s with one clear message: what, where (file, field, value) and
what to do. The command prints the message and exits with `exit_code`; no traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

E = TypeVar("E", bound="LockstepError")

_HEAD, _TAIL = 8 << 10, 24 << 10


def shortened(message: str) -> str:
    """A message of a bounded length: its beginning and its end, and how much is left out.

    An exception's text may hold a whole tensor or file, and is kept in memory, events, results and
    logs of all ranks.
    """
    left_out = len(message) - _HEAD - _TAIL
    if left_out <= 0:
        return message
    return f"{message[:_HEAD]}\n… ({left_out:,} characters left out) …\n{message[-_TAIL:]}"


class LockstepError(ValueError):
    """Base of all errors meant for the user; long messages are shortened.

    Attributes:
        exit_code: exit code of the command.
        is_shared: whether every rank raises it. Only then can a rank leave in order; from any other
            error the group has to be aborted, or the rest would wait for this rank for ever.
        is_alone: whether this rank may be the only one that raises it, where no group knows of it.
            Then it tells the user, whatever its number.
        rank: rank of this process in its group; None while there was no group.
        is_told: whether the user has been told already, so that no message is printed for it.
    """

    exit_code = 2
    is_shared = False
    is_alone = False
    is_told = False
    rank: int | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show of an error that nobody catches: the message."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(LockstepError):
    """A config key, value or combination of values is not usable."""


class DataError(LockstepError):
    """A dataset is missing, damaged or does not follow the dataset protocol."""


class TaskError(LockstepError):
    """A user's Task does not keep the contract of `lockstep.Task`."""


class EnvironError(LockstepError):
    """The launcher's environment variables contradict each other or are half set."""


class LaunchError(LockstepError):
    """Ranks could not be started."""


class RunDirectoryError(LockstepError):
    """A run directory is unwritable, in use, or belongs to another config."""


class CheckpointError(LockstepError):
    """A checkpoint is damaged, missing or belongs to another model."""


class NonFiniteError(LockstepError):
    """A loss or gradient is NaN or infinite."""


class DivergenceError(LockstepError):
    """Replicas that must be bit-identical are not."""


class TaskFailure(LockstepError):
    """The user's code raised an exception on some rank; the message holds its traceback."""

    exit_code = 1


class RankFailure(LockstepError):
    """A rank was lost, and the others cannot go on without it; the run can be resumed."""

    exit_code = 75
    is_shared = True


def alone(error: E) -> E:
    """The error, marked as one that this rank tells, since others may not raise it."""
    error.is_alone = True
    return error


def shared(error: E) -> E:
    """The error, marked as one that every rank raises."""
    error.is_shared = True
    return error


@contextmanager
def file_errors(
    kind: type[LockstepError], path: object, done: str = "written", advice: str = ""
) -> Iterator[None]:
    """Raise an `OSError` that occurs in this context as an error for the user.

    Args:
        kind: class of the error to raise.
        path: path of the file, for the message.
        done: what cannot be done with the file, such as `read`.
        advice: what the user can do about it.

    Raises:
        LockstepError: of class `kind`, instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        hint = f"; {advice}" if advice else ""
        raise kind(f"{path}: cannot be {done}: {error.strerror or error}{hint}") from error


@contextmanager
def needing(extra: str, need: str) -> Iterator[None]:
    """Raise an `ImportError` that occurs in this context as an error for the user.

    Args:
        extra: extra of this package that brings what is imported.
        need: who needs what, as in `pictures need matplotlib`.

    Raises:
        ConfigError: instead of an `ImportError`.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f'{need}: pip install "lockstep-train[{extra}]"') from error

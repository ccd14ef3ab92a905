"""Every error a user can cause or must act on.

All of them are `ValueError`s with one clear message: what, where (file, field, value) and
what to do. The command prints the message and exits with `exit_code`; no traceback.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound="LockstepError")


class LockstepError(ValueError):
    """Base of all errors meant for the user.

    Attributes:
        exit_code: what the command exits with.
        is_shared: whether every rank raises it. Only then can a rank leave in order; from any other
            error the group has to be aborted, or the rest would wait for this rank for good.
        rank: the one this process had in its group; None while there was no group.
    """

    exit_code = 2
    is_shared = False
    rank: int | None = None


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


def shared(error: E) -> E:
    """The error, marked as one that every rank raises."""
    error.is_shared = True
    return error

"""The folder of a run: bound to one config, used by one job at a time."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from lockstep.config import TrainConfig, outcome
from lockstep.config.files import leftovers, open_regular, read_text, replacing
from lockstep.config.parsing import as_type, flattened, parse_object, parse_yaml, shown_apart
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.listing import own_entries
from lockstep.engine.flight import FlightFolder
from lockstep.errors import RunDirectoryError

_IDENTITY = "run.json"
_COMMITTED = b'"event": "StepDone"'
_HANG_REPORT = "hang_of_slot_"

_LOCK_POLL_S = 0.02


@dataclass(frozen=True)
class Identity:
    """The identity of the run that a folder belongs to.

    Attributes:
        task: name of the task.
        config_hash: hash of the config, 16 hexadecimal digits.
        target: name of a recipe, or file and class, that the task is loaded from; empty if unknown.
        overrides: `key=value` items that a script was started with.
        epochs: that of the config, which a resumed run may change; None in files of versions that
            did not write it.
        steps: like `epochs`.
    """

    task: str
    config_hash: str
    target: str
    overrides: tuple[str, ...] = ()
    epochs: int | None = None
    steps: int | None = None

    @property
    def length(self) -> dict[str, int | None]:
        """`epochs` and `steps`, if they are known."""
        return {} if self.epochs is None else {"epochs": self.epochs, "steps": self.steps}


def rescued_paths(run_dir: Path) -> Iterator[Path]:
    """The folders in which a run goes on whose directory is gone, the first that is free."""
    yield run_dir.with_name(f"{run_dir.name}-rescued")
    for number in itertools.count(2):
        yield run_dir.with_name(f"{run_dir.name}-rescued-{number}")


class RunDirectory:
    """Paths of a run, and the claim on them. Used by rank 0.

    Attributes:
        path: path of the folder.
        checkpoints: folder of the checkpoints.
        flight: files with the newest calls of ranks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.flight = FlightFolder(path)
        self._lock: IO[str] | None = None
        self._folder: tuple[int, int] | None = None
        self._files: tuple[str, str] = ("", "")
        self._unsettled: tuple[str, str] | None = None

    def hang_report(self, slot: int) -> Path:
        """The path that the watchdog of a process writes its report to."""
        return self.path / f"{_HANG_REPORT}{slot}.json"

    def hang_reason(self, slot: int) -> str:
        """Why the watchdog of a process has killed it; empty if it has not."""
        try:
            return str(parse_object(read_text(self.hang_report(slot)))["reason"])
        except (OSError, ValueError, KeyError):
            return ""

    def open(self, config: TrainConfig, identity: Identity, resume: bool) -> None:
        """Claim the folder for this config, creating it if need be.

        Args:
            config: config that is to be trained.
            identity: task, config hash and target of the run.
            resume: whether to go on from checkpoints that are there; the config may then have other
                `epochs` and `steps` than the run's, and `settle` writes them when that is allowed.

        Raises:
            RunDirectoryError: it cannot be written, another job uses it, it belongs to another
                config, or it holds checkpoints and `resume` is false.
        """
        self.lock()
        try:
            self._bind(config, identity, resume)
        except BaseException:
            self.close()
            raise

    def lock(self, patience_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> None:
        """Make sure that this process is the only one that writes here; no-op if it is.

        Args:
            patience_s: seconds to wait for a process that holds the lock and is about to end.
            on_wait: function that is called again and again while waiting.

        Raises:
            RunDirectoryError: it cannot be written, or another job uses it.
        """
        if self._lock is not None:
            return
        deadline = time.monotonic() + patience_s
        while not self._try_lock():
            if time.monotonic() >= deadline:
                raise RunDirectoryError(
                    f"{self.path}: another job is training in it; wait for it, or choose another "
                    "with --run-dir"
                )
            on_wait()
            time.sleep(_LOCK_POLL_S)
        if not any(self._files):  # of a process that takes over from one that was lost
            with suppress(OSError, ValueError):
                self._files = (
                    read_text(self.path / "config.yaml"), read_text(self.path / _IDENTITY)
                )  # fmt: skip

    def _try_lock(self) -> bool:
        """Whether this process has the lock now.

        A POSIX record lock belongs to the process: it is gone when the process ends, where an
        `flock` would live on in forked children such as data loader workers. In return, closing
        any descriptor of the file gives it up, and it does not exclude this process itself; so
        nothing else may open the file.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_regular(self.path / ".lock", os.O_RDWR | os.O_CREAT))
            self._folder = _identity(os.stat(self.path))
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path}: is not writable: {error.strerror}; choose another with --run-dir"
            ) from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both for "someone has it"
            self.close()
            return False
        except OSError as error:
            self.close()
            raise RunDirectoryError(
                f"{self.path}: cannot be locked: {error.strerror}; choose another with --run-dir"
            ) from None
        for path in leftovers(self.path) + leftovers(self.checkpoints):
            # Watchdogs of other ranks write their reports without the lock.
            if not path.name.startswith(f".{_HANG_REPORT}"):
                with suppress(OSError):  # folders are pruned with the checkpoints
                    path.unlink()
        return True

    def close(self) -> None:
        """Give up the claim."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_gone(self) -> bool:
        """Whether another folder, or none, is where this process has locked its own.

        A disk that does not answer for a moment is no reason to think so.
        """
        if self._lock is None:
            return False
        try:
            lock = os.stat(self.path / ".lock")
            return _identity(os.stat(self.path)) != self._folder or _identity(lock) != _identity(
                os.fstat(self._lock.fileno())
            )
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def rescue(self) -> str:
        """Go on in a new folder beside this one, which is gone; its path.

        Raises:
            RunDirectoryError: there can be none.
        """
        path = next(path for path in rescued_paths(self.path) if not path.exists())
        self.close()
        self.path, self.checkpoints, self.flight = path, path / "checkpoints", FlightFolder(path)
        self.lock()
        config, identity = self._files
        self._write("config.yaml", config)
        self._write(_IDENTITY, identity)
        return str(path)

    def _bind(self, config: TrainConfig, identity: Identity, resume: bool) -> None:
        is_other = False
        if (self.path / _IDENTITY).exists():
            known = self.identity()
            is_same = (known.task, known.config_hash) == (identity.task, identity.config_hash)
            if not is_same and not self._is_begun():
                self._clear()
                known = identity
            if known.task != identity.task:
                raise RunDirectoryError(
                    f"{self.path}: holds a run of {known.task}, this is {identity.task}; choose "
                    "another with --run-dir"
                )
            is_other = known.config_hash != identity.config_hash
            if is_other and not (resume and self._is_of_other_length(known, config)):
                differences = self._differences(known, config)
                raise RunDirectoryError(
                    f"{self.path}: holds a run with another config: {differences}; leave that "
                    "as it is there, or choose another with --run-dir"
                )
        try:
            listing.bring_back(self.checkpoints)
        except OSError as error:
            raise RunDirectoryError(
                f"{error.filename}: cannot be renamed to {error.filename2}: {error.strerror}; it "
                "is a checkpoint that was about to be replaced; rename it yourself"
            ) from None
        if listing.folders(self.checkpoints) and not resume:
            newest = listing.folders(self.checkpoints)[0].name
            raise RunDirectoryError(
                f"{self.path}: already holds this run up to {newest}; add --resume (in Python, "
                "resume=True) to go on, or choose another with --run-dir"
            )
        # Of earlier sessions: a process of this one with the same slot may die of something else.
        for report in self.path.glob(f"{_HANG_REPORT}*.json"):
            with suppress(OSError):
                report.unlink()
        with suppress(OSError):
            self.flight.begin()
        whole = config.model_copy(update={"stop_at_step": None})  # of a session, not of the run
        self._files = whole.to_yaml(), json.dumps(asdict(identity)) + "\n"
        self._unsettled = self._files
        if not is_other:
            self.settle()

    def settle(self) -> None:
        """Write config and identity, if that waits until it is known that the run may go on so.

        Raises:
            RunDirectoryError: they cannot be written.
        """
        if self._unsettled is not None:
            config, identity = self._unsettled
            self._write("config.yaml", config)
            self._write(_IDENTITY, identity)
            self._unsettled = None

    def identity(self) -> Identity:
        """The identity of the run that is there.

        Raises:
            RunDirectoryError: there is none, or its file is damaged.
        """
        path = self.path / _IDENTITY
        try:
            return as_type(Identity, parse_object(read_text(path)))
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.path}: is no run directory (no {_IDENTITY})") from None
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise RunDirectoryError(
                f"{path}: is damaged: {error}; start the run in a new directory, or put the file "
                "back from a copy"
            ) from None

    def _is_begun(self) -> bool:
        """Whether a step of the run that is there was ever committed."""
        if any(self.checkpoints.glob("*step_*")):
            return True
        try:
            with os.fdopen(open_regular(self.path / "events.jsonl"), "rb") as file:
                return any(_COMMITTED in line for line in file)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _clear(self) -> None:
        """Remove what starts without a committed step have left, so that any config may be next."""
        for entry in own_entries(self.path):
            with suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != ".lock":
                    entry.unlink()
        self.checkpoints.mkdir(exist_ok=True)

    def _is_of_other_length(self, known: Identity, config: TrainConfig) -> bool:
        """Whether the run that is there differs in `epochs` and `steps` only.

        Whether it may is seen when its newest checkpoint is read, see `snapshot.longer`.
        """
        try:
            # config.yaml may say what the run was about to become, if it was killed in `settle`.
            there = known.length or parse_yaml(read_text(self.path / "config.yaml"))
            length = {key: there[key] for key in ("epochs", "steps")}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return config.model_copy(update=length).hash == known.config_hash

    def _differences(self, known: Identity, config: TrainConfig) -> str:
        """The keys of the hash with other values than the run's in the folder."""
        try:
            there = parse_yaml(read_text(self.path / "config.yaml"))
        except (OSError, ValueError):
            return "its config.yaml cannot be read"
        old = flattened(there) | known.length
        new = flattened(config.model_dump(mode="json"))
        harmless = new.keys() - flattened(outcome(config)).keys()
        keys = [k for k in {**old, **new} if k not in harmless and old.get(k) != new.get(k)]
        pairs = {key: shown_apart(old.get(key), new.get(key)) for key in keys[:5]}
        return ", ".join(f"{k} is {there} there, {here} here" for k, (there, here) in pairs.items())

    def _write(self, name: str, text: str) -> None:
        try:
            with replacing(self.path / name) as file:
                file.write(text)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path / name}: cannot be written: {error.strerror}"
            ) from None


def _identity(status: os.stat_result) -> tuple[int, int]:
    """What tells a file or folder from any other one, whatever it is called."""
    return status.st_dev, status.st_ino

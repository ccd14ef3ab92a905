"""The run directory: it belongs to one config, and one job at a time uses it."""

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
from time import perf_counter
from typing import IO

from lockstep.config import TrainConfig, outcome
from lockstep.config.files import leftovers, open_regular, read_text, replacing
from lockstep.config.parsing import as_type, flattened, parse_object, parse_yaml, shown_apart
from lockstep.engine.call_history import FlightFolder
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.listing import IDENTITY, Owners, own_entries
from lockstep.errors import RunDirectoryError, file_errors

_COMMITTED = b'"event": "StepDone"'
_HANG_REPORT = "hang_of_slot_"

_LOCK_POLL_S = 0.02

_LOOK_S = 0.25
"""Seconds between checks whether the run directory still exists."""

DIRECTORY_LOST = "the run directory is gone"
"""The reason to end for it."""


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
    """Folders in which a run may go on whose directory is gone; it uses the first free one."""
    yield run_dir.with_name(f"{run_dir.name}-rescued")
    for number in itertools.count(2):
        yield run_dir.with_name(f"{run_dir.name}-rescued-{number}")


class RunDirectory:
    """Paths of a run, and the lock on them. Used by rank 0.

    Attributes:
        path: path of the folder.
        name: its path for users, or the URL that it is a copy of.
        checkpoints: folder of the checkpoints.
        flight: files with the newest calls of ranks.
        lost: path of the folder that is gone; None before the run has moved to another.
        owners: who writes to it, and to those of other hosts.
        stores: whether this process stores what happens here.
    """

    def __init__(self, path: Path, url: str = "") -> None:
        self._use(path, url)
        self.lost: Path | None = None
        self.owners, self.stores = Owners(), False
        self._lock: IO[str] | None = None
        self._folder: os.stat_result | None = None
        self._files: tuple[str, str] = ("", "")
        self._is_settled = True

    def _use(self, path: Path, url: str = "") -> None:
        self.name = url or str(path)
        self.path, self.checkpoints, self.flight = path, path / "checkpoints", FlightFolder(path)

    def hang_report(self, slot: int) -> Path:
        """The path that the watchdog of a process writes its report to."""
        return self.path / f"{_HANG_REPORT}{slot}.json"

    def hang_reason(self, slot: int) -> str:
        """Why the watchdog of a process has killed it; empty if it has not."""
        try:
            return str(parse_object(read_text(self.hang_report(slot)))["reason"])
        except (OSError, ValueError, KeyError):
            return ""

    def open(
        self, config: TrainConfig, identity: Identity, resume: bool, trains: bool = False
    ) -> None:
        """Lock the folder and bind it to this config, creating it if necessary.

        Args:
            config: config that is to be trained.
            identity: task, config hash and target of the run.
            resume: whether to go on from existing checkpoints; the config may then have other
                `epochs` and `steps` than the run, and `settle` writes them when that is allowed.
            trains: whether the run trains already, so that its reports and its length hold.

        Raises:
            RunDirectoryError: it cannot be written, another job uses it, it belongs to another
                config, or it holds checkpoints and `resume` is false.
        """
        self.lock()
        try:
            self._bind(config, identity, resume, trains)
        except BaseException:
            self.close()
            raise

    def lock(self, patience_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> None:
        """Make sure that only this process writes here; does nothing if it has the lock.

        Args:
            patience_s: seconds to wait for a process that has the lock and is about to end.
            on_wait: function that is called repeatedly while waiting.

        Raises:
            RunDirectoryError: it cannot be written, or another job uses it.
        """
        if self._lock is not None:
            return
        deadline = time.monotonic() + patience_s
        while not self._try_lock():
            if time.monotonic() >= deadline:
                raise RunDirectoryError(
                    f"{self.name}: another job is training in it; wait for it, or choose another "
                    "with --run-dir"
                )
            on_wait()
            time.sleep(_LOCK_POLL_S)

    def _try_lock(self) -> bool:
        """Whether this process has the lock now.

        A POSIX record lock belongs to the process: it is released when the process ends, whereas
        an `flock` would live on in forked children such as data loader workers. But closing any
        descriptor of the file releases it, and it does not exclude this process itself; so nothing
        else may open the file.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_regular(self.path / ".lock", os.O_RDWR | os.O_CREAT))
            self._note_folder()
        except OSError as error:
            reason = f"is not writable: {error.strerror}"
            if isinstance(error, FileExistsError) and os.path.islink(self.path):
                reason = f"is a link to {os.readlink(self.path)}, which does not exist"
            raise RunDirectoryError(
                f"{self.name}: {reason}; choose another with --run-dir"
            ) from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both for "someone has it"
            self.close()
            return False
        except OSError as error:
            self.close()
            raise RunDirectoryError(
                f"{self.name}: cannot be locked: {error.strerror}; choose another with --run-dir"
            ) from None
        for path in leftovers(self.path) + leftovers(self.checkpoints):
            # Watchdogs of other ranks write their reports without the lock.
            if not path.name.startswith(f".{_HANG_REPORT}"):
                with suppress(OSError):  # folders are pruned with the checkpoints
                    path.unlink()
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_gone(self) -> bool:
        """Whether the folder that this process knows was deleted, moved or replaced.

        An I/O error is not a sign of that: a network disk may not answer for a moment.
        """
        if self._folder is None:
            return False
        try:
            is_same = os.path.samestat(os.stat(self.path), self._folder)
            if self._lock is not None:
                own = os.fstat(self._lock.fileno())
                is_same = is_same and os.path.samestat(os.stat(self.path / ".lock"), own)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not is_same

    def rescue(self) -> str:
        """Go on in a new folder beside this one if it is gone; returns the path of the run's.

        Raises:
            RunDirectoryError: it cannot be created.
        """
        if self.is_gone():
            self.follow(
                next(path for path in rescued_paths(self.path) if not listing.is_used(path))
            )
            self.lock()
            self._is_settled = False
            self.settle()
        return str(self.path)

    def follow(self, path: Path) -> None:
        """Use the folder that rank 0 has moved the run to; does nothing if it is this one."""
        if path != self.path:
            self.close()
            self.lost = self.path
            self._use(path)
            self._note_folder()

    def describe(self, config: TrainConfig, identity: Identity) -> None:
        """Note what the run in this folder is, and which folder it is.

        So that any rank may become rank 0, and find that the folder is gone.
        """
        # `stop_at_step` belongs to the session, not to the run.
        whole = config.model_copy(update={"stop_at_step": None})
        self._files = whole.to_yaml(), json.dumps(asdict(identity)) + "\n"
        if self._lock is None:
            self._note_folder()

    def _note_folder(self) -> None:
        """Note which folder this is; on hosts that do not have it, there is nothing to note."""
        self._folder = None
        with suppress(OSError):
            self._folder = os.stat(self.path)

    def _bind(self, config: TrainConfig, identity: Identity, resume: bool, trains: bool) -> None:
        is_other, is_there = False, (self.path / IDENTITY).exists()
        if is_there:
            known = self.identity()
            is_same = (known.task, known.config_hash) == (identity.task, identity.config_hash)
            if not is_same and not self._is_begun():
                self._clear()
                known = identity
            if known.task != identity.task:
                raise RunDirectoryError(
                    f"{self.name}: holds a run of {known.task}, this is {identity.task}; choose "
                    "another with --run-dir"
                )
            is_other = known.config_hash != identity.config_hash
            if is_other and not (resume and self._is_of_other_length(known, config)):
                differences = self._differences(known, config)
                raise RunDirectoryError(
                    f"{self.name}: holds a run with another config: {differences}; leave that "
                    "as it is there, or choose another with --run-dir"
                )
        try:
            listing.bring_back(self.checkpoints)
        except OSError as error:
            raise RunDirectoryError(
                f"{error.filename}: cannot be renamed to {error.filename2}: {error.strerror}; it "
                "is a checkpoint that was about to be replaced; rename it yourself"
            ) from None
        # Never by chance: a second run would mix its checkpoints with those of the first.
        if listing.folders(self.checkpoints) and not resume:
            newest = listing.folders(self.checkpoints)[0].name
            raise RunDirectoryError(
                f"{self.name}: already holds this run up to {newest}; add --resume (in Python, "
                "resume=True) to go on, or choose another with --run-dir"
            )
        self.describe(config, identity)
        if not trains:
            # Of earlier sessions: a process of this one with the same slot may die for another
            # reason.
            for report in self.path.glob(f"{_HANG_REPORT}*.json"):
                with suppress(OSError):
                    report.unlink()
            with suppress(OSError):
                self.flight.begin()
        # That a disk is full now is no reason to end if nothing has to be written.
        self._is_settled = trains and is_there and not is_other
        if trains or not is_other:  # else `Checkpointer.resume` checks first if it may be longer
            self.settle()

    def settle(self) -> None:
        """Write config and identity, unless that is done; once it is known that the run may go on.

        Raises:
            RunDirectoryError: they cannot be written.
        """
        if self._is_settled:
            return
        for name, text in zip(("config.yaml", IDENTITY), self._files, strict=True):
            self._write(name, text)
        self._is_settled = True

    def identity(self) -> Identity:
        """The identity of the run in this folder.

        Raises:
            RunDirectoryError: there is none, or its file is damaged.
        """
        path = self.path / IDENTITY
        try:
            return as_type(Identity, parse_object(read_text(path)))
        except FileNotFoundError:
            raise RunDirectoryError(f"{self.name}: is no run directory (no {IDENTITY})") from None
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise RunDirectoryError(
                f"{path}: is damaged: {error}; start the run in a new directory, or put the file "
                "back from a copy"
            ) from None

    def _is_begun(self) -> bool:
        """Whether a step of the run in this folder was ever committed."""
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
        """Remove the files of starts without a committed step, so that any config may follow."""
        for entry in own_entries(self.path):
            with suppress(OSError):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != ".lock":
                    entry.unlink()
        self.checkpoints.mkdir(exist_ok=True)

    def _is_of_other_length(self, known: Identity, config: TrainConfig) -> bool:
        """Whether the run in this folder differs in `epochs` and `steps` only.

        Whether it may is checked when its newest checkpoint is read, see `resumable.stretch`.
        """
        try:
            # After a kill in `settle`, config.yaml may have the new length already.
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
        path = self.path / name
        with file_errors(RunDirectoryError, path), replacing(path) as file:
            file.write(text)


class DirectoryWatch:
    """Checks from time to time whether the run directory of this process is gone.

    If so, it reports that in each step from then on: the first of these may have to be repeated.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._look_at = 0.0
        self._reason = ""

    def reason(self) -> str:
        """Why the run has to end; empty if it does not."""
        now = perf_counter()
        if not self._reason and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._reason = DIRECTORY_LOST if self._directory.is_gone() else ""
        return self._reason

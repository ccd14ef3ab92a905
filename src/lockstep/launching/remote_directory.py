"""A run directory in object storage, and the folder with its copy: what differs, and sending it.

The files of a checkpoint are sent first, then its manifest, then the hints that name it. So what
others find is always a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.config.files import read_text, replacing, replacing_binary
from lockstep.config.parsing import parse_object
from lockstep.engine.checkpoint.listing import IDENTITY, MANIFEST, own_entries
from lockstep.errors import RunDirectoryError

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)")
"""A URL; `pathlib` makes one slash of two."""
_ON_DISK = ("file", "local")
_OWNER = ".owner.json"
_SENT = ".sent.json"
_AT_ONCE = 8
_CHECKPOINT = re.compile(r"checkpoints/step_[0-9]+/")
_FIRST = (IDENTITY, "config.yaml")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # A wrong address is told in seconds, and not after botocore's minutes.
    "s3": {
        "config_kwargs": {
            "connect_timeout": 4, "read_timeout": 30, "retries": {"max_attempts": 2},
        },
        "use_listings_cache": False,
    },
}  # fmt: skip


def url_of(path: str | Path | None) -> str | None:
    """The URL that a run directory has been given as; None for a folder on a disk."""
    match = _URL.fullmatch(str(path)) if path is not None else None
    if match is None or match[1] in _ON_DISK:
        return None
    return f"{match[1]}://{match[2].rstrip('/')}"


class RemoteDirectory:
    """A run directory in object storage, and the folder with its copy.

    Attributes:
        url: of the run directory.
        path: the folder.
    """

    def __init__(
        self, url: str, purpose: str = "train", on_warning: Callable[[str], None] = print
    ) -> None:
        """Find both; nothing is read yet.

        Args:
            url: of the run directory.
            purpose: name of the folder that has all copies for one purpose.
            on_warning: gets what users should know.

        Raises:
            RunDirectoryError: no installed package reads such URLs.
        """
        # After the import of torch, which brings it, this takes no time.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url, self._warn = url, on_warning
        scheme = url.partition(":")[0]
        try:
            self._fs, self._base = url_to_fs(url, **_OPTIONS.get(scheme, {}))
        except ImportError as error:
            advice = "`pip install 'lockstep-train[s3]'`" if scheme == "s3" else str(error)
            raise RunDirectoryError(f"{url}: needs another package: {advice}") from None
        except Exception as error:
            raise RunDirectoryError(f"{url}: cannot be a run directory: {text_of(error)}") from None
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        copies = Path(home).expanduser() / "lockstep" / "copies" / purpose / scheme
        self.path: Path = copies / self._base.strip("/")
        if ".." in self.path.parts:
            raise RunDirectoryError(f"{url}: must not contain ..")
        self._id = uuid.uuid4().hex
        self._sent: dict[str, Any] = {}

    def runs(self) -> list[str]:
        """The URLs of all runs in it, or its own, if it is a run.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        found = [
            name for name in self._there(any_name=True) if PurePosixPath(name).name == IDENTITY
        ]
        places = sorted(str(PurePosixPath(name).parent) for name in found)
        return [self.url if place == "." else f"{self.url}/{place}" for place in places]

    def fetch(self, keeps_unsent: bool = True, with_checkpoints: bool = True) -> None:
        """Make the folder a copy of what the URL has.

        Args:
            keeps_unsent: whether changes that an earlier process has made in the folder and could
                not send stay: as they are if nobody has taken the run over since, else in a folder
                beside it.
            with_checkpoints: whether the folders of checkpoints are wanted too.

        Raises:
            RunDirectoryError: the URL cannot be read, or the folder cannot be written.
        """
        there = self._there()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            owner, self._sent = self._read_sent()
            if keeps_unsent and self._changes():
                with suppress(FileNotFoundError):  # nobody has taken it over
                    if owner == self._owner().get("id"):
                        return  # that process may have sent more than it could note
                self._put_aside()
            complete = {str(PurePosixPath(n).parent) for n in there if n.endswith(f"/{MANIFEST}")}
            wanted = {
                name: tag
                for name, tag in there.items()
                if not _CHECKPOINT.match(name)
                or (with_checkpoints and str(PurePosixPath(name).parent) in complete)
            }
            here = self._here()
            old = [n for n, t in wanted.items() if self._sent.get(n) != [here.get(n), t]]
            for name in here.keys() - wanted.keys():
                (self.path / name).unlink()
                with suppress(OSError):  # it has other files
                    (self.path / name).parent.rmdir()  # an empty one is no checkpoint
            self._each(self._download, old)
            here = self._here()
            self._sent = {name: [here[name], tag] for name, tag in there.items() if name in here}
            self._write_sent()
        except OSError as error:
            raise RunDirectoryError(
                f"{self.url}: cannot be copied to {self.path}: {text_of(error)}"
            ) from None

    def own(self) -> None:
        """Take the run directory over; a job that still writes to it will stop.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        owner = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self._fs.pipe_file(f"{self._base}/{_OWNER}", json.dumps(owner).encode())
        except Exception as error:
            raise self._unusable("written", error) from None
        self._write_sent()

    def send(self) -> None:
        """Carry over what has changed in the folder.

        Raises:
            RunDirectoryError: another job has taken the run directory over.
            Exception: whatever a file system raises that cannot be written.
        """
        changed = self._changes()
        if not changed:
            return
        self._check_owner()
        here = self._here()
        new = {name for name in changed if name in here}
        # Nobody may take a checkpoint for whole while its files are replaced or removed.
        for manifest in {f"{m[0]}{MANIFEST}" for m in map(_CHECKPOINT.match, new) if m}:
            if manifest in self._sent:
                self._remove(manifest)
            if manifest in here:
                new.add(manifest)
        try:
            for stage in range(_NUM_STAGES):
                self._each(self._upload, [name for name in new if _stage(name) == stage])
            gone = [name for name in changed if name not in here]
            for name in sorted(gone, key=lambda name: not name.endswith(f"/{MANIFEST}")):
                self._remove(name)
        finally:
            self._write_sent()

    def _there(self, any_name: bool = False) -> dict[str, str]:
        """What the URL has: for each name a text that changes with the content."""
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._base, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise self._unusable("read", error) from None
        names = {path[len(self._base) + 1 :]: info for path, info in found.items()}
        return {n: _tag(info) for n, info in names.items() if any_name or _is_part(n)}

    def _here(self) -> dict[str, list[int]]:
        """Size and time of each file in the folder."""
        found: dict[str, list[int]] = {}
        for entry in own_entries(self.path):
            for path in (entry, *(entry.rglob("*") if entry.is_dir() else ())):
                name = path.relative_to(self.path).as_posix()
                with suppress(FileNotFoundError):  # pruned meanwhile
                    status = path.lstat()
                    if _is_part(name) and path.is_file() and not path.is_symlink():
                        found[name] = [status.st_size, status.st_mtime_ns]
        return found

    def _changes(self) -> list[str]:
        """Names of files that are others than the URL has, or are gone."""
        here = self._here()
        if self._sent and IDENTITY not in here:
            return []  # the folder itself was removed or moved, which deletes no run
        return [n for n in {**here, **self._sent} if self._sent.get(n, [None])[0] != here.get(n)]

    def _unusable(self, how: str, error: Exception) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self.url}: cannot be {how}: {text_of(error)}; check the URL, the endpoint and the "
            "credentials"
        )

    def _owner(self) -> dict[str, Any]:
        """Who has taken the run over last."""
        return parse_object(self._fs.cat_file(f"{self._base}/{_OWNER}").decode())

    def _check_owner(self) -> None:
        owner = self._owner()
        if owner.get("id") != self._id:
            raise RunDirectoryError(
                f"{self.url}: another job (process {owner.get('pid')} of {owner.get('host')}) has "
                f"begun to train in it, so this one stops; its own state is in {self.path}"
            )

    def _download(self, name: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._fs.open(f"{self._base}/{name}", "rb") as there, replacing_binary(path) as f:
                shutil.copyfileobj(there, f, 1 << 20)
        except FileNotFoundError:
            pass  # a job that trains there has removed it meanwhile
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{name}: {text_of(error)}") from None

    def _upload(self, name: str) -> None:
        # Before the content is read, so that what is added meanwhile counts as a change.
        with suppress(FileNotFoundError):
            status = (self.path / name).stat()
            self._fs.put_file(str(self.path / name), f"{self._base}/{name}")
            tag = _tag(self._fs.info(f"{self._base}/{name}"))
            self._sent[name] = [[status.st_size, status.st_mtime_ns], tag]

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._base}/{name}")
        self._sent.pop(name, None)

    @staticmethod
    def _each(work: Any, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(work, names))

    def _put_aside(self) -> None:
        """Keep a copy that is not of what the URL has now."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}-unsent-{number}")).exists():
            number += 1
        self.path.rename(aside)
        self.path.mkdir()
        self._sent = {}
        self._warn(
            f"{aside} holds what could not be carried over to {self.url} before another job did"
        )

    def _read_sent(self) -> tuple[str, dict[str, Any]]:
        """Who has sent from this folder last, and what."""
        with suppress(OSError, ValueError, KeyError):
            known = parse_object(read_text(self.path / _SENT))
            return str(known["owner"]), dict(known["files"])
        return "", {}

    def _write_sent(self) -> None:
        with replacing(self.path / _SENT) as file:
            json.dump({"owner": self._id, "files": self._sent}, file)


_NUM_STAGES = 4


def _stage(name: str) -> int:
    """Which files of a change are sent first."""
    if name in _FIRST:
        return 0
    if _CHECKPOINT.match(name):
        return 2 if name.endswith(f"/{MANIFEST}") else 1
    return 3


def _is_part(name: str) -> bool:
    """Whether a file is part of the run, and not of a write that is under way."""
    return not any(part.startswith(".") for part in PurePosixPath(name).parts)


def _tag(info: Mapping[str, Any]) -> str:
    """A text that changes with the content of an object."""
    if "ETag" in info:
        return str(info["ETag"])
    when = next((info[key] for key in ("mtime", "LastModified", "created") if key in info), "")
    return f"{info.get('size')} {when}"


def text_of(error: BaseException) -> str:
    """An error of a library in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

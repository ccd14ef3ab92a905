"""The entries of a run directory, its files, checkpoints and hints; and who writes them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.files import leftovers, read_text, replacing

ENTRIES = (
    "checkpoints", "config.yaml", "events.jsonl", "flight", "logged", "metrics.csv", "profile",
    "ranks.log", "report.html", "report.md", "report_figures", "result.json", "run.json", "sketch",
    "tags.json", "tensorboard", "trackers", "view", ".lock",
)  # fmt: skip
"""Names of files and folders."""

PATTERNS = ("hang_of_slot_*.json", "quantum_epoch*.npz")
"""Patterns of further ones."""
_FIRST_ENTRIES = "checkpoints", ".lock", "config.yaml"
"""What there is of a run directory before it belongs to a run."""
IDENTITY = "run.json"
"""The file that says what run it is."""
MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last, with the SHA-256 of the others."""
INDEX = ".metadata"
"""The same of a folder of `torch.distributed.checkpoint`."""
SUFFIX = ".safetensors"
_FOLDER = re.compile(r"step_([0-9]{8,20})")


@dataclass(frozen=True)
class Owners:
    """Which ranks write to which run directories; by default rank 0 to the one that there is.

    Hosts that share no file system have one each. It belongs to the first rank that sees it, its
    *owner*. All owners store what happens; the first `checkpoint.copies` of them are *savers*,
    which also write each checkpoint, from memory.

    Attributes:
        ranks: the owner of each directory, rank 0 first.
        copies: number of them that are to keep checkpoints.
        of_rank: for each rank the owner of the directory that it sees; -1 where there is none.
        hosts: name of the host of each rank.
        problems: why some hosts have no directory.
    """

    ranks: tuple[int, ...] = (0,)
    copies: int = 1
    of_rank: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def savers(self) -> tuple[int, ...]:
        """The ranks that write checkpoints."""
        return self.ranks[: self.copies]

    @property
    def are_several(self) -> bool:
        """Whether there is more than one run directory."""
        return len(self.ranks) > 1

    def of(self, rank: int) -> int:
        """The owner of the directory that a rank sees; -1 if there is none."""
        return self.of_rank[rank] if self.of_rank else 0

    def names(self, ranks: Sequence[int]) -> str:
        """The hosts of some ranks in words."""
        return ", ".join(dict.fromkeys(self.hosts[rank] for rank in ranks))

    def hint(self, run_dir: str) -> str:
        """What a user should know about copies of checkpoints; empty if there is nothing."""
        key = f"checkpoint.copies={self.copies}"
        if self.are_several and self.copies == 1:
            others = self.names(self.ranks[1:])
            return (
                f"{others}: does not see {run_dir} of {self.hosts[0]}, which alone keeps "
                "checkpoints, and whose loss is theirs; set checkpoint.copies=2, or let all hosts "
                "share the run directory"
            )
        if self.copies > len(self.ranks):
            there = f"all ranks share {run_dir}, so each checkpoint is written once"
            if self.are_several:
                number, names = len(self.ranks), self.names(self.ranks)
                there = f"only {number} hosts ({names}) have a run directory to keep checkpoints in"
            return f"{key}: {there}; start on {self.copies} hosts with one each, or set fewer"
        return ""


FIRST = Owners()
"""Rank 0 owns the directory that there is."""


def own_entries(run_dir: Path) -> Iterator[Path]:
    """Paths that Lockstep may have written; not all of them exist."""
    yield from (run_dir / name for name in ENTRIES)
    for pattern in PATTERNS:
        yield from run_dir.glob(pattern)


def is_used(run_dir: Path) -> bool:
    """Whether a path has more than the folder of a rank that has died while it made it."""
    if not os.path.lexists(run_dir):
        return False
    try:
        known = {*leftovers(run_dir), *(run_dir / name for name in _FIRST_ENTRIES)}
        checkpoints = run_dir / _FIRST_ENTRIES[0]
        is_begun = checkpoints.exists() and any(checkpoints.iterdir())
        return is_begun or not known.issuperset(run_dir.iterdir())
    except OSError:
        return True


def stamp_of(folder: Path) -> list[int]:
    """What tells a folder of weights from another by its path, such as on another host's disk.

    It is of the file that was written last; empty if there is none.
    """
    for name in (MANIFEST, INDEX):
        with suppress(OSError):
            status = os.stat(folder / name)
            return [status.st_ino, status.st_size, status.st_mtime_ns]
    return []


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by the name of its folder.

    Raises:
        ValueError: it is not the name of a checkpoint.
    """
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name}: is no name of a checkpoint's folder")
    return int(match[1])


def folders(root: Path) -> list[Path]:
    """All complete checkpoints, newest step first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if _FOLDER.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def files_with(file: str, names: Iterable[str]) -> list[str]:
    """Those files, of a checkpoint's, that hold what `file` could; none if some are missing."""
    there = set(names)
    if file in there:
        return [file]
    form = re.compile(re.escape(file.removesuffix(SUFFIX)) + r"-\d{5}-of-(\d{5})" + SUFFIX)
    counts = {int(match[1]) for match in map(form.fullmatch, there) if match}
    for count in counts:
        stem = file.removesuffix(SUFFIX)
        found = [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
        if len(counts) == 1 and there.issuperset(found):
            return found
    return []


def set_aside(root: Path, step: int) -> list[str]:
    """Rename checkpoints newer than a step, so that they no longer count; returns their names."""
    newer = [folder for folder in folders(root) if step_of(folder) > step]
    for folder in newer:
        # Not deleted: somebody may want to repair it, or find out what has damaged it.
        aside = root / f"damaged_{folder.name}"
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return [folder.name for folder in newer]


def mark_latest(root: Path, step: int) -> None:
    """Let the hint name the newest checkpoint, which may be on another host's disk."""
    if hinted(root, "latest") != root / folder_name(step):
        write_hint(root, "latest", folder_name(step))


def mark_best(root: Path, step: int) -> None:
    """Let the hint name the best checkpoint, if any: its writer may have died before that."""
    if not step:  # it names the checkpoint of an evaluation that no longer counts
        (root / "best").unlink(missing_ok=True)
        return
    best = root / folder_name(step)
    if best.is_dir() and read_hint(root, "best") != best:
        write_hint(root, "best", best.name)


def bring_back(root: Path) -> None:
    """Restore a checkpoint whose writer was killed while it replaced it by another one.

    Raises:
        OSError: the disk is read-only, or gone.
    """
    for aside in root.glob(".step_*.old"):
        final = root / aside.name[1:].partition(".")[0]
        if _FOLDER.fullmatch(final.name) and not final.exists():
            aside.rename(final)


def write_hint(root: Path, name: str, folder: str) -> None:
    """Let `root/name` name `folder`."""
    with replacing(root / name) as file:
        file.write(folder + "\n")


def read_hint(root: Path, name: str) -> Path | None:
    """The folder that `root/name` names, if both exist."""
    folder = hinted(root, name)
    return folder if folder is not None and folder.is_dir() else None


def missing(root: Path, name: str) -> list[str]:
    """An error message about a hint, if it names a folder that does not exist."""
    folder = hinted(root, name)
    if folder is None or folder.is_dir():
        return []
    return [f"{root / name}: names {folder.name}, which is missing"]


def hinted(root: Path, name: str) -> Path | None:
    """The folder that `root/name` names, whether it exists or not."""
    try:
        # A damaged hint may be of any size, and is no reason to run out of memory.
        folder = read_text(root / name, limit=100).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return root / folder if _FOLDER.fullmatch(folder) else None

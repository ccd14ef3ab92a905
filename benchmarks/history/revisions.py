"""Commits of this repository, and their files in folders of their own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = "."
"""Name of the files as they are, committed or not."""


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git answers.

    Raises:
        SystemExit: it failed; the message is git's.
    """
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit_of(revision: str, root: Path = ROOT) -> str:
    """The hash of a revision; `HERE` for itself."""
    if revision == HERE:
        return HERE
    return git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", root=root)


def commits_between(good: str, bad: str, root: Path = ROOT) -> list[str]:
    """The commits after one, up to another, along the line of first parents, oldest first."""
    return git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}", root=root).split()


def described(commit: str, root: Path = ROOT) -> str:
    """A commit in a line: short hash, date and subject."""
    if commit == HERE:
        return "the files as they are"
    return git("log", "-1", "--date=short", "--format=%h %ad %s", commit, root=root)


@contextmanager
def files_of(revision: str, root: Path = ROOT) -> Iterator[Path]:
    """A folder with the files of a revision, which is removed at the end."""
    if revision == HERE:
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-history-") as name:
        folder = Path(name) / "tree"
        git("worktree", "add", "--detach", "--force", str(folder), commit_of(revision, root),
            root=root)  # fmt: skip
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder), root=root)

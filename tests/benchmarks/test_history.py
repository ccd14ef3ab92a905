"""Revisions measured in turn: verdicts, the commit that is found, and what is kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarks.history import __main__ as command
from benchmarks.history import records
from benchmarks.history.cases import Case
from benchmarks.history.judging import Ratio, first_slower
from benchmarks.history.revisions import HERE, commit_of, commits_between, files_of
from benchmarks.processes import Failed
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Six commits, each of which says in a file how long it takes; the fourth takes longer."""
    root = tmp_path / "a repository"
    root.mkdir()

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)

    git("init", "--initial-branch=main")
    for number, seconds in enumerate(("1.0", "1.01", "broken", "1.5", "1.49", "1.5")):
        (root / "seconds").write_text(seconds)
        git("add", ".")
        git("commit", "--allow-empty", "-m", f"commit {number}")
    return root


@pytest.fixture
def told(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command, for that repository and a case that reads the file."""

    def seconds(tree: Path) -> float:
        text = (tree / "seconds").read_text()
        if text == "broken":
            raise Failed("it is broken")
        return float(text)

    monkeypatch.setattr(command, "CASES", {"case": Case("a case", seconds)})
    for name in ("commit_of", "commits_between", "described", "files_of", "git"):
        function = getattr(command, name)
        monkeypatch.setattr(
            command, name, lambda *a, f=function, **k: f(*a, **{"root": repository} | k)
        )
    return repository


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["history", *arguments])
    command.main()


def test_the_commit_that_made_it_slower_is_found(told, monkeypatch, capsys):
    run(monkeypatch, "find", "case", "main~5", "main")
    said = capsys.readouterr().out
    found = [line for line in said.splitlines() if line.startswith("slower since")]
    # The one before cannot be measured, so it may be that one as well.
    assert [line[-8:] for line in found] == ["commit 2", "commit 3"]
    assert "cannot be measured: it is broken" in said


def test_a_slower_revision_is_an_exit_code(told, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "compare", "main~5")
    assert ended.value.code == 1
    assert "1.500 (1.500–1.500)  slower" in capsys.readouterr().out
    run(monkeypatch, "compare", "main", "main~5")
    assert "faster" in capsys.readouterr().out
    run(monkeypatch, "compare", "main~1", "main")
    assert "alike" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not slower"):
        run(monkeypatch, "find", "case", "main~1", "main")


def test_what_is_recorded_is_compared_with_what_was_before(told, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "FILE", tmp_path / "history.jsonl")
    monkeypatch.setattr(command, "PAGE", tmp_path / "history.md")
    with pytest.raises(SystemExit, match="--against"):
        run(monkeypatch, "record")
    run(monkeypatch, "record", "--against", "main~5")
    run(monkeypatch, "record")
    first, second = records.read(tmp_path / "history.jsonl")
    assert (first.ratio.median, second.ratio.median) == (1.5, 1.0)
    assert second.against == first.commit == commit_of("main", told)
    monkeypatch.setattr(records, "CASES", command.CASES)
    assert "**slower**" in records.page([first, second])
    (tmp_path / "history.jsonl").write_text('{"commit": 1}\n')
    with pytest.raises(SystemExit, match="line 1: is no record"):
        records.read(tmp_path / "history.jsonl")


def test_folders_of_revisions_are_removed(repository):
    with files_of("main~5", repository) as tree:
        assert (tree / "seconds").read_text() == "1.0"
    assert not tree.exists()
    with files_of(HERE, repository) as tree:
        assert tree == repository
    worktrees = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert len(worktrees.stdout.splitlines()) == 1
    assert len(commits_between("main~3", "main", repository)) == 3
    with pytest.raises(SystemExit, match="git rev-parse"):
        commit_of("--help", repository)


def test_too_few_rounds_say_nothing():
    with pytest.raises(ValueError, match="at least 6"):
        Ratio.of([1.0] * 5)
    assert Ratio.of([1.1, 1.2, 1.3, 1.4, 1.5, 1.6]) == Ratio(1.35, 1.1, 1.6)
    # Nine leave out one on each side: 1 - 2 * 10 / 512 is 0.961, two would be 0.820.
    assert Ratio.of([float(n) for n in range(1, 10)]) == Ratio(5.0, 2.0, 8.0)


@given(st.integers(1, 40), st.data())
def test_bisection_finds_the_first_that_is_slower(count, data):
    first = data.draw(st.integers(0, count - 1))
    unknown = data.draw(st.sets(st.integers(0, count - 2))) if count > 1 else set()
    commits = [str(n) for n in range(count)]
    asked = []

    def is_slower(commit: str) -> bool | None:
        asked.append(commit)
        return None if int(commit) in unknown else int(commit) >= first

    found = first_slower(commits, is_slower)
    assert str(first) in found or all(int(c) in unknown for c in commits[first : int(found[-1])])
    assert set(map(int, found[:-1])) <= unknown
    assert len(asked) == len(set(asked))

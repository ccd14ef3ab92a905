"""Measure revisions in turn, find the commit that made something slower, keep what was found.

    python -m benchmarks.history compare v0.1.0          # and the files as they are
    python -m benchmarks.history find step-64 v0.1.0 main
    python -m benchmarks.history record                  # before a release

All revisions run under today's packages, each with its own loop, two programs in turn (A B B A …).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.history import records
from benchmarks.history.cases import CASES, Case
from benchmarks.history.judging import Ratio, first_slower
from benchmarks.history.revisions import HERE, commit_of, commits_between, described, files_of, git
from benchmarks.machine import machine
from benchmarks.processes import HERE as FOLDER
from benchmarks.processes import Failed

_DOCS = FOLDER.parent / "docs" / "benchmarks"
FILE = _DOCS / "history.jsonl"
PAGE = _DOCS / "history.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="one revision with another")
    compare.add_argument("before", help="revision that the other one is compared with")
    compare.add_argument("after", nargs="?", default=HERE, help="by default the files as they are")
    find = commands.add_parser("find", help="the first commit as slow as another one")
    find.add_argument("case", choices=CASES)
    find.add_argument("good", help="revision that is not slow")
    find.add_argument("bad", help="revision that is")
    record = commands.add_parser("record", help="compare HEAD with what was recorded last")
    record.add_argument("--against", help="revision to compare with instead")
    for each in (compare, record):
        each.add_argument("--only", choices=CASES, action="append", help="may be repeated")
    for each in (compare, find, record):
        each.add_argument("--rounds", type=int, default=9, help="at least 6")
    args = parser.parse_args()
    if args.rounds < 6:
        parser.error(f"--rounds {args.rounds}: must be at least 6")
    if args.command == "find":
        _find(args.case, args.good, args.bad, args.rounds)
        return
    names = list(args.only or CASES)
    if args.command == "record":
        _record(names, args.against, args.rounds)
        return
    found = _compared(args.before, args.after, names, args.rounds)
    if any(ratio.verdict == "slower" for _, ratio in found):
        sys.exit(1)


def _compared(
    before: str, after: str, names: Sequence[str], rounds: int
) -> list[tuple[float, Ratio]]:
    """Seconds of the second revision, and its ratio to the first one, of each case."""
    print(f"before: {described(commit_of(before))}\nafter:  {described(commit_of(after))}")
    found = []
    with files_of(before) as old, files_of(after) as new:
        for name in names:
            seconds, ratio = _in_turn(CASES[name], old, new, rounds)
            found.append((seconds, ratio))
            print(
                f"{name:12} {1e3 * seconds:9.4g} ms  {ratio.median:.3f} "
                f"({ratio.low:.3f}–{ratio.high:.3f})  {ratio.verdict}",
                flush=True,
            )
    return found


def _in_turn(case: Case, old: Path, new: Path, rounds: int) -> tuple[float, Ratio]:
    """One round that does not count, then pairs, of which each other one begins with the newer.

    Raises:
        Failed: one of the revisions cannot do it.
    """
    case.seconds(old), case.seconds(new)
    times: dict[Path, list[float]] = {old: [], new: []}
    for number in range(rounds):
        for tree in (old, new) if number % 2 == 0 else (new, old):
            times[tree].append(case.seconds(tree))
    ratios = [b / a for a, b in zip(times[old], times[new], strict=True)]
    return statistics.median(times[new]), Ratio.of(ratios)


def _find(name: str, good: str, bad: str, rounds: int) -> None:
    ((_, whole),) = _compared(good, bad, [name], rounds)
    if whole.verdict != "slower":
        sys.exit(f"{name}: {bad} is not slower than {good}")
    # As slow as the bad one: nearer to it than to the good one.
    limit = (1 + whole.median) / 2
    with files_of(good) as old:

        def is_slower(commit: str) -> bool | None:
            with files_of(commit) as tree:
                try:
                    _, ratio = _in_turn(CASES[name], old, tree, rounds)
                except Failed as error:
                    print(f"{described(commit)}: cannot be measured: {error}")
                    return None
            print(f"{described(commit)}: {ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})")
            return ratio.median > limit

        for commit in first_slower(commits_between(good, bad), is_slower):
            print(f"slower since: {described(commit)}")


def _record(names: Sequence[str], against: str | None, rounds: int) -> None:
    known = records.read(FILE)
    if against is None:
        if not known:
            sys.exit("nothing is recorded yet: name a revision with --against")
        against = known[-1].commit
    if git("status", "--porcelain", "--", "src", "benchmarks"):
        sys.exit("src or benchmarks differ from HEAD: commit them first")
    commit, before = commit_of("HEAD"), commit_of(against)
    facts = machine(("torch", "mpi4py"))
    found = _compared(before, commit, names, rounds)
    today = f"{datetime.now():%Y-%m-%d}"
    new = [
        records.Record(commit, today, before, name, seconds, ratio, facts)
        for name, (seconds, ratio) in zip(names, found, strict=True)
    ]
    records.add(FILE, new)
    PAGE.write_text(records.page([*known, *new]), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`python -m tests.campaigns.surroundings`: short trainings in poisoned surroundings.

Each either ends with code 0 and the SHA-256 that it has elsewhere, or soon with a documented exit
code and one message. Nothing is left behind: no process, no file in /dev/shm or a folder for
temporary files, and no run directory in which the command would not work when all is well again.

As root, each has file systems of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.observe import read_events
from tests.campaigns.commands import LOCKSTEP, Command, environment, indented, run
from tests.campaigns.poisons import Poison, Surroundings, draw
from tests.conftest import result

_TASK = Path(__file__).parents[1] / "distributed" / "state_tasks.py"
_KEYS = ("steps=4", "eval_every=2")

_LIMIT_S, _REFUSES_S = 60.0, 30.0

_REFUSED = 2
_RAW = ("Traceback (most recent call last)", "Fatal Python error", "Segmentation fault")

_SCRIPT = """\
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp
{mounts}
( cd "$ROOT"
{setup}
exec "$@" )
code=$?
umask 22
cp -a "$ROOT/runs" "$ROOT/kept"  # from a file system that may be of these namespaces only
find /dev/shm /tmp "$ROOT/tmp" -mindepth 1 ! -name .filler > "$ROOT/left" 2>/dev/null
exit $code
"""


@dataclass(frozen=True)
class Outcome:
    """What a training comes to: its SHA-256, and how the machine rounds as it sees it."""

    sha256: str
    rounding: str


@dataclass
class Met:
    """What a command has come to in its surroundings.

    Attributes:
        code: exit code; None if it was ended since it took too long.
        wall_s: seconds that it took.
        wrong: what should be otherwise.
        output: what it has written.
    """

    code: int | None
    wall_s: float
    wrong: list[str]
    output: str

    def said(self) -> str:
        """Its message, as far as a row of a table has space."""
        return next((ascii(x)[1:90] for x in self.output.splitlines() if _is_error(x)), "")


def main() -> int:
    """Try all surroundings of a campaign; 1 if anything went wrong in one."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.surroundings")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", type=int, help="the number of one of them")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # no command stays
    if subprocess.run(["unshare", "--mount", "--net", "--uts", "true"], check=False).returncode:
        raise SystemExit("these surroundings need namespaces: start this as root on Linux")
    if Path(sys.executable).is_relative_to("/tmp"):
        raise SystemExit("each command has a /tmp of its own: start this from a clone elsewhere")
    print(f"seed {arguments.seed}", flush=True)
    started = time.monotonic()
    # Not in /tmp, of which each command has its own.
    root = Path(tempfile.mkdtemp(prefix="lockstep-surroundings-", dir="/var/tmp"))
    expected = _undisturbed(root)
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    ended, bad = [], []
    for number in numbers:
        surroundings = draw(arguments.seed, number)
        met = meet(surroundings, root / str(number), expected)
        ended.append(met)
        row = f"{number:3} exit {met.code} {met.wall_s:5.1f} s  {surroundings}"
        print("\n      ".join([row, *filter(None, [met.said(), *met.wrong])]), flush=True)
        if met.wrong:
            bad.append(number)
            again = f"--seed {arguments.seed} --only {number}"
            print(f"{indented(met.output)}\n      again: {again}", flush=True)
        elif arguments.only is None:
            shutil.rmtree(root / str(number), ignore_errors=True)
    completed = sum(met.code == 0 for met in ended)
    print(
        f"{len(ended)} surroundings: {completed} completed, {len(ended) - completed} refused, "
        f"{len(bad)} wrong{f' {bad}' if bad else ''}, {time.monotonic() - started:.0f} s; "
        f"seed {arguments.seed}"
    )
    if not bad and arguments.only is None:
        shutil.rmtree(root)
    return 1 if bad else 0


def meet(surroundings: Surroundings, folder: Path, expected: Outcome) -> Met:
    """Train in some surroundings.

    Args:
        surroundings: what is wrong.
        folder: a new folder for everything.
        expected: what it comes to elsewhere.
    """
    poisons = surroundings.poisons
    for name in filter(None, (poison.folder for poison in poisons)):
        folder /= name
    for name in ("tmp", "runs"):
        (folder / name).mkdir(parents=True)
    task = folder / "task.py"
    shutil.copy(_TASK, task)
    argv = [LOCKSTEP, "train", f"{task}:Plain", *_KEYS, *surroundings.ranks, "--run-dir"]
    there = [*argv, folder / "runs" / "run"]
    output = folder / "output"
    since = time.monotonic()
    with Command(
        _wrapped(poisons, there), folder, _environment(poisons, folder), output
    ) as command:
        command.wait(_LIMIT_S)
        code, wall_s = command.ended(), time.monotonic() - since
        left = [f"left behind: {line}" for line in command.left()]
    left += [f"left behind: {line}" for line in _lines(folder / "left")]
    text = output.read_text(errors="replace")
    is_mute = any(poison.is_mute for poison in poisons)
    wrong = left + [f"{raw} is shown" for raw in _RAW if raw in text]
    if code == 0:
        wrong += _wrong_result(folder, expected)
    else:
        wrong += _wrong_end(code, wall_s, "" if is_mute else text, is_mute)
        wrong += _wrong_rest(argv, folder, expected)
    return Met(code, wall_s, wrong, text)


def _wrong_result(folder: Path, expected: Outcome) -> list[str]:
    """What is wrong with a run that says it is complete."""
    try:
        found = _outcome(folder / "kept" / "run")
    except (OSError, LockstepError) as error:
        return [f"exit code 0, but {error}"]
    if found.rounding != expected.rounding:
        return []  # as on another machine
    return [] if found == expected else [f"SHA-256 {found.sha256}, expected {expected.sha256}"]


def _wrong_end(code: int | None, wall_s: float, text: str, is_mute: bool) -> list[str]:
    """What is wrong with a refusal."""
    if code is None:
        return [f"takes more than {_LIMIT_S:g} s"]
    wrong = [] if code == _REFUSED else [f"exit code {code}"]
    if wall_s > _REFUSES_S:
        wrong.append(f"is refused after {wall_s:.0f} s")
    if not is_mute and (count := sum(map(_is_error, text.splitlines()))) != 1:
        wrong.append(f"{count} messages")
    return wrong


def _wrong_rest(argv: Sequence[str | Path], folder: Path, expected: Outcome) -> list[str]:
    """What is wrong with what a refused run leaves: the same command must work in it later."""
    run_dir = folder / "kept" / "run"
    if not run_dir.is_dir() or _rounding(run_dir) not in ("", expected.rounding):
        return []
    code, text = run([*argv, run_dir, "--resume"], folder, environment(), _LIMIT_S)
    found = _outcome(run_dir) if code == 0 else None
    return [] if found == expected else [f"run directory is of no use: {code}\n{indented(text, 6)}"]


def _wrapped(poisons: Sequence[Poison], argv: Sequence[str | Path]) -> list[str | Path]:
    """A command in a shell, in namespaces of its own, that makes its surroundings first."""
    script = _SCRIPT.format(
        mounts="\n".join(filter(None, (poison.mounts for poison in poisons))),
        setup="\n".join(filter(None, (poison.setup for poison in poisons))),
    )
    namespaces = dict.fromkeys(n for poison in poisons for n in poison.namespaces)
    return ["/usr/bin/unshare", "--mount", *namespaces, "/bin/sh", "-c", script, "sh", *argv]


def _environment(poisons: Sequence[Poison], folder: Path) -> dict[str, str]:
    env = environment(TMPDIR=str(folder / "tmp"))
    for name in (name for poison in poisons for name in poison.unset):
        if name == "*":
            env.clear()
        env.pop(name, None)
    for poison in poisons:
        env.update(poison.env)
    return env | {"ROOT": str(folder)}


def _undisturbed(root: Path) -> Outcome:
    argv = [LOCKSTEP, "train", f"{_TASK}:Plain", *_KEYS, "--run-dir", "run"]
    code, text = run(argv, root, environment(), _LIMIT_S)
    if code != 0:
        raise SystemExit(f"exit code {code} where nothing is wrong\n{text}")
    return _outcome(root / "run")


def _outcome(run_dir: Path) -> Outcome:
    return Outcome(result(run_dir)["params_sha256"], _rounding(run_dir))


def _rounding(run_dir: Path) -> str:
    """How the first process of a run rounded; empty if none has come that far."""
    try:
        rows = read_events(run_dir / "events.jsonl")
        return next((row["rounding"] for row in rows if row["event"] == "Joined"), "")
    except LockstepError:
        return ""


def _is_error(line: str) -> bool:
    return line.startswith("error: ")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if os.path.exists(path) else []


if __name__ == "__main__":
    sys.exit(main())

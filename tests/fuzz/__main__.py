"""`python -m tests.fuzz`: bad inputs for everything that reads; see `make test-fuzz`.

Each target runs in a process of its own with limits on time and memory. An input is a function of
(seed, target, number), so a failure is done again with `--target NAME --seed SEED --only NUMBER`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from lockstep.errors import LockstepError
from tests.fuzz.base import Target
from tests.fuzz.checkpoints import prepare
from tests.fuzz.targets import TARGETS

LIMIT_S = 10
LIMIT_BYTES = 1 << 30
_MOST_FAILURES = 5


class _Hang(BaseException):
    """An input that takes longer than it may."""


def main() -> int:
    """Run all targets; 1 if any input broke something."""
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("--inputs", type=int, default=10_500, help="of all targets together")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--only", type=int, help="the number of one input")
    arguments = parser.parse_args()
    chosen = [TARGETS[name] for name in arguments.target or TARGETS]
    print(f"seed {arguments.seed}", flush=True)
    share = arguments.inputs / sum(target.weight for target in chosen)
    total = refused = failed = 0
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="lockstep-fuzz-"))
    try:
        _in_child(lambda: prepare(root))
        for target in chosen:
            count = math.ceil(target.weight * share)
            numbers = range(count) if arguments.only is None else (arguments.only,)
            begun = time.monotonic()
            report = _Run(target, root, arguments.seed).all(numbers)
            total += report["inputs"]
            refused += report["refused"]
            failed += len(report["failures"])
            print(
                f"{target.name:24} {report['inputs']:6} inputs, {report['refused']:6} refused, "
                f"{len(report['failures'])} failures, {time.monotonic() - begun:5.1f} s",
                flush=True,
            )
            for number, text in report["failures"]:
                print(f"--- {target.name}, input {number}:\n{text}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(
        f"{total} inputs, {refused} refused, {failed} failures in "
        f"{time.monotonic() - started:.0f} s; seed {arguments.seed}"
    )
    return 1 if failed else 0


class _Run:
    """One target's inputs, in processes that are replaced when they die."""

    def __init__(self, target: Target, root: Path, seed: int) -> None:
        self._target, self._root, self._seed = target, root, seed
        self._state = root / f"{target.name}.state"
        self._report: dict = {"inputs": 0, "refused": 0, "failures": []}

    def all(self, numbers) -> dict:
        left = list(numbers)
        while left and len(self._report["failures"]) < _MOST_FAILURES:
            self._state.write_text("")
            child = os.fork()
            if child == 0:
                try:
                    self._child(left)
                except BaseException:
                    self._note(-1, "failed", f"with a valid sample: {traceback.format_exc()}")
                os._exit(0)
            status = self._watch(child)
            rows = [json.loads(line) for line in self._state.read_text().splitlines()]
            self._report["inputs"] += sum("end" in row for row in rows)
            self._report["refused"] += sum(row.get("end") == "refused" for row in rows)
            self._report["failures"] += [
                [row["number"], row["text"]] for row in rows if row.get("end") == "failed"
            ]
            if status == 0:
                break
            begun = {row["number"] for row in rows} - {r["number"] for r in rows if "end" in r}
            number = max(begun, default=left[0])
            self._report["failures"].append([number, f"the process ended with status {status}"])
            left = [n for n in left if n > number]
        return self._report

    def _watch(self, child: int) -> int:
        """The exit status; kills a child that is stuck where no signal handler runs."""
        size, since = -1, time.monotonic()
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            now = self._state.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > 6 * LIMIT_S:
                os.kill(child, signal.SIGKILL)
                since = time.monotonic()
            time.sleep(0.01)

    def _note(self, number: int, end: str = "", text: str = "") -> None:
        row = {"number": number} | ({"end": end, "text": text} if end else {})
        with self._state.open("a") as state:
            state.write(json.dumps(row) + "\n")

    def _child(self, numbers) -> None:
        warnings.simplefilter("ignore")
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        folder = self._root / self._target.name
        folder.mkdir(exist_ok=True)
        samples, call = self._target.make(folder, self._root / "run")
        for sample in samples:
            call(sample)  # what is valid is accepted; and everything is imported
        _limit_memory()
        signal.signal(signal.SIGALRM, _on_alarm)
        for number in numbers:
            rng = random.Random(f"{self._seed}/{self._target.name}/{number}")
            data = self._target.mutate(rng, rng.choice(samples))
            self._note(number)
            end, text = _outcome(call, data)
            if text:
                text += f"\n{data[:300]!r}{' …' if len(data) > 300 else ''}"
            self._note(number, end, text)


def _outcome(call, data: bytes) -> tuple[str, str]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(LIMIT_S)
    try:
        call(data)
        end, text = "accepted", ""
    except LockstepError as error:
        end, text = "refused", ""
        if len(str(error)) > 10_000:
            end, text = "failed", f"a message of {len(str(error))} characters"
    except _Hang:
        end, text = "failed", f"takes longer than {LIMIT_S} s\n{traceback.format_exc()[-1500:]}"
    except BaseException:
        end, text = "failed", "\n".join(traceback.format_exc().splitlines()[-14:])[-2500:]
    finally:
        signal.alarm(0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if grown * 1024 > LIMIT_BYTES:
        end, text = "failed", f"takes {grown >> 10} MiB"
    return end, text


def _on_alarm(*_: object) -> NoReturn:
    raise _Hang


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _in_child(action) -> None:
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("the samples could not be made")


if __name__ == "__main__":
    sys.exit(main())

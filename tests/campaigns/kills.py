"""`python -m tests.campaigns.kills`: random kills of random processes in runs on random meshes.

A run is trained in some sessions, each on another mesh and number of ranks. Ranks, launchers, warm
servers, mpirun and whole groups are killed, stopped and asked to stop, at random moments of a
session. Whatever strikes it, the run ends with the SHA-256 and the rows of metrics of a run on one
process that nothing strikes; sessions end with a documented exit code and leave no process behind.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.campaigns.blows import TASKS, draw
from tests.campaigns.struck import Reference, Struck, reference, train


def main() -> int:
    """Strike runs until enough signals were sent; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="tests.campaigns.kills")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=300, help="signals to send, in all runs")
    parser.add_argument("--only", type=int, help="the number of one run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # no command stays
    print(f"seed {arguments.seed}", flush=True)
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="lockstep-kills-"))
    references: dict[str, Reference] = {}
    ended: list[Struck] = []
    kills, number = 0, arguments.only or 0
    while kills < arguments.kills:
        plan = draw(arguments.seed, number)
        if plan.task not in references:
            references[plan.task] = reference(TASKS[plan.task], root / plan.task)
        folder = root / f"{number:03}"
        struck = train(plan, folder, references[plan.task])
        ended.append(struck)
        kills += len(struck.blows)
        print(struck.table(kills), flush=True)
        if struck.wrong:
            again = f"python -m tests.campaigns.kills --seed {arguments.seed} --only {number}"
            print(f"      again: {again}; its files: {folder}", flush=True)
        elif arguments.only is None:
            shutil.rmtree(folder)
        number += 1
        if arguments.only is not None:
            break
    blows = [blow for struck in ended for blow in struck.blows]
    for kind, counts in (
        ("signals", Counter(f"{blow.word} {blow.role}" for blow in blows)),
        ("phases", Counter(blow.phase for blow in blows)),
    ):
        print(f"{kind}: {', '.join(f'{name} {n}' for name, n in counts.most_common())}")
    bad = [struck.plan.number for struck in ended if struck.wrong]
    print(
        f"{kills} kills in {len(ended)} runs and {sum(s.sessions for s in ended)} sessions, "
        f"{len(bad)} runs wrong{f' {bad}' if bad else ''}, {time.monotonic() - started:.0f} s; "
        f"seed {arguments.seed}"
    )
    if not bad and arguments.only is None:
        shutil.rmtree(root)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

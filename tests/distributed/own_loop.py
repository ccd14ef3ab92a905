"""A loop of its own over `ls.steps`, whose ranks die, leave or stop where `OWN_LOOP` says.

`OWN_LOOP` is a JSON list of [slot, step, what]: `die` (once), `break`, `raise`, `refuse`, `exit`,
`change`, or why the run is complete. Slot -1 is every rank. Each process writes the steps it has
had, one a line.
"""

import json
import os
import sys
from pathlib import Path

import torch
from tests.distributed.tasks import Everything

import lockstep as ls
from lockstep.launching.rank.environment import detect

KEYS = {"steps": 12, "eval_every": 4, "checkpoint": ls.CheckpointConfig(every=3)}


def dies_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)


def main() -> None:
    folder, slot = Path(os.environ["OWN_LOOP_FOLDER"]), detect(os.environ).rank
    plans = [plan for plan in json.loads(os.environ["OWN_LOOP"]) if plan[0] in (-1, slot)]
    config = Everything.Config(**KEYS)
    with (folder / f"{slot}-{os.getpid()}.txt").open("w", buffering=1) as file:
        for step in ls.steps(Everything(config), config):
            file.write(f"{step.number} {json.dumps([step.metrics, step.evaluated])}\n")
            todo = [(n, what) for n, (_, at, what) in enumerate(plans) if at == step.number]
            for number, what in todo:
                if what == "die":
                    dies_once(folder / f"died-{slot}-{number}")
                elif what == "raise":
                    raise KeyError("of the body")
                elif what == "refuse":
                    raise ls.LockstepError("budget.txt: is missing")
                elif what == "exit":
                    sys.exit("not good enough")
                elif what == "change":
                    with torch.no_grad():
                        next(step.model.parameters()).add_(1)
                elif what != "break":
                    step.stop(what)
            if any(what == "break" for _, what in todo):
                break
        file.write("end\n")


if __name__ == "__main__":
    main()

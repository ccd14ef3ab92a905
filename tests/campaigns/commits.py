"""What each rank of a campaign on hosts writes down of its own steps, and what follows from it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.agents import TASK

# Each process has a file of its own, so that it is written by the losing side of a partition, too.
NOTED = (
    TASK.replace("class Slow(", "class Plain(")
    + """
import json, os, socket, zlib
from lockstep.comm.torchdist.elastic_transport import ElasticTransport

GROUP = [0, []]
SESSION = os.environ.get("SESSION") or Path("session").read_text()
build = ElasticTransport._build

def noting(self, generation, members):
    GROUP[:] = [generation, list(members)]
    return build(self, generation, members)

ElasticTransport._build = noting

class Slow(Plain):
    def after_step(self, model, step):
        digest = 0
        for parameter in model.parameters():
            digest = zlib.crc32(parameter.detach().numpy().tobytes(), digest)
        row = {"at": time.clock_gettime(time.CLOCK_MONOTONIC_RAW), "step": step, "digest": digest,
               "generation": GROUP[0], "members": GROUP[1]}
        name = f"commits/{SESSION}-{socket.gethostname()}-{os.getpid()}"
        with open(name, "a") as file:
            file.write(json.dumps(row) + "\\n")
"""
)


def commits(folder: Path) -> list[dict[str, Any]]:
    """The rows of all processes in order of time, with the `session` and the `process`."""
    rows = []
    for path in folder.iterdir():
        session, _, process = path.name.partition("-")
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # else it was killed while it wrote
                rows.append({**json.loads(line), "session": int(session), "process": process})
    return sorted(rows, key=lambda row: row["at"])


def contradictions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where two sides have both gone on: none may be left.

    A process that was stopped, or cut off, may still end the step that all were in the middle of:
    this one step and no other, with the bits that the others give it. More than that would be a
    group of which the newer one knows nothing.
    """
    found = []
    digests: dict[int, int] = {}
    members: dict[tuple[int, int], list[int]] = {}
    starts: dict[str, int] = {}
    late: dict[tuple[int, int], set[int]] = defaultdict(set)
    newest, since, session = (0, 0), 0.0, 0
    for row in rows:
        generation, step, process = row["generation"], row["step"], row["process"]
        if process not in starts:
            # Generations are counted from 1 again where all have ended, and have started again.
            is_start = generation < newest[1] or row["session"] > session
            starts[process] = newest[0] + is_start
            session = row["session"]
        number = starts[process], generation
        where = f"step {step} of generation {generation} on {process}"
        if digests.setdefault(step, row["digest"]) != row["digest"]:
            found.append(f"{where}: other bits")
        if members.setdefault(number, row["members"]) != row["members"]:
            found.append(f"{where}: two groups of this number")
        if number > newest:
            newest, since = number, row["at"]
        elif number < newest:
            late[number].add(step)
            if len(late[number]) > 1:
                found.append(f"{where}: {row['at'] - since:.3f} s after the next one began")
    return found


def missing(rows: Sequence[dict[str, Any]], num_steps: int) -> list[str]:
    """Steps of a run's events that are not there exactly once, but for what a resume does again."""
    done: list[int] = []
    for row in rows:
        if row["event"] == "Resumed" or (row["event"] == "RunStarted" and not row["step"]):
            done = [step for step in done if step <= row["step"]]
        elif row["event"] == "StepDone":
            done.append(row["step"])
    wrong = {step for step in done if done.count(step) > 1} | set(range(1, num_steps + 1)) - {*done}
    return [f"step {step}: {done.count(step)} events" for step in sorted(wrong)]

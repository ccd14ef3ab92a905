"""What grows with the number of ranks: measured on one machine, and simulated up to 10,000 ranks.

Writes `docs/benchmarks/scale.md` and `scale.json`; as root, for ranks have a network of their own
whose bytes are counted. `--quick` sees that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import ceil, log2
from pathlib import Path
from typing import Any

from lockstep.cli.prove.chaos_plan import Incident
from lockstep.cli.prove.chaos_verdict import effect_of
from lockstep.comm.ahead import FEW_RANKS
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.launching.job.commands import rank_environment
from lockstep.observe import read_events, read_result
from page import Section, command, publish
from run import DOCS, machine
from simulated import (
    ITEM_BYTES,
    NUM_HEADER,
    NUM_SCALARS,
    Case,
    header_seconds,
    messages_of_a_microbatch,
    most,
    simulated,
)

MEASURED = (2, 8, 32, 64, 128)
SIMULATED = (8, 64, 1024, 10_000)
PER_HOST = 8
STEPS = 12
KILL_AT = 8
_TIMEOUT_S = 400.0
_LOOK_S = 0.02
_MESSAGE_S = 5e-6
"""What a message costs a process, whatever its length: that of MPI, or of a kernel of NCCL."""
_GB = 1e9
BANDWIDTHS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}
"""Bytes in a second of a rank's network."""
_LARGE = 7_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    facts = machine(("torch",)) | {"command": command("scale")}
    sections = [
        _measured(MEASURED[:2] if args.quick else MEASURED),
        _simulated(SIMULATED[:2] if args.quick else SIMULATED),
        _large(),
    ]
    publish(None if args.quick else DOCS, "scale", "Scale", facts, sections, _METHOD)


def _measured(sizes: Sequence[int]) -> Section:
    """Ranks of one machine."""
    section = Section(
        "Many ranks on one machine",
        "`digits`, `--launcher local`, a kill; most ranks wait for a core. `start`: until the "
        "first step. `memory`: of a rank, shared pages in parts. `network`: MB through loopback, "
        "of all.",
        ("ranks", "start, s", "step, ms", "regroup, ms", "memory, MB", "network: start", "regroup"),
    )
    hashes = set()
    for size in sizes:
        found = trained(size)
        section.raw[str(size)] = found
        hashes.add(found["sha256"])
        section.rows.append(
            (
                str(size),
                f"{found['start_s']:.1f}",
                f"{1e3 * found['step_s']:.0f}",
                f"{1e3 * found['regroup_s']:.0f}",
                f"{found['memory_bytes'] / 1e6:.0f}",
                f"{found['start_bytes'] / 1e6:.1f}",
                f"{found['regroup_bytes'] / 1e6:.1f}",
            )
        )
    section.at_most("one SHA-256", f"{len(hashes)} in {len(sizes)} runs", len(hashes) == 1)
    return section


def trained(size: int) -> dict[str, Any]:
    """What a run of so many ranks takes, of which one is killed."""
    with tempfile.TemporaryDirectory() as name:
        run_dir, log = Path(name) / "run", Path(name) / "log"
        log.touch()
        fault = PlannedFault(size // 2, KILL_AT, "compute", "kill", 0.0)
        argv = [sys.executable, "-m", "lockstep", "train", "digits", "-n", str(size)]
        argv += ["--launcher", "local", "--run-dir", str(run_dir), f"steps={STEPS}", "log_every=1"]
        argv += ["num_microbatches=128", "batch_size=256", "checkpoint.every=100000"]
        inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *argv]
        started = time.time()
        with subprocess.Popen(
            inside, env=rank_environment(1) | to_env([fault], log), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            watched = _watch(process, run_dir / "events.jsonl")
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            sys.exit(f"{size} ranks ended with {process.returncode}:\n{output}")
        rows = read_events(run_dir / "events.jsonl")
        strikes = [json.loads(line) for line in log.read_text().splitlines()]
        sha256 = read_result(run_dir)["params_sha256"]
    effect = effect_of(Incident(fault.kind, fault.step, (fault,)), strikes, rows)
    steps = [row for row in rows if row["event"] == "StepDone"]
    quiet = [row for row in steps if 2 <= row["step"] < KILL_AT]
    assert [r["world_size"] for r in rows if r["event"] == "Recovered"] == [size - 1]
    ranks = [rank for row in quiet for rank in row["ranks"]]
    found = {
        "start_s": steps[0]["time"] - started,
        "step_s": statistics.median(row["seconds"] for row in quiet),
        "regroup_s": effect.regroup_s,
        "resumed_s": effect.resumed_s,
        "calls": statistics.mean(rank["num_calls"] for rank in ranks),
        "sent_bytes": statistics.mean(rank["sent_bytes"] for rank in ranks),
        "sha256": sha256,
        **watched,
    }
    print(f"  {size} ranks: {found}", file=sys.stderr, flush=True)
    return found


def _watch(process: subprocess.Popen[str], events: Path) -> dict[str, float]:
    """Memory of ranks, and what went over their network, while a run goes on."""
    at: dict[str, int] = {}
    memory: list[int] = []
    seen = 0
    while process.poll() is None and "regrouped" not in at:
        time.sleep(_LOOK_S)
        data = events.read_bytes() if events.exists() else b""
        if len(data) == seen:
            continue
        seen = len(data)
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        rows = [json.loads(line) for line in lines]
        last = max((row["step"] for row in rows if row["event"] == "StepDone"), default=0)
        now = _network_bytes(process.pid)
        if last:
            at.setdefault("started", now)
        if last and not memory:
            pids = [row["pid"] for row in rows if row["event"] == "Joined"]
            memory = [size for size in map(_memory_bytes, pids) if size]
        if last < KILL_AT:
            at["before"] = now
        if any(row["event"] == "Recovered" for row in rows):
            at["regrouped"] = now
    return {
        "memory_bytes": statistics.mean(memory) if memory else 0,
        "start_bytes": at.get("started", 0),
        "regroup_bytes": at.get("regrouped", 0) - at.get("before", 0),
    }


def _network_bytes(pid: int) -> int:
    """Bytes that have come through loopback in a process's network."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == "lo":
                return int(rest.split()[0])
    return 0


def _memory_bytes(pid: int) -> int:
    """Memory of a process, a page that n processes have as an n-th; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def _simulated(sizes: Sequence[int]) -> Section:
    """What ranks send, from the project's own code."""
    section = Section(
        "Messages of a rank in a step, simulated",
        "The exchanges' own code on a transport that moves nothing: 100 M parameters, 16,384 "
        "microbatches, the busiest rank. `a2a`: all-to-alls; `few`: all else; `by host`: "
        f"{PER_HOST} ranks a host; `ms`: to read headers; `layout`: Python after a loss.",
        ("ranks", "a2a", "few", "a2a by host", "few by host", "few sharded", "received, MB",
         "headers, kB", "ms", "layout, s"),
    )  # fmt: skip
    most_few = 0.0
    for size in sizes:
        flat, by_host = most(Case(size))["gradients"], most(Case(size, PER_HOST))["gradients"]
        sharded = most(Case(size, sharding="optimizer"))
        few = [sum(part.messages.values()) - part.messages["all-to-all"]
               for part in (flat, by_host, *sharded.values())]  # fmt: skip
        if size > FEW_RANKS:
            most_few = max(most_few, max(few) / ceil(log2(size)))
        layout = simulated(Case(size), 0).layout_s
        header_bytes = 8 * (NUM_HEADER + NUM_SCALARS) * size
        read_s = header_seconds(size)
        section.raw[str(size)] = {
            "flat": vars(flat) | {"messages": dict(flat.messages)},
            "by_host": vars(by_host) | {"messages": dict(by_host.messages)},
            "layout_s": layout,
            "headers_s": read_s,
        }
        section.rows.append(
            (
                f"{size:,}",
                f"{flat.messages['all-to-all']:,}",
                str(few[0]),
                f"{by_host.messages['all-to-all']:,}",
                str(few[1]),
                str(sum(few[2:])),
                f"{flat.received_bytes / 1e6:,.0f}",
                f"{header_bytes / 1e3:,.0f}",
                f"{1e3 * read_s:.2f}",
                f"{layout:.2f}",
            )
        )
    section.at_most(
        f"more than {FEW_RANKS} ranks: `few` of each part ≤ 4 ⌈log2 n⌉",
        f"{most_few:.1f} ⌈log2 n⌉",
        most_few <= 4,
    )
    stages = {num: messages_of_a_microbatch(num) for num in (4, 64)}
    section.raw["pipeline"] = stages
    section.at_most(
        "as many messages a microbatch between 64 stages as between 4",
        ", ".join(str(num) for num in stages.values()),
        len(set(stages.values())) == 1,
    )
    return section


def _large() -> Section:
    """A large model on 64 GPUs."""
    section = Section(
        "7 B parameters on 64 GPUs",
        "float32, AdamW, 32 blocks; memory without activations. Seconds: bytes by bandwidth, and "
        f"{_MESSAGE_S * 1e6:.0f} µs a message; NCCL gathers in its own way.",
        ("sharding", "`bucket_bytes`, MiB", "memory, GB", "messages", "received, GB",
         *(f"s, {name}" for name in BANDWIDTHS)),
    )  # fmt: skip
    for sharding in ("optimizer", "gradients", "parameters"):
        for bucket in (8 << 20, 256 << 20) if sharding == "parameters" else (256 << 20,):
            case = Case(64, 1, _LARGE, 64, sharding, bucket, blocks=32)
            parts = simulated(case, 0).parts.values()
            messages = sum(part.messages.total() for part in parts)
            received = sum(part.received_bytes for part in parts)
            seconds = [received / rate + messages * _MESSAGE_S for rate in BANDWIDTHS.values()]
            section.raw[f"{sharding} {bucket}"] = {"messages": messages, "received": received}
            section.rows.append(
                (
                    sharding,
                    str(bucket >> 20),
                    f"{_memory(case) / _GB:.1f}",
                    f"{messages:,}",
                    f"{received / _GB:.1f}",
                    *(f"{each:.2f}" for each in seconds),
                )
            )
    return section


def _memory(case: Case) -> float:
    """Bytes of parameters, gradients and AdamW's two moments on a rank, and of its buddy's."""
    whole = case.parameters * ITEM_BYTES
    part = whole / case.ranks
    state = 2 * 2 * part
    if case.sharding == "optimizer":
        return 2 * whole + state
    if case.sharding == "gradients":
        return whole + whole / case.blocks + 2 * part + state
    return 2 * whole / case.blocks + 4 * part + state


_METHOD = """\
n ranks, L of which share a host:

| part of a step | messages of a rank | bytes |
|---|---|---|
| gradients | all-to-all: n - 1 a bucket, n / L by host | twice the gradient |
| headers, losses | 2 log2 n; memory inside a host | 200 n |
| norm, sharded parameters | 2 log2 n | their own |
| barriers, broadcasts | log2 n, by the library | |
| pipeline | 6 a microbatch | activations |
| tables | all-to-all | rows |

The first wall is the start over gloo: a rank connects to all others (n - 1 descriptors) and reads \
n addresses from one store; MPI connects when it sends. Next comes the all-to-all of gradients \
where each rank has its own host, then headers: 2 MB a step with 10,000 ranks. Over gloo, \
agreements are messages of all ranks to the launcher."""


if __name__ == "__main__":
    main()

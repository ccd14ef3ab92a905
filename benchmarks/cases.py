"""What is compared with what, how long for, and what is hoped for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from comparing import (
    SETTLED,
    Effort,
    bare_mpi,
    compared,
    lockstep,
    peer,
    percent,
    side_by_side,
    speedup,
    work,
)
from host_cases import allreduce, busy, exchange
from page import Section, duration, ratio
from processes import Program, Result, Spread, alternate, run

MIB = 1 << 20
_BATCHES = (1000, 64)
"""Samples a rank, of the small model."""


def latency(effort: Effort) -> list[Section]:
    """A small model, where the time between ranks counts most."""
    return [_latency(effort, *each) for each in zip(_BATCHES, (2.2, 3.5), strict=True)]


def _latency(effort: Effort, batch: int, target: float) -> Section:
    args = work("mlp_small", batch) + effort.length(200, 40, 5)
    programs = [
        lockstep("Lockstep (MPI)", (*args, *effort.settled), num_ranks=2),
        peer("DDP (gloo)", "ddp", args),
        peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
        peer("Fabric (DDP, gloo)", "fabric", args),
        peer("Accelerate (DDP, gloo)", "accelerate_loop", args),
        bare_mpi("bare MPI_Allreduce", (*args, "--fused")),
        bare_mpi("bare MPI_Barrier", (*args, "--fused", "--meet")),
        bare_mpi("guarded MPI_Allreduce", (*args, "--fused", "--guarded")),
        side_by_side(args),
    ]
    section = Section(
        f"MLP of 9,345 parameters, batch {batch} a rank, 2 ranks",
        f"{SETTLED}Peers use torch's default Adam unless `fused`, as in Lockstep, is said. "
        "`no exchange`: two separate models, the floor for a step on two ranks. `bare`: that loop "
        "with one call of MPI a step. `guarded`: it also checks by hand what Lockstep promises."
        if batch == _BATCHES[0]
        else "As above.",
    )
    targets = [(1, target, "DDP"), (-1, 0.85, "two loops")]
    compared(section, programs, effort.rounds(5), targets)
    _limits(section, programs)
    return section


def _limits(section: Section, programs: Sequence[Program]) -> None:
    """What would be the gain over DDP, the second program, of the guarded loop and of two loops."""
    _, ddp, *_, guarded, two_loops = programs
    section.verdicts += [
        f"- A hand-written loop that keeps the promises: {ratio(speedup(section, guarded, ddp))}.",
        "- With no exchange and no engine at all it would be "
        f"{ratio(speedup(section, two_loops, ddp))}.",
    ]


def one_rank(effort: Effort) -> list[Section]:
    """What the engine costs where there is nobody to talk to."""
    return [_one_rank(effort, *each) for each in zip(_BATCHES, (0.98, 0.92), strict=True)]


def _one_rank(effort: Effort, batch: int, target: float) -> Section:
    args = work("mlp_small", batch) + effort.length(300, 50, 5)
    programs = [
        lockstep("Lockstep, 1 microbatch", (*args, *effort.settled)),
        Program("plain loop", "peers/plain.py", args),
        Program("plain loop, fused Adam", "peers/plain.py", (*args, "--fused")),
        Program("guarded loop, fused Adam", "peers/plain.py", (*args, "--fused", "--guarded")),
        lockstep("Lockstep, 2 microbatches", (*args, *effort.settled, "--num-microbatches", "2")),
    ]
    section = Section(
        f"MLP of 9,345 parameters, batch {batch}, 1 rank",
        "Beside loops written by hand." if batch == _BATCHES[0] else "As above.",
    )
    targets = [(2, target, "the fused plain loop")]
    compared(section, programs, effort.rounds(5), targets)
    _, _, plain, guarded, _ = programs
    limit = speedup(section, guarded, plain)
    section.verdicts.append(f"- The guarded loop / the fused plain loop: {ratio(limit)}.")
    return section


def mlp(effort: Effort) -> list[Section]:
    """A model of the size of an MNIST classifier."""
    args = work("mlp_0p8m", 256) + effort.length(60, 20, 5)
    section = Section("MLP of 802,314 parameters, batch 256 a rank, 2 ranks", "As above.")
    return [_beside_ddp(section, args, effort.rounds(5), 1.6)]


def _beside_ddp(section: Section, args: tuple[str, ...], rounds: int, target: float) -> Section:
    """Two ranks beside DDP, and beside loops that do less than what is asked of either."""
    programs = [
        lockstep("Lockstep (MPI)", args, num_ranks=2),
        peer("DDP (gloo)", "ddp", args),
        peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
        bare_mpi("bare MPI_Allreduce", (*args, "--fused")),
        bare_mpi("guarded MPI_Allreduce", (*args, "--fused", "--guarded")),
        side_by_side(args),
    ]
    compared(section, programs, rounds, [(1, target, "DDP")])
    _limits(section, programs)
    return section


def transformer(effort: Effort) -> list[Section]:
    """A model whose gradients are large: 107 MB."""
    args = work("transformer_27m", 8) + effort.length(2, 1, 3)
    section = Section(
        "Transformer of 27 million parameters, 8 × 64 tokens a rank, 2 ranks",
        "107 MB of gradients in each step. DDP overlaps the exchange with the backward pass, "
        "Lockstep exchanges after it. A sample is a sequence of 64 tokens.",
    )
    return [_beside_ddp(section, args, effort.rounds(3), 1.5)]


def scaling(effort: Effort) -> list[Section]:
    """The same work per rank on more ranks."""
    args = work("mlp_small", 1000) + effort.length(300, 50, 5)
    plain_loops = side_by_side(args)
    alone = Program("plain loop, fused Adam", "peers/plain.py", (*args, "--fused"))
    programs = [
        lockstep("2 ranks", (*args, *effort.settled), num_ranks=2),
        lockstep("1 rank", (*args, *effort.settled)),
        plain_loops,
        alone,
    ]
    section = Section(
        "Lockstep from 1 to 2 ranks, batch 1000 a rank",
        f"{SETTLED}The MLP of 9,345 parameters, one microbatch a rank. Two independent loops show "
        "the contention between processes.",
    )
    compared(section, programs, effort.rounds(5), [(1, 1.8, "1 rank")])
    limit = speedup(section, plain_loops, alone)
    section.verdicts.append(f"- Two plain loops, which exchange nothing: {ratio(limit)}.")
    return [section]


def checkpoint(effort: Effort) -> list[Section]:
    """How long training stands still for a checkpoint."""
    section = Section(
        "Checkpoints, 2 ranks",
        "`stall`: how long training stands still for a checkpoint. `cost`: all that a checkpoint "
        "takes, since the writer shares the cores with the ranks. Both over the time of 100 "
        "steps.",
        ("model", "bytes", "step", "stall", "stall / 100 steps", "write", "cost / 100 steps"),
    )
    for model, every, repeats, rounds in (("mlp_0p8m", 100, 5, 2), ("transformer_27m", 4, 3, 1)):
        if effort.quick:
            every, repeats = every // 2, 1
        length = ("--steps", str(every), "--warmup", "1", "--repeats", str(repeats))
        args = (*work(model), *length)
        saving = ("--checkpoint-every", str(every))
        programs = [
            lockstep(f"{model}, no checkpoints", args, num_ranks=2),
            lockstep(f"{model}, checkpoints", (*args, *saving), num_ranks=2),
        ]
        results = alternate(programs, effort.rounds(rounds))
        section.raw |= results
        _checkpoint_row(section, model, every, *results.values())
    return [section]


def _checkpoint_row(
    section: Section, model: str, every: int, without: list[Result], saving: list[Result]
) -> None:
    step = Spread.of([r["step_s"] for r in without])
    # The first of each run also allocates and makes folders, as it does in any run.
    found = [c for r in saving for c in r["checkpoints"]]
    stall = Spread.of([c["stall_s"] for c in found])
    write = Spread.of([c["write_s"] for c in found])
    part = Spread(*(s / (100 * step.median) for s in (stall.median, stall.low, stall.high)))
    longer = (a["step_s"] - b["step_s"] for a, b in zip(saving, without, strict=True))
    cost = Spread.of([every * seconds / (100 * step.median) for seconds in longer])
    row = [model, f"{found[0]['num_bytes']:,}", duration(step), duration(stall), percent(part)]
    section.rows.append([*row, duration(write), percent(cost)])
    section.at_most(f"{model}: stall < 1 %", percent(part), part.median < 0.01)


def memory(effort: Effort) -> list[Section]:
    """Flat copies of the gradient that are in use at once."""
    small, large = (
        run(Program(f"count {model}", "memory.py", ("count", "--model", model)))
        for model in ("mlp_small", "transformer_27m")
    )
    peaks = {
        m: run(Program(f"peak, {m}", "memory.py", ("rss", "--num-microbatches", str(m))))
        for m in (1, 8)
    }
    worlds = sorted({row["world_size"] for row in large["table"]})
    section = Section(
        "Memory for gradients",
        "Flat copies of the gradient in use at once on the rank with most, counted in the "
        "reduction of the 27-million-parameter model. M: microbatches, W: ranks.",
        ("M", *(f"W = {w}" for w in worlds), "2 + log2 M"),
    )
    flat_bytes = large["flat_bytes"]
    met = True
    for m in dict.fromkeys(row["num_microbatches"] for row in large["table"]):
        used = [r["fold"] / flat_bytes for r in large["table"] if r["num_microbatches"] == m]
        bound = 2 + math.log2(m)
        met &= max(used) <= bound + 0.01  # header, scalars and padding
        section.rows.append([str(m), *(f"{u:.1f}" for u in used), f"{bound:g}"])
    section.at_most("at most 2 + log2 M copies", "see the table", met)
    bucket = max(row["exchange"] for row in large["table"])
    inbox = max(row["kept"] + row["exchange"] for row in small["table"] if row["world_size"] > 1)
    section.verdicts += [
        f"- While ranks exchange slices, buffers of up to {bucket / MIB:.0f} MiB are added.",
        "- Where all partial sums take up to 1 MiB, every rank receives all of them: up to "
        f"{inbox / 1024:,.0f} KiB for 9,345 parameters.",
        *_measured_peaks(peaks, large),
    ]
    section.raw = {"small": small, "large": large, "peaks": list(peaks.values())}
    return [section]


def _measured_peaks(peaks: dict[int, Result], large: Result) -> list[str]:
    kept = {r["num_microbatches"]: r["fold"] for r in large["table"] if r["world_size"] == 1}
    flat_bytes = large["flat_bytes"]
    return [
        f"- Measured: from 1 to {m} microbatches of one sample on one rank, the peak of the "
        f"process's resident memory grows by "
        f"{(peak['peak_bytes'] - peaks[1]['peak_bytes']) / flat_bytes:.2f} flat copies; the table "
        f"says {(kept[m] - kept[1]) / flat_bytes:.2f}."
        for m, peak in peaks.items()
        if m > 1
    ]


CASES: Mapping[str, Callable[[Effort], list[Section]]] = {
    "latency": latency,
    "one_rank": one_rank,
    "mlp": mlp,
    "transformer": transformer,
    "scaling": scaling,
    "busy": busy,
    "checkpoint": checkpoint,
    "memory": memory,
    "allreduce": allreduce,
    "exchange": exchange,
}

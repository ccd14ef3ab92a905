"""What is compared with what, how long for, and what is hoped for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from page import Section, duration, number, ratio
from processes import Program, Result, Spread, alternate, run

MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        quick: as little as shows that everything runs.
    """

    quick: bool

    def rounds(self, full: int) -> int:
        """How often programs take turns."""
        return 1 if self.quick else full

    def length(self, steps: int, warmup: int, repeats: int) -> tuple[str, ...]:
        """The arguments that say how long a program measures."""
        if self.quick:
            steps, warmup, repeats = max(1, steps // 20), 1, 1
        return ("--steps", str(steps), "--warmup", str(warmup), "--repeats", str(repeats))


def latency(effort: Effort) -> list[Section]:
    """A small model, where the time between ranks counts most."""
    return [_latency(effort, batch, target) for batch, target in ((1000, 2.0), (64, 4.0))]


def _latency(effort: Effort, batch: int, target: float) -> Section:
    args = _work("mlp_small", batch) + effort.length(200, 40, 5)
    programs = [
        _lockstep("Lockstep (MPI)", args, num_ranks=2),
        _peer("DDP (gloo)", "ddp", args),
        _peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
        _peer("Fabric (DDP, gloo)", "fabric", args),
        _peer("Accelerate (DDP, gloo)", "accelerate_loop", args),
        _side_by_side(args),
    ]
    section = Section(
        f"MLP of 9,345 parameters, batch {batch} a rank, 2 ranks",
        "Adam as each loop makes it: torch's default kernels in the peers, which a second row of "
        "DDP replaces by fused ones; fused ones on the flat parameters in Lockstep. The last row "
        "does not exchange anything, so it trains two models: the floor for a step of torch on "
        "two ranks.",
    )
    _compared(section, programs, effort.rounds(5), [(1, target, "DDP")])
    limit = _speedup(section, programs[-1], programs[1])
    section.verdicts.append(f"- With no exchange and no engine at all it would be {ratio(limit)}.")
    return section


def one_rank(effort: Effort) -> list[Section]:
    """What the engine costs where there is nobody to talk to."""
    return [_one_rank(effort, batch) for batch in (1000, 64)]


def _one_rank(effort: Effort, batch: int) -> Section:
    args = _work("mlp_small", batch) + effort.length(300, 50, 5)
    programs = [
        _lockstep("Lockstep, 1 microbatch", args),
        Program("plain loop", "peers/plain.py", args),
        Program("plain loop, fused Adam", "peers/plain.py", (*args, "--fused")),
        _lockstep("Lockstep, 2 microbatches", (*args, "--num-microbatches", "2")),
    ]
    section = Section(
        f"MLP of 9,345 parameters, batch {batch}, 1 rank",
        "Against a hand-written loop over tensors, with torch's default Adam and with its fused "
        "one (which Lockstep uses). Two microbatches do the same work in twice as many, half as "
        "long, passes.",
    )
    return _compared(section, programs, effort.rounds(4), [(1, 0.95, "the plain loop")])


def mlp(effort: Effort) -> list[Section]:
    """A model of the size of an MNIST classifier."""
    args = _work("mlp_0p8m", 256) + effort.length(60, 20, 5)
    programs = [
        _lockstep("Lockstep (MPI)", args, num_ranks=2),
        _peer("DDP (gloo)", "ddp", args),
        _peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
    ]
    section = Section("MLP of 802,314 parameters, batch 256 a rank, 2 ranks", "As above.")
    return [_compared(section, programs, effort.rounds(3), [(1, 1.2, "DDP")])]


def transformer(effort: Effort) -> list[Section]:
    """A model whose gradients are large: 107 MB."""
    args = _work("transformer_27m", 8) + effort.length(2, 1, 3)
    programs = [
        _lockstep("Lockstep (MPI)", args, num_ranks=2),
        _peer("DDP (gloo)", "ddp", args),
        _peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
    ]
    section = Section(
        "Transformer of 27 million parameters, 8 × 64 tokens a rank, 2 ranks",
        "107 MB of gradients in each step. DDP overlaps the exchange with the backward pass, "
        "Lockstep exchanges after it. A sample is a sequence of 64 tokens.",
    )
    return [_compared(section, programs, effort.rounds(2), [(1, 1.0, "DDP")])]


def scaling(effort: Effort) -> list[Section]:
    """The same work per rank on more ranks."""
    args = _work("mlp_small", 1000) + effort.length(300, 50, 5)
    side_by_side = _side_by_side(args)
    alone = Program("plain loop, fused Adam", "peers/plain.py", (*args, "--fused"))
    programs = [
        _lockstep("2 ranks", args, num_ranks=2), _lockstep("1 rank", args), side_by_side, alone,
    ]  # fmt: skip
    section = Section(
        "Lockstep from 1 to 2 ranks, batch 1000 a rank",
        "The MLP of 9,345 parameters, one microbatch a rank. Two plain loops that know nothing of "
        "each other show what two processes cost each other on this machine.",
    )
    _compared(section, programs, effort.rounds(5), [(1, 1.8, "1 rank")])
    limit = _speedup(section, side_by_side, alone)
    section.verdicts.append(f"- Two plain loops, which exchange nothing: {ratio(limit)}.")
    return [section]


def checkpoint(effort: Effort) -> list[Section]:
    """How long training stands still for a checkpoint."""
    section = Section(
        "Checkpoints, 2 ranks",
        "`stall` is how long the training thread stands still for one checkpoint, as a part of "
        "the time of 100 steps: the promise. The last column is what a checkpoint costs in all, "
        "as the same part: the file is written in the background, but on this many cores the "
        "writer takes time from the ranks.",
        ("model", "bytes", "step", "stall", "stall / 100 steps", "write", "cost / 100 steps"),
    )
    for model, every, repeats, rounds in (("mlp_0p8m", 100, 5, 2), ("transformer_27m", 4, 3, 1)):
        if effort.quick:
            every, repeats = every // 2, 1
        length = ("--steps", str(every), "--warmup", "1", "--repeats", str(repeats))
        args = (*_work(model), *length)
        saving = ("--checkpoint-every", str(every))
        programs = [
            _lockstep(f"{model}, no checkpoints", args, num_ranks=2),
            _lockstep(f"{model}, checkpoints", (*args, *saving), num_ranks=2),
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
    row = [model, f"{found[0]['num_bytes']:,}", duration(step), duration(stall), _percent(part)]
    section.rows.append([*row, duration(write), _percent(cost)])
    section.at_most(f"{model}: stall < 1 %", _percent(part), part.median < 0.01)


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
        "Flat copies of the gradient in use at once on the rank that uses most: the nodes of the "
        "tree that are kept, and the gradients autograd makes. Counted by running the real "
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
        f"- While ranks exchange slices, buffers of up to {bucket / MIB:.0f} MiB come in, whatever "
        "the model's size (autograd's gradients are gone by then).",
        "- Gradients of up to 1 MiB (all nodes of all ranks together) are not cut into slices: "
        f"every rank takes in all nodes. For 9,345 parameters that is up to {inbox / 1024:,.0f} "
        "KiB in all.",
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


def allreduce(effort: Effort) -> list[Section]:
    """The MPI backend of torch.distributed, by itself."""
    length = ("--repeats", "1", "--seconds", "0.05") if effort.quick else ("--seconds", "0.2")
    programs = [
        Program("mpi4py", "allreduce.py", ("--backend", "mpi4py", *length), "mpirun", 2),
        Program("gloo", "allreduce.py", ("--backend", "gloo", *length), "torchrun", 2),
    ]
    results = alternate(programs, effort.rounds(3))
    section = Section(
        "All-reduce through torch.distributed, 2 ranks",
        "`dist.all_reduce` of float32 in a loop.",
        ("bytes", *(f"{name}" for name in results), "gloo / mpi4py"),
        raw=results,
    )
    for size in results["mpi4py"][0]["latency_s"]:
        times = {name: [r["latency_s"][size] for r in rs] for name, rs in results.items()}
        spreads = {name: Spread.of(values) for name, values in times.items()}
        cells = [f"{duration(s)}, {int(size) / s.median / 1e9:.2g} GB/s" for s in spreads.values()]
        faster = Spread.of_ratios(times["gloo"], times["mpi4py"])
        section.rows.append([f"{int(size):,}", *cells, ratio(faster)])
    return [section]


def exchange(effort: Effort) -> list[Section]:
    """Sums of gradients inside a host, without the rest of a step."""
    length = ("--repeats", "1", "--seconds", "0.05") if effort.quick else ()
    program = Program("exchange", "exchange.py", length, "mpirun", 2)
    found = [run(program)["exchange_s"] for _ in range(effort.rounds(3))]
    ways = list(next(iter(found[0].values())))
    section = Section(
        "Sums of gradients of float32 inside a host, 2 ranks",
        "A node of the tree on each rank: slices in memory that the ranks share, slices that are "
        "sent, and `MPI_Allreduce`, whose bits depend on the number of ranks.",
        ("bytes", *ways, "MPI_Allreduce / shared memory"),
        raw={"exchange": found},
    )
    for size in found[0]:
        times = {way: [f[size][way] for f in found] for way in ways}
        faster = Spread.of_ratios(times["MPI_Allreduce"], times["shared memory"])
        cells = [duration(Spread.of(spent)) for spent in times.values()]
        section.rows.append([f"{int(size):,}", *cells, ratio(faster)])
    section.at_least("MPI_Allreduce / shared memory, 50 MB", faster, 2.0)
    return [section]


CASES: Mapping[str, Callable[[Effort], list[Section]]] = {
    "latency": latency,
    "one_rank": one_rank,
    "mlp": mlp,
    "transformer": transformer,
    "scaling": scaling,
    "checkpoint": checkpoint,
    "memory": memory,
    "allreduce": allreduce,
    "exchange": exchange,
}


def _compared(
    section: Section,
    programs: Sequence[Program],
    rounds: int,
    targets: Sequence[tuple[int, float, str]],
) -> Section:
    """Fill a section with the samples/s of programs, relative to the first one.

    Args:
        section: to fill.
        programs: the first one is what the others are compared with.
        rounds: of all programs.
        targets: (number of the program, least ratio, what to call it).
    """
    results = alternate(programs, rounds)
    first = programs[0].name
    speeds = {name: [r["samples_per_s"] for r in found] for name, found in results.items()}
    ratios = {name: Spread.of_ratios(speeds[first], found) for name, found in speeds.items()}
    section.header = ("", "samples/s", "step", f"speed of {first} / this one's")
    section.rows = [
        [
            name,
            number(Spread.of(speeds[name])),
            duration(Spread.of([r["step_s"] for r in found])),
            "" if name == first else ratio(ratios[name]),
        ]
        for name, found in results.items()
    ]
    for index, target, called in targets:
        section.at_least(f"samples/s / {called}'s", ratios[programs[index].name], target)
    section.raw = dict[str, Any](results)
    return section


def _speedup(section: Section, program: Program, reference: Program) -> Spread:
    """How many times as many samples/s a program of a filled section computes as another."""
    fast, slow = ([r["samples_per_s"] for r in section.raw[p.name]] for p in (program, reference))
    return Spread.of_ratios(fast, slow)


def _side_by_side(arguments: tuple[str, ...]) -> Program:
    name = "two plain loops, fused Adam, no exchange"
    return Program(name, "peers/plain.py", (*arguments, "--fused"), "torchrun", 2)


def _work(model: str, batch: int | None = None) -> tuple[str, ...]:
    return ("--model", model, *(() if batch is None else ("--batch", str(batch))))


def _lockstep(name: str, arguments: tuple[str, ...], num_ranks: int = 1) -> Program:
    script = "lockstep_loop.py"
    return Program(name, script, arguments, "mpirun" if num_ranks > 1 else "python", num_ranks)


def _peer(name: str, script: str, arguments: tuple[str, ...]) -> Program:
    return Program(name, f"peers/{script}.py", arguments, "torchrun", 2)


def _percent(part: Spread) -> str:
    low, middle, high = (f"{100 * v:.2f}" for v in (part.low, part.median, part.high))
    return f"{middle} % ({low}–{high})"

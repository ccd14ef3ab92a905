"""What the ranks of one host do to each other, and other processes to them."""

from __future__ import annotations

from comparing import Effort, compared, lockstep, peer, work
from page import Section, duration, ratio
from processes import Program, Spread, alternate, busy_cores, run


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
        "A partial sum on each rank: through shared memory, by messages, and by "
        "`MPI_Allreduce`, whose bits depend on the number of ranks.",
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


def busy(effort: Effort) -> list[Section]:
    """Ranks on cores that others use, too."""
    args = work("mlp_small", 64) + effort.length(100, 20, 5)
    programs = [
        lockstep("Lockstep (MPI)", (*args, *effort.settled), num_ranks=2),
        peer("DDP (gloo)", "ddp", args),
        peer("DDP (gloo), fused Adam", "ddp", (*args, "--fused")),
    ]
    section = Section(
        "MLP of 9,345 parameters, batch 64 a rank, 2 ranks, beside busy processes",
        "One process that computes all the time for each core. Who waits by spinning takes the "
        "time in which the others could compute.",
    )
    with busy_cores():
        compared(section, programs, effort.rounds(3), [(1, 1.0, "DDP")])
    return [section]

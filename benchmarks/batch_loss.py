"""A loss over the whole batch, beside a DDP loop that gathers outputs with gradients.

Writes `docs/benchmarks/batch-loss.md`; `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics

from page import Section, command, duration, number, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

OURS, PEER = "pairs_loop.py", "peers/pairs_ddp.py"
_MIB = 1 << 20
_TARGET = 0.9
_SAME = 1e-4
"""Greatest difference of losses, as a part of the first one, that is rounding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="how often each program runs")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py"))
    facts["command"] = command("batch_loss")
    section = measured(args.quick, 1 if args.quick else args.rounds)
    publish(
        None if args.quick else DOCS, "batch-loss", "Losses over the whole batch", facts, [section]
    )


def measured(quick: bool, rounds: int) -> Section:
    """Samples per second, memory and losses of each program."""
    length = ("--steps", "3" if quick else "20", "--repeats", "2" if quick else "4")
    eight = (*length, "--num-microbatches", "8")
    programs = [
        Program("DDP with all_gather, 2 ranks", PEER, length, "torchrun", 2),
        Program("2 ranks", OURS, length, "mpirun", 2),
        Program("2 ranks, recompute", OURS, (*length, "--recompute"), "mpirun", 2),
        Program("2 ranks, 8 microbatches", OURS, eight, "mpirun", 2),
        Program("2 ranks, 8 microbatches, recompute", OURS, (*eight, "--recompute"), "mpirun", 2),
        Program("1 rank", OURS, length),
    ]
    results = alternate(programs, rounds)
    peer = results[programs[0].name]
    section = Section(
        "Time, memory and curve beside DDP",
        "InfoNCE over 512 pairs of views; a perceptron of 784, 1,024, 1,024 and 128 features, "
        "Adam, float32, 2 microbatches unless said otherwise. DDP gathers outputs by "
        "`torch.distributed.nn.functional.all_gather` over gloo; both compute the loss of all "
        "pairs on each rank. Lockstep keeps activations, or computes them again "
        "(`batch_loss.recompute`). The peak is rank 0's, Python and torch included. The loss is "
        "the mean of the last 20 steps; `bits` is a SHA-256 of the final parameters.",
        ("", "samples/s", "step", "samples/s / DDP's", "peak", "last loss", "bits"),
        raw=dict(results),
    )
    for name, found in results.items():
        peak = statistics.median(r["peak_bytes"] for r in found) / _MIB
        section.rows.append(
            (
                name,
                number(Spread.of(speeds(found))),
                duration(Spread.of([r["step_s"] for r in found])),
                "" if found is peer else ratio(Spread.of_ratios(speeds(found), speeds(peer))),
                f"{peak:,.0f} MiB",
                f"{found[0]['losses'][-1]:.6f}",
                ", ".join(sorted({r.get("digest", "") for r in found})),
            )
        )
    ours = results["2 ranks"]
    section.at_least(
        "samples/s of 2 ranks / DDP's", Spread.of_ratios(speeds(ours), speeds(peer)), _TARGET
    )
    pairs = zip(ours[0]["losses"], peer[0]["losses"], strict=True)
    apart = max(abs(a - b) for a, b in pairs) / peer[0]["losses"][0]
    section.at_most(
        f"greatest difference of the curves / first loss ≤ {_SAME:g}",
        f"{apart:.1e}",
        apart <= _SAME,
    )
    return section


def speeds(results: list[Result]) -> list[float]:
    """Samples per second of each round."""
    return [r["samples_per_s"] for r in results]


if __name__ == "__main__":
    main()

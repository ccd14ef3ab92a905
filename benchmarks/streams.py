"""Streams in parts, beside everyone reading everything and beside DDP; writes a page of the docs.

`docs/benchmarks/streams.md`; `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from page import Section, command, number, publish, ratio
from peers.json_lines import BATCH, FEATURES, LINES, MICROBATCHES, NUM_FILES, WARMUP, written
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

OURS, PEER = "stream_steps.py", "peers/json_ddp.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    args = parser.parse_args()
    facts = machine(("torch", "datasets", "mpi4py")) | {"command": command("streams")}
    with tempfile.TemporaryDirectory() as folder:
        sections = [measured(Path(folder), 1 if args.quick else args.rounds)]
    publish(None if args.quick else DOCS, "streams", "Streams in parts", facts, sections)


def measured(folder: Path, rounds: int) -> Section:
    """Bytes that rank 0 reads, and samples per second."""
    data = sum(Path(path).stat().st_size for path in written(folder))
    lines, parts = (str(folder),), (str(folder), "--shards", str(NUM_FILES))
    pieces = (str(folder), "--microbatches", str(MICROBATCHES))
    programs = [
        Program("1 rank, every line", OURS, lines),
        Program("1 rank, parts", OURS, parts),
        Program("2 ranks, every line on both", OURS, lines, "mpirun", 2),
        Program("2 ranks, parts", OURS, parts, "mpirun", 2),
        Program("DDP, 1 rank", PEER, lines, "torchrun", 1),
        Program("DDP, 2 ranks", PEER, lines, "torchrun", 2),
        Program(f"DDP, 1 rank, {MICROBATCHES} microbatches", PEER, pieces, "torchrun", 1),
        Program(f"DDP, 2 ranks, {MICROBATCHES} microbatches", PEER, pieces, "torchrun", 2),
    ]
    results = alternate(programs, rounds)
    section = Section(
        "Bytes and samples per second",
        f"{NUM_FILES} files of {LINES:,} JSON lines with {FEATURES} numbers each, a "
        "`datasets.IterableDataset`, read in the training process; a perceptron, batches of "
        f"{BATCH} samples in {MICROBATCHES} microbatches. DDP over gloo, with "
        "`split_dataset_by_node`, in one pass, or accumulating as many microbatches. Time is that "
        f"of steps after the first {WARMUP}, many of which Lockstep does twice, as a check.",
        ("", "bytes of rank 0 / all", "samples/s", "/ DDP's", "/ DDP's in microbatches"),
        raw={**results, "bytes": data},
    )
    against: dict[tuple[str, str], Spread] = {}
    for name, found in results.items():
        ranks = "2 ranks" if "2 ranks" in name else "1 rank"
        peers = [f"DDP, {ranks}", f"DDP, {ranks}, {MICROBATCHES} microbatches"]
        read = statistics.median(result["bytes"] for result in found) / data
        cells = [name, f"{read:.2f}", number(Spread.of(speeds(found)))]
        for peer in peers:
            against[name, peer] = Spread.of_ratios(speeds(found), speeds(results[peer]))
            cells.append("" if name == peer else ratio(against[name, peer]))
        section.rows.append(cells)
    for ranks in ("1 rank", "2 ranks"):
        found = against[f"{ranks}, parts", f"DDP, {ranks}"]
        section.at_least(f"samples/s of {ranks} / DDP's", found, 0.8)
    part = statistics.median(r["bytes"] for r in results["2 ranks, parts"]) / data
    section.at_most("bytes of one of 2 ranks ≤ 0.6 of the data", f"{part:.2f}", part <= 0.6)
    return section


def speeds(results: list[Result]) -> list[float]:
    """Samples per second of each round."""
    return [BATCH / result["step_s"] for result in results]


if __name__ == "__main__":
    main()

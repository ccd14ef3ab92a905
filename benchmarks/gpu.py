"""One process on a GPU: whether runs end with the same bits, and what a step costs.

    python -m benchmarks.gpu              # writes docs/benchmarks/gpu.md and gpu.json
    python -m benchmarks.gpu --dry-run    # every case, small, without a GPU; writes nothing

A dry run computes on the accelerator of host memory that the tests have (`tests/accelerator`), with
small models in place of large ones.

Needs torch with CUDA and Lockstep's own dependencies; takes about 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # as for those that are run by their path

from machine import machine
from page import Section, duration, page, ratio, write
from processes import Failed, Program, Result, Spread, measured

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"
_LOCKSTEP = (sys.executable, "-m", "lockstep")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Training:
    """A recipe of which runs are compared.

    Attributes:
        recipe: its name, and keys of its config.
        steps: how many; a checkpoint every tenth of them.
    """

    recipe: tuple[str, ...]
    steps: int


_TRAININGS = {
    "digits, perceptron": Training(("digits",), 300),
    "digits, CNN": Training(("digits", "model=cnn"), 200),
    "sketched perceptron": Training(("sketched",), 200),
    "quantum transformer": Training(("quantum",), 100),
    "HRM": Training(("hrm",), 60),
    "sea ice": Training(("ufs",), 100),
}


@dataclass(frozen=True)
class Loop:
    """A model that Lockstep and a plain loop train.

    Attributes:
        model: its name in `peers/models.py`.
        batch: samples of a step.
        steps: of the warm-up and of each repeat; enough that the checks of the first steps
            (1, 2, 4, …, 64) lie in the warm-up.
        dtype: of autocast.
        target: the least ratio of steps a second, Lockstep's to the plain loop's.
        dry_model: the model of a dry run.
    """

    model: str
    batch: int
    steps: int
    dtype: str = "fp32"
    target: float = 0.95
    dry_model: str = "mlp_small"


_LOOPS = {
    "perceptron, 9,345 parameters, batch 64": Loop("mlp_small", 64, 300, target=3.0),
    "perceptron, 802,314 parameters, batch 256": Loop(
        "mlp_0p8m", 256, 200, target=3.0, dry_model="mlp_0p8m"
    ),
    "transformer, 26.9 M parameters, batch 8 x 64": Loop(
        "transformer_27m", 8, 100, dry_model="transformer_tiny"
    ),
    "GPT-2, 124 M parameters, bf16, batch 8 x 1,024": Loop(
        "gpt_124m", 8, 70, "bf16", dry_model="transformer_tiny"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, with few steps")
    args = parser.parse_args()
    device = "cuda"
    if args.dry_run:
        from tests.accelerator import surroundings

        os.environ.update(surroundings(os.environ))  # of the programs that are started
        device = "accelerator"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: run it where there is one, or with --dry-run")
    facts = _facts(device)
    sections = [_same_bits(device, args.dry_run), _speed(device, args.rounds, args.dry_run)]
    text = page("On a GPU", facts, sections)
    print(text)
    if not args.dry_run:
        write(DOCS, "gpu", text, facts, sections)


def _facts(device: str) -> dict[str, str]:
    facts = machine(("torch", "numpy"))
    if device == "cuda":
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        facts["GPU"] = torch.cuda.get_device_name()
        facts["CUDA"] = f"{torch.version.cuda}, driver {driver.stdout.strip()}"
        facts["cuDNN"] = str(torch.backends.cudnn.version())
    return facts | {"command": "`python -m benchmarks.gpu`"}


def _same_bits(device: str, is_dry: bool) -> Section:
    section = Section(
        "Same bits",
        "SHA-256 of the final parameters. Each system in one process on the GPU: with "
        "`compute.graphs=auto` and `false`, and killed (SIGKILL) after its first checkpoint and "
        "resumed. Systems run side by side.",
        ("system", "graphs", "no graphs", "killed and resumed", "test or validation"),
    )
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2 if is_dry else None) as pool:
        ends = pool.map(
            lambda item: _three_ends(item[1], device, is_dry, Path(name) / str(item[0])),
            enumerate(_TRAININGS.values()),
        )
        section.raw = dict(zip(_TRAININGS, ends, strict=True))
    num_equal = 0
    for text, found in section.raw.items():
        hashes = [end.get("params_sha256") or end["failed"] for end in found]
        section.rows.append((text, *(f"`{each[:12]}`" for each in hashes), _metrics(found[0])))
        num_equal += len(set(hashes)) == 1 and "params_sha256" in found[0]
    num_systems = len(section.raw)
    section.at_most(
        "one SHA-256 for each system", f"{num_equal} of {num_systems}", num_equal == num_systems
    )
    return section


def _three_ends(
    training: Training, device: str, is_dry: bool, folder: Path
) -> list[dict[str, Any]]:
    steps = 2 if is_dry else training.steps
    keys = (f"device={device}", f"steps={steps}", f"checkpoint.every={max(steps // 10, 1)}")
    argv = [*_LOCKSTEP, "train", *training.recipe, *keys]
    return [
        _ended(argv, folder / "first"),
        _ended([*argv, "compute.graphs=false"], folder / "second"),
        _killed_and_resumed(argv, folder / "killed"),
    ]


def _ended(argv: list[str], run_dir: Path) -> dict[str, Any]:
    """The result of a training, or what it said when it failed."""
    print(f"  {' '.join(argv[3:])}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*argv, "--quiet", "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return _result(done, run_dir)


def _result(done: subprocess.CompletedProcess[str], run_dir: Path) -> dict[str, Any]:
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
        return {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return result


def _killed_and_resumed(argv: list[str], run_dir: Path) -> dict[str, Any]:
    process = subprocess.Popen(
        [*argv, "--quiet", "--run-dir", str(run_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + _TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if any((run_dir / "checkpoints").glob("step_*")):
            break
        time.sleep(0.002)
    process.kill()
    process.wait()
    done = subprocess.run(
        [*_LOCKSTEP, "resume", str(run_dir)], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    return _result(done, run_dir)


def _metrics(result: dict[str, Any]) -> str:
    found = result.get("metrics", {})
    names = [name for name in found if name.split("/")[0] in ("val", "test")]
    return ", ".join(f"{name} {found[name]:.4g}" for name in names[:2])


def _speed(device: str, rounds: int, is_dry: bool) -> Section:
    section = Section(
        "Steps",
        "Lockstep with one microbatch, beside a plain loop of torch that asks for deterministic "
        "kernels too. Both take shuffled batches of data in the computer's memory; Adam. The "
        "ratio of steps a second is that with `compute.graphs=auto`. Brackets are of three "
        "repeats.",
        ("model", "plain loop", "no graphs", "graphs", "ratio"),
    )
    for text, loop in _LOOPS.items():
        steps, batch = (3, 2) if is_dry else (loop.steps, loop.batch)
        arguments = (
            "--model", loop.dry_model if is_dry else loop.model, "--batch", str(batch),
            "--steps", str(steps), "--warmup", str(steps), "--repeats", "3",
            "--device", device, "--dtype", loop.dtype,
        )  # fmt: skip
        found = _in_turn(arguments, 1 if is_dry else rounds)
        if isinstance(found, str):
            section.rows.append((text, "", "", found, ""))
            continue
        plain, eager, own = map(_of_repeats, found.values())
        gained = Spread(plain.median / own.median, plain.low / own.high, plain.high / own.low)
        section.rows.append((text, *map(duration, (plain, eager, own)), ratio(gained)))
        section.at_least(text, gained, loop.target)
        section.raw[text] = found
    return section


def _of_repeats(found: list[Result]) -> Spread:
    """The time of a step: the median of all runs, and the least and greatest of all repeats."""
    ends = [float(seconds) for result in found for seconds in result["step_s_range"]]
    return Spread(Spread.of([float(r["step_s"]) for r in found]).median, min(ends), max(ends))


def _in_turn(arguments: tuple[str, ...], rounds: int) -> dict[str, list[Result]] | str:
    """Lines of all programs by name, or what one said when it failed."""
    programs = [
        Program("plain", "peers/plain.py", arguments),
        Program("eager", "lockstep_loop.py", (*arguments, "--no-graphs")),
        Program("lockstep", "lockstep_loop.py", arguments),
    ]
    found: dict[str, list[Result]] = {program.name: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            print(f"  {program.name} {' '.join(arguments)}", file=sys.stderr, flush=True)
            try:
                found[program.name].append(measured(program, dict(os.environ)))
            except Failed as error:
                print(error, file=sys.stderr, flush=True)
                return str(error).strip().splitlines()[-1]
    return found


if __name__ == "__main__":
    main()

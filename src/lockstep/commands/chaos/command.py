"""`lockstep chaos`: the same run without and with faults, and whether it made any difference."""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.commands.chaos.plan import HANG_TIMEOUT_S, Blow, draw
from lockstep.commands.chaos.table import Effect, Row, effect_of, render, started_again
from lockstep.commands.waiting import shown_status
from lockstep.config import TrainConfig, override
from lockstep.engine import faults
from lockstep.engine.checkpoint import listing
from lockstep.errors import ConfigError, LaunchError, LockstepError
from lockstep.front import Sitting
from lockstep.launching.start import check_replacements, rank_command, start
from lockstep.launching.warm import fork_server
from lockstep.observe import read_events, read_result
from lockstep.targets import absolute, configured, is_script

LAUNCHERS = ("mpi", "local")
"""Launchers under which survivors of a lost rank go on."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that faults strike.

    Attributes:
        number: number of processes at the start of each sitting, at least 2.
        launcher: name of the launcher that starts them, one of `LAUNCHERS`.
        replacements: greatest number of killed processes that it replaces in a sitting.
    """

    number: int
    launcher: str = "mpi"
    replacements: int = 0

    def check(self) -> None:
        """Refuse what cannot be done.

        Raises:
            LaunchError: too few ranks, or a launcher under which none would survive.
        """
        if self.number < 2:
            raise LaunchError(f"-n {self.number}: must be at least 2, for some have to survive")
        if self.launcher not in LAUNCHERS:
            raise LaunchError(
                f"--launcher {self.launcher}: must be one of {', '.join(LAUNCHERS)}; under others "
                "no rank survives the loss of another"
            )
        check_replacements(self.launcher, self.replacements)


def chaos(
    target: str,
    overrides: Sequence[str],
    ranks: Ranks,
    num_faults: int,
    seed: int,
    keep: Path | None,
    console: Console,
    quiet: bool = False,
) -> int:
    """Train without faults, then with random ones, and compare the SHA-256s.

    Args:
        target: recipe, file or script to train.
        overrides: `key=value` items for the config.
        ranks: ranks that the faults strike.
        num_faults: number of faults, at least 1.
        seed: seed that the faults are drawn with.
        keep: folder for the run directories; None deletes them.
        console: console to print on.
        quiet: whether to print the verdict only.

    Returns:
        0 if faults struck, the parameters are equal and each step was done once, 1 if not.

    Raises:
        LockstepError: something given does not work, or a run failed.
    """
    ranks.check()
    if num_faults < 1:
        raise ConfigError(f"--faults {num_faults}: must be at least 1")
    with ExitStack() as stack:
        server = stack.enter_context(fork_server(ranks.launcher, target))
        if not is_script(target):
            configured(target, overrides)
        if keep is None:
            folder = tempfile.mkdtemp(prefix="lockstep-chaos-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            keep = Path(folder)
        runs = _Runs(target, overrides, ranks, server)
        with shown_status(console, "training without faults", quiet):
            runs.sit(keep / "reference", [])
            reference = read_result(keep / "reference")
        keys = _keys(target, overrides)
        plan = draw(
            num_faults, ranks.number, int(reference["step"]), seed, ranks.replacements,
            keys.data.num_workers > 0, keys.mesh.tp, keys.mesh.pp,
            {row["moment"] for row in faults.logged(_log(keep / "reference"))},
        )  # fmt: skip
        effects: list[Effect] = []
        before: list[Row] = []
        for blows in plan:
            what = f"training with faults: {len(effects)} of {num_faults} done"
            with shown_status(console, what, quiet):
                more, rows = runs.sit(keep / "chaos", blows)
            if effects and effects[-1].blow.ends_sitting:
                effects[-1] = started_again(effects[-1], before, rows)
            effects += more
            before = rows
        if not quiet:
            console.print(render(effects))
        return _verdict(reference, keep / "chaos", effects, console)


class _Runs:
    """Starts the sittings of runs."""

    def __init__(self, target: str, overrides: Sequence[str], ranks: Ranks, server: str) -> None:
        self._target = absolute(target)
        self._script = is_script(target)
        self._threads = 1 if self._script else configured(target, overrides)[1].threads
        self._overrides = [
            *overrides, "log_every=1", "checkpoint.keep=3", f"hang_timeout_s={HANG_TIMEOUT_S}",
        ]  # fmt: skip
        if not any(o.startswith("checkpoint.every=") for o in overrides):
            self._overrides.append("checkpoint.every=10")
        self._ranks, self._server = ranks, server

    def sit(self, run_dir: Path, blows: Sequence[Blow]) -> tuple[list[Effect], list[Row]]:
        """Start the ranks, let the faults strike, and see to the end of the sitting.

        Returns:
            What the faults did, and the events.

        Raises:
            LaunchError: it ended in another way than the faults explain.
        """
        log = _log(run_dir)
        log.unlink(missing_ok=True)
        env = faults.to_env([f for blow in blows for f in blow.faults], log)
        kept = tuple(self._overrides) if self._script else ()
        resume = run_dir.exists()
        sitting = Sitting(str(run_dir), resume, kept, False, self._target)
        ranks = self._ranks
        command = rank_command(
            ranks.launcher, ranks.number, self._target, self._overrides, ranks.replacements,
            self._server,
        )  # fmt: skip
        rows_before = len(_rows(run_dir))
        ended = start(
            command, sitting, self._threads, on_row=_ignore, on_line=_ignore, restarts=0, env=env
        )
        last = blows[-1].what if blows else ""
        is_planned = ended.exit_code == (143 if last == "preempt" else 0)
        if last in ("job", "corrupt"):
            is_planned = bool(ended.again)
        if not is_planned:
            raise LaunchError(
                f"the run ended with exit code {ended.exit_code}, which its faults do not explain: "
                f"{ended.message}; see {run_dir / 'ranks.log'}"
            )
        if last == "corrupt":
            _damage_newest(run_dir / "checkpoints")
        rows = _rows(run_dir)[rows_before:]
        strikes = faults.logged(log) if blows else []
        return [effect_of(blow, strikes, rows) for blow in blows], rows


def _log(run_dir: Path) -> Path:
    """Of the faults of a sitting; of the reference, of the moments that ranks come to."""
    return run_dir.with_suffix(".faults")


def _keys(target: str, overrides: Sequence[str]) -> TrainConfig:
    """The config, as far as it is known of a script: what overrides say."""
    if not is_script(target):
        return configured(target, overrides)[1]
    known = ("data.num_workers=", "mesh.tp=", "mesh.pp=", "num_shards=")
    return override(TrainConfig(), [o for o in overrides if o.startswith(known)])


def _damage_newest(root: Path) -> None:
    """Flip a bit in the newest checkpoint, if there is another one to go back to.

    A run whose only checkpoint is damaged does not start over by itself.
    """
    folders = listing.folders(root)
    if len(folders) < 2:
        return
    file = folders[0] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _verdict(
    reference: dict[str, Any], run_dir: Path, effects: Sequence[Effect], console: Console
) -> int:
    result = read_result(run_dir)
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["split"] == "train"]
    once = steps == list(range(1, int(reference["step"]) + 1))
    keys = ("params_sha256", "carry_sha256", "tables_sha256")
    equal = all(result.get(key) == reference.get(key) for key in keys)
    struck = sum(effect.struck for effect in effects)
    console.print(
        f"faults: {struck} of {len(effects)} struck"
        + ("" if struck else ": nothing is shown; raise steps=, or try another --seed"),
        style="green" if struck else "red",
    )
    console.print(
        f"steps: each of {len(steps)} was committed once, and with it its samples"
        if once
        else f"steps: {len(steps)} rows for {reference['step']} steps",
        style="green" if once else "red",
    )
    if equal:
        console.print("equal without and with faults: SHA-256", style="green")
        console.print(result["params_sha256"], soft_wrap=True)
        if "carry_sha256" in result:
            console.print(f"{result['carry_sha256']} of the carry", soft_wrap=True)
        if "tables_sha256" in result:
            console.print(f"{result['tables_sha256']} of the rows of tables", soft_wrap=True)
    else:
        console.print("different: SHA-256 without faults, and with them", style="red")
        for sha256 in (reference["params_sha256"], result["params_sha256"]):
            console.print(sha256, soft_wrap=True)
    return 0 if once and equal and struck else 1


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_events(run_dir / "events.jsonl")
    except LockstepError:
        return []


def _ignore(_: object) -> None:
    """Runs under test are not shown."""

"""`lockstep chaos`: the same run without and with faults, and whether it made any difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lockstep.cli.options import folder_for, shown_status
from lockstep.cli.prove.chaos.plan import draw
from lockstep.cli.prove.chaos.sessions import Ranks, SessionResult, Sessions, log_of, trained
from lockstep.cli.prove.chaos.verdict import Effect, render, started_again, verdict
from lockstep.config import TrainConfig, override
from lockstep.engine import faults
from lockstep.errors import ConfigError
from lockstep.launching.targets import configured, is_script
from lockstep.launching.warm.starting import fork_server


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
    """Train without faults, then with random ones, and compare SHA-256s, steps and evaluations.

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
        0 if faults struck, parameters and evaluations are equal, each step was done once, and no
        other rank was lost than those that faults struck; 1 if not.

    Raises:
        LockstepError: something given does not work, or a run failed.
    """
    ranks.check()
    if num_faults < 1:
        raise ConfigError(f"--faults {num_faults}: must be at least 1")
    with fork_server(ranks.launcher, target) as server, folder_for(keep, "chaos") as folder:
        if not is_script(target):
            configured(target, overrides)
        sessions = Sessions(target, overrides, ranks, server)
        with shown_status(console, "training without faults", quiet):
            reference = trained([sessions.run(folder / "reference", [])])
        keys = _keys(target, overrides)
        plan = draw(
            num_faults, ranks.number, int(reference.result["step"]), seed, ranks.replacements,
            keys.data.num_workers > 0, keys.mesh.tp, keys.mesh.pp,
            {row["moment"] for row in faults.logged(log_of(folder / "reference"))},
        )  # fmt: skip
        effects: list[Effect] = []
        results: list[SessionResult] = []
        run_dir = folder / "chaos"
        for incidents in plan:
            what = f"training with faults: {len(effects)} of {num_faults} done"
            with shown_status(console, what, quiet):
                result = sessions.run(run_dir, incidents)
            if effects and effects[-1].incident.ends_session:
                effects[-1] = started_again(effects[-1], results[-1].rows, result.rows)
            effects += result.effects
            results.append(result)
            run_dir = result.run_dir
        if not quiet:
            console.print(render(effects))
        lost = sorted({slot for result in results for slot in result.lost})
        return verdict(reference, trained(results), effects, lost, console)


def _keys(target: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of the runs; of a script, only the keys that overrides set are known."""
    if not is_script(target):
        return configured(target, overrides)[1]
    known = ("data.num_workers=", "mesh.tp=", "mesh.pp=", "num_shards=")
    return override(TrainConfig(), [o for o in overrides if o.startswith(known)])

"""`lockstep chaos`: the same run without and with faults, in sessions, and whether they differ."""

from __future__ import annotations

import csv
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep.cli.options import folder_for, shown_status
from lockstep.cli.prove.chaos_host_faults import Faults, Struck, render_struck
from lockstep.cli.prove.chaos_hosts import Hosts
from lockstep.cli.prove.chaos_plan import HANG_TIMEOUT_S, STALL_S, Group, Incident, What, draw
from lockstep.cli.prove.chaos_verdict import (
    Effect,
    Row,
    Trained,
    effect_of,
    lost_unexplained,
    render,
    started_again,
    verdict,
)
from lockstep.config import TrainConfig, override
from lockstep.engine import faults
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.run_directory import rescued_paths
from lockstep.engine.faults import PRINTED, moved
from lockstep.engine.recovery import SURVIVABLE
from lockstep.errors import ConfigError, LaunchError, LockstepError, RunDirectoryError
from lockstep.launching.api import Session
from lockstep.launching.job.ending import Ended
from lockstep.launching.rank.join import free_port
from lockstep.launching.start import check_replacements, rank_command, start
from lockstep.launching.targets import absolute, configured, is_script
from lockstep.launching.warm.starting import fork_server
from lockstep.observe import read_events, read_result

_HOST_TIMEOUT_S = 2.0
_S_A_FAULT = 10.0
"""Seconds of a run on hosts for each fault: one that was killed has to come back meanwhile."""
_MOST_REST_S = 600.0
_TERMINATED = 128 + signal.SIGTERM
_GONE = "was deleted, moved or replaced"
"""Part of the message of a run whose directory is gone."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that faults strike.

    Attributes:
        number: number of processes at the start of each session, at least 2; of each host, if any.
        launcher: name of the launcher that starts them, one of `SURVIVABLE`.
        replacements: greatest number of killed processes that it replaces in a session.
        hosts: number of hosts, whose agents are the launcher; 0 for this host and none.
    """

    number: int
    launcher: str = "mpi"
    replacements: int = 0
    hosts: int = 0

    def check(self) -> None:
        """Refuse what cannot be done.

        Raises:
            LaunchError: too few ranks, or a launcher under which none would survive.
        """
        if self.hosts:
            if min(self.hosts - 1, self.number) < 1:
                given = f"--hosts {self.hosts} -n {self.number}"
                raise LaunchError(f"{given}: must be at least 2 and 1")
            return
        if self.number < 2:
            raise LaunchError(f"-n {self.number}: must be at least 2, for some have to survive")
        if self.launcher not in SURVIVABLE:
            raise LaunchError(
                f"--launcher {self.launcher}: must be one of {', '.join(SURVIVABLE)}; under others "
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
    if ranks.hosts:
        with folder_for(keep, "chaos") as folder:
            return _on_hosts(
                target, overrides, ranks, num_faults, seed, folder.absolute(), console, quiet
            )
    with fork_server(ranks.launcher, target) as server, folder_for(keep, "chaos") as folder:
        if not is_script(target):
            configured(target, overrides)
        sessions = Sessions(target, overrides, ranks, server)
        with shown_status(console, "training without faults", quiet):
            reference = trained([sessions.run(folder / "reference", [])])
        keys = _keys(target, overrides)
        group = Group(
            ranks.number, ranks.replacements, keys.data.num_workers > 0, keys.mesh.tp, keys.mesh.pp,
            {row["moment"] for row in faults.logged(log_of(folder / "reference"))},
        )  # fmt: skip
        plan = draw(num_faults, int(reference.result["step"]), seed, group)
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


def _on_hosts(
    target: str,
    overrides: Sequence[str],
    ranks: Ranks,
    num_faults: int,
    seed: int,
    folder: Path,
    console: Console,
    quiet: bool,
) -> int:
    """`chaos` on agents, whose faults strike from outside; see there."""
    if not is_script(target):
        configured(target, overrides)
    alone = Sessions(target, overrides, Ranks(2, "local"), "")
    with shown_status(console, "training without faults", quiet):
        reference = trained([alone.run(folder / "reference", [])])
    run_dir, pace = folder / "chaos", folder / "paced"
    pace_s = _S_A_FAULT * num_faults / len(reference.steps)
    env = os.environ | faults.to_env([], pace=faults.Pace(pace_s, str(pace)))
    if alone.is_script:
        env |= Session(str(run_dir), True, alone.kept, False, absolute(target)).to_env()
    replaced = str(max(ranks.replacements, num_faults))
    options = ("--rendezvous", f"127.0.0.1:{free_port()}", "--replace", replaced)
    hosts = Hosts(
        Path.cwd(), ranks.hosts, ranks.number, _HOST_TIMEOUT_S, options, alone.command(run_dir),
        run_dir, folder / "agents.log", env,
    )  # fmt: skip
    pace.touch()
    struck: list[Struck] = []
    try:
        for host in range(ranks.hosts):
            hosts.start(host)
        made = Faults(hosts, random.Random(seed))
        with shown_status(console, f"training on {ranks.hosts} hosts with faults", quiet):
            for fault in made.strike_all(num_faults):
                struck.append(fault)
            lost = made.end()
            pace.unlink()
            codes = hosts.codes(_MOST_REST_S)
            if any(code for host, code in enumerate(codes) if host not in lost):
                raise LaunchError(f"agents ended with {codes}{hosts.told}")
            hosts.check_gone()
    finally:
        hosts.kill_all()
    if not quiet:
        console.print(render_struck(struck))
    rest = [Effect(Incident("kill", 0, ()), False)] * (num_faults - len(struck))
    effects = [Effect(Incident("kill", fault.step, ()), True) for fault in struck]
    run = trained([SessionResult([], hosts.all_rows(), [], None, run_dir)])
    return verdict(reference, run, [*effects, *rest], [], console)


def _keys(target: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of the runs; of a script, only the keys that overrides set are known."""
    if not is_script(target):
        return configured(target, overrides)[1]
    known = ("data.num_workers=", "mesh.tp=", "mesh.pp=", "num_shards=")
    return override(TrainConfig(), [o for o in overrides if o.startswith(known)])


@dataclass(frozen=True)
class SessionResult:
    """The result of one session.

    Attributes:
        effects: effects of its faults.
        rows: its events.
        lost: slots of ranks that were lost without a fault that explains it.
        moved: where its run directory was moved to; None if it was not.
        run_dir: run directory in which the next session goes on.
    """

    effects: list[Effect]
    rows: list[Row]
    lost: list[int]
    moved: Path | None
    run_dir: Path


class Sessions:
    """Starts the sessions of runs.

    Args:
        target: recipe, file or script to train.
        overrides: `key=value` items for the config.
        ranks: ranks to start.
        server: the warm server that ranks are forked from; empty if there is none.
    """

    def __init__(self, target: str, overrides: Sequence[str], ranks: Ranks, server: str) -> None:
        self._target = absolute(target)
        self.is_script = is_script(target)
        self._threads = 1 if self.is_script else configured(target, overrides)[1].threads
        self._overrides = [
            *overrides, "log_every=1", "checkpoint.keep=3", f"hang_timeout_s={HANG_TIMEOUT_S}",
        ]  # fmt: skip
        if not any(o.startswith("checkpoint.every=") for o in overrides):
            self._overrides.append("checkpoint.every=10")
        self._num_ranks = ranks.number
        self.kept = tuple(self._overrides) if self.is_script else ()
        self._command = rank_command(
            ranks.launcher, ranks.number, self._target, self._overrides, ranks.replacements, server
        )

    def command(self, run_dir: Path) -> list[str]:
        """What each rank of `lockstep agent` runs, at the first start and at all others."""
        if self.is_script:
            return [self._target]
        return ["train", self._target, *self._overrides, "--run-dir", str(run_dir), "--resume"]

    def run(self, run_dir: Path, incidents: Sequence[Incident]) -> SessionResult:
        """Run one session with its faults to its end.

        Raises:
            LaunchError: the faults do not explain how it ended.
            SystemExit: this process was asked to stop, as by Ctrl-C.
        """
        log = log_of(run_dir)
        log.unlink(missing_ok=True)
        rows_before = len(rows_of(run_dir))
        ended = self._start(run_dir, incidents, log)
        strikes = faults.logged(log) if incidents else []
        if ended.again and incidents and _was_hit_at_start(incidents, strikes):
            ended = self._start(run_dir, incidents, log)
            strikes = faults.logged(log)
        last = incidents[-1].what if incidents else None
        rescued = next(rescued_paths(run_dir))
        if not _is_planned(ended, last, rescued):
            raise LaunchError(
                f"the run ended with exit code {ended.exit_code}, which its faults do not explain: "
                f"{ended.message}; see {run_dir / 'ranks.log'}"
            )
        if last == "corrupt":
            _damage_newest(run_dir / "checkpoints")
        gone = moved(run_dir) if last == "directory" else None
        rows = rows_of(gone or run_dir)[rows_before:]
        effects = [effect_of(incident, strikes, rows) for incident in incidents]
        lost = lost_unexplained(incidents, rows, self._num_ranks)
        return SessionResult(effects, rows, lost, gone, rescued if gone else run_dir)

    def _start(self, run_dir: Path, incidents: Sequence[Incident], log: Path) -> Ended:
        env = faults.to_env([f for incident in incidents for f in incident.faults], log, run_dir)
        session = Session(str(run_dir), run_dir.exists(), self.kept, False, self._target)
        with stalling_reader(STALL_S):
            ended = start(
                self._command, session, self._threads, on_row=lambda _: None, restarts=0, env=env
            )
        if ended.stopped_by is not None:  # no fault sends this process a signal
            raise SystemExit(ended.exit_code or 128 + ended.stopped_by)
        return ended


def trained(results: Sequence[SessionResult]) -> Trained:
    """What all sessions of a finished run have left."""
    steps: list[int] = []
    for result in [*(result for result in results if result.moved), results[-1]]:
        folder = result.moved or result.run_dir
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            own = [int(row["step"]) for row in csv.DictReader(file) if row["split"] == "train"]
        if result.moved:  # a file that is gone gets no more rows where these need another column
            done = [int(row["step"]) for row in result.rows if row["event"] == "StepDone"]
            own += [step for step in done if step > max(own, default=0)]
        # A directory that was rescued has the rows from its checkpoint on.
        steps = [step for step in steps if not own or step < own[0]] + own
    events = [row for result in results for row in result.rows]
    return Trained(read_result(results[-1].run_dir), steps, events)


def log_of(run_dir: Path) -> Path:
    """The log of a session's faults; of the reference, of the moments that its ranks reach."""
    return run_dir.with_suffix(".faults")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run; none before its first start."""
    try:
        return read_events(run_dir / "events.jsonl")
    except LockstepError:
        return []


def _is_planned(ended: Ended, last: What | None, rescued: Path) -> bool:
    """Whether a session has ended in the way that its last fault explains."""
    match last:
        case "job" | "corrupt":
            return bool(ended.again)
        case "preempt":
            return ended.exit_code == _TERMINATED
        case "directory":
            is_refused = ended.exit_code == RunDirectoryError.exit_code
            return is_refused and _GONE in ended.message and rescued.is_dir()
        case _:
            return ended.exit_code == 0


def _was_hit_at_start(incidents: Sequence[Incident], strikes: Sequence[Row]) -> bool:
    """Whether all ranks may have ended because one of them was killed while they started.

    If they have reached the fault that ends their session, that fault is the reason.
    """
    first, last = incidents[0], incidents[-1]
    struck = {(row["slot"], row["step"], row["moment"]) for row in strikes}
    are_struck = [
        any((f.slot, f.step, f.moment) in struck for f in incident.faults)
        for incident in (first, last)
    ]
    return first.what == "start" and are_struck[0] and not (last.ends_session and are_struck[1])


def _damage_newest(root: Path) -> None:
    """Flip a bit in the newest checkpoint, if there is another one to go back to.

    A run whose only checkpoint is damaged does not start over by itself.
    """
    folders = listing.folders(root)
    if len(folders) < 2:
        return
    file = min(folders[0].glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def stalling_reader(stall_s: float) -> Iterator[None]:
    """Replace `sys.stdout` in this context by a pipe whose reader stalls where a fault prints.

    Args:
        stall_s: seconds for which the reader reads nothing, while the fault goes on printing.
    """
    source, sink = os.pipe()
    reader = threading.Thread(target=_read, args=(source, stall_s), name="reader", daemon=True)
    reader.start()
    try:
        with open(sink, "w", encoding="utf-8") as stream, redirect_stdout(stream):
            yield
    finally:
        reader.join()


def _read(source: int, stall_s: float) -> None:
    with os.fdopen(source, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if PRINTED in line:
                time.sleep(stall_s)

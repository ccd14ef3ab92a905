"""The text of a SLURM job script that trains, stops in time, and goes on after a requeue.

Only text is made here: nothing is looked up, started or written, so it can be tested anywhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.launch.slurm.resources import Resources

FIRST_COMMENT = "# Written by `lockstep slurm`"
"""The beginning of the second line of every script: a file without it is the user's own."""

RUN_DIR = "${run_dir}"
"""Stands for the job's run directory in a rank's arguments and environment variables."""

_WIDTH = 96


@dataclass(frozen=True)
class BatchJob:
    """A job that trains.

    Attributes:
        name: name of the job.
        resources: resources that it asks for.
        command: command that starts the ranks; `RUN_DIR` in it stands for the run directory.
        env: environment variables of the ranks; `RUN_DIR` in them stands for the run directory.
        threads: number of threads of each rank.
        run_dir: absolute path of the run directory; None puts it below `work_dir`, named after the
            job and its number.
        work_dir: absolute path of the folder to run in.
        log: absolute path of the job's log, with SLURM's `%j` for the job's number.
        title: description of what is trained, for the log.
        trains: whether the command trains: such a job stops in time and is requeued.
    """

    name: str
    resources: Resources
    command: Sequence[str]
    env: Mapping[str, str]
    threads: int
    run_dir: Path | None
    work_dir: Path
    log: Path
    title: str = ""
    trains: bool = True


def script(job: BatchJob) -> str:
    """The job script.

    Raises:
        LaunchError: a text in it has a line break or another control character.
    """
    paths = map(str, (job.run_dir, job.work_dir, job.log))
    for text in (job.name, job.title, *paths, *job.command, *job.env.values()):
        _printable(text)
    ranks = job.resources.num_ranks
    parts = [
        "#!/bin/bash",
        f"{FIRST_COMMENT}: {job.name} on {ranks} rank{'s'[: ranks > 1]}. Submit it with sbatch.",
        *_directives(job),
        "",
        *_setting(job),
        "",
        _BANNER.format(
            ranks=ranks,
            threads=job.threads,
            tasks=job.resources.tasks_per_node,
            cpus=job.resources.cpus_per_task,
            title=shlex.quote(job.title),
        ),
    ]
    if not job.trains:
        return "\n".join([*parts, f"{_wrapped(job.command)} </dev/null", ""])
    parts += [
        _START.format(command=_wrapped(job.command), patience=job.resources.patience_s),
        _END,
    ]
    return "\n".join(parts)


def _directives(job: BatchJob) -> list[str]:
    asked = job.resources
    options = {
        "job-name": job.name,
        "nodes": str(asked.nodes),
        "ntasks-per-node": str(asked.tasks_per_node),
        "cpus-per-task": str(asked.cpus_per_task),
        "time": asked.time,
        "partition": asked.partition,
        "account": asked.account,
        # B: only this shell gets it, and passes it on; SLURM would tell its own steps only, which
        # are mpirun's daemons and not the ranks.
        "signal": f"B:USR1@{asked.signal_before_s}" if job.trains else None,
        "open-mode": "append",
        "chdir": str(job.work_dir),
        "output": str(job.log),
    }
    lines = [f"#SBATCH --{name}={shlex.quote(v)}" for name, v in options.items() if v is not None]
    return [*lines, f"#SBATCH --{'' if job.trains else 'no-'}requeue"]


def _setting(job: BatchJob) -> list[str]:
    """The lines that set the run directory and the environment variables."""
    if job.run_dir is None:
        base, suffix = job.work_dir / "runs" / job.name, '-"$job"'
    else:
        base, suffix = job.run_dir, '"${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"'
    lines = [
        "# A requeued job keeps its number, and so its run directory; an array's task has its own.",
        "job=${SLURM_JOB_ID:-local}",
        'if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then',
        "    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        "fi",
        f"run_dir={shlex.quote(str(base))}{suffix}",
        "",
        "# Sums depend on the number of threads, so it belongs to the config (threads=…).",
    ]
    for name, value in job.env.items():
        before, separator, after = value.partition(json.dumps(RUN_DIR))
        text = _quoted(value)
        if separator:
            # The suffix consists of harmless characters: what is JSON before it is JSON after it.
            text = f"{shlex.quote(before + json.dumps(str(base))[:-1])}{suffix}"
            text += shlex.quote('"' + after)
        lines.append(f"export {name}={text}")
    return lines


_BANNER = """\
say() {{
    echo "== $(date '+%Y-%m-%dT%H:%M:%S%z') $*"
}}
say "job $job (start $((${{SLURM_RESTART_COUNT:-0}} + 1)))" \\
    "on ${{SLURM_JOB_NUM_NODES:-1}} node(s): ${{SLURM_JOB_NODELIST:-$(hostname)}}"
say "{ranks} rank(s), {tasks} a node with {cpus} CPU(s) each, {threads} thread(s) each;" \\
    "run directory: $run_dir"
say "what:" {title}
say "master address and port: ${{MASTER_ADDR:-none}} ${{MASTER_PORT:-none}} (mpirun needs none)"
"""

_START = """\
newest_checkpoint() {{
    ls -1 "$run_dir/checkpoints" 2>/dev/null | grep '^step_[0-9]*$' | sort -V | tail -n 1
}}
result() {{
    sed -n "s/^  \\"$1\\": \\"\\{{0,1\\}}\\([^\\",]*\\)\\"\\{{0,1\\}},\\{{0,1\\}}\\$/\\1/p" \\
        "$run_dir/result.json" 2>/dev/null
}}
# What an earlier start of this job ended with must not be taken for how this one ends.
rm -f "$run_dir/result.json"
newest_before=$(newest_checkpoint)
fruitless=$run_dir/.told_to_stop_too_early

# mpirun passes SIGUSR1 and SIGUSR2 on to all ranks, which stop at the next step boundary with a
# checkpoint. Its own answer to SIGTERM would be to end them.
noticed= cancelled= patience= ranks=
on_notice() {{
    [ -n "$noticed" ] && return
    noticed=yes
    say "notice of the end (SIGUSR1): the ranks stop at the next step boundary"
    kill -s USR1 "$ranks" 2>/dev/null
    {{ sleep {patience}; kill -s TERM "$ranks"; }} >/dev/null 2>&1 &
    patience=$!
}}
on_cancel() {{
    [ -n "$cancelled" ] && return
    cancelled=yes
    say "SIGTERM: the ranks are asked to stop, unless SLURM ends them itself"
    kill -s USR2 "$ranks" 2>/dev/null
}}
trap on_notice USR1
trap on_cancel TERM

{command} </dev/null &
ranks=$!
# A trapped signal ends `wait` early.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
wait "$ranks"
code=$?
[ -n "$patience" ] && kill "$patience" 2>/dev/null
"""

_END = """\
status=$(result status)
reason=$(result reason)
told=$(result exit_code)
[ -n "$status" ] && code=${told:-$code}
# mpirun that lost a node's daemon says so, and exits with 0.
[ -z "$status" ] && [ "$code" = 0 ] && code=1
say "ended: ${status:-no result}, exit code $code"

newest=$(newest_checkpoint)
progress= late=
[ "$newest" != "$newest_before" ] && progress=yes
[ -n "$noticed" ] && [ -z "$status" ] && late=yes
if [ -n "$cancelled" ]; then
    exit "$code"
elif [ "$reason" = preempted ]; then
    why="stopped with a checkpoint because of the notice"
elif [ -n "$late" ] && [ -n "$progress" ]; then
    why="did not stop in time; the newest checkpoint is used"
elif [ -n "$late" ] && [ "$(cat "$fruitless" 2>/dev/null)" != "after ${newest:-none}" ]; then
    # Once only from the same checkpoint: what takes longer to start than it may run, always will.
    mkdir -p "$run_dir" && echo "after ${newest:-none}" > "$fruitless"
    why="was told to stop before it had written a checkpoint; tried once more"
elif [ -n "$late" ]; then
    say "was told to stop before it had written a checkpoint, for the second time: not requeued;" \\
        "give it more time (--time, --signal-before) or set checkpoint.every to fewer steps"
    exit "$code"
elif [ "$code" != 0 ] && [ "$code" != 2 ] && [ "${status:-failed}" = failed ] \\
    && [ -n "$progress" ]; then
    # Only after progress: what fails at the same step every time is not tried for ever.
    why="lost a rank or a node; the newest checkpoint is used"
else
    exit "$code"
fi

if [ -z "${SLURM_JOB_ID:-}" ] || ! command -v scontrol >/dev/null; then
    say "$why. There is no job or no scontrol here to requeue it with: run" \\
        "'scontrol requeue ${SLURM_JOB_ID:-JOB}' where there is, or 'lockstep resume $run_dir'"
    exit "$code"
fi
say "$why: requeueing job $job"
scontrol requeue "$SLURM_JOB_ID" ||
    say "SLURM does not requeue it: 'lockstep resume $run_dir' goes on"
exit "$code"
"""


def _wrapped(words: Sequence[str]) -> str:
    """A command on lines of a readable length."""
    lines = [""]
    for word in map(_quoted, words):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _quoted(word: str) -> str:
    return '"$run_dir"' if word == RUN_DIR else shlex.quote(word)


def _printable(text: str) -> None:
    if not text.isprintable():
        raise LaunchError(f"{text!r}: has a line break or another character no job script may have")

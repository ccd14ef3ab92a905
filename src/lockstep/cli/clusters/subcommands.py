"""Subcommands about machines: SLURM scripts, checks, and the cost of communication and of steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep import __version__
from lockstep.cli.options import (
    LauncherOption,
    Overrides,
    Replace,
    RunDir,
    Target,
    importing,
    leave,
)
from lockstep.launching.rank.early import ending_at_interrupt
from lockstep.launching.warm import foresee_ranks


def slurm(
    target: Target,
    overrides: Overrides = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="A YAML file with the options below.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", help="Time limit such as 1:30:00; needed, here or in --job's file."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Number of nodes; 1.")] = None,
    tasks: Annotated[
        int | None, typer.Option("--ntasks-per-node", help="Ranks on each node; 1.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-task", help="Cores of a rank; threads if left out.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Where to run.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Who pays.")] = None,
    signal_before: Annotated[
        int | None,
        typer.Option("--signal-before", help="Seconds for a checkpoint at the time limit; 120."),
    ] = None,
    replace: Annotated[
        int | None,
        typer.Option("--replace", min=0, help="New processes at most for killed ranks; 0."),
    ] = None,
    agents: Annotated[
        bool,
        typer.Option("--agents", help="Start agents, not mpirun: go on when a node is lost."),
    ] = False,
    setup: Annotated[
        str | None,
        typer.Option("--setup", help="A file with lines such as `module load`, or a site's name."),
    ] = None,
    run_dir: RunDir = None,
    output: Annotated[Path | None, typer.Option("--output", help="The script to write.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to SLURM.")] = False,
) -> None:
    """Write a SLURM job script that trains, stops in time, and goes on after a requeue.

    The target `doctor` makes one that tests the nodes' communication. What stands behind `--`, such
    as `-- --gpus-per-task=1 --qos=high`, is passed on to sbatch.
    """
    with ending_at_interrupt():
        from lockstep.cli.clusters import slurm as command
        from lockstep.cli.clusters.slurm import job_file
    given = {
        "nodes": nodes, "ntasks_per_node": tasks, "cpus_per_task": cpus, "time": time,
        "partition": partition, "account": account, "signal_before": signal_before,
        "replace": replace, "setup": setup, "agents": agents or None,
    }  # fmt: skip
    command.slurm(target, overrides or [], job_file(job, given), run_dir, output, submit)


def kubernetes(
    target: Target,
    overrides: Overrides = None,
    image: Annotated[
        str, typer.Option("--image", help="Container image with Lockstep in it.")
    ] = "",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Pods, of a rank each.")] = 2,
    name: Annotated[str, typer.Option("--name", help="Of the Job; the target's if left out.")] = "",
    namespace: Annotated[str | None, typer.Option("--namespace", help="Where to run.")] = None,
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="Cores of a pod.")] = 1,
    memory: Annotated[str | None, typer.Option("--memory", help="Of a pod, such as 4Gi.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of a pod.")] = 0,
    claim: Annotated[
        str | None,
        typer.Option("--claim", help="PersistentVolumeClaim for run directories, of all pods."),
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often each rank may fail.")
    ] = 10,
    grace: Annotated[
        int, typer.Option("--grace", help="Seconds from SIGTERM to SIGKILL, for a checkpoint.")
    ] = 60,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", metavar="URL", help="Object storage instead of a volume."),
    ] = None,
    secret: Annotated[
        str | None, typer.Option("--secret", help="A Secret with environment variables, as keys.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="The file to write.")] = None,
) -> None:
    """Write an Indexed Job for Kubernetes, whose pods are the ranks and go on after a loss."""
    with ending_at_interrupt():
        from lockstep.cli.clusters import kubernetes as command
        from lockstep.cli.clusters.kubernetes import Pods
    pods = Pods(
        name, image, ranks, namespace, cpus, memory, gpus, claim, restarts, grace, run_dir, secret
    )
    command.kubernetes(target, overrides or [], pods, output)


def agent(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="What each rank runs, behind `--`: train TARGET …, resume RUN … or script.py ….",
        ),
    ],
    rendezvous: Annotated[
        str,
        typer.Option(
            "--rendezvous",
            metavar="HOST:PORT",
            help="Where agents meet, on a host of the run; or etcd://HOST:PORT,…/NAME.",
        ),
    ],
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="Hosts that the run starts on.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks on each host.")] = 1,
    replace: Replace = 0,
    host_timeout: Annotated[
        float, typer.Option("--host-timeout", min=1, help="Seconds until a silent host is lost.")
    ] = 5.0,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for that host, or for etcd.")
    ] = 300.0,
    name: Annotated[
        str | None, typer.Option("--id", help="The run's name; by default SLURM's job, if any.")
    ] = None,
) -> None:
    """Start ranks on this host as part of a run on several hosts, which survives the loss of one.

    Start it with the same arguments on each host, by hand, with srun or in pods:
    `lockstep agent --rendezvous node1:29500 --hosts 3 -n 4 -- train digits --run-dir DIR`.
    """
    with ending_at_interrupt():
        from lockstep.launching.host.agent import Agent, rank_argv
        from lockstep.launching.host.line import TOKEN, Rendezvous, Terms
        from lockstep.launching.host.output_pump import pumped_output
        from lockstep.launching.job.commands import rank_environment, threads_of
    argv = rank_argv(command)
    where = Rendezvous.parse(rendezvous)
    known = os.environ.get("SLURM_JOB_ID", "") if name is None else name
    terms = Terms(__version__, known, hosts, ranks, replace, host_timeout, tuple(command))
    variables = rank_environment(threads_of(command))
    token = variables.pop(TOKEN, "")
    os.environ.clear()
    os.environ.update(variables)
    with pumped_output():  # a reader that stalls must not stall the coordinator
        code = Agent(where, terms, argv, wait, token=token).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the store's threads may be anywhere


def doctor(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks to start for tests.")] = 2,
    run_dir: RunDir = None,
) -> None:
    """Check what this machine has, and say how to fix what is missing."""
    with ending_at_interrupt():
        from rich.console import Console

        from lockstep.cli.clusters import doctor as command
    console = Console()
    with console.status("checking") as status:
        checks = command.run_doctor(
            ranks, run_dir or Path(), on_check=lambda check: status.update(f"checked {check.name}")
        )
    console.print(command.render(checks))
    leave(command.exit_code(checks))


def comm_profile(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Number of ranks to start; 2.")
    ] = None,
    launcher: LauncherOption = None,
    sizes: Annotated[
        str, typer.Option("--sizes", help="FIRST:LAST in steps of four, or sizes with commas.")
    ] = "1KB:256MB",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure.")] = 60.0,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or accelerator.")
    ] = "auto",
    json: Annotated[Path | None, typer.Option("--json", help="A file for the profile.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="A picture: FILE.svg or FILE.png.")
    ] = None,
    torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Measure torch.distributed too.")
    ] = True,
) -> None:
    """Measure what collectives and messages cost, by size, with a line through each.

    In ranks of mpirun, torchrun or srun, these are measured.
    """
    with importing():
        from rich.console import Console

        from lockstep.cli.clusters import comm_profile as command
    options = command.Options(ranks, launcher, sizes, seconds, device, json, plot, torch)
    leave(command.comm_profile(options, Console()))


def plan(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[
        str, typer.Option("--ranks", help="Numbers of ranks, with commas between them.")
    ] = "1,2,4,8,16,64,256,1024,10000",
    ranks_per_host: Annotated[
        int | None,
        typer.Option("--ranks-per-host", help="Most ranks of a host; as many as have cores."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", metavar="FILE", help="What `comm-profile --json` has written."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="RATE,LATENCY", help="Between hosts: 10gbit,50us."),
    ] = None,
    mtbf: Annotated[
        float, typer.Option("--mtbf", metavar="HOURS", help="Between two losses of one rank.")
    ] = 10_000.0,
    launcher: LauncherOption = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long each training is measured.")
    ] = 3.0,
    rounds: Annotated[
        int, typer.Option("--rounds", help="How often; the fastest counts. More on a busy machine.")
    ] = 1,
    json: Annotated[Path | None, typer.Option("--json", help="A file for the plan.")] = None,
) -> None:
    """Predict time, memory and messages of a step on other numbers of ranks, and choose.

    It trains for some seconds on this host, alone and beside itself, and measures messages here,
    or takes those of --profile. Nothing else should run meanwhile.
    """
    foresee_ranks(overrides or [])
    with importing():
        from rich.console import Console

        from lockstep.cli.clusters import plan as command
    profiles = tuple(profile or ())
    options = command.Options(
        ranks, ranks_per_host, profiles, network, mtbf, launcher, seconds, rounds, json
    )
    command.plan(target, overrides or [], options, Console())

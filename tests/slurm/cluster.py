"""A SLURM cluster of several nodes on this machine, made of Debian's packages.

Real munged, slurmctld and one slurmd for each node, all in the foreground below this process, with
all their files in one temporary folder and free ports: nothing of the machine's own SLURM, if it
has one, is touched. Only installing the packages needs root.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.apt import find
from tests.apt import install as install_packages

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PACKAGES = ("slurm-wlm", "munge")

# Intervals are short, so that tests are: a silent node is given up after SlurmdTimeout, SIGKILL
# follows SIGTERM after KillWait.
CONFIG = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={state}/munge.socket
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/slurmd-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=5
KillWait=15
MinJobAge=3600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install() -> str:
    """Install what is missing: why that is impossible, or nothing."""
    return install_packages(PROGRAMS, PACKAGES)


class Cluster:
    """A running cluster; `stop` ends all of it.

    Args:
        state: an empty folder for everything it writes. Its path must be short: sockets are in it.

    Attributes:
        env: the environment variables with which SLURM's commands find this cluster.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        conf = state / "slurm.conf"
        self.env = {**_clean_environment(), "SLURM_CONF": str(conf)}
        # All nodes share this machine's cores: ranks that wait must not keep others from working.
        self.env["OMPI_MCA_mpi_yield_when_idle"] = "1"
        ports = _free_ports(len(NODES) + 1)
        (state / "ctld").mkdir()
        conf.write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                ctld_port=ports[-1],
                state=state,
            )
            + "".join(
                f"NodeName={node} NodeHostname={socket.gethostname().partition('.')[0]} "
                f"NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
                for node, port in zip(NODES, ports, strict=False)
            )
        )

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        key = self._state / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={self._state}/munge.{end}" for option, end in files.items()]
        self._spawn(
            "munged", "--foreground", "--force", f"--seed-file={self._state}/seed", *options
        )
        wait_for(lambda: (self._state / "munge.socket").exists(), 20, "munged")
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, if it does not run."""
        if node not in self._processes:
            self._spawn("slurmd", "-D", "-N", node, name=node)

    def wait_until_idle(self) -> None:
        """Wait until all nodes can take a job."""
        asked = "sinfo", "--noheader", "--Node", "--format=%T"
        wait_for(lambda: self.run(*asked).split() == ["idle"] * len(NODES), 60, "idle nodes")

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 120) -> str:
        """Run a command on the cluster's login node: its standard output."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode and command[0] != "sinfo":  # which fails until slurmctld listens
            raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job: `JobState`, `Restarts`, `BatchHost`, …"""
        shown = self.run("scontrol", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait_for_end(self, job: str, timeout: float) -> dict[str, str]:
        """Wait until a job is over for good: what SLURM knows of it."""

        def is_over() -> bool:
            known = self.job(job)
            # SLURM lets a requeued job wait for two minutes; here, nothing is gained by that.
            if known["JobState"] == "PENDING" and known["Reason"] == "BeginTime":
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return known["JobState"] in (
                "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED",
            )  # fmt: skip

        wait_for(is_over, timeout, f"end of job {job}")
        return self.job(job)

    def kill_daemon(self, node: str) -> None:
        """Kill a node's daemon; what runs on the node goes on."""
        daemon = self._processes.pop(node)
        daemon.kill()
        daemon.wait()

    def signal_daemon(self, node: str, signum: int) -> None:
        """Send a signal to a node's daemon."""
        self._processes[node].send_signal(signum)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and everything that runs on the node, as a power cut would."""
        self.kill_daemon(node)
        conf = f"SLURM_CONF={self.env['SLURM_CONF']}"
        _kill_with_stepds(_processes_with(conf, f"SLURMD_NODENAME={node}"))

    def stop(self) -> None:
        """End everything that was started, jobs too."""
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Jobs outlive the daemons: all of their processes have been told where the cluster is.
        _kill_with_stepds(_processes_with(f"SLURM_CONF={self.env['SLURM_CONF']}"))

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        log = (self._state / f"{name or program}.log").open("ab")
        command = [find(program) or program, *arguments]
        with log:
            self._processes[name or program] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """A cluster, while the context lasts."""
    # Paths of pytest's are too long for sockets.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as state:
        cluster = Cluster(Path(state))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def wait_for(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for: {what}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _clean_environment() -> dict[str, str]:
    """This process's environment, without what another cluster told it."""
    return {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "SBATCH"))}


def _processes_with(*variables: str) -> list[int]:
    """Other processes with these environment variables."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            there = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if set(variables) <= set(there):
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    """The parent of a process; 0 if there is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0


def _is_stepd(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    except OSError:
        return False


def _kill_with_stepds(pids: list[int]) -> None:
    """Kill processes of jobs, and SLURM's own that look after them."""
    for pid in {*pids, *filter(_is_stepd, map(parent, pids))}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

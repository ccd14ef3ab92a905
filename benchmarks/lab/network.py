"""Hosts made of network namespaces, and the switch between them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError, EnvironError

from . import wire
from .leftovers import FILES, STATE, host_of, remove, remove_leftovers, switch_of
from .shape import Shape, parse_shape
from .tools import call, check_machine, has_netem, ip_batch, ip_json

INTERFACE = "eth0"
"""Name of the interface by which a host reaches the others."""

MOST_HOSTS = 64

_BRIDGE, _PORT = "bridge", "port"
_QUEUE_S = 0.05
"""Seconds for which frames may wait for a rate before they are lost, as in a switch's buffer."""

_BURST_S, _LEAST_BURST = 0.0005, 16_000
_FRAME = 1514
_MOST_RATE = 1e10
"""Bits per second for which netem has room where there is no rate: it must not lose them."""

_WIRE_SEED = 0


class Lab:
    """Hosts of a network of their own; a context manager that makes and removes them.

    Each host is a network namespace and a host name, `h0`, `h1`, …, with an address that all
    hosts know by that name. They reach each other and nothing else. Files, processes and cores
    are those of this machine. A lab that was killed is removed when the next one is made.

    The rate is kept by the kernel (tbf). So are delay and loss where it has netem; elsewhere a
    process in the middle keeps them (`wire.py`), which costs a part of a core and carries some
    hundred megabits per second.

    Attributes:
        num_hosts: number of hosts.
        shape: what each host's way out is like.
        name: name of the lab, with which those of its namespaces begin; empty outside the context.
        keeper: what keeps delay and loss; None where there are none, or outside the context.
    """

    def __init__(self, num_hosts: int, shape: Shape | str = "lan") -> None:
        """Set up nothing yet.

        Raises:
            ConfigError: the number or the shape cannot be used.
        """
        if not 1 <= num_hosts <= MOST_HOSTS:
            raise ConfigError(f"lab: hosts={num_hosts}: give 1 to {MOST_HOSTS}")
        self.num_hosts = num_hosts
        self.shape = parse_shape(shape) if isinstance(shape, str) else shape
        self.name = ""
        self.keeper: Literal["netem", "wire"] | None = None
        self._wire: subprocess.Popen[str] | None = None

    def __enter__(self) -> Lab:
        """Make the hosts.

        Raises:
            EnvironError: this machine or user cannot make them; the message says why.
        """
        check_machine()
        remove_leftovers()
        if self.shape.delay_s or self.shape.loss:
            self.keeper = "netem" if has_netem() else "wire"
        try:
            self._claim_name()
            for host in range(self.num_hosts):
                self._make_host(host)
            if self.keeper == "wire":
                self._start_wire()
            else:
                self._make_bridge()
            for host in range(self.num_hosts):
                self._connect(host)
        except OSError as error:
            self.close()
            raise EnvironError(
                f"lab: {error.filename}: {error.strerror}; {STATE.parent} and {FILES} have to be "
                "writable: in a container, mount a tmpfs there"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hosts, as `close`."""
        self.close()

    def close(self) -> None:
        """End all processes of the hosts and remove these; does nothing the second time.

        Raises:
            EnvironError: something cannot be removed.
        """
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
            self._wire = None
        if self.name:
            remove(self.name)
        self.name, self.keeper = "", None

    def address(self, host: int) -> str:
        """The address of a host, from 0, in the network."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on a host; it becomes `argv` without a process between.

        Raises:
            ConfigError: there are no hosts, outside the context.
        """
        if not self.name:
            raise ConfigError("lab: there are no hosts; call this inside `with Lab(…) as lab:`")
        inside = ["ip", "netns", "exec", host_of(self.name, host)]
        return [*inside, "nsenter", f"--uts={self._uts(host)}", "--", *argv]

    def agent(self) -> str:
        """A program that runs a command on a host of this name, as ssh would, for `mpirun`."""
        # Open MPI takes this apart at blanks, of which there are none in these names.
        return f"/bin/sh {STATE / self.name / 'agent'}"

    def bytes_sent(self) -> list[int]:
        """How many bytes each host has sent to the others, with headers, since it was made.

        Where the kernel hands on several frames as one, their headers count once.

        Raises:
            EnvironError: the interfaces do not tell.
        """
        return [self._bytes_sent(host) for host in range(self.num_hosts)]

    def bytes_between_hosts(self) -> int:
        """How many bytes all hosts have sent to others, with headers, since they were made.

        Raises:
            EnvironError: the interfaces do not tell.
        """
        return sum(self.bytes_sent())

    def _bytes_sent(self, host: int) -> int:
        (row,) = ip_json(host_of(self.name, host), "link", "show", "dev", INTERFACE)
        return int(row["stats64"]["tx"]["bytes"])

    def _uts(self, host: int) -> Path:
        return STATE / self.name / f"h{host}"

    def _claim_name(self) -> None:
        """Make the switch's namespace, whose name no other lab has."""
        for number in itertools.count():
            name = f"lockstep-lab-{os.getpid()}-{number}"
            try:
                call(["ip", "netns", "add", switch_of(name)])
            except EnvironError as error:
                if "File exists" not in str(error):
                    raise
            else:
                break
        self.name = name
        folder = STATE / name
        folder.mkdir(parents=True)
        enter = f"ip netns exec {name}-$host nsenter --uts={folder}/$host"
        agent = f'host=$1\nshift\nexec {enter} -- /bin/sh -c "$*"\n'
        (folder / "agent").write_text(agent, encoding="utf-8")

    def _make_host(self, host: int) -> None:
        namespace = host_of(self.name, host)
        files = FILES / namespace
        # Of a lab of this name before the machine was started again, the folder may be left.
        files.mkdir(parents=True, exist_ok=True)
        known = [f"{self.address(other)} h{other}" for other in range(self.num_hosts)]
        text = "\n".join(["127.0.0.1 localhost", *known, ""])
        (files / "hosts").write_text(text, encoding="utf-8")
        call(["ip", "netns", "add", namespace])
        self._uts(host).touch()
        call(["unshare", f"--uts={self._uts(host)}", "hostname", f"h{host}"])

    def _make_bridge(self) -> None:
        lines = [
            f"link add {_BRIDGE} type bridge mcast_snooping 0",
            f"link set {_BRIDGE} addrgenmode none up",
        ]
        for host in range(self.num_hosts):
            peer = f"peer name {INTERFACE} netns {host_of(self.name, host)}"
            port = f"{_PORT}{host}"
            lines.append(f"link add {port} type veth {peer}")
            lines.append(f"link set {port} master {_BRIDGE} addrgenmode none up")
        ip_batch(switch_of(self.name), lines)

    def _start_wire(self) -> None:
        switch = switch_of(self.name)
        shape = [str(self.shape.delay_s), str(self.shape.loss), str(_WIRE_SEED)]
        script = [sys.executable, "-I", "-S", wire.__file__, str(self.num_hosts), *shape]
        self._wire = subprocess.Popen(
            ["ip", "netns", "exec", switch, *script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != wire.READY:
            _, said = self._wire.communicate()
            raise EnvironError(
                f"lab: this kernel has no netem to delay and lose frames, and {said.strip()}; use "
                "a kernel with sch_netem or tun, or a shape with a rate alone"
            )
        move = "link set {} netns {} name {}"
        ip_batch(switch, [
            move.format(f"{wire.TAP}{host}", host_of(self.name, host), INTERFACE)
            for host in range(self.num_hosts)
        ])  # fmt: skip

    def _connect(self, host: int) -> None:
        others = [other for other in range(self.num_hosts) if other != host]
        ip_batch(host_of(self.name, host), [
            "link set lo up",
            f"link set {INTERFACE} address {wire.mac_of(host)} addrgenmode none",
            f"addr add {self.address(host)}/24 dev {INTERFACE}",
            # What is lost must be a frame, not a heap of frames that the kernel sends as one.
            *([f"link set {INTERFACE} gso_max_segs 1"] if self.keeper == "netem" else []),
            f"link set {INTERFACE} up",
            # Nobody asks who has an address: that would count as bytes, and could be lost.
            *(f"neighbour add {self.address(other)} lladdr {wire.mac_of(other)} nud permanent "
              f"dev {INTERFACE}" for other in others),
        ])  # fmt: skip
        if shaping := queue(self.shape, self.keeper):
            namespace = host_of(self.name, host)
            call(["tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *shaping])


def queue(shape: Shape, keeper: str | None) -> list[str]:
    """What follows `tc qdisc add dev eth0` to shape a host's way out; empty where nothing is."""
    rate = [] if shape.rate is None else ["rate", f"{shape.rate:.0f}bit"]
    if keeper == "netem":
        most = round((shape.rate or _MOST_RATE) / 8 * (shape.delay_s + _QUEUE_S) / _FRAME) + 1
        delay = ["delay", f"{shape.delay_s * 1e6:.0f}us", "loss", f"{shape.loss * 100:g}%"]
        return ["root", "netem", "limit", str(most), *delay, *rate]
    if shape.rate is None:
        return []
    burst = max(_LEAST_BURST, round(shape.rate / 8 * _BURST_S))
    return ["root", "tbf", *rate, "burst", str(burst), "latency", f"{_QUEUE_S * 1e3:g}ms"]

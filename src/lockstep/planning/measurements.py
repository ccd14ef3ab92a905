"""The measurements that a plan is made from, and the cost of a collective that follows from them.

Measured are steps, memory, messages, starts and checkpoints. The cost of a collective among some
ranks comes from profiles of other groups.

A profile that has as many ranks is taken as it is: between two measured sizes, a straight line. For
other numbers of ranks the time is split into what it takes whatever the size, which grows with the
levels of a binary tree, and the rest, which grows with the bytes that the busiest rank moves
(R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19, 2005, section 3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from lockstep.config.train_config import Sharding
from lockstep.errors import ConfigError
from lockstep.parallel.reduction import SMALL_BYTES
from lockstep.planning.operations import OPERATIONS
from lockstep.planning.profile import Measurement, Profile, Scope

_LINK = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg]bit),([0-9]+(?:\.[0-9]+)?)(us|ms|s)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Timed:
    """Steps of replicas on one host that computed at the same time without communication.

    Attributes:
        num_microbatches: microbatches that each replica computed in a step.
        num_copies: replicas that computed at the same time.
        pp: stages of a replica.
        tp: ranks that shared the layers of each stage.
        step_s: seconds of a step, the median of reports.
        peak_bytes: the most memory that a rank had.
        jitter: seconds of single steps over their mean; empty where they were not measured singly.
        sent_bytes: bytes that the ranks of a replica sent to each other in a step.
    """

    num_microbatches: int
    num_copies: int
    pp: int
    tp: int
    step_s: float
    peak_bytes: int
    jitter: tuple[float, ...] = ()
    sent_bytes: float = 0.0

    @property
    def num_ranks(self) -> int:
        """Ranks of this host that computed."""
        return self.num_copies * self.pp * self.tp


@dataclass(frozen=True)
class Group:
    """Ranks of one host that trained together, each a whole replica.

    Attributes:
        num_ranks: number of ranks.
        step_s: seconds of a step, the median of reports.
        peak_bytes: the most memory that a rank had.
    """

    num_ranks: int
    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Anatomy:
    """The sizes and parts of a model and its optimizer.

    Attributes:
        num_parameters: numbers in all parameters.
        gradient_bytes: bytes of a gradient: of all parameters that are trained.
        largest_bytes: bytes of the largest block; two of them may be whole at a time.
        state_bytes: bytes that the optimizer keeps of all parameters.
        num_blocks: blocks that stages can be made of; 1 for a model that is no `Pipeline`.
        num_shards: parts that layers can be cut into; 1 for a model without such layers.
        is_elementwise: whether the optimizer's state can be kept in slices.
        has_tables: whether the model has tables, whose rows are distributed.
    """

    num_parameters: int
    gradient_bytes: int
    largest_bytes: int
    state_bytes: int
    num_blocks: int
    num_shards: int
    is_elementwise: bool
    has_tables: bool

    def can(self, sharding: Sharding) -> bool:
        """Whether ranks can keep their slices only."""
        if sharding == "parameters" and self.num_blocks == 1:
            return False
        return sharding == "none" or self.is_elementwise


@dataclass(frozen=True)
class Facts:
    """All measurements of a task.

    Attributes:
        task: what is trained, as it is given to `lockstep train`.
        overrides: `key=value` items of its config.
        config_hash: hash of the config.
        measured_at: Unix seconds.
        versions: versions of programs, by name.
        host: name of the machine that was measured on.
        cores: cores that its ranks may use.
        memory_bytes: memory that all ranks of a host have together.
        launcher: launcher of groups of ranks.
        batch_size: samples of a full step, of which there are no more than an epoch has.
        num_microbatches: microbatches of a step.
        total_steps: steps of the whole run.
        buddy: whether a rank keeps the slice of another one too.
        anatomy: sizes and parts of the model.
        timed: steps that were measured.
        groups: steps of ranks of this host that trained together.
        messages: costs of messages among these ranks.
        group_bytes: memory that a rank needs more when it is one of two.
        start_s: seconds from the command to the first step.
        checkpoint_bytes: size of a checkpoint.
        checkpoint_s: seconds in which training stands still for one.
        write_s: seconds until it is on disk.
        device: what ranks compute on, as a config says it.
    """

    task: str
    overrides: tuple[str, ...]
    config_hash: str
    measured_at: float
    versions: dict[str, str]
    host: str
    cores: int
    memory_bytes: int
    launcher: str
    batch_size: int
    num_microbatches: int
    total_steps: int
    buddy: bool
    anatomy: Anatomy
    timed: tuple[Timed, ...]
    groups: tuple[Group, ...]
    messages: tuple[Profile, ...]
    group_bytes: int
    start_s: float
    checkpoint_bytes: int
    checkpoint_s: float
    write_s: float
    device: str = "cpu"

    @property
    def jitter(self) -> tuple[float, ...]:
        """Seconds of single steps over their mean, of the largest number of copies."""
        known = [timed for timed in self.timed if timed.jitter]
        return max(known, key=lambda timed: timed.num_copies).jitter if known else ()


def _gathered(num_bytes: float, num_ranks: int, per_host: int) -> float:
    return num_bytes * (num_ranks - 1) / num_ranks


def _scattered(num_bytes: float, num_ranks: int, per_host: int) -> float:
    return per_host * num_bytes * (num_ranks - per_host) / num_ranks


def _passed(num_bytes: float, num_ranks: int, per_host: int) -> float:
    return num_bytes


def _summed(num_bytes: float, num_ranks: int, per_host: int) -> float:
    if num_bytes * num_ranks <= SMALL_BYTES:
        return _gathered(num_bytes * num_ranks, num_ranks, per_host)
    return _scattered(num_bytes, num_ranks, per_host) + _gathered(num_bytes, num_ranks, per_host)


_LEAVING: Mapping[str, tuple[int, Callable[[float, int, int], float]]] = MappingProxyType(
    {
        "ordered_sum": (2, _summed),
        "all_gather": (1, _gathered),
        "all_to_all": (1, _scattered),
        "to_next": (1, _passed),
    }
)
"""For each collective, the number of times that all wait for all, and the bytes that leave a host:
a function of the size, the number of ranks, and the number of ranks on a host."""


@dataclass(frozen=True)
class Link:
    """The network between hosts.

    Attributes:
        bytes_per_s: bytes that a host can send in a second.
        latency_s: seconds of an empty message from host to host.
    """

    bytes_per_s: float
    latency_s: float


def parse_link(text: str) -> Link:
    """A link as people write it: rate and latency, such as `10gbit,50us`.

    Raises:
        ConfigError: it is not that.
    """
    match = _LINK.fullmatch(text.strip().lower())
    link = Link(0.0, 0.0)
    if match is not None:
        link = Link(float(match[1]) * _BITS[match[2]] / 8, float(match[3]) * _SECONDS[match[4]])
    if not (0 < link.bytes_per_s < math.inf and 0 <= link.latency_s < math.inf):
        raise ConfigError(
            f"--network {text}: must be the rate of a host's link and the latency between two "
            "hosts, such as 10gbit,50us"
        )
    return link


class Network:
    """The costs of collectives among any number of ranks, from profiles of some groups.

    Args:
        profiles: profiles of groups of ranks; may be none.
        ranks_per_host: most ranks of a host.
        link: network between hosts; None if the profiles include it, or it is not known.
    """

    def __init__(
        self, profiles: Sequence[Profile], ranks_per_host: int, link: Link | None = None
    ) -> None:
        self._profiles = profiles
        self._ranks_per_host = ranks_per_host
        self._link = link

    def num_hosts(self, num_ranks: int) -> int:
        """Hosts that so many ranks are on."""
        return -(-num_ranks // self._ranks_per_host)

    def assumes(self, num_ranks: int) -> list[str]:
        """The assumptions about a group of so many ranks that was not measured."""
        inside = min(num_ranks, self._ranks_per_host) if self._link else num_ranks
        if inside == 1:
            return []
        found = self._measured("ordered_sum", inside)
        if found is None:
            where = " inside a host" if self._link else ""
            return [f"messages{where} cost nothing: there is no profile of them (--profile FILE)"]
        assumptions = []
        if found.num_ranks != inside:
            assumptions.append(
                f"messages of other groups follow from those of {found.num_ranks} ranks: latency "
                "grows with the logarithm of the number of ranks, the rest with the bytes of a rank"
            )
        if self.num_hosts(num_ranks) > 1 and found.scope == "inside" and self._link is None:
            assumptions.append(
                "messages between hosts cost what they cost inside this one (--profile FILE of "
                "several hosts, or --network RATE,LATENCY)"
            )
        return assumptions

    def seconds(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective of Lockstep's transport.

        Args:
            operation: its name, as in profiles.
            num_bytes: its size, see `Operation.meaning`.
            num_ranks: ranks that take part.
        """
        inside = min(num_ranks, self._ranks_per_host) if self._link else num_ranks
        found = self._measured(operation, inside) if inside > 1 else None
        seconds = _scaled(found, num_bytes, inside) if found is not None else 0.0
        return seconds + self._between(operation, num_bytes, num_ranks)

    def _between(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """The time of the network between hosts, which carries messages of a host in sequence."""
        hosts = self.num_hosts(num_ranks)
        if self._link is None or hosts == 1:
            return 0.0
        trips, leaving = _LEAVING[operation]
        sent = leaving(num_bytes, num_ranks, self._ranks_per_host)
        latency_s = trips * math.ceil(math.log2(hosts)) * self._link.latency_s
        return latency_s + sent / self._link.bytes_per_s

    def _measured(self, operation: str, num_ranks: int) -> Measurement | None:
        """The measurement of the most similar group."""
        hosts = self.num_hosts(num_ranks)
        scopes: list[Scope] = ["all", "between", "inside"]
        scopes = scopes if hosts > 1 else scopes[::-1]
        if self._link is not None:
            scopes = ["inside"]
        for scope in scopes:
            found = [p.find("lockstep", operation, scope) for p in self._profiles]
            there = [measurement for measurement in found if measurement is not None]
            if there:
                return min(there, key=lambda m: abs(math.log(m.num_ranks / max(2, num_ranks))))
        return None


def _scaled(found: Measurement, num_bytes: float, num_ranks: int) -> float:
    """The time of a measured collective among another number of ranks."""
    seconds = _interpolated(found, num_bytes)
    if num_ranks == found.num_ranks:
        return seconds
    factor = OPERATIONS[f"{found.layer}/{found.operation}"].factor
    latency = min(found.points[0].median_s, seconds)
    levels = math.log2(num_ranks) / math.log2(found.num_ranks)
    moved = factor(num_ranks) / factor(found.num_ranks) if factor(found.num_ranks) else 1.0
    return latency * levels + (seconds - latency) * moved


def _interpolated(found: Measurement, num_bytes: float) -> float:
    """The median time of a size, on a straight line through the two sizes next to it."""
    points = found.points
    if num_bytes <= points[0].num_bytes or len(points) == 1:
        return points[0].median_s
    lines = pairwise(points)
    before, after = next((p for p in lines if num_bytes <= p[1].num_bytes), points[-2:])
    part = (num_bytes - before.num_bytes) / (after.num_bytes - before.num_bytes)
    seconds = before.median_s + part * (after.median_s - before.median_s)
    return max(seconds, after.median_s) if part > 1 else seconds

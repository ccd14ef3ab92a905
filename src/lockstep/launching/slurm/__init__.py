"""Jobs of SLURM: the resources that they request, checked before any script is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.errors import LaunchError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)
# SLURM keeps the number of seconds before the end in 16 bits.
_LONGEST_NOTICE_S = 65_535


@dataclass(frozen=True)
class Resources:
    """The resources that a job requests from SLURM.

    Attributes:
        nodes: number of nodes.
        tasks_per_node: number of ranks on each node.
        cpus_per_task: number of cores for each rank.
        time: time limit as SLURM reads it, such as `90` (minutes), `1:30:00` or `1-12`
            (days-hours).
        partition: partition to run in; SLURM's default if None.
        account: account that pays; SLURM's default if None.
        signal_before_s: seconds before the time limit at which the ranks are asked to stop.

    Raises:
        LaunchError: SLURM would refuse one of them, or it makes no sense.
    """

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    time: str
    partition: str | None = None
    account: str | None = None
    signal_before_s: int = 120

    def __post_init__(self) -> None:
        _at_least_one("--nodes", self.nodes)
        _at_least_one("--ntasks-per-node", self.tasks_per_node)
        _at_least_one("--cpus-per-task", self.cpus_per_task)
        _at_least_one("--signal-before", self.signal_before_s)
        _one_word("--partition", self.partition)
        _one_word("--account", self.account)
        if self.signal_before_s > _LONGEST_NOTICE_S:
            raise LaunchError(
                f"--signal-before {self.signal_before_s}: must be at most {_LONGEST_NOTICE_S} "
                "seconds"
            )
        limit = seconds(self.time)
        if limit <= self.signal_before_s:
            raise LaunchError(
                f"--signal-before {self.signal_before_s}: is not less than --time {self.time}, "
                f"which is {limit} seconds: no time to train would be left"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the whole job."""
        return self.nodes * self.tasks_per_node

    @property
    def patience_s(self) -> int:
        """Seconds that ranks may take to stop on request, before they are ended."""
        return max(self.signal_before_s // 2, self.signal_before_s - 30)


def seconds(time: str) -> int:
    """A time limit as SLURM reads it.

    Raises:
        LaunchError: it is not one, or it is zero.
    """
    match = _TIME.fullmatch(time)
    parts = [int(part) for part in match["parts"].split(":")] if match else []
    if match and match["days"] is not None:
        hours, minutes, rest = [*parts, 0, 0][:3]
        total = int(match["days"]) * 86_400 + hours * 3600 + minutes * 60 + rest
    elif len(parts) == 3:
        total = parts[0] * 3600 + parts[1] * 60 + parts[2]
    else:
        total = sum(part * unit for part, unit in zip(parts, (60, 1), strict=False))
    if total < 1:
        raise LaunchError(
            f"--time {time}: is no time limit; write minutes, minutes:seconds, "
            "hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
        )
    return total


def _at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise LaunchError(f"{option} {value}: must be at least 1")


def _one_word(option: str, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[^\s\x00-\x1f'\"\\-][^\s\x00-\x1f'\"\\]*", value):
        raise LaunchError(f"{option} {value!r}: must be one word without quotes")

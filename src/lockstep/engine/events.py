"""Events that the engine emits while it works.

The engine never prints or formats: it emits these records, and whoever wants to show, store
or count something listens (`lockstep.observe`). Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `step` is the number of optimizer steps committed so far."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training begins (or goes on, when `step` > 0) with this plan."""

    task: str
    run_dir: str
    config_hash: str
    total_steps: int
    steps_per_epoch: int
    """0 for a stream that does not say its length."""
    num_samples: int
    """Of an epoch; 0 for a stream that does not say its length."""
    num_parameters: int
    world_size: int
    transport: str
    launcher: str
    device: str
    threads: int
    num_microbatches: int
    batch_size: int
    """Samples of a full step: the config's `batch_size`, or all of an epoch if it has fewer."""
    continued: bool = False
    """Rank 0 was lost, and another one goes on in its place: not the start of a session."""


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """A process takes part; one event for each process."""

    slot: int
    rank: int
    host: str
    pid: int
    local_rank: int
    device: str
    threads: int
    microbatches: tuple[int, ...]
    """The microbatches this rank computes: first, last + 1, and a step if they are not contiguous
    (`sharding`)."""
    cores: int = 0
    """Cores that all ranks of its host may use; 0 if that is not known."""
    counted_cores: int = 0
    """Cores that it may run on itself, whose work is `RankTimes.cores_s`; 0 if not known."""
    rounding: str = ""
    """Digest of what a few kernels compute: the same on machines that round alike."""
    machine: str = ""
    """Its processor and libraries, in words."""
    device_bytes: int = 0
    """Memory of its device in all; 0 on CPUs, or if not known."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank has spent since the last report: seconds by kind of work, and beside them."""

    rank: int
    compute_s: float
    communication_s: float
    data_s: float
    checkpoint_s: float
    cpu_s: float = 0.0
    """Seconds that all its threads have computed; a rank that waits for MPI computes too."""
    cores_s: float = 0.0
    """Seconds that anybody has computed on the cores that it may run on; 0 if not known."""
    faults: int = 0
    """Page faults that had to read from a disk: memory that was swapped out, or a mapped file."""
    preemptions: int = 0
    """How often it had to leave a core to another process."""
    peak_bytes: int = 0
    """The most memory that it has had so far."""
    swapped_bytes: int = 0
    """Memory that is swapped out at the moment."""
    device_bytes: int = 0
    """The most memory that its tensors have had on its device so far; 0 if not known."""
    device_retries: int = 0
    """How often the device's allocator had no memory left, and gave back what it kept for later."""
    device_busy: float = 0.0
    """Part of the time in which the device has computed lately, for anybody; 0 if not known."""
    num_calls: int = 0
    """Collectives that it has taken part in, and messages that it has sent or received."""
    sent_bytes: int = 0
    """Bytes that it has given to other ranks; what an all-gather gives to each of them counts."""
    received_bytes: int = 0
    """Bytes that it has got from other ranks."""
    grad_norm: float = 0.0
    """Norm of the mean gradient of its own samples, before the sum over ranks, in the last of these
    steps; 0 where a rank has no such gradient."""

    @property
    def memory_bytes(self) -> int:
        """The most memory so far: of the device, where there is one that says it."""
        return self.device_bytes or self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """`num_steps` steps were committed since the last such event; values are their means."""

    num_steps: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    lr: float
    grad_norm: float
    """Global norm of the mean gradient before clipping, of the last of these steps."""
    loss_scale: float
    samples: int
    seconds: float
    """Wall time of these steps on rank 0."""
    ranks: tuple[RankTimes, ...]

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks for each second of wall time."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def compute_efficiency(self) -> float:
        """Compute / (compute + exposed communication + data wait + checkpoint), all ranks."""
        compute = sum(r.compute_s for r in self.ranks)
        total = compute + sum(r.communication_s + r.data_s + r.checkpoint_s for r in self.ranks)
        return compute / total if total > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The metrics of a whole split, exact whatever the number of ranks."""

    split: str
    metrics: dict[str, float]
    seconds: float
    model_step: int | None = None
    """The step whose parameters were evaluated, if it is another one than `step`."""
    arrays: dict[str, Any] = field(default_factory=dict)
    """Metrics of more than one number: nested lists by name."""


@dataclass(frozen=True, kw_only=True)
class Improved(Event):
    """The watched metric is better than ever; a checkpoint of this step is kept as best."""

    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """What a task or a hook has logged by `lockstep.log`; of a name and step, the last one counts.

    Attributes:
        name: words with `/` between them.
        kind: `scalar`, `text`, `histogram`, `image` or `figure`.
        value: a scalar's number; a histogram's `min` and `max` of the finite values, `counts` of
            as many bins of equal width in between as it has, `num_nan` and `num_inf`; of a picture
            `path` in the run directory, `sha256`, `width` and `height` in pixels. None for text.
        text: the text.
        png: content of a picture's file; of events that were read, empty.
    """

    name: str
    kind: str
    value: Any = None
    text: str = ""
    png: bytes = field(default=b"", repr=False)


def picture_path(name: str, step: int) -> str:
    """Path in the run directory of a picture that was logged."""
    return f"{PICTURES}/{name}/{step:08}.png"


PICTURES = "logged"
"""Folder in the run directory."""


@dataclass(frozen=True, kw_only=True)
class Checkpointed(Event):
    """A checkpoint is complete on disk."""

    path: str
    num_bytes: int
    stall_s: float
    """Seconds in which training stood still for it."""
    write_s: float


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """A trace of this rank's last steps is complete on disk."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """State was restored from a checkpoint."""

    path: str
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, each with its reason."""


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """A process has died, or was ended because it hung; the others go on without it."""

    slot: int
    rank: int
    """The one it had."""
    reason: str = ""
    """Why its watchdog ended it, if it did."""
    reached: str = ""
    """Where it stood if its watchdog ended it: the step, and its newest call. Said by rank 0."""
    waiting: str = ""
    """Who waited for it then, and in which call. Said by rank 0."""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The survivors have regrouped, agree on the state after `step`, and go on."""

    world_size: int
    seconds: float
    """From the first sign of the loss, on rank 0, to going on."""
    copied: bool
    """Whether some ranks were a step behind and got the state from another one."""
    microbatches: tuple[int, ...] = ()
    """Number of microbatches that each rank computes from now on; empty in older files."""


@dataclass(frozen=True, kw_only=True)
class ExchangeChosen(Event):
    """How a group of ranks exchanges gradients, where it has a choice."""

    way: str
    """`shared memory`, `messages`, or `hierarchical`: first inside hosts, then between them."""
    reason: str = ""
    """Why not in shared memory, if not; between hosts also what each way took."""


@dataclass(frozen=True, kw_only=True)
class Rebalanced(Event):
    """Microbatches are distributed by measured speed from now on: slow ranks get fewer."""

    microbatches: tuple[int, ...]
    """Number of microbatches that each rank computes."""
    slowest: int
    """The rank that took longest for one microbatch; of a replica of several, its first."""
    slowdown: float
    """Time of the slowest rank as a multiple of that of the fastest."""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know; training goes on."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The run ends because of an error."""

    error: str
    message: str
    exit_code: int = 1


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The run ends in order."""

    status: str
    """`completed`, or `stopped` when it ended before its last step on request."""
    reason: str
    params_sha256: str
    metrics: dict[str, float]
    world_size: int
    wall_s: float
    checkpoint: str = ""
    exit_code: int = 0
    test_step: int | None = None
    """The step whose parameters the test split was evaluated with; None if it was not."""
    arrays: dict[str, Any] = field(default_factory=dict)
    """The newest metrics of more than one number: nested lists by "split/name"."""
    carry_sha256: str = ""
    """SHA-256 of what microbatches carry to the next step; empty if they carry nothing."""
    tables_sha256: str = ""
    """SHA-256 of the rows of all tables, and what their optimizers keep; empty without tables."""


Emit = Callable[[Event], None]
"""Takes an event; called on every rank."""


class Backlog:
    """Events that rank 0 may not have stored yet, on every rank, for any may become rank 0.

    This one keeps none.
    """

    @property
    def stored(self) -> int:
        """Step up to whose events this process has stored all; -1 if it stores none."""
        return -1

    def keep_from(self, step: int) -> None:
        """Learn that rank 0 has stored all events of the steps before this one."""

    def rows(self) -> list[str]:
        """What is kept, for a joining rank, each event as a line of JSON."""
        return []

    def take(self, rows: list[str]) -> None:
        """Keep what another rank has kept."""

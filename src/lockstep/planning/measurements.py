"""The measurements that a plan is made from: steps, memory, messages, starts and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.train_config import Sharding
from lockstep.planning.profile import Profile


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

    @property
    def jitter(self) -> tuple[float, ...]:
        """Seconds of single steps over their mean, of the largest number of copies."""
        known = [timed for timed in self.timed if timed.jitter]
        return max(known, key=lambda timed: timed.num_copies).jitter if known else ()

"""The sections of `TrainConfig`: keys that belong together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config.section import (
    NO_OUTCOME,
    Beta,
    Count,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class OptimizerConfig(Section):
    """The default optimizer. A Task with its own ignores all keys but `sharded` and `buddy`."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """How gradients become steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of parameters: decoupled (adamw), or added to the gradient (sgd, adam)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of gradients and their squares (adam, adamw)."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator (adam, adamw)."""
    momentum: NonNegativeFloat = 0.0
    """Factor of the last step in the next one (sgd)."""
    nesterov: bool = False
    """Nesterov's momentum (sgd); needs a momentum above 0."""
    sharded: bool = Field(default=False, json_schema_extra=NO_OUTCOME)
    """Short for `sharding: optimizer`, where `sharding` asks for no more."""
    buddy: bool = Field(default=True, json_schema_extra=NO_OUTCOME)
    """With `sharding`, and where survivors can go on: each rank also keeps and steps the slice of
    the rank before it, so that the loss of a rank loses no state."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> OptimizerConfig:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")
        return self


class ScheduleConfig(Section):
    """How the learning rate changes. A task that has its own `lr_factor` ignores all keys.

    There it may ask for the factors of this section by `lockstep.lr_factor`.
    """

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_restarts",
        "polynomial",
        "inverse_sqrt",
        "onecycle",
        "step",
        "plateau",
    ] = "constant"
    """How the learning rate changes after the warmup; `inverse_sqrt` falls as
    √(`warmup_steps` / step)."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step (linear, cosine, polynomial, onecycle), at the end of each
    cycle (cosine_restarts), or the least one (plateau), as a part of `lr`."""
    power: PositiveFloat = 1.0
    """Exponent of the decay (polynomial)."""
    cycle_steps: Positive = 1000
    """Steps of the first cycle (cosine_restarts)."""
    cycle_factor: Positive = 1
    """How many times as long as the one before each further cycle is (cosine_restarts)."""
    start_ratio: Annotated[float, Field(gt=0, le=1)] = 0.04
    """Learning rate at the first step, as a part of `lr` (onecycle)."""
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Part of the steps after the warmup at which the learning rate reaches `lr` (onecycle)."""
    step_size: Positive = 1000
    """Steps between two decays (step)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of each decay (step, plateau)."""
    patience: Count = 10
    """Evaluations without a better `watch` before the next one decays (plateau)."""


class PrecisionConfig(Section):
    """Autocast and loss scaling."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast of forward passes; parameters stay as they are."""
    deterministic: bool = True
    """On a GPU: only kernels that give the same bits each time; without, runs may differ."""
    loss_scale: PositiveFloat = 2.0**16
    """First loss scale (fp16): halved when a gradient overflows, and that step changes nothing."""
    growth_interval: Positive = 2000
    """Steps without overflow before the loss scale is doubled (fp16)."""


class ComputeConfig(Section):
    """How a microbatch is computed; it never decides what is computed."""

    graphs: Literal["auto", True, False] = Field(default="auto", json_schema_extra=NO_OUTCOME)
    """On a GPU: launch all kernels of a microbatch at once (CUDA graphs). `auto`: where that is
    quicker, and no code runs between steps; `true`: also where such code changes what a loss reads
    in tensors on the GPU only, in place."""


class EarlyStoppingConfig(Section):
    """Stop when `watch` has not improved for `patience` evaluations."""

    patience: Count = 0
    """Evaluations without a better `watch` after which the run ends; 0 never ends it."""
    min_delta: NonNegativeFloat = 0.0
    """Least change of `watch` that counts as better."""


class ConvergenceConfig(Section):
    """A rule that ends the run when a metric has settled."""

    metric: str = "loss"
    """An evaluation metric."""
    window: Annotated[int, Field(ge=2)] = 5
    """Evaluations that are looked at."""
    tolerance: NonNegativeFloat = 1e-3
    """Most by which they may differ, as a part of their greatest magnitude."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every: Count = Field(default=0, json_schema_extra=NO_OUTCOME)
    """Steps between checkpoints; 0 writes one at each epoch's end. The last step, and each new best
    one, always has one."""
    keep: Positive = Field(default=3, json_schema_extra=NO_OUTCOME)
    """How many of the newest to keep, beside the best."""
    keep_every_s: NonNegativeFloat = Field(default=0.0, json_schema_extra=NO_OUTCOME)
    """Of the older ones, keep one for each time of this length for good: 86400 keeps one a day; 0
    keeps none."""
    background: bool = Field(default=True, json_schema_extra=NO_OUTCOME)
    """Write in a background thread from a copy in memory."""
    copies: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)
    """Number of hosts that keep each checkpoint, where each has a run directory of its own: with 2,
    a host that is lost with its disk loses nothing."""
    file_bytes: Positive = Field(default=256 << 20, json_schema_extra=NO_OUTCOME)
    """Most bytes of tensors in a file, unless one has more."""


class DataConfig(Section):
    """How batches are fetched."""

    num_workers: Count = Field(default=0, json_schema_extra=NO_OUTCOME)
    """Processes of each rank that fetch microbatches ahead; 0 fetches in the training process."""
    prefetch: Positive = Field(default=2, json_schema_extra=NO_OUTCOME)
    """Microbatches each worker process fetches ahead."""
    shuffle: bool = True
    """Draw a new order for each epoch."""
    shuffle_buffer: Count = 0
    """Samples of a stream that are shuffled together, in memory; 0 leaves their order."""
    stream_shards: Count = 0
    """Parts of a stream that has `shard`, a multiple of `num_microbatches`; a rank reads those of
    its microbatches only. 0: every rank reads the whole stream."""
    drop_last: bool = False
    """Leave out an epoch's last batch if it is smaller than `batch_size`."""


class CarryConfig(Section):
    """What microbatches carry from step to step (`Task.carry`)."""

    buddy: bool = Field(default=True, json_schema_extra=NO_OUTCOME)
    """Keep what microbatches carry on the next rank too, where survivors can go on. Without, the
    loss of a rank takes training back to the newest checkpoint."""


class BatchLossConfig(Section):
    """Losses over the whole batch (`Task.batch_loss`)."""

    recompute: bool = Field(default=False, json_schema_extra=NO_OUTCOME)
    """Compute a second forward pass of each microbatch instead of keeping its activations until the
    loss is known."""


class CompressionConfig(Section):
    """Gradients that travel in fewer bytes. Each microbatch's is compressed by itself."""

    name: Literal["none", "int8", "int16", "topk", "randomk", "onebit", "lowrank"] = "none"
    """`int8`, `int16`: integers of these bits that hold the sum of all microbatches, with a scale
    for each 256 elements; `topk`: the elements of each tensor with the greatest magnitudes;
    `randomk`: elements that the seed draws for each step; `onebit`: signs, and the mean magnitude
    of each 256 elements; `lowrank`: two factors of each matrix (PowerSGD)."""
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Part of the elements of each tensor to send (topk, randomk)."""
    rank: Positive = 2
    """Columns of the factors of each matrix (lowrank)."""
    error_feedback: bool = True
    """Add what was cut off a microbatch's gradient to its next one, at the cost of a copy of the
    gradient for each microbatch."""
    buddy: bool = Field(default=False, json_schema_extra=NO_OUTCOME)
    """As `carry.buddy`, of what was cut off: sends a whole gradient for each microbatch in each
    step."""


class LocalConfig(Section):
    """Workers that step by themselves between two exchanges (local SGD, DiLoCo).

    A microbatch is a worker. A step of the run is `steps` of each, with `batch_size` samples in
    all, and then one of the outer optimizer with the mean of how far they have come. `lr`,
    `schedule`, `clip_norm` and the optimizer are those of workers.
    """

    steps: Positive = 1
    """Steps of each worker between two exchanges; 1 exchanges gradients."""
    outer_lr: NonNegativeFloat = 0.7
    """Learning rate of the outer optimizer; 1 without momentum takes the mean of all workers."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer optimizer."""


class TablesConfig(Section):
    """Tables whose rows are distributed over ranks (`lockstep.nn.SparseEmbedding`)."""

    buddy: bool = Field(default=True, json_schema_extra=NO_OUTCOME)
    """As `carry.buddy`, of rows."""


class MeshConfig(Section):
    """Where a run is computed; it never decides what is computed."""

    pp: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)
    """Pipeline parallelism: stages of a replica, each with some of the blocks of a
    `lockstep.nn.Pipeline`, or of a row (`lockstep.nn.stages`). A replica has `mesh.pp` x `mesh.tp`
    ranks."""
    interleave: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)
    """Stages of each of the `mesh.pp` ranks, if these are several: more means less waiting and more
    sending."""
    tp: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)
    """Tensor parallelism: ranks that compute a microbatch together, each some of the `num_shards`
    shards."""

    shrink: Literal["drop-replica", "replan"] = Field(
        default="drop-replica", json_schema_extra=NO_OUTCOME
    )
    """With fewer ranks than a replica needs, `drop-replica` refuses to start or resume, `replan`
    goes on with fewer stages and fewer ranks to a stage."""

    @property
    def num_stages(self) -> int:
        """Number of ranges of blocks that the ranks of a replica share out."""
        return self.pp * self.interleave if self.pp > 1 else 1


class WeightsConfig(Section):
    """Weights of another run that this one starts from: `lockstep train --from`."""

    path: str = Field(default="", json_schema_extra=NO_OUTCOME)
    """The run directory or checkpoint; of a run, its best, or its latest where there was no
    evaluation. `RUN/latest`, `RUN/best` and `RUN/500` name one."""
    only: tuple[str, ...] = ()
    """Glob patterns of tensors to take, such as `encoder.*`; without any, all, which must match."""
    step: Count | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """Step of that checkpoint; filled in when the run begins."""
    sha256: str = ""
    """SHA-256 that tells its weights from others; filled in when the run begins."""

"""The config of a run: all keys that every task has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field, model_validator

from lockstep.config.section import (
    NO_OUTCOME,
    Count,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    outcome,
)
from lockstep.config.sections import (
    BatchLossConfig,
    CarryConfig,
    CheckpointConfig,
    CompressionConfig,
    ComputeConfig,
    ConvergenceConfig,
    DataConfig,
    EarlyStoppingConfig,
    LocalConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TablesConfig,
    WeightsConfig,
)

Sharding = Literal["none", "optimizer", "gradients", "parameters"]


class TrainConfig(Section):
    """Everything that shapes a run. Subclass it to give a system keys of its own.

    Attributes:
        is_completed: whether keys that were not given get values from elsewhere than their class.
    """

    is_completed: ClassVar[bool] = False

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything random."""
    init: Literal["in_order", "by_name"] = "in_order"
    """How the model's first values are drawn. `in_order`: one after another, as its code does;
    `by_name`: each tensor's by `seed` and its name, which are other ones. With `mesh.pp` or
    `sharding=parameters`, a rank then draws its own part, and never has the whole model."""
    batch_size: Positive = 256
    """Samples in a global batch: one optimizer step, whatever the number of ranks."""
    num_microbatches: Positive = 8
    """Parts of a global batch, distributed over the ranks; at most `batch_size`. More ranks than
    this have nothing to do; each costs time, so small models want few (`diagnose`)."""
    num_shards: Positive = 1
    """Parts of the features of layers that can be cut (`lockstep.nn`), distributed over the ranks
    that compute a microbatch together (`mesh.tp`)."""
    epochs: Positive = 1
    """Passes over the data."""
    steps: Positive | None = None
    """Optimizer steps of the whole run, instead of `epochs`; the schedule spans them."""
    stop_at_step: Positive | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """End this session after this step, with a checkpoint; the run can be resumed. Not written to
    `config.yaml`."""

    lr: NonNegativeFloat = 1e-3
    """Learning rate."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: PositiveFloat | None = None
    """Scale the mean gradient down to this global norm."""
    precision: PrecisionConfig = PrecisionConfig()
    activation_checkpointing: tuple[str, ...] = ()
    """Glob patterns of module names whose activations are recomputed in the backward pass."""

    threads: Positive = 1
    """Threads a rank computes with. Sums inside an operation, and so the bits, depend on it."""
    device: Literal["auto", "cpu", "cuda", "accelerator"] = "auto"
    """Where ranks compute; `auto` is a GPU for each rank if the host has that many, else the CPU;
    `accelerator` is what `torch.accelerator` finds, such as one that a package adds to torch.
    The hash holds the word, not the device found."""

    compute: ComputeConfig = Field(default=ComputeConfig(), json_schema_extra=NO_OUTCOME)
    batch_loss: BatchLossConfig = Field(default=BatchLossConfig(), json_schema_extra=NO_OUTCOME)
    local: LocalConfig = LocalConfig()
    compression: CompressionConfig = CompressionConfig()
    carry: CarryConfig = Field(default=CarryConfig(), json_schema_extra=NO_OUTCOME)
    tables: TablesConfig = Field(default=TablesConfig(), json_schema_extra=NO_OUTCOME)
    mesh: MeshConfig = MeshConfig()
    sharding: Sharding = Field(default="none", json_schema_extra=NO_OUTCOME)
    """What is divided among ranks: same bits, less memory. `optimizer`: the state of element-wise
    optimizers (ZeRO-1); `gradients`: these too (ZeRO-2); `parameters`: these too (ZeRO-3), except
    while their block or unit is computed (`lockstep.nn.Pipeline`, `stages`, `units`)."""
    min_ranks: Positive = Field(default=1, json_schema_extra=NO_OUTCOME)
    """Stop with a checkpoint when fewer ranks than this are left."""

    balance_every: Count = Field(default=50, json_schema_extra=NO_OUTCOME)
    """Steps between looks at whether slow ranks should get fewer microbatches; 0 never looks."""
    hang_timeout_s: NonNegativeFloat = Field(default=300.0, json_schema_extra=NO_OUTCOME)
    """Kill a rank that does nothing for this long (or ten times its longest pause), or that is
    stopped by a signal for this long; 0 never does. A host that Lockstep's `mpirun` cannot reach
    for this long ends the job."""

    start_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=300.0, json_schema_extra=NO_OUTCOME
    )
    """Longest time that ranks wait for each other at the start before it fails."""

    strict: bool = Field(default=False, json_schema_extra=NO_OUTCOME)
    """Refuse checkpoints computed on a machine with other rounding (processor, maths library), and
    ranks on such machines; otherwise warn."""

    eval_every: Count = 0
    """Steps between evaluations of `val`; 0 evaluates at each epoch's end. There always is one
    after the last step."""
    eval_batch_size: Positive = 256
    """Samples in one evaluation batch, on one rank."""
    watch: str = "loss"
    """The evaluation metric that says which checkpoint is best: a plain name is one of `val`, those
    of other validation splits are called `val_ood/loss`."""
    watch_mode: Literal["min", "max"] = "min"
    """Whether less or more of `watch` is better."""
    test_on: Literal["best", "last"] = Field(default="best", json_schema_extra=NO_OUTCOME)
    """Parameters that `test` is evaluated with: of the best checkpoint, if there is a `val`, or of
    the last step."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    convergence: tuple[ConvergenceConfig, ...] = ()
    """Rules that each end the run when a metric has settled, such as
    `{metric: loss, window: 5, tolerance: 0.001}`."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    weights_from: WeightsConfig = WeightsConfig()
    digest_every: Count = Field(default=0, json_schema_extra=NO_OUTCOME)
    """Steps between checks that all replicas are bit-identical; 0 checks at checkpoints only."""
    log_every: Positive = Field(default=10, json_schema_extra=NO_OUTCOME)
    """Steps between rows of `metrics.csv` and `events.jsonl`. One more comes before each evaluation
    and checkpoint."""
    tensorboard: bool = Field(default=False, json_schema_extra=NO_OUTCOME)
    """Write event files for TensorBoard."""
    trackers: tuple[Literal["mlflow", "wandb", "trackio"], ...] = Field(
        default=(), json_schema_extra=NO_OUTCOME
    )
    """Experiment trackers that get config, curves and pictures, each an extra of that name."""
    plan: str = Field(default="", json_schema_extra=NO_OUTCOME)
    """A file of `lockstep plan TASK --json FILE`, whose prediction is shown beside measured
    steps."""
    exchange: Literal["auto", "messages", "flat", "hierarchical"] = Field(
        default="auto", json_schema_extra=NO_OUTCOME
    )
    """How gradients are exchanged. `auto`: through shared memory inside a host, else by messages;
    on several hosts, summed inside each host first if that is measured to be quicker.
    `hierarchical`: always so; `flat`: never so; `messages`: never so, and without shared memory."""
    overlap: bool = Field(default=True, json_schema_extra=NO_OUTCOME)
    """Let gradients travel during a step's last backward pass, where ranks have a host each."""
    bucket_bytes: Positive = Field(default=8 << 20, json_schema_extra=NO_OUTCOME)
    """About the most bytes of gradient that a rank receives at a time, where they are sent."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> TrainConfig:
        for problem in (*self._problems(), *self._compression_problems(), *self._local_problems()):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if {self.epochs, self.steps} == {None}:  # a task's own config may allow both
            yield "epochs=None, steps=None: nothing says when training ends; set one of them"
        if self.num_microbatches > self.batch_size:
            yield (
                f"num_microbatches={self.num_microbatches} is more than "
                f"batch_size={self.batch_size}: a microbatch needs at least one sample"
            )
        if self.data.stream_shards % self.num_microbatches:
            yield (
                f"data.stream_shards={self.data.stream_shards}: must be a multiple of "
                f"num_microbatches={self.num_microbatches}, so that each microbatch has as many "
                "parts of the stream, or 0"
            )
        if self.mesh.tp > self.num_shards:
            yield (
                f"mesh.tp={self.mesh.tp} is more than num_shards={self.num_shards}: each rank of a "
                f"replica needs at least one shard; raise num_shards or set mesh.tp to at most "
                f"{self.num_shards}"
            )
        if self.exchange == "hierarchical" and self.shards_gradients:
            yield (
                f"exchange=hierarchical: sharding={self.sharding} sums each microbatch at once, "
                "before the ranks of a host have anything to add up; set sharding=optimizer, or "
                "exchange=auto"
            )
        if self.exchange == "hierarchical" and self.compression.name != "none":
            yield (
                f"exchange=hierarchical: compression.name={self.compression.name} has an exchange "
                "of its own; set compression.name=none, or exchange=auto"
            )
        if self.mesh.num_stages > self.mesh.pp and self.shards_gradients:
            yield (
                f"mesh.interleave={self.mesh.interleave}: sharding={self.sharding} sums gradients "
                "after each microbatch, of which several are under way at a time here; set "
                "mesh.interleave=1 or sharding=optimizer"
            )
        twice = next((name for name in self.trackers if self.trackers.count(name) > 1), None)
        if twice is not None:
            yield f"trackers={list(self.trackers)}: {twice} comes twice"

    def _compression_problems(self) -> Iterator[str]:
        name = self.compression.name
        if name == "none":
            return
        if self.mesh.tp * self.mesh.pp > 1:
            yield (
                f"mesh.tp={self.mesh.tp}, mesh.pp={self.mesh.pp}: compression.name={name} is for "
                "ranks that share out microbatches only; set both to 1, or compression.name=none"
            )
        if self.shards_optimizer:
            yield (
                f"sharding={self.sharding}, optimizer.sharded={self.optimizer.sharded}: ranks send "
                f"each other whole parameters, which compression.name={name} makes no smaller; set "
                "sharding=none and optimizer.sharded=false, or compression.name=none"
            )
        if self.precision.dtype == "fp16":
            yield (
                f"precision.dtype=fp16: what compression.name={name} cuts off would be of another "
                "loss scale in the next step; set precision.dtype=bf16, or compression.name=none"
            )
        most = {"int8": 127, "int16": 32767}.get(name, self.num_microbatches)
        if self.num_microbatches > most:
            yield (
                f"num_microbatches={self.num_microbatches}: compression.name={name} has integers "
                f"for the sum of at most {most:,}; set fewer, or compression.name=int16"
            )

    def _local_problems(self) -> Iterator[str]:
        steps = self.local.steps
        if steps == 1:
            return
        if self.mesh.tp * self.mesh.pp > 1:
            yield (
                f"mesh.tp={self.mesh.tp}, mesh.pp={self.mesh.pp}: with local.steps={steps} a rank "
                "steps all parameters of a worker; set both to 1, or local.steps=1"
            )
        if self.shards_optimizer:
            yield (
                f"sharding={self.sharding}, optimizer.sharded={self.optimizer.sharded}: with "
                f"local.steps={steps} a rank steps all parameters of a worker; set sharding=none "
                "and optimizer.sharded=false, or local.steps=1"
            )
        if self.precision.dtype == "fp16":
            yield (
                f"precision.dtype=fp16: its loss scale is of the run's steps, not of local.steps="
                f"{steps}; set precision.dtype=bf16, or local.steps=1"
            )
        if self.num_microbatches * steps > self.batch_size:
            yield (
                f"local.steps={steps}: batch_size={self.batch_size} is less than a sample for each "
                f"step of num_microbatches={self.num_microbatches} workers"
            )

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank keeps its slice of the optimizer's state only."""
        return self.sharding != "none" or self.optimizer.sharded

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps its slice of summed gradients only."""
        return self.sharding in ("gradients", "parameters")

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank keeps its slice of the parameters only, outside of their block."""
        return self.sharding == "parameters"

    @property
    def draws_by_block(self) -> bool:
        """Whether a rank draws the first values of a block when it needs it, and of its own."""
        in_blocks = self.mesh.pp > 1 or self.shards_parameters
        return self.init == "by_name" and in_blocks and self.num_shards == 1

    @property
    def hash(self) -> str:
        """SHA-256 (16 hex digits) of all keys that can change the final parameters."""
        values = outcome(self)
        # Of a run that compresses nothing, has no workers, starts from no other, draws in order or
        # reads no stream in parts, it says nothing: that run's hash is older than these keys.
        for name, default in (
            ("compression", CompressionConfig()),
            ("local", LocalConfig()),
            ("weights_from", WeightsConfig()),
        ):
            if values[name] == outcome(default):
                del values[name]
        if self.init == "in_order":
            del values["init"]
        if not self.data.stream_shards:
            del values["data"]["stream_shards"]
        canonical = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """All keys with their values, as YAML that `load` reads back."""
        values = self.model_dump(mode="json")
        # The emitter in C, where PyYAML has it, writes the same text in a quarter of the time.
        fast = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        try:
            return str(yaml.dump(values, Dumper=fast, sort_keys=False))
        except UnicodeEncodeError:  # names of files may have bytes that are no text
            return yaml.safe_dump(values, sort_keys=False)

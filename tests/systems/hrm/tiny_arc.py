"""Keys of runs on few tasks of ARC, by a small model."""

TINY = (
    "preset=arc-1", "num_train=3", "num_val=2", "augment=2", "dim=8", "num_heads=1",
    "inner_multiple=8", "num_blocks=1", "high_cycles=1", "low_cycles=1", "puzzle_tokens=2",
    "batch_size=5", "num_microbatches=3", "max_segments=3", "eval_segments=1",
    "eval_batch_size=4", "explore=0.5", "precision.dtype=fp32", "schedule.warmup_steps=2",
    "device=cpu",
)  # fmt: skip
RUN = (*TINY, "steps=6", "eval_every=6", "checkpoint.every=2", "log_every=1", "puzzle_lr=0.5")

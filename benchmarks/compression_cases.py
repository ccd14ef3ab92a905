"""What is trained with compressed gradients, and kinds of compression."""

from __future__ import annotations

from dataclasses import dataclass

from processes import HERE

NEVER = 1_000_000_000

KINDS = {
    "none": (),
    "int8": ("compression.name=int8",),
    "int16": ("compression.name=int16",),
    "topk 1 %": ("compression.name=topk",),
    "randomk 10 %": ("compression.name=randomk", "compression.ratio=0.1"),
    "onebit": ("compression.name=onebit",),
    "lowrank 2": ("compression.name=lowrank",),
    "lowrank 4": ("compression.name=lowrank", "compression.rank=4"),
}
"""Keys of each kind, by what the tables call it."""


@dataclass(frozen=True)
class Case:
    """A task to train.

    Attributes:
        name: what the tables call it.
        target: what the command trains.
        keys: of its config.
        steps: optimizer steps of a training whose result counts.
        metric: the result that counts, of the last step.
        is_accuracy: whether more is better, and it is a part of 1; else it is a loss.
        seeds: number of trainings of each kind, each with a seed of its own.
        timed_steps: optimizer steps of a training in the network; 0 if it is not timed.
    """

    name: str
    target: str
    keys: tuple[str, ...]
    steps: int
    metric: str
    is_accuracy: bool
    seeds: int
    timed_steps: int = 0


DEEP = Case(
    "MLP, 0.8 M",
    f"{HERE / 'deep_digits.py'}:Deep",
    # `topk` and `onebit` send a message for each of them.
    ("batch_size=128", "num_microbatches=2"),
    120,
    "test/accuracy",
    True,
    5,
    timed_steps=24,
)
CNN = Case("CNN, 21 k", "digits", ("model=cnn",), 360, "test/accuracy", True, 5, timed_steps=24)
ICE = Case("sea ice, 9 k", "ufs", ("jacobian_samples=0",), 200, "test/loss", False, 3)
GPT = Case(
    "transformer, 0.1 M",
    str(HERE.parent / "examples" / "gpt.py"),
    ("width=64", "num_layers=2", "schedule.warmup_steps=30"),
    150,
    "val/loss",
    False,
    2,
)

CASES = (DEEP, CNN, ICE, GPT)

"""Adaptive computation time: slots that hold examples until they halt, and losses of answers.

Graves 2016 (arXiv:1603.08983) in the form of the hierarchical reasoning model (arXiv:2506.21734): a
step is one segment of all slots; a slot that has halted takes a new example before the next step.
All functions here are of tensors, and do not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError, TaskError
from lockstep.systems.hrm.reasoning.blocks import check_sizes

IGNORED = -100
"""The label of a token that has no right answer; torch's own default."""


def refill(
    halted: Tensor, current: Mapping[str, Tensor], fresh: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The next content of slots: new examples where they have halted, else the current ones.

    Args:
        halted: bool [B].
        current: tensors [B, …] by name: examples, states or counts of segments.
        fresh: tensors of the same names and shapes, such as a batch or `initial(B)`.

    Returns:
        Tensors of the shapes and dtypes of `current`.

    Raises:
        TaskError: names or shapes differ.
    """
    if current.keys() != fresh.keys():
        raise TaskError(
            f"slots hold {sorted(current)} and are to take {sorted(fresh)}; the names must agree"
        )
    filled = {}
    for name, old in current.items():
        new = fresh[name]
        if new.shape != old.shape or new.shape[:1] != halted.shape:
            raise TaskError(
                f"{name}: slots hold {[*old.shape]} and are to take {[*new.shape]} where "
                f"{[*halted.shape]} says; the shapes must agree"
            )
        mask = halted.view(-1, *[1] * (old.dim() - 1))
        filled[name] = torch.where(mask, new.to(old.dtype), old)
    return filled


def draw_min_steps(
    num_slots: int,
    max_steps: int,
    probability: float = 0.1,
    device: torch.device | str | None = None,
) -> Tensor:
    """The minimum number of segments before each slot may halt: 0 for most, random for some.

    So training explores the effect of more segments. Two numbers are always drawn for each slot
    from the device's global generator, so later draws do not depend on the slots.

    Args:
        num_slots: number of slots B.
        max_steps: the largest number that is drawn; the smallest is 2.
        probability: probability of a random number.
        device: device of the draws.

    Returns:
        int64 [B].

    Raises:
        ConfigError: max_steps is below 1, or probability is not within 0 … 1.
    """
    check_sizes(max_steps=max_steps)
    if not 0 <= probability <= 1:
        raise ConfigError(f"probability={probability}: must be within 0 … 1")
    explores = torch.rand(num_slots, device=device) < probability
    drawn = torch.randint(min(2, max_steps), max_steps + 1, (num_slots,), device=device)
    return torch.where(explores, drawn, 0)


def halts(
    q_halt: Tensor,
    q_continue: Tensor | None,
    steps: Tensor,
    max_steps: int,
    is_training: bool,
    min_steps: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Which slots halt after this segment.

    A slot halts at `max_steps`; in training also if its logit of halting is above that of going on,
    but not before `min_steps`. Evaluations go on to `max_steps`, unless `early` lets them halt as
    in training.

    Args:
        q_halt: logits of halting [B].
        q_continue: logits of going on [B]; None for a model without them, which halts above 0.
        steps: number of segments of each slot, including this one, integers [B].
        max_steps: segments after which every slot halts.
        is_training: whether slots may halt by themselves.
        min_steps: from `draw_min_steps`, [B], for training; None for no minimum.
        early: whether slots may halt by themselves in an evaluation.

    Returns:
        bool [B].

    Raises:
        ConfigError: max_steps is below 1.
    """
    check_sizes(max_steps=max_steps)
    is_last = steps >= max_steps
    if not (is_training or early):
        return is_last
    wants = q_halt > (0 if q_continue is None else q_continue)
    if is_training and min_steps is not None:
        wants = wants & (steps >= min_steps)
    return is_last | wants


def continue_target(next_q_halt: Tensor, next_q_continue: Tensor, is_last: Tensor) -> Tensor:
    """The target of going on: the probability from the next segment, without gradient.

    Args:
        next_q_halt: logits of halting after one more segment [B].
        next_q_continue: logits of going on after it [B].
        is_last: whether a slot has finished its last segment, so that the next one would halt; bool
            [B].

    Returns:
        [B], in 0 … 1, float32.
    """
    best = torch.maximum(next_q_halt, next_q_continue)
    return torch.where(is_last, next_q_halt, best).detach().float().sigmoid()


def halting_loss(q: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits, for each slot.

    The target of logits of halting is whether the answer is right (`exact`), and that of logits of
    going on is `continue_target`.

    Args:
        q: logits [B].
        target: bool, or probabilities, [B].

    Returns:
        [B], float32; float64 for float64 logits.
    """
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    target = target.detach().to(wide.dtype)
    return F.binary_cross_entropy_with_logits(wide, target, reduction="none")


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the probabilities s(x) / Σ s(x), in float64.

    Prieto et al. 2025, "Grokking at the Edge of Numerical Stability" (arXiv:2501.04697):
    s(x) = x + 1 for x ≥ 0 and 1 / (1 - x) below, which grows too slowly to saturate. The published
    code adds 1e-30 to that denominator, which changes no bit, since it is above 1.

    Args:
        logits: [B, L, V].
        labels: integers [B, L] in 0..V-1, or `IGNORED`.

    Returns:
        [B]: means over the labels that are not ignored, 0 if all are; float32, or float64 for
        float64 logits.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    wide = logits.double()
    # Clamped, since the gradient of the branch that is not taken would be NaN at its pole, 1.
    weights = torch.where(wide < 0, 1 / (1 - wide.clamp(max=0)), wide + 1)
    chosen = _chosen(weights, labels, valid)
    return _mean(weights.sum(-1).log() - chosen.log(), valid, logits)


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of softmax, in float32.

    Args:
        logits: [B, L, V]; those of float64 are computed in float64.
        labels: integers [B, L] in 0..V-1, or `IGNORED`.

    Returns:
        [B], as `stablemax_cross_entropy` does.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return _mean(wide.logsumexp(-1) - _chosen(wide, labels, valid), valid, logits)


def exact(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether every label of a sample is predicted; false for a sample without labels.

    Args:
        logits: [B, L, V].
        labels: integers [B, L], or `IGNORED`.

    Returns:
        [B], bool.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    return ((logits.argmax(-1) == labels) | ~valid).all(-1) & valid.any(-1)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The fraction of a sample's labels that is predicted; 0 for a sample without labels.

    Args:
        logits: [B, L, V].
        labels: integers [B, L], or `IGNORED`.

    Returns:
        [B], float32.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    right = ((logits.argmax(-1) == labels) & valid).sum(-1)
    return right.float() / valid.sum(-1).clamp(min=1)


def _valid(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise TaskError(
            f"logits are {[*logits.shape]} and labels {[*labels.shape]}; they must be [B, L, V] "
            "and [B, L]"
        )
    return labels != IGNORED


def _chosen(values: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """The value [B, L] of each label, and of token 0 where it is ignored."""
    index = torch.where(valid, labels, 0).long()
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _mean(losses: Tensor, valid: Tensor, logits: Tensor) -> Tensor:
    counted = torch.where(valid, losses, 0)
    mean = counted.sum(-1) / valid.sum(-1).clamp(min=1)
    return mean.to(torch.promote_types(logits.dtype, torch.float32))

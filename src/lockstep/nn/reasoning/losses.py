"""Losses and metrics of answers, for each sample: labels of `IGNORED` count nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.errors import TaskError

IGNORED = -100
"""The label of a token that has no right answer; torch's own default."""


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the probabilities s(x) / Σ s(x), in float64.

    Prieto et al. 2025, "Grokking at the Edge of Numerical Stability" (arXiv:2501.04697):
    s(x) = x + 1 for x ≥ 0 and 1 / (1 - x) below, which grows too slowly to saturate. Published code
    adds 1e-30 to that denominator, which changes no bit of it, for it is above 1.

    Args:
        logits: [B, L, V].
        labels: integers [B, L] in 0..V-1, or `IGNORED`.

    Returns:
        [B]: means over the labels that are not ignored, 0 where all are; float32, or float64 for
        logits of float64.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    wide = logits.double()
    # Clamped, so that the branch that is not taken has no pole at 1.
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
    return (_is_right(logits, labels) | ~valid).all(-1) & valid.any(-1)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The part of a sample's labels that is predicted; 0 for a sample without labels.

    Args:
        logits: [B, L, V].
        labels: integers [B, L], or `IGNORED`.

    Returns:
        [B], float32.

    Raises:
        TaskError: shapes do not fit.
    """
    valid = _valid(logits, labels)
    right = (_is_right(logits, labels) & valid).sum(-1)
    return right.float() / valid.sum(-1).clamp(min=1)


def _valid(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise TaskError(
            f"logits are {[*logits.shape]} and labels {[*labels.shape]}; they must be [B, L, V] "
            "and [B, L]"
        )
    return labels != IGNORED


def _is_right(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1) == labels


def _chosen(values: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """The value [B, L] of each label, and of token 0 where it is ignored."""
    index = torch.where(valid, labels, 0).long()
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _mean(losses: Tensor, valid: Tensor, logits: Tensor) -> Tensor:
    kept = torch.where(valid, losses, 0)
    mean = kept.sum(-1) / valid.sum(-1).clamp(min=1)
    return mean.to(torch.promote_types(logits.dtype, torch.float32))

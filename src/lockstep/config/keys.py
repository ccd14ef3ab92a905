"""The dotted keys of a config, and the message for one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pydantic import BaseModel

from lockstep.parsing import shown

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "accumulation_steps": "num_microbatches",
        "amp": "precision.dtype",
        "batch": "batch_size",
        "bs": "batch_size",
        "clip": "clip_norm",
        "eval_interval": "eval_every",
        "eval_steps": "eval_every",
        "grad_clip": "clip_norm",
        "gradient_accumulation_steps": "num_microbatches",
        "gradient_clip_val": "clip_norm",
        "learning_rate": "lr",
        "logging_steps": "log_every",
        "max_epochs": "epochs",
        "max_grad_norm": "clip_norm",
        "max_steps": "steps",
        "mixed_precision": "precision.dtype",
        "num_epochs": "epochs",
        "num_steps": "steps",
        "num_train_epochs": "epochs",
        "optim": "optimizer.name",
        "random_seed": "seed",
        "save_steps": "checkpoint.every",
        "scheduler": "schedule.name",
        "train_batch_size": "batch_size",
        "warmup": "schedule.warmup_steps",
        "wd": "optimizer.weight_decay",
        "workers": "data.num_workers",
    }
)
"""Names that other libraries have for Lockstep's keys, where they are not similar."""


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a config class; the name of a section alone is not a key."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_key(kind: type[BaseModel], key: str) -> str:
    """The message that a config has no such key, with the one that may be meant."""
    nearest = _nearest(list(keys(kind)), key)
    return f"unknown key {shown(key)}" + (f"; did you mean {nearest}?" if nearest else "")


def _nearest(known: list[str], key: str) -> str | None:
    plain = key.lower().replace("-", "_")
    if _ELSEWHERE.get(plain) in known:
        return _ELSEWHERE[plain]
    leaf = plain.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return difflib.get_close_matches(plain, same, n=1, cutoff=0.0)[0]
    # A key is often given without its section.
    names = {k.rpartition(".")[2]: k for k in reversed(known)} | {k: k for k in known}
    matches = difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
    return names[matches[0]] if matches else None

"""Mistakes of callers that type checkers find: each line is an error but for its comment.

An unused comment is an error, so each mistake is found. Checked by `make types`, never run.
"""

from __future__ import annotations

import torch
from torch import nn

import lockstep as ls

ls.TrainConfig(batchsize=64)  # type: ignore[call-arg]
ls.TrainConfig(batch_size="64")  # type: ignore[arg-type]
ls.TrainConfig(optimizer=ls.ScheduleConfig())  # type: ignore[arg-type]
ls.OptimizerConfig(name="adamax")  # type: ignore[arg-type]
ls.TrainConfig().learning_rate  # type: ignore[attr-defined]  # noqa: B018
ls.TrainConfig().lr = 0.1  # type: ignore[misc]
ls.Taks  # type: ignore[attr-defined]  # noqa: B018
ls.Loss(torch.zeros(()))  # type: ignore[call-arg]
ls.Loss.mean(torch.zeros(()), 3, {"accuracy": 0.5})  # type: ignore[dict-item]


class Half(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)


Half()  # type: ignore[abstract]

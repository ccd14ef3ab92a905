"""Starting from the weights of another run."""

from __future__ import annotations

from torch import nn

from lockstep.comm.transport import Transport
from lockstep.config import WeightsConfig
from lockstep.engine.checkpoint import origin
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.runtime import on_first
from lockstep.engine.snapshot.restore import receive_model
from lockstep.engine.step.train_step import TrainStep
from lockstep.engine.task import data_buffers
from lockstep.errors import ConfigError
from lockstep.nn.cutting import load_held


def take_over(
    start: WeightsConfig, train_step: TrainStep, model: nn.Module, transport: Transport
) -> None:
    """Bring the weights that a run starts from, which rank 0 reads, to all ranks; a collective.

    Optimizer, step, random state, the task's own state and buffers that are set from the data are
    those of a new run.

    Raises:
        LockstepError: they are not there or do not fit; on all ranks.
        GroupBroken: a rank has died.
    """
    snapshot = Snapshot(0, {}, {})

    def read() -> None:
        if start.only and train_step.places.is_split:
            raise ConfigError(
                "weights_from.only: a model of which each rank has a part (mesh.tp, mesh.pp) "
                "starts from all weights of another run or from none; leave it out, or set both "
                "to 1"
            )
        own = data_buffers(train_step.task_state.task, model)
        snapshot.model = origin.weights(start, model, own)

    with train_step.parameters.whole():
        on_first(transport, read)
        is_first = transport.rank == 0
        tensors, _ = receive_model(snapshot if is_first else None, train_step, model, transport, 0)
        transport.agree()
        load_held(model, train_step.places.own, tensors)
    train_step.state.mark()
    train_step.watched.mark()

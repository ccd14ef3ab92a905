"""What a plan predicts for a step of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.engine.runtime import on_first
from lockstep.errors import ConfigError, DataError
from lockstep.observe import Predicted, StepCost, text

if TYPE_CHECKING:
    from lockstep.planning.prediction import Layout


def predicted(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """The prediction of the config's plan for a step; None without a plan.

    Args:
        config: config of the run, with the mesh that its ranks fill.
        num_ranks: number of ranks that the run starts on.

    Raises:
        ConfigError: there is no such file, or it is no plan.
    """
    if not config.plan:
        return None
    from lockstep.planning.plan import read_plan

    try:
        plan = read_plan(Path(config.plan).expanduser())
    except DataError as error:
        raise ConfigError(
            f"plan={shown(config.plan)}: {error}, or train without one (plan='\"\"')"
        ) from None
    if plan.facts.config_hash != config.hash:
        reason = (
            f"{config.plan} is of config {shown(plan.facts.config_hash)[1:-1]}, and this run is of "
            f"{config.hash}: its first reports predict the later ones"
        )
        return Predicted(step=0, by="", cost=None, reason=reason)
    layout = _layout(config, num_ranks)
    row = plan.find(layout)
    if row is None:
        ranks = text.count(num_ranks, "rank")
        reason = f"{config.plan} has no row for {ranks} (mesh {layout.name})"
        return Predicted(step=0, by=config.plan, cost=None, reason=reason)
    cost = StepCost(row.prediction.step_s, row.prediction.peak_bytes)
    return Predicted(step=0, by=config.plan, cost=cost)


def predicted_for_all(config: TrainConfig, transport: Transport) -> Predicted | None:
    """The result of `predicted` on rank 0, for all ranks: each of them may become rank 0.

    Only rank 0 needs the file.

    Raises:
        ConfigError: on all ranks, as for `predicted`.
        GroupBroken: a rank has died.
    """
    if not config.plan:
        return None

    def found() -> dict[str, object]:
        prediction = predicted(config, transport.size)
        assert prediction is not None
        return asdict(prediction)

    row = on_first(transport, found)
    return Predicted(**row | {"cost": StepCost(**row["cost"]) if row["cost"] else None})


def predicted_for_joiner(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """As `predicted`, for a joining rank: a file that cannot be used is no error there."""
    try:
        return predicted(config, num_ranks)
    except ConfigError as error:
        return Predicted(step=0, by="", cost=None, reason=str(error))


def _layout(config: TrainConfig, num_ranks: int) -> Layout:
    """The layout of the run, as plans name it."""
    from lockstep.planning.prediction import Layout

    if num_ranks == 1:  # it holds everything, whatever the config says
        return Layout(1)
    sharding = config.sharding
    if sharding == "none" and config.optimizer.sharded:
        sharding = "optimizer"
    return Layout(num_ranks, config.mesh.pp, config.mesh.tp, sharding)

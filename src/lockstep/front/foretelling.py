"""What a plan says of a run that is about to begin."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.engine.runtime import on_first
from lockstep.errors import ConfigError, DataError
from lockstep.observe import Predicted, StepCost, text
from lockstep.parsing import shown

if TYPE_CHECKING:
    from lockstep.planning.layouts import Layout


def foretold(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """What the plan of a config says of a step on some ranks; None without a plan.

    Args:
        config: of the run, with the mesh that its ranks fill.
        num_ranks: number of ranks that the run starts on.

    Raises:
        ConfigError: there is no such file, or it is no plan.
    """
    if not config.plan:
        return None
    from lockstep.planning.plan import read_plan  # few runs have one

    try:
        plan = read_plan(Path(config.plan).expanduser())
    except DataError as error:
        raise ConfigError(
            f"plan={shown(config.plan)}: {error}, or train without one (plan='\"\"')"
        ) from None
    of = plan.facts.config_hash
    if of != config.hash:
        reason = (
            f"{config.plan} is of config {shown(of)[1:-1]}, and this run is of {config.hash}: its "
            "first reports predict the later ones"
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


def foretold_to_all(config: TrainConfig, transport: Transport) -> Predicted | None:
    """As `foretold` on rank 0, which alone needs the file; on all ranks, for any may become rank 0.

    Raises:
        ConfigError: on all ranks, as for `foretold`.
        GroupBroken: a rank has died.
    """
    if not config.plan:
        return None

    def found() -> dict[str, object]:
        said = foretold(config, transport.size)
        assert said is not None
        return asdict(said)

    row = on_first(transport, found)
    return Predicted(**row | {"cost": StepCost(**row["cost"]) if row["cost"] else None})


def foretold_to_newcomer(config: TrainConfig, num_ranks: int) -> Predicted | None:
    """As `foretold`, for a process that joins a run: what is wrong with the file is no error then.

    Args:
        config: as for `foretold`.
        num_ranks: number of ranks that the run was started on.
    """
    try:
        return foretold(config, num_ranks)
    except ConfigError as error:
        return Predicted(step=0, by="", cost=None, reason=str(error))


def _layout(config: TrainConfig, num_ranks: int) -> Layout:
    """What each rank holds, as plans name it."""
    from lockstep.planning.layouts import Layout

    if num_ranks == 1:  # which holds everything, whatever is asked for
        return Layout(1)
    sharding = config.sharding
    if sharding == "none" and config.optimizer.sharded:
        sharding = "optimizer"
    return Layout(num_ranks, config.mesh.pp, config.mesh.tp, sharding)

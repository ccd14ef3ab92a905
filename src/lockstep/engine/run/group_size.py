"""Whether a group has as many ranks as a run needs."""

from __future__ import annotations

from lockstep.config import TrainConfig
from lockstep.engine.runtime import Runtime
from lockstep.errors import ConfigError, RankFailure, shared
from lockstep.parallel.mesh import sizes_of_replicas


def check_size(config: TrainConfig, runtime: Runtime) -> None:
    """Refuse a group that is smaller than it may become.

    Raises:
        ConfigError: there are less than `min_ranks` ranks, or less than a replica needs; on all
            ranks.
    """
    size = runtime.transport.size
    needed = config.mesh.tp * config.mesh.pp
    if needed > size:
        keys = {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}
        said = ", ".join(f"{key}={value}" for key, value in keys.items() if value > 1)
        fitting = [f"{pp}x{tp}" for pp, tp in sizes_of_replicas(size, config.num_shards)]
        raise shared(
            ConfigError(
                f"{said}: a replica needs {needed} ranks, and world size is {size}; start more "
                f"ranks, or set mesh.pp x mesh.tp to one of {', '.join(fitting)}, or "
                "mesh.shrink=replan"
            )
        )
    if config.min_ranks > runtime.transport.size:
        raise shared(
            ConfigError(
                f"min_ranks={config.min_ranks}: is more than the {runtime.transport.size} ranks "
                "there are; start more ranks or lower it"
            )
        )


def check_enough_left(config: TrainConfig, num_ranks: int) -> None:
    """Make sure that those that are left of a start can train; else all have to start again.

    Raises:
        RankFailure: they are less than `min_ranks`, or less than a replica needs; on all ranks.
    """
    needed = max(config.mesh.tp * config.mesh.pp, config.min_ranks)
    if num_ranks < needed:
        raise shared(
            RankFailure(
                f"a rank was lost while ranks started, and of {needed} that are needed {num_ranks} "
                "are left"
            )
        )

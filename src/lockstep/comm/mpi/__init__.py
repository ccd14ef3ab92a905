"""Bytes over MPI: the engine's transport, and new processes for its group.

Importing this package does not start MPI; importing its modules does.
"""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLE = "OMPI_MCA_coll"
"""The components of collectives that Open MPI uses, or, after a ^, those that it does not."""


def without_hierarchy(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that turns Open MPI's hierarchical collectives off.

    These (`coll/han`, used across nodes) give wrong data without an error in a group that has lost
    a rank, and hang in one that has gained a rank (measured with 5.0.11).

    Args:
        environment: environment whose own choice of components is kept.
    """
    components = environment.get(_VARIABLE, "")
    if components.startswith("^"):
        is_off = "han" in components[1:].split(",")
        return {_VARIABLE: components if is_off else f"{components},han"}
    return {_VARIABLE: ",".join(c for c in components.split(",") if c != "han") or "^han"}

"""Which of Open MPI's collectives are used.

Its hierarchical ones (`coll/han`, used across nodes) give wrong data without an error in a group
that has lost a rank, and hang in one that has got a new one (measured with 5.0.11). So they are
turned off before MPI starts.
"""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLE = "OMPI_MCA_coll"
"""The components of collectives that Open MPI uses, or, after a ^, those that it does not."""


def without_hierarchy(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that turns them off, on top of what the environment says."""
    components = environment.get(_VARIABLE, "")
    if components.startswith("^"):
        is_off = "han" in components[1:].split(",")
        return {_VARIABLE: components if is_off else f"{components},han"}
    return {_VARIABLE: ",".join(c for c in components.split(",") if c != "han") or "^han"}

"""An extension of griffe: `lockstep.quantum` and `lockstep.sketch` have the names of their systems.

When imported they are those modules; the reference is made from the source, which does not say so.
"""

from __future__ import annotations

from typing import Any

import griffe

_DOORS = {"quantum": "quantum", "sketch": "sketched"}
"""The system behind each public name."""


class Doors(griffe.Extension):
    """Gives the public modules aliases of all that their systems export."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add the aliases once the package is loaded."""
        if pkg.name != "lockstep":
            return
        for door, system in _DOORS.items():
            for name in pkg[f"systems.{system}"].exports or ():
                alias = griffe.Alias(str(name), f"lockstep.systems.{system}.{name}")
                pkg[door].set_member(str(name), alias)

"""`lockstep runs`: the runs that are there, compared, tagged and removed."""

from lockstep.commands.runs.app import app

__all__ = ["app"]

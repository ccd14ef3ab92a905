"""What ranks do when some of them are lost or new ones come."""

SURVIVABLE = ("mpi", "local")
"""Launchers under which the other ranks go on when one is lost."""

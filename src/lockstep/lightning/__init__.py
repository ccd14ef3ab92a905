"""LightningModules as tasks; only their own files import Lightning (extra `lightning`)."""

from lockstep.lightning.target import from_lightning

__all__ = ["from_lightning"]

"""The sea-ice emulator: NetCDF fields in, ice concentration and its Jacobian out."""

from lockstep.launching.systems import CommandGroup, System

SYSTEM = System(
    "lockstep.systems.ufs.task:Ufs",
    "Sea ice from ocean and atmosphere: NetCDF in, concentration and its Jacobian out.",
    CommandGroup(
        "data", "Write synthetic data of the sea-ice emulator.", "lockstep.systems.ufs.cli"
    ),
    originals="lockstep.systems.ufs.originals",
)

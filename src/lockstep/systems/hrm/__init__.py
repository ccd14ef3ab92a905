"""The hierarchical reasoning model: puzzles in, answers by repeated refinement out."""

from lockstep.launching.systems import CommandGroup, System

SYSTEM = System(
    "lockstep.systems.hrm.task:Hrm",
    "Puzzles, solved in segments by a small recursive or hierarchical model.",
    CommandGroup(
        "hrm",
        "Puzzles: their data, and what to do with a trained model.",
        "lockstep.systems.hrm.cli",
    ),
)

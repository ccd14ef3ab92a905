"""The hierarchical reasoning model: puzzles in, answers by repeated refinement out."""

from lockstep.launching.systems import CommandGroup, System

SYSTEM = System(
    "lockstep.systems.hrm.task:Hrm",
    "Puzzles, solved in segments by a small recursive or hierarchical model.",
    CommandGroup(
        "hrm",
        "Puzzles: make datasets, solve, view and evaluate.",
        "lockstep.systems.hrm.cli",
    ),
    originals="lockstep.systems.hrm.reports.trained_model",
)

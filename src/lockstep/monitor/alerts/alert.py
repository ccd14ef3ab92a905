"""An alert, as it is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """Something that a rule looks for has come, or has gone.

    Attributes:
        rule: name of the rule.
        state: `on` or `over`.
        run: the run's folder; for a disk a folder on it.
        task: name of the run's task; empty if it is not known.
        step: that the run was at; 0 for a disk.
        message: what it is, in one line.
        since: Unix time at which it came.
        time: Unix time of this telling.
    """

    rule: str
    state: str
    run: str
    task: str
    step: int
    message: str
    since: float
    time: float

    def told(self) -> str:
        """One line for people."""
        lasted = f" after {self.time - self.since:.0f} s" if self.state == "over" else ""
        return f"alert {self.rule} {self.state}{lasted}: {self.run}: {self.message}"

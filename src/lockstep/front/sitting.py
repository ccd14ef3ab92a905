"""What is asked of one start of a run, and how a launcher says it to its ranks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from lockstep.errors import EnvironError
from lockstep.parsing import as_type, parse_object

SITTING = "LOCKSTEP_SITTING"
"""Environment variable in which a launcher tells its ranks, as JSON, what is asked of them."""


@dataclass(frozen=True)
class Sitting:
    """What is asked of one sitting of a run; nothing of it changes the result.

    Attributes:
        run_dir: the run directory; None makes a new one below `runs/`.
        resume: go on from the newest valid checkpoint.
        overrides: `key=value` items for the config.
        console: show progress on standard output.
        target: what `lockstep resume` has to load to get the task; empty finds it out.
        quiet: show warnings and how the run ended only, rather than progress.
        profile: first and last step of this sitting that each rank records, if it is to.
    """

    run_dir: str | None = None
    resume: bool = False
    overrides: tuple[str, ...] = ()
    console: bool = True
    target: str = ""
    quiet: bool = False
    profile: tuple[int, int] | None = None

    def to_env(self) -> dict[str, str]:
        """The environment variable that `from_env` reads."""
        return {SITTING: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Sitting | None:
        """What the launcher asked for, if one did.

        Raises:
            EnvironError: the variable holds something else.
        """
        text = os.environ.get(SITTING)
        if text is None:
            return None
        try:
            return as_type(cls, parse_object(text))
        except ValueError as error:
            raise EnvironError(
                f"environment variable {SITTING}: is not what a launcher writes ({error}); unset it"
            ) from None

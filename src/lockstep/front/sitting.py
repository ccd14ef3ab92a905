"""What is asked of one start of a run, and how a launcher says it to its ranks."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

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
        target: what `lockstep resume` has to load to get the task; empty for a task that is in no
            file. None takes the script that this process runs.
        quiet: show warnings and how the run ended only, rather than progress.
        profile: first and last step of this sitting that each rank records, if it is to.
        per_rank: show with each report what each rank has done with its time.
        search_path: folders of `sys.path` of the program that has started the ranks.
    """

    run_dir: str | None = None
    resume: bool = False
    overrides: tuple[str, ...] = ()
    console: bool = True
    target: str | None = None
    quiet: bool = False
    profile: tuple[int, int] | None = None
    search_path: tuple[str, ...] = ()
    per_rank: bool = False

    @property
    def resumed(self) -> Path | None:
        """The run directory, if the run is gone on with where it is there."""
        return Path(self.run_dir) if self.resume and self.run_dir else None

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

    def extend_search_path(self) -> None:
        """Have modules found here that the program that has started the ranks would find.

        Its folders come last, so that they hide none of the modules that are found anyway.
        """
        sys.path.extend(folder for folder in self.search_path if folder not in sys.path)

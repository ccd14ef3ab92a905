"""Run directories removed, with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from lockstep.engine.checkpoint.contents import own_entries
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import RunDirectoryError
from lockstep.reading.listing import is_run, summarise


def remove_run(run_dir: Path) -> list[str]:
    """Remove what Lockstep has written into a run directory, and the folder if nothing is left.

    Returns:
        Names of what others have put there, which stays, and the folder with it.

    Raises:
        RunDirectoryError: it is no run directory, is a link, is trained in, or cannot be removed.
    """
    if run_dir.is_symlink():
        raise RunDirectoryError(f"{run_dir}: is a link; remove the run directory it points to")
    if not is_run(run_dir):
        raise RunDirectoryError(f"{run_dir}: is no run directory; nothing was removed")
    if summarise(run_dir).state == "running":
        raise RunDirectoryError(
            f"{run_dir}: is trained in, or was a moment ago on another host; nothing was removed"
        )
    run_dir = run_dir.resolve()
    directory = RunDirectory(run_dir)
    directory.lock()
    try:
        own = {*own_entries(run_dir)}
        # The identity goes last: a removal that is broken off leaves a run that can be removed.
        for path in sorted(own, key=lambda p: (p.name in ("run.json", ".lock"), p.name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        left = sorted(path.name for path in run_dir.iterdir())
        if not left:
            run_dir.rmdir()
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or run_dir}: cannot be removed: {error.strerror or error}"
        ) from None
    finally:
        directory.close()
    return left

"""What has become of a point's run, and whether the run that is there is the point's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import TrainConfig, outcome
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import RunDirectoryError
from lockstep.parsing import flattened, parse_yaml, shown
from lockstep.reading.listing import Summary, is_run, summarise

_LENGTH = ("epochs", "steps")
"""Keys with which a run may go on for longer."""
_TELLING = ("test_on", "weights_from.path", "weights_from.step")
"""Keys of every task that leave the parameters as they are, but say what is meant by the run."""
_MOST_SHOWN = 5
_NOT_SET = "not set"


def state_of(path: Path, items: Sequence[str], config: TrainConfig | None) -> str:
    """The state of a point's run; `new` if there is none.

    Args:
        path: its run directory.
        items: `key=value` items of the point.
        config: config of the point; None for a script, which has a config only when it runs.

    Raises:
        RunDirectoryError: there is a run that has trained with other values.
    """
    if not is_run(path):
        return "new"
    run = summarise(path)
    if not run.step:  # it may have failed because of its values
        return run.state
    there, here = _of_script(path, items) if config is None else _of_task(run, config)
    others = [k for k in {**there, **here} if there.get(k, _NOT_SET) != here.get(k, _NOT_SET)]
    free = {*_LENGTH, *_without_effect()}
    refused = [k for k in others if k not in free]
    if refused:
        said = ", ".join(
            f"{k} is {_said(there, k)} there, {_said(here, k)} here" for k in refused[:_MOST_SHOWN]
        )
        raise RunDirectoryError(
            f"{path}: is a run with other values: {said}; choose another with --dir"
        )
    if run.state == "completed" and not {*_LENGTH}.isdisjoint(others):
        return "of another length"
    return run.state


def _of_task(run: Summary, config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a run and of a point, of the keys that both have."""
    here = flattened(config.model_dump(mode="json"))
    both = run.config.keys() & here.keys()
    return {k: run.config[k] for k in here if k in both}, {k: here[k] for k in here if k in both}


def _of_script(path: Path, items: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values that a script's run was started with, and a point's; both empty if it is not known."""
    try:
        known = RunDirectory(path).identity().overrides
    except RunDirectoryError:
        return {}, {}
    return _values(known), _values(items)


def _values(items: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, _, text in (item.partition("=") for item in items):
        try:
            values[key] = parse_yaml(text)
        except ValueError:  # the script will say so
            values[key] = text
    return values


def _without_effect() -> set[str]:
    """Keys of every task that say how a run is computed and shown, and nothing of what it is."""
    config = TrainConfig()
    every, telling = flattened(config.model_dump()), flattened(outcome(config))
    return {*every} - {*telling, *_TELLING}


def _said(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else _NOT_SET

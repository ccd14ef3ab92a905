"""Rules that watch runs, what is done when one holds, and reading them from a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from lockstep.config.parsing import shown
from lockstep.config.reading import read_keys
from lockstep.config.section import Section, explain
from lockstep.errors import ConfigError

Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Ended = Literal["failed", "killed", "stopped"]


def _check_only_one(section: Section, keys: Sequence[str]) -> None:
    keys_given = [key for key in keys if getattr(section, key) is not None]
    if len(keys_given) != 1:
        found = f", not {' and '.join(keys_given)}" if keys_given else ""
        raise ValueError(f"must have one of {', '.join(keys)}{found}")


class Condition(Section):
    """The condition of a rule: one of these keys, and the limit of a metric."""

    metric: Name | None = None
    """A metric's newest value, such as `val/loss`, is outside of `above` or `below`."""
    above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The metric is greater than this."""
    below: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The metric is less than this."""
    no_step_for_s: Seconds | None = None
    """A run that goes on has reported no step for so many seconds."""
    not_finite: Name | None = None
    """A metric whose name fits this pattern (`*`: any) is NaN or infinite."""
    rank_lost: Literal[True] | None = None
    """A rank has died, or a watchdog has ended it; over when the run has as many as before."""
    ranks_below: Annotated[int, Field(ge=1)] | None = None
    """Fewer ranks take part."""
    efficiency_below: Share | None = None
    """The part of the ranks' time in which they compute is less."""
    disk_free_bytes_below: Annotated[int, Field(ge=1)] | None = None
    """The disk of a run that goes on has fewer bytes left."""
    disk_free_share_below: Share | None = None
    """The disk of a run that goes on has a lesser part left."""
    ended: tuple[Ended, ...] | None = None
    """A run has ended, but not in order: any of `failed`, `killed`, `stopped`."""
    digest_differs: Literal[True] | None = None
    """Two completed runs of one task and config have different SHA-256s."""

    @property
    def kind(self) -> str:
        """The key of `KINDS` that the condition has."""
        return next(key for key in KINDS if getattr(self, key) is not None)

    @property
    def is_of_disk(self) -> bool:
        """Whether it is checked once for each disk, not for each run."""
        return self.kind.startswith("disk")

    @model_validator(mode="after")
    def _check(self) -> Condition:
        _check_only_one(self, KINDS)
        limits = (self.above is not None) + (self.below is not None)
        if self.metric is None and limits:
            raise ValueError("above and below need metric")
        if self.metric is not None and limits != 1:
            raise ValueError("metric needs either above or below")
        if self.ended is not None and not self.ended:
            raise ValueError("ended: must name failed, killed or stopped")
        return self


KINDS = (
    "metric", "no_step_for_s", "not_finite", "rank_lost", "ranks_below", "efficiency_below",
    "disk_free_bytes_below", "disk_free_share_below", "ended", "digest_differs",
)  # fmt: skip
"""Keys of `Condition`, of which each has one."""


class Action(Section):
    """What is done when a rule begins to hold, and again when it is over: one of these."""

    print: Literal[True] | None = None
    """Show a line."""
    webhook: str | None = None
    """POST a JSON object to this address."""
    command: tuple[str, ...] | None = None
    """Start a program: its path and arguments. No shell reads them."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long the address or the program may take."""

    @field_validator("webhook")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an address that begins with http:// or https://")
        if any(sign.isspace() or not sign.isprintable() for sign in value):
            raise ValueError("must hold no blanks and control signs")
        _ = parts.port  # raises ValueError if it is none
        return value

    @model_validator(mode="after")
    def _check(self) -> Action:
        _check_only_one(self, ("print", "webhook", "command"))
        if self.command is not None and (not self.command or not self.command[0]):
            raise ValueError("command: must begin with the path of a program")
        if self.command is not None and any("\0" in part for part in self.command):
            raise ValueError("command: must hold no NUL")
        return self


class Rule(Section):
    """A condition, the runs that it is checked in, and the actions."""

    name: Name
    """What the alert is called; no two rules have the same."""
    when: Condition
    """What is looked for."""
    runs: Name = "*"
    """Pattern of the runs' paths or names: `*`, `sweep*`, `runs/large`."""
    for_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """The condition has to hold for so many seconds first."""
    for_steps: Annotated[int, Field(ge=0)] = 0
    """The condition has to hold for so many steps first."""
    past: bool = False
    """Whether it also looks at runs that had ended when the monitor was started."""
    do: tuple[Action, ...] = (Action(print=True),)
    """What is done when the rule begins to hold, and when it is over."""

    @model_validator(mode="after")
    def _check(self) -> Rule:
        if not self.do:
            raise ValueError("do: must have an action")
        if self.for_steps and self.when.kind in _NO_STEPS:
            raise ValueError(f"for_steps: means nothing with {self.when.kind}")
        return self


_NO_STEPS = (
    "no_step_for_s", "ended", "digest_differs", "disk_free_bytes_below", "disk_free_share_below",
)  # fmt: skip
"""Conditions that do not depend on steps."""


class Rules(Section):
    """A file of rules."""

    rules: tuple[Rule, ...]
    """In the order in which they are tried."""

    @model_validator(mode="after")
    def _check(self) -> Rules:
        if not self.rules:
            raise ValueError("rules: must have a rule")
        names = [rule.name for rule in self.rules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rules: the name {shown(twice)} comes twice")
        return self


def read_rules(path: Path) -> Rules:
    """The rules in a YAML file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or does not fit; each problem is a line.
    """
    try:
        return Rules.model_validate(read_keys(path))
    except ValidationError as error:
        lines = [_explained(problem, str(path)) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _explained(problem: Any, source: str) -> str:
    """One of pydantic's errors as a line; for an unknown key with the known ones."""
    location = problem["loc"]
    key = ".".join(map(str, location))
    if problem["type"] == "missing":
        return f"{source}: {key}: is missing"
    if problem["type"] != "extra_forbidden":
        return explain(Rules, problem, source)
    return f"{source}: {key}: is no key; there are {', '.join(_section_at(location).model_fields)}"


def _section_at(location: tuple[int | str, ...]) -> type[Section]:
    """The class of the section that a key is in."""
    sections: dict[str, type[Section]] = {"rules": Rule, "when": Condition, "do": Action}
    names = [part for part in location[:-1] if isinstance(part, str)]
    return sections[names[-1]] if names else Rules


def rule_lines(rules: Rules) -> Iterator[str]:
    """A line for each rule: its condition, its runs and its actions."""
    for rule in rules.rules:
        limits = {k: v for k, v in rule.when.model_dump().items() if v is not None}
        condition_text = " ".join(f"{key} {_as_text(value)}" for key, value in limits.items())
        lasting = [f"for {rule.for_s:g} s"] * (rule.for_s > 0)
        lasting += [f"for {rule.for_steps:,} steps"] * (rule.for_steps > 0)
        past = ", those that have ended too" if rule.past else ""
        actions = ", ".join(map(_action_text, rule.do))
        when = " ".join([condition_text, *lasting])
        yield f"{rule.name}: when {when}; in runs {rule.runs}{past}; then {actions}"


def _as_text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


def _action_text(action: Action) -> str:
    if action.webhook is not None:
        return f"POST to {action.webhook}"
    return f"start {' '.join(action.command)}" if action.command is not None else "print"

"""State that microbatches and batches of evaluations leave behind, looked for while a run goes on.

What the trial before the first step cannot see begins later: when training has warmed up, at the
end of an epoch, in a rare batch, after an evaluation. Two things are noticed here: attributes that
one pass sets and another one reads, in any step (`AttributeGuard`); and whatever else passes change
in place, in some steps. Either is only a suspicion, for a cache does the same. So the step, or the
evaluation, is done again and must come out the same (`Repetition`).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lockstep.comm.transport import Transport
from lockstep.data.attributes import AttributeGuard, PassAttribute
from lockstep.data.passes import is_stream
from lockstep.engine.audit.caches import Caches
from lockstep.engine.audit.hidden_state import (
    KEYS,
    containers_held,
    hidden_state,
    module_globals,
    objects_held,
)
from lockstep.engine.audit.reachable import MOST_BYTES
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.task import is_part_of, is_scratch
from lockstep.errors import TaskError, shared

_SETTINGS = ("torch.get_default_dtype()", "torch.get_num_threads()", "torch.is_grad_enabled()")
_IS_TRAINING = attrgetter("training")
_MOST_NAMED = 3
_MOST_TRUSTED = 8
"""Values of one attribute that are looked into, before it has to be named in `scratch`."""
_MOST_SENT = 20
"""Number of suspects that a rank tells the others."""
_BLOCK = 100
"""In each block of so many steps, the passes of one are looked at."""
_POWERS = 3
"""Of the steps 1, 2, 4, 8, …, every third is done again."""
_QUICK_BYTES = 1 << 16
"""Bytes of a tensor or array that are looked at where it happens often."""
_MOST_TIME = 0.002
"""Greatest part of the time that looks at random steps and before checkpoints may take."""


class PassState:
    """All that can be reached from task, hooks, datasets and model, as passes find and leave it.

    Attributes:
        guard: notices attributes that one pass sets and another one reads.
        free: paths of values that passes change, such as caches, of which no result depends.
        caches: those of them that can be forgotten for a while.
    """

    def __init__(
        self,
        task_state: TaskState,
        model: nn.Module,
        datasets: Mapping[str, object],
        seed: int,
        checkpoint_every: int,
    ) -> None:
        """Take note of what there is to watch.

        Args:
            task_state: the task and its hooks.
            model: model of the task.
            datasets: by the name of their split.
            seed: seed of the run, from which the steps that are looked at are drawn.
            checkpoint_every: number of steps from one checkpoint to the next; 0 for none.
        """
        self._task = task_state.task
        hooks = {f"hooks[{i}]": h for i, h in enumerate(task_state.hooks) if not h.first_only}
        self._roots: dict[str, object] = {"task": self._task, **hooks}
        self._roots |= {f"dataset({split!r})": data for split, data in datasets.items()}
        # A stream is read in order, by all ranks alike, and so may keep what it likes.
        self._streams = [data for data in datasets.values() if is_stream(data)]
        self._model = model
        self._kinds = {type(root): None for root in self._roots.values()}
        self.guard = AttributeGuard()
        self.free: set[str] = set()
        self.caches = Caches(self._kinds)
        self._at_start: dict[str, str] | None = None
        self._seed = seed
        self._every = checkpoint_every
        self._modules: dict[str, nn.Module] = {}
        self._began, self._spent = perf_counter(), 0.0
        self._block, self._drawn = -1, 0

    def open(self) -> None:
        """Begin to watch."""
        there = objects_held({"model": self._model, **self._roots}, self._streams)
        self.guard.watch(there, self.is_scratch)
        self._modules = dict(self._model.named_modules())

    def modes(self) -> list[object]:
        """Modes of all modules, and settings of torch; looked at in every step."""
        modes: list[object] = list(map(_IS_TRAINING, self._modules.values()))
        modes += (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
        return modes

    def modes_apart(self, before: Sequence[object]) -> list[str]:
        """Paths of the modes that are not as they were, unless they are known to change."""
        names = [f"model.{name}.training" if name else "model.training" for name in self._modules]
        pairs = zip([*names, *_SETTINGS], before, self.modes(), strict=True)
        changed = [name for name, was, now in pairs if was != now]
        return [p for p in changed if p not in self.free and not self.is_scratch(p)]

    def note_start(self) -> None:
        """Take note of everything as it is before the first step of this process."""
        if self._at_start is None:
            self._at_start = self.held()

    def compare(self, transport: Transport, step: int, is_model_whole: bool) -> list[str]:
        """Make sure that all ranks hold the same; a collective.

        Values that passes change, and entries that a dict has on some ranks only, may be caches.

        Args:
            transport: the group of ranks.
            step: number of the step.
            is_model_whole: whether each rank has all of the model.

        Returns:
            Paths of values that have differed since the start, on all ranks; they are named once.

        Raises:
            TaskError: something has become different; on all ranks.
        """
        own = {p: t for p, t in self.held().items() if is_model_whole or not _is_of_model(p)}
        digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
        everyone = transport.gather_json([digest, sorted({*self.free, *self.guard.paths})])
        if all(theirs == digest for theirs, _ in everyone):
            return []
        self.free.update(*(free for _, free in everyone))
        start = self._at_start or {}
        texts = transport.gather_json(
            {p: [t, start.get(p) == t] for p, t in own.items() if not is_part_of(p, self.free)}
        )
        paths = _apart(texts)
        new = [p for p in paths if not all(theirs[p][1] for theirs in texts if p in theirs)]
        if new:
            raise shared(
                TaskError(
                    f"step {step}: {named(new)}: has become different on different ranks, though "
                    f"no checkpoint can hold more than one of them. {remedy(new[0])}"
                )
            )
        self.free.update(paths)
        return paths

    def close(self) -> None:
        """Watch no more; classes are as they were."""
        self.guard.close()

    def is_scratch(self, path: str) -> bool:
        """Whether the task says of a path that no result depends on it."""
        return is_scratch(self._task, path)

    def held(self, is_quick: bool = True, with_environment: bool = False) -> dict[str, str]:
        """Everything there is, by path, but for what no result depends on.

        Args:
            is_quick: whether to look at fewer elements of large tensors and arrays.
            with_environment: whether to look at environment variables, which ranks have of their
                own.
        """
        began = perf_counter()
        most_bytes = _QUICK_BYTES if is_quick else MOST_BYTES
        texts = hidden_state(self._there(), self._streams, most_bytes)
        if with_environment:
            texts |= {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
        known = [*self.free, *self.guard.paths]
        texts = {
            path: text
            for path, text in texts.items()
            if not is_part_of(path, known) and not self.is_scratch(path)
        }
        self._spent += perf_counter() - began
        return texts

    def _there(self) -> dict[str, object]:
        there = {"model": self._model, **self._roots}
        for kind in self._kinds:
            there |= module_globals(kind, beside=False)  # others take long, again and again
        return there

    def is_due(self, step: int) -> bool:
        """Whether what the passes of a step change is looked for; may differ from rank to rank.

        Args:
            step: number of the step, from 0.
        """
        count = step + 1
        if count & step == 0:
            return True
        if step // _BLOCK != self._block:
            self._block = step // _BLOCK
            draw = random.Random(f"{self._seed} {self._block}")
            self._drawn = self._block * _BLOCK + draw.randrange(_BLOCK)
        if step != self._drawn and (not self._every or count % self._every):
            return False
        return self._spent <= _MOST_TIME * (perf_counter() - self._began)

    def is_repeated(self, step: int, seconds: float, spent: float) -> bool:
        """Whether a step is done again and compared, whatever is known of it.

        State may lie where nobody looks: in a module elsewhere, a file, a thread, a library.

        Args:
            step: number of the step, from 0.
            seconds: what its passes have taken.
            spent: seconds that were spent on doing steps again.
        """
        count = step + 1
        if count & step == 0:  # 8, 64, 512, …
            return count > 1 and count.bit_length() % _POWERS == 1
        is_due = step == self._drawn and step // _BLOCK == self._block
        return is_due and spent + seconds <= _MOST_TIME * (perf_counter() - self._began)

    def root_of(self, path: str) -> str:
        """The attribute that a path leads to or through: `task.cache` of `task.cache[3].rows`."""
        root = max((r for r in self._roots if path.startswith(r)), key=len, default="")
        rest = path[len(root) :]
        return root + rest.partition("[")[0].rstrip("!")

    def trust(self, attributes: Iterable[PassAttribute], paths: Iterable[str]) -> None:
        """Take note that no result depends on what passes have left in these places.

        Raises:
            TaskError: an attribute was set and read over and over again.
        """
        roots = {self.root_of(path) for path in paths}
        if roots - self.free:
            held = containers_held(self._there(), self._streams)
            self.caches.note({p: v for p, v in held.items() if self.root_of(p) in roots})
        self.free |= roots
        for attribute in attributes:
            attribute.is_trusted = True
            attribute.num_trusted += 1
            if attribute.num_trusted > _MOST_TRUSTED and not attribute.path.startswith("dataset("):
                raise TaskError(
                    f"{named([attribute.path])}: is set by one microbatch or evaluation batch and "
                    f"read by another, over and over again; {remedy(attribute.path)}"
                )


def is_looked_at(number: int) -> bool:
    """Whether the changes of a step, evaluation or epoch's end, counted from 1, are checked.

    They are for powers of two, and for 1 to 9 times a power of ten: what is done in every tenth or
    hundredth step never falls on a power of two.
    """
    return number & (number - 1) == 0 or not str(number)[1:].strip("0")


class Repetition:
    """Passes of a step or evaluation that are looked at, and done again if they have changed state.

    Attributes:
        is_second: whether this is the second time.
    """

    def __init__(self, state: PassState) -> None:
        self._state = state
        self._guard = state.guard
        self.forget()

    def forget(self) -> None:
        """Have nothing to compare with: ranks compute other microbatches from now on."""
        self.is_second = False
        self._is_quick = True
        self._modes: list[object] = []
        self._before: dict[str, str] | None = None
        self._after: dict[str, str] | None = None
        self._read: list[PassAttribute] = []
        self._changed: list[str] = []

    def begin(self, is_due: bool, is_quick: bool = True) -> None:
        """Before the passes.

        Args:
            is_due: whether what they change in place is to be looked for.
            is_quick: whether to look at fewer elements of large tensors and arrays.
        """
        self._guard.begin(cleared=self.is_second)
        if self.is_second:
            # What changes with every pass would change in another function's results.
            self._state.caches.forget(with_functions=not self.suspects)
        if not self.is_second:
            self._is_quick = is_quick
            # Once a step is enough: between steps nothing may change them either.
            self._modes = self._modes or self._state.modes()
            self._before = self._held() if is_due else None

    def end(self) -> None:
        """After the passes; those of the first time may turn out to be suspicious."""
        self.leave()
        if self.is_second:
            return
        self._read, self._changed, self._after = list(self._guard.read), [], None
        if self._before is not None:
            self._after = self._held()
            self._changed = _differing(self._before, self._after)
        modes = self._state.modes()
        if modes != self._modes:
            self._changed += self._state.modes_apart(self._modes)
            self._modes = modes

    def leave(self) -> None:
        """The passes are over, or were broken off by an exception."""
        self._guard.leave()
        self._state.caches.recall()

    @property
    def has_suspects(self) -> bool:
        """Whether there are any `suspects`; asked in every step."""
        return bool(self._read or self._changed)

    @property
    def suspects(self) -> list[str]:
        """What passes have left behind, or read of what others had left, the first time."""
        roots = map(self._state.root_of, self._changed)
        return [*dict.fromkeys((*self.suspects_read, *roots))]

    def suspects_of_all(self, transport: Transport) -> list[str]:
        """The suspects of all ranks; a collective."""
        everyone = transport.gather_json(self.suspects[:_MOST_SENT])
        return [*dict.fromkeys(path for theirs in everyone for path in theirs)]

    def check_unchanged(self) -> None:
        """Refuse values that were changed once more when the same passes were done again.

        Raises:
            TaskError: naming them.
        """
        if self._after is None:
            return
        now = self._held()
        moved = [p for p in _differing(self._after, now) if p not in self.suspects_read]
        if moved:
            raise TaskError(
                f"{named(moved)}: is changed by microbatches or evaluation batches, so it depends "
                f"on how many of them this rank computes. {remedy(moved[0])}"
            )

    def _held(self) -> dict[str, str]:
        return self._state.held(self._is_quick, with_environment=True)

    @property
    def suspects_read(self) -> list[str]:
        """Paths of attributes that a pass has read and another one had set."""
        return [attribute.path for attribute in self._read]

    def trust(self) -> None:
        """Take note that no result depends on the suspects.

        Raises:
            TaskError: one of them must be named in `scratch`.
        """
        read, changed = self._read, self._changed
        self.forget()
        self._state.trust(read, changed)


def depends_on(what: str, suspects: Collection[str]) -> TaskError:
    """The error of a step or evaluation that came out otherwise the second time.

    Args:
        what: phrase that begins the message, such as `step 3`.
        suspects: what passes had left behind.
    """
    first = next(iter(suspects), "")
    if not first:
        return TaskError(
            f"{what}: came out otherwise when it was done again, though nothing that can be "
            "reached from the task was changed; something keeps state between microbatches "
            "elsewhere (in a module of another folder, a file, an environment variable, a thread, "
            "a setting or a random generator of a library). Let the loss depend on its batch, the "
            "model and what Task.after_step has set"
        )
    return TaskError(
        f"{what}: came out otherwise when it was done again, because of what earlier microbatches "
        f"or evaluation batches have left in {named(suspects)}; which of them this rank has "
        f"computed depends on the number of ranks. {remedy(first)}"
    )


def named(paths: Iterable[str]) -> str:
    """Some paths for a message, the first of them if there are many."""
    names = [*dict.fromkeys(path.removesuffix("!") for path in paths)]
    more = f" (and {len(names) - _MOST_NAMED} more)" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def remedy(path: str) -> str:
    """What a user can do about state at a path."""
    return (
        "Draw random numbers from the global generators or from lockstep.generator(), which are "
        "set for each microbatch; change state once a step, in Task.after_step(model, step), and "
        "save it by Task.state_dict(); if no result depends on it, say so: "
        f"`scratch = ({path.removesuffix('!')!r},)` in the task's class"
    )


def _apart(texts: Sequence[Mapping[str, Sequence[Any]]]) -> list[str]:
    """Paths of what is not the same on all ranks, of the text of each path on each rank."""
    paths = dict.fromkeys(path for theirs in texts for path in theirs)
    apart = []
    for path in paths:
        there = {theirs[path][0] for theirs in texts if path in theirs}
        is_size_of_dict = path.endswith("!") and all(KEYS in text for text in there)
        is_missing = not all(path in theirs for theirs in texts)
        if (len(there) > 1 and not is_size_of_dict) or (is_missing and "[" not in path):
            apart.append(path)
    return apart


def _is_of_model(path: str) -> bool:
    return path.startswith(("model.", "model["))


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]

"""State that microbatches and evaluation batches leave behind, looked for during the run.

Some state appears only after the trial before the first step: when training has warmed up, at the
end of an epoch, in a rare batch, after an evaluation. Two things are noticed here: attributes that
one pass sets and another one reads, in any step (`AttributeGuard`); and whatever else passes change
in place, in some steps. Either is only a suspicion, for a cache does the same. So the step, or the
evaluation, is repeated and must give the same result (`Repetition`).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import MappingProxyType

import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.data.attributes import AttributeGuard, PassAttribute
from lockstep.data.passes import is_stream
from lockstep.data.sampler import BatchLayout
from lockstep.engine.audit.hidden_state import Walk, hidden_state
from lockstep.engine.audit.lasting_values import Caches
from lockstep.engine.audit.reachable import MOST_BYTES, module_globals, modules_around
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.task_config import is_scratch, length_reads, outside, scratch_paths
from lockstep.errors import TaskError

SETTINGS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.get_num_threads()": torch.get_num_threads,
        "torch.is_grad_enabled()": torch.is_grad_enabled,
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
        "torch.is_autocast_enabled('cpu')": partial(torch.is_autocast_enabled, "cpu"),
    }
)
"""Settings of torch that may not be changed for later passes."""
_MOST_NAMED = 3
_MOST_TRUSTED = 8
"""Values of one attribute that are checked, before it has to be named in `scratch`."""
_BLOCK = 100
"""In each block of this many steps, the passes of one are checked."""
_POWERS = 3
"""Of the steps 1, 2, 4, 8, …, every third is repeated."""
_POWERS_OF_TWO = frozenset((1 << bits) - 1 for bits in range(63))
"""Those steps, from 0, which are always looked at."""
_ALWAYS_REPEATED = frozenset((1 << bits) - 1 for bits in range(_POWERS, 63, _POWERS))
"""Those that are repeated however long it takes: the 8th, 64th, 512th and so on."""
_GOLDEN, _TRIED = 0x9E3779B1, 1 << 29
"""Multiples of the golden ratio, modulo 2**32, hit every eighth step, but without a period."""
_QUICK_BYTES = 1 << 16
"""Bytes of a tensor or array that are looked at in frequent checks."""
_MOST_TIME = 0.002
"""Greatest part of the time that checks of random steps and before checkpoints may take."""
_LEAST_SECONDS = 0.1
"""Seconds that they may take in any case: a short run would have none of them."""


class ForeseenSaves:
    """Counts of steps after which it is known beforehand that parameters may be saved."""

    def __init__(
        self, config: TrainConfig, sampler: BatchLayout, total_steps: int, has_validation: bool
    ) -> None:
        self._layout, self._every = sampler, {config.checkpoint.every}
        # After an evaluation, the best parameters may be.
        self._every |= {config.eval_every} if has_validation else set()
        self._ends = {total_steps, config.stop_at_step or total_steps}

    def among(self, counts: range) -> set[int]:
        """Those of some counts, in steps of 1, after which a save is foreseen."""
        due = self._layout.due_among
        return self._ends.intersection(counts).union(*(due(counts, n) for n in self._every))

    def is_due(self, count: int) -> bool:
        """Whether a save is foreseen after so many steps."""
        return bool(self.among(range(count, count + 1)))

    def is_last(self, count: int) -> bool:
        """Whether the run, or this session, ends after so many steps if nothing ends it sooner."""
        return count in self._ends

    def first_of_epochs(self, steps: range) -> range:
        """Those of some steps, from 0 and in steps of 1, with which an epoch begins."""
        return self._layout.due_among(steps, 0)


class PassState:
    """All that can be reached from task, hooks, datasets and model, before and after passes.

    Attributes:
        guard: notices attributes that one pass sets and another one reads.
        free: paths of values that passes change, such as caches, on which no result depends.
        at_start: texts of the state before the first step of this process.
        caches: those of them that can be cleared for a while.
        tries: steps, near the one of the last `is_due`, that are repeated if there is time.
        quiet: those near it that are neither repeated nor looked at.
        is_repetition_due: whether the next step is repeated, whatever is planned.
        optimizers: state and groups of optimizers, of which ranks may have parts. A task that
            refers to its optimizer reaches them.
    """

    def __init__(
        self,
        task_state: TaskState,
        model: nn.Module,
        datasets: Mapping[str, object],
        seed: int,
        saves: ForeseenSaves,
    ) -> None:
        """Note what to watch.

        Args:
            task_state: the task and its hooks.
            model: model of the task.
            datasets: by the name of their split.
            seed: seed of the run, from which the steps that are looked at are drawn.
            saves: when the run's state will be saved.
        """
        self._task = task_state.task
        hooks = {f"hooks[{i}]": h for i, h in enumerate(task_state.hooks) if not h.first_only}
        self._roots: dict[str, object] = {"task": self._task, **hooks}
        self._roots |= {f"dataset({split!r})": data for split, data in datasets.items()}
        # A stream is read in order, by all ranks alike, and so may keep any state.
        self._streams = [data for data in datasets.values() if is_stream(data)]
        self._model = model
        self._kinds = {type(root): None for root in self._roots.values()}
        kinds = {*self._kinds, *map(type, model.modules())}
        self._imported = modules_around(kinds, with_folders=False)
        self.guard = AttributeGuard()
        self.free: set[str] = set()
        self.optimizers: Sequence[object] = ()
        self.caches = Caches(self._kinds, self._imported)
        self.at_start: dict[str, str] = {}
        self._seed = seed
        self._saves = saves
        self._modules: dict[str, nn.Module] = {}
        self._began, self._spent, self._look_s = perf_counter(), 0.0, 0.0
        self._is_free = True  # looks in few steps do not count
        self._block, self._looks = range(0), {-1}
        self.tries, self.quiet = {-1}, set[int]()
        self._next_try, self.is_repetition_due = 1 << _POWERS, False

    def open(self) -> None:
        """Begin to watch."""
        found = Walk({"model": self._model, **self._roots}, self._streams).objects
        self.guard.watch(found, self.is_scratch)
        self._modules = dict(self._model.named_modules())

    def modes(self) -> dict[str, object]:
        """Modes of all modules, and settings of torch, by path."""
        modes: dict[str, object] = {
            f"model.{name}.training" if name else "model.training": module.training
            for name, module in self._modules.items()
        }
        return modes | {name: read() for name, read in SETTINGS.items()}

    def changed_modes(self, before: Mapping[str, object]) -> list[str]:
        """Paths of the modes that have changed, unless they are known to change."""
        changed = [path for path, mode in self.modes().items() if before[path] != mode]
        return [p for p in changed if p not in self.free and not self.is_scratch(p)]

    def note_start(self) -> None:
        """Keep the state before the first step of this process, to compare with."""
        if not self.at_start:
            self.at_start = self.state(without=self.optimizers)

    def close(self) -> None:
        """Stop watching, and restore the classes."""
        self.guard.close()

    def is_scratch(self, path: str) -> bool:
        """Whether the task says of a path that no result depends on it."""
        return is_scratch(self._task, path)

    def state(
        self,
        is_quick: bool = True,
        with_environment: bool = False,
        without: Sequence[object] = (),
        with_caches: bool = False,
    ) -> dict[str, str]:
        """A text for everything, by path, except for what no result depends on.

        Args:
            is_quick: whether to look at fewer elements of large tensors and arrays.
            with_environment: whether to look at what ranks may have of their own: environment
                variables, and modules that those of the task and all else import.
            without: objects that are left out.
            with_caches: whether to look at `free` paths, too.
        """
        began = perf_counter()
        most_bytes = _QUICK_BYTES if is_quick else MOST_BYTES
        roots = self._all_roots(with_imported=with_environment)
        texts = hidden_state(roots, [*self._streams, *without], most_bytes)
        if with_environment:
            texts |= {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
        free = () if with_caches else self.free
        texts = outside(texts, (*free, *self.guard.paths, *scratch_paths(self._task)))
        self._look_s = perf_counter() - began
        self._spent += 0.0 if self._is_free else self._look_s
        return texts

    def note_values(self) -> None:
        """Before an evaluation, note what it may change."""
        engines = *self.optimizers, length_reads(self._task.config)
        self.caches.leftovers.note(self._all_roots(), [*self._streams, *engines])

    def collect_leftovers(self) -> None:
        """After it, have the next step done again without what it has changed, if it has."""
        if self.caches.leftovers.collect(self.is_scratch):
            self.is_repetition_due = True
            self._block, self.quiet = range(0), set()  # plan again

    def _all_roots(self, with_imported: bool = True) -> dict[str, object]:
        there = {"model": self._model, **self._roots}
        for kind in self._kinds:
            there |= module_globals(kind)
        return there | (module_globals(type(self._task), self._imported) if with_imported else {})

    def is_due(self, step: int) -> bool:
        """Whether the changes of a step's passes are looked for; may differ between ranks.

        Args:
            step: number of the step, from 0.
        """
        if step not in self._block:
            self._plan(step)
        self._is_free = step in _POWERS_OF_TWO
        if self._is_free or step not in self._looks:
            return self._is_free
        spent = self._look_s if self._saves.is_last(step + 1) else self._spent
        return spent <= self.affordable()

    def seconds_to_repeat(self, step: int, spent: float) -> float:
        """How long it may take to repeat and compare the step of the last `is_due`; 0: not due.

        State may be where no check can find it: in another folder's module, a file, a thread.

        Args:
            step: number of the step, from 0.
            spent: seconds that were spent on repeating steps.
        """
        if step not in self.tries:
            return 0.0
        if step in _ALWAYS_REPEATED:
            return math.inf
        # Nothing of the run is seen later than its last step.
        return self.affordable() - (0.0 if self._saves.is_last(step + 1) else spent)

    def _plan(self, step: int) -> None:
        """Choose which steps of a block are looked at and repeated: cheaper than step by step."""
        first = step - step % _BLOCK
        self._block = block = range(first, first + _BLOCK)
        drawn = first + random.Random(f"{self._seed} {first // _BLOCK}").randrange(_BLOCK)
        saved = self._saves.among(range(first + 1, block.stop + 1))
        self._looks = {drawn, *(count - 1 for count in saved)}
        # What begins late may be of effect now and then only.
        often = {s for s in block if (s * _GOLDEN + self._seed) % (1 << 32) < _TRIED}
        tried = {s for s in often.union(self._saves.first_of_epochs(block)) if s >= self._next_try}
        self.tries = tried | self._looks | _ALWAYS_REPEATED.intersection(block)
        self.quiet = {*block} - self.tries - _POWERS_OF_TWO

    def may_repeat(self, step: int, needed: float, spent: float, step_s: float) -> bool:
        """Whether there is time to repeat a step; without, few are tried until there will be.

        Args:
            step: number of the step.
            needed: seconds that it takes to repeat it.
            spent: seconds that were spent on repeating steps.
            step_s: seconds that a step takes.
        """
        if needed <= self.seconds_to_repeat(step, spent):
            self._next_try = 0  # steps may have become longer than foreseen
            return True
        if step >= self._next_try:
            left = (spent + needed) / _MOST_TIME - (perf_counter() - self._began)
            self._next_try = step + max(1, int(left / step_s))
            self._block, self.quiet = range(0), set()  # plan again
        return False

    def affordable(self) -> float:
        """Seconds that each kind of check may have taken so far."""
        return max(_LEAST_SECONDS, _MOST_TIME * (perf_counter() - self._began))

    def root_of(self, path: str) -> str:
        """The attribute that a path leads to or through: `task.cache` of `task.cache[3].rows`."""
        root = max((r for r in self._roots if path.startswith(r)), key=len, default="")
        rest = path[len(root) :]
        return root + rest.partition("[")[0].rstrip("!")

    def trust(self, attributes: Iterable[PassAttribute], paths: Iterable[str]) -> None:
        """Note that no result depends on what passes have left in these attributes and paths.

        Raises:
            TaskError: an attribute was set and read over and over again.
        """
        roots = {self.root_of(path) for path in paths}
        if roots - self.free:
            found = Walk(self._all_roots(), self._streams).containers
            self.caches.note({p: v for p, v in found.items() if self.root_of(p) in roots})
        self.free |= roots
        for attribute in attributes:
            attribute.is_trusted = True
            attribute.num_trusted += 1
            if attribute.num_trusted > _MOST_TRUSTED and not attribute.path.startswith("dataset("):
                raise TaskError(
                    f"{named([attribute.path])}: is set by one microbatch or evaluation batch and "
                    f"read by another, over and over again; {remedy(attribute.path)}"
                )


def settings() -> tuple[object, ...]:
    """The settings that are read in each step."""
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip


def is_check_due(number: int) -> bool:
    """Whether the changes of a step, evaluation or epoch's end, counted from 1, are checked.

    They are for powers of two, and for 1 to 9 times a power of ten: what happens in every tenth or
    hundredth step never falls on a power of two.
    """
    return number & (number - 1) == 0 or not str(number)[1:].strip("0")


def named(paths: Iterable[str]) -> str:
    """Paths for a message; only the first ones if there are many."""
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

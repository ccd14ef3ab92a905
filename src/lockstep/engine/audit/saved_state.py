"""Whether a checkpoint can hold what a task and its hooks have: for all ranks, and to come back."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from types import FunctionType
from typing import Any

from torch import nn, optim

from lockstep.comm.transport import Transport
from lockstep.data.loader import BatchSource
from lockstep.engine.audit.hidden_state import (
    HOOKS,
    KEYS,
    Walk,
    differing,
    hidden_state,
    own_attributes,
)
from lockstep.engine.audit.pass_state import SETTINGS, PassState, is_check_due, named, remedy
from lockstep.engine.audit.reachable import cached_functions, is_library, module_globals
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.task_config import is_scratch, outside, rebuilt
from lockstep.errors import TaskError, shared

_NOT_COMPARED = "dataset("
"""What begins the paths of datasets, which keep what they have read."""
_SHARED = "shared: "
"""Begins the paths of what belongs to classes and modules."""
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)


class SavedState:
    """Compares the state before and after the code of a task and its hooks has run."""

    def __init__(
        self,
        state: TaskState,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        loader: BatchSource,
    ) -> None:
        self._state = state
        self._model = model
        self._optimizers = optimizers
        self._loader = loader
        self._own: dict[str, str] = {}
        self._num_checks = 0
        self._last: dict[str, str] = {}
        self._seen: set[str] = set()
        self._spent = 0.0
        roots = {"task": state.task, "model": model} | _saved_hooks(state)
        bases = [b for o in Walk(roots).objects.values() for b in type(o).__mro__]
        self._kinds = [k for k in dict.fromkeys(bases) if not is_library(k.__module__)]
        # What they keep follows from their arguments.
        self._functions = [function for _, _, function in cached_functions(self._kinds)]

    def state(self, with_shared: bool = False) -> dict[str, str]:
        """Everything that can be reached from task, hooks, model and dataset, by its path.

        Args:
            with_shared: whether to look at what their classes and modules keep, too.
        """
        # Separately, since a dataset may be reached from the task too.
        inside = hidden_state({"dataset('train')": self._loader.dataset})
        # The optimizer's own state is saved, also where the task refers to the optimizer.
        saved = kept_by(self._optimizers)
        roots = {"task": self._state.task, "model": self._model} | _saved_hooks(self._state)
        if not with_shared:
            return hidden_state(roots, saved) | inside
        before, after = self._shared()
        without = [*saved, *self._functions, *self._kinds]
        return hidden_state(before | roots | after, without) | inside

    def _shared(self) -> tuple[dict[str, object], dict[str, object]]:
        """Attributes of classes, and global variables, that objects of other processes lack.

        An object finds its class's attributes too, so these have to come before it. It may also
        keep and restore what a function or a global variable refers to, which comes after it.
        """
        before, after = dict[str, object](), dict[str, object]()
        for kind in self._kinds:
            for name, value in own_attributes(kind).items():
                there = after if isinstance(value, _FUNCTIONS) else before
                there[f"{_SHARED}{kind.__qualname__}.{name}"] = value
            for path, value in module_globals(kind).items():
                after[_SHARED + path] = value
        return before, after

    def check(self, before: Mapping[str, str], caller: str, with_shared: bool = False) -> None:
        """Refuse changes that a resumed run, or a process that fetches data, would not see.

        Args:
            before: the state before the code ran.
            caller: name of the code, for messages.
            with_shared: as for `state`.

        Raises:
            TaskError: naming the first.
        """
        now = self.state(with_shared)
        changed = [path for path in differing(before, now) if not self._is_scratch(path)]
        own = [path for path in changed if path.startswith(("task", "hooks"))]
        self._own |= dict.fromkeys(own, caller)
        back = self._restored() if own else {}
        for path in changed:
            name = path.rstrip("!")
            if path.startswith(_SHARED):
                place = name.removeprefix(_SHARED)
                raise TaskError(
                    f"{place}: is changed by {caller}, and belongs to a class or a module, so no "
                    "checkpoint holds it; keep it in self, and save it by state_dict; if no result "
                    f"depends on it, say so: `scratch = ({place!r},)` in the task's class"
                )
            if path.startswith("dataset"):
                if self._loader.num_workers:
                    raise TaskError(
                        f"{name}: is changed by {caller}, and the processes that fetch data have "
                        "copies of it; set data.num_workers=0, or use it in Task.loss"
                    )
                if not own:
                    raise TaskError(
                        f"{name}: is changed by {caller}, and no checkpoint holds it; keep it in "
                        "the task, and save it by Task.state_dict"
                    )
            elif path.startswith("model"):
                raise TaskError(
                    f"{name}: is changed by {caller}, and no checkpoint holds it; make it a "
                    "buffer of the model, or keep it in the task, save it by Task.state_dict, and "
                    "set it in each Task.loss"
                )
            elif back is not None and back.get(path) != now.get(path):
                raise self._not_restored(path, caller)

    def _is_scratch(self, path: str) -> bool:
        """Whether the task names a path in `scratch`; what its class has, as its own too."""
        task, place = self._state.task, path.removeprefix(_SHARED)
        starts = [f"{kind.__qualname__}." for kind in type(task).__mro__]
        own = [f"task.{place.removeprefix(s)}" for s in starts if place.startswith(s)]
        return any(is_scratch(task, name) for name in (place, *own))

    def check_again(self, passes: PassState) -> list[str]:
        """Look, before a checkpoint, for what would not come back from it.

        Args:
            passes: knows what passes change, on which no result depends.

        Returns:
            Paths of what has changed, whatever has changed it; each once.

        Raises:
            TaskError: naming the first state that was restored before, and no longer is.
        """
        self._num_checks += 1
        self._check_own()
        return self._forgotten(passes)

    def _check_own(self) -> None:
        if not self._own or not is_check_due(self._num_checks):
            return
        back, now = self._restored(), self.state()
        for path, caller in self._own.items():
            if back is not None and back.get(path) != now.get(path):
                raise self._not_restored(path, caller)

    def note(self) -> None:
        """Take the present state as the first one, unless there is one: also after a loss."""
        self._last = self._last or self._present()

    def _forgotten(self, passes: PassState) -> list[str]:
        # Code that runs in rare steps is seen by no other check. Where checkpoints are so frequent
        # that looks would take too long, not each has one.
        if self._spent > passes.affordable() and not is_check_due(self._num_checks):
            return []
        began = perf_counter()
        before, self._last = self._last, self._present()
        self._spent += perf_counter() - began
        now = outside(self._last, (*passes.free, *passes.guard.paths, *self._seen))
        changed = [p for p in differing(before, self._last) if p in now and not self._is_scratch(p)]
        self._seen.update(changed)
        back = self._restored() if any(p.startswith(("task", "hooks")) for p in changed) else {}
        if back is None:
            changed, back = [p for p in changed if p.startswith(("model", "torch"))], {}
        self._own |= {p: "training" for p in changed if back.get(p) == now[p]}
        return [path for path in changed if back.get(path) != now[path]]

    def _present(self) -> dict[str, str]:
        settings = {name: repr(read()) for name, read in SETTINGS.items()}
        own = {p: text for p, text in self.state().items() if not p.startswith("dataset")}
        return own | settings

    def _not_restored(self, path: str, caller: str) -> TaskError:
        kind = type(self._state.task).__name__
        owner = "the hook's " if path.startswith("hooks") else f"{kind}."
        return TaskError(
            f"{path.rstrip('!')}: is changed by {caller}, and does not come back by {owner}"
            "state_dict and load_state_dict; a resumed run would go on without it. If no result "
            f"depends on it, say so: `scratch = ({_attribute(path)!r},)` in the task's class"
        )

    def _restored(self) -> dict[str, str] | None:
        """The state of a new task after loading this one's; None if unknown."""
        tensors, values = self._state.capture()
        task = self._state.task
        fresh = None
        with contextlib.suppress(Exception):  # its `__init__` may need more than a config
            fresh = rebuilt(task, task.config)
        if fresh is None:
            return None if tensors or values else {}
        state = TaskState(fresh, fresh.hooks())
        for hook in state.hooks:
            if not hook.first_only and any(hook is own for own in self._state.hooks):
                raise TaskError(
                    f"{type(task).__name__}.hooks: two tasks have the same "
                    f"{type(hook).__name__}; make it in __init__ of the task, or in hooks"
                )
        state.restore(tensors, values)
        return hidden_state({"task": fresh} | _saved_hooks(state))


class Comparison:
    """Compares what can be reached from the task and all else across ranks."""

    def __init__(self, state: PassState) -> None:
        self._state = state
        self._num_looks, self._told = 0, set[str]()

    def run(self, transport: Transport, step: int, is_model_whole: bool) -> list[str]:
        """Make sure that the state is the same on all ranks; a collective.

        Values that passes change, and entries that a dict has on some ranks only, may be caches.

        Args:
            transport: the group of ranks.
            step: number of the step.
            is_model_whole: whether each rank has all of the model.

        Returns:
            Paths of values that have differed since the start, or that passes have changed and
            that seemed to be caches; on all ranks, and each once.

        Raises:
            TaskError: something has become different during the run; on all ranks.
        """
        state = self._state
        texts = {
            path: text
            for path, text in state.state(without=state.optimizers, with_caches=True).items()
            if is_model_whole or not path.startswith(("model.", "model["))
        }
        own, set_by_passes = outside(texts, state.free), state.guard.paths
        everyone = transport.gather_json(
            [_digest(own), sorted(state.free), set_by_passes, self._num_looks]
        )
        self._num_looks = 1 + max(number for *_, number in everyone)  # ranks may have joined
        if all(theirs == everyone[0][0] for theirs, *_ in everyone):
            return self._compare_caches(transport, texts, everyone)
        state.free.update(*(names for _, *lists, _ in everyone for names in lists))
        start = state.at_start
        found = transport.gather_json(
            {p: [t, start.get(p) == t] for p, t in outside(own, state.free).items()}
        )
        paths = _different(found)
        new = [p for p in paths if not all(theirs[p][1] for theirs in found if p in theirs)]
        if new:
            raise shared(
                TaskError(
                    f"step {step}: {named(new)}: has become different on different ranks, though "
                    f"no checkpoint can hold more than one of them. {remedy(new[0])}"
                )
            )
        state.free.update(paths)
        self._told.update(paths)
        return [*paths, *self._compare_caches(transport, texts, everyone)]

    def _compare_caches(
        self,
        transport: Transport,
        texts: Mapping[str, str],
        everyone: Sequence[tuple[str, list[str], list[str], int]],
    ) -> list[str]:
        """What seemed to be caches, and has other values on other ranks; a collective.

        Caches may have other entries there, but not another value under the same key.

        Args:
            transport: the group of ranks.
            texts: of everything, by path.
            everyone: of each rank, as second and third, what passes have changed and set.
        """
        if not is_check_due(self._num_looks):
            return []
        free = {n for _, names, *_ in everyone for n in names if not n.startswith(_NOT_COMPARED)}
        texts = outside(texts, (name for _, _, names, _ in everyone for name in names))
        others = outside(texts, free - self._told)
        kept = {p: text for p, text in texts.items() if p not in others and text != "None"}
        if len({*transport.gather_json(_digest(kept))}) == 1:
            return []
        found = transport.gather_json(kept)
        values = {p: {k[p] for k in found if p in k} for k in found for p in k}
        apart = [p for p, v in values.items() if len(v) > 1 and not any(KEYS in t for t in v)]
        roots = sorted({*map(self._state.root_of, apart)})
        self._told.update(roots)
        return roots


def forgetting(paths: Sequence[str]) -> str:
    """The warning about values that have changed and that no checkpoint holds."""
    return (
        f"{named(paths)}: has changed since the run began, and no checkpoint holds it: a resumed "
        "run would go on without it. Save it by state_dict, or make it a buffer of the model; if "
        f"no result depends on it, say so: `scratch = ({_attribute(paths[0])!r},)` in the task's "
        "class"
    )


def unequal(paths: Sequence[str]) -> str:
    """The warning about values that differ between ranks, though they should not matter."""
    return (
        f"{named(paths)}: differs between ranks; no result may depend on it. If "
        f"none does, say so: `scratch = ({paths[0]!r},)` in the task's class"
    )


def _digest(texts: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def _different(texts: Sequence[Mapping[str, Sequence[Any]]]) -> list[str]:
    """Paths whose values differ between ranks, of the text of each path on each rank."""
    paths = dict.fromkeys(path for theirs in texts for path in theirs)
    apart = []
    for path in paths:
        there = {theirs[path][0] for theirs in texts if path in theirs}
        is_size_of_dict = path.endswith("!") and all(KEYS in text for text in there)
        may_be_absent = path.rpartition(".")[2].removesuffix("!") in HOOKS
        is_missing = not (may_be_absent or all(path in theirs for theirs in texts))
        if (len(there) > 1 and not is_size_of_dict) or (is_missing and "[" not in path):
            apart.append(path)
    return apart


def _attribute(path: str) -> str:
    """The attribute of the task or of a hook that a path leads to or through."""
    return re.sub(r"^([^.]*\.\w+).*", r"\1", path.rstrip("!"))


def kept_by(optimizers: Iterable[optim.Optimizer]) -> list[object]:
    """State and groups of optimizers, which checkpoints hold."""
    return [v for o in optimizers for v in (o.state, o.defaults, o.param_groups, *o.param_groups)]


def _saved_hooks(state: TaskState) -> dict[str, object]:
    """The hooks whose state is saved; those that run on rank 0 only may have any state."""
    return {f"hooks[{i}]": hook for i, hook in enumerate(state.hooks) if not hook.first_only}

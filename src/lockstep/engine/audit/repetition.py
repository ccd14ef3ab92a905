"""Repeating a step or an evaluation whose passes may have read or changed state, to compare."""

from __future__ import annotations

import math
from collections.abc import Collection
from time import perf_counter
from typing import NamedTuple

from lockstep.comm.transport import Transport
from lockstep.data.attributes import PassAttribute
from lockstep.engine.audit.hidden_state import differing
from lockstep.engine.audit.pass_state import SETTINGS, PassState, named, remedy, settings
from lockstep.engine.digests import checksum
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.timing import Stopwatch
from lockstep.errors import TaskError, shared

_MOST_SENT = 20
"""Number of suspects that a rank sends to the others."""


class Repetition:
    """Passes of a step or evaluation, which are watched, and repeated if they have changed state.

    Attributes:
        is_second: whether this is the second time.
    """

    def __init__(self, state: PassState) -> None:
        self._state = state
        self._guard = state.guard
        self.forget()

    def forget(self) -> None:
        """Drop what is known of the passes: ranks compute other microbatches from now on."""
        self._guard.read.clear()
        self.is_second = False
        self._is_quick = True
        self._modes: dict[str, object] = {}
        self._settings: tuple[object, ...] = ()
        self._num_modes_set = -1
        self._before: dict[str, str] | None = None
        self._after: dict[str, str] | None = None
        self._read: list[PassAttribute] = []
        self._changed: list[str] = []

    def begin(self, is_due: bool, is_quick: bool = True) -> None:
        """Called before the passes.

        Args:
            is_due: whether to look for what they change in place.
            is_quick: whether to look at fewer elements of large tensors and arrays.
        """
        if self.is_second:
            self._guard.clear(self._read)
            if self._before is None:
                self._before = self._visible_state()
            # With suspects, results of cached functions stay: `check_unchanged` would not see what
            # every pass changes in those of the functions that replace them.
            self._state.caches.forget(with_functions=not self.suspects)
        else:
            self._is_quick = is_quick
            if not self._modes:
                self._note_modes()
            self._before = self._visible_state() if is_due else None

    def end(self) -> None:
        """Called after the passes; the first time, this is where suspicions arise."""
        self.leave()
        read, self._guard.read = self._guard.read, {}
        if self.is_second:
            return
        self._read, self._changed, self._after = list(read), [], None
        if self._before is not None:
            self._after = self._visible_state()
            self._changed = differing(self._before, self._after)
        # Modes are seldom read, for they are many; between steps nothing may change them either.
        if self._before is not None or self.may_have_suspects:
            self._changed += self._state.changed_modes(self._modes)
            self._note_modes()

    @property
    def may_have_suspects(self) -> bool:
        """Whether to look for changes where `begin` was told that none is due."""
        guard = self._guard
        is_set = self._num_modes_set != guard.num_modes_set
        return is_set or bool(guard.read) or self._settings != settings()

    def _note_modes(self) -> None:
        self._num_modes_set = self._guard.num_modes_set
        self._modes, self._settings = self._state.modes(), settings()

    def leave(self) -> None:
        """Called when the passes are over, or were interrupted by an exception."""
        self._guard.leave()
        if self.is_second:
            self._state.caches.recall()

    @property
    def has_suspects(self) -> bool:
        """Whether there are any `suspects`."""
        return bool(self._read or self._changed)

    @property
    def suspects(self) -> list[str]:
        """What passes have left behind, or read of what other passes had left, the first time."""
        roots = map(self._state.root_of, self._changed)
        return [*dict.fromkeys((*self.suspects_read, *roots))]

    def suspects_of_all(self, transport: Transport) -> list[str]:
        """The suspects of all ranks; a collective."""
        everyone = transport.gather_json(self.suspects[:_MOST_SENT])
        return [*dict.fromkeys(path for theirs in everyone for path in theirs)]

    @property
    def changed(self) -> list[str]:
        """What has changed, directly or further inside, since the state was looked at."""
        paths = differing(self._before or {}, self._visible_state())
        return [*dict.fromkeys(map(self._state.root_of, paths))]

    def check_unchanged(self) -> None:
        """Refuse values that were changed again when the same passes were repeated.

        Raises:
            TaskError: naming them, or a setting of torch that has been changed.
        """
        if changed := [path for path in self._changed if path in SETTINGS]:
            raise TaskError(
                f"{named(changed)}: was changed during training, and belongs to the whole process: "
                "neither other ranks nor a resumed run would have it. Set it in the task's "
                "__init__, or put the old value back before the function returns"
            )
        if self._after is None:
            return
        now = self._visible_state()
        moved = [p for p in differing(self._after, now) if p not in self.suspects_read]
        if moved:
            raise TaskError(
                f"{named(moved)}: is changed by microbatches or evaluation batches, so it depends "
                f"on how many of them this rank computes. {remedy(moved[0])}"
            )

    def _visible_state(self) -> dict[str, str]:
        return self._state.state(self._is_quick, with_environment=True)

    @property
    def suspects_read(self) -> list[str]:
        """Paths of attributes that a pass has read and another one had set."""
        return [attribute.path for attribute in self._read]

    def trust(self) -> None:
        """Note that no result depends on the suspects.

        Raises:
            TaskError: one of them must be named in `scratch`.
        """
        read, changed = self._read, self._changed
        self.forget()
        self._state.trust(read, changed)


def depends_on(where: str, suspects: Collection[str], cleared: Collection[str] = ()) -> TaskError:
    """The error of a step or evaluation that gave another result the second time.

    Args:
        where: phrase that begins the message, such as `step 3`.
        suspects: paths of what passes had left behind.
        cleared: paths of caches that were cleared for the second time.
    """
    first = next(iter(suspects), "")
    if not first:
        caches = f"what earlier microbatches have left in {named(cleared)}, for "
        return TaskError(
            f"{where}: gave another result when it was repeated, and no change was seen that "
            f"explains it; look for {caches if cleared else ''}what loss, a dataset or a hook on "
            "tensors changes now and then (an item of a dict or list, a global variable), and for "
            "state that is elsewhere (in a module of another folder, a file, an environment "
            "variable, a thread, a setting or a random generator of a library). Let the loss "
            "depend on its batch, the model and what Task.after_step has set"
        )
    return TaskError(
        f"{where}: gave another result when it was repeated, because of what earlier microbatches "
        f"or evaluation batches have left in {named(suspects)}; which of them this rank has "
        f"computed depends on the number of ranks. {remedy(first)}"
    )


class StepRepeated(Exception):
    """A step is to be done again, on all ranks; nothing of it was applied."""


class _Outcome(NamedTuple):
    """What a step's passes have come to: sums of losses and metrics, and checksums."""

    scalars: list[float]
    gradients: list[int]
    buffers: list[int]


class StepAudit:
    """Repeats a step and compares, if its passes have left suspicious state behind.

    Each rank looks at its own passes. All ranks learn from the headers that one of them has a
    suspicion, and all do the step again, this time without what earlier passes had left in
    attributes. A cache makes no difference then; state does. Some steps are done again in any case.

    Args:
        runtime: the group of ranks.
        state: what passes may change.
        watch: says how long steps take.

    Attributes:
        is_suspicious: whether this rank wants the step to be done again.
    """

    def __init__(self, runtime: Runtime, state: PassState, watch: Stopwatch) -> None:
        self._runtime = runtime
        self._state = state
        self._watch = watch
        self._passes = Repetition(state)
        self._step = -1
        self._first: _Outcome | None = None
        self._suspects: list[str] = []
        self._left: list[list[str]] = []
        self._is_given_up = self._is_due = self._is_quiet = self.is_suspicious = False
        self._began = self._spent = self._repetition_s = 0.0
        self._worked, self._counted = 0.0, 0

    def begin(self, step: int) -> bool:
        """Before the passes of a step; returns whether it is being done again."""
        # Most steps, so without a call that could be saved.
        if self._is_quiet and step in self._state.quiet:
            self._step = step
            return False
        self._is_quiet = self.is_suspicious = False
        if step != self._step:
            if self._first is not None or self._is_given_up:
                self.forget()
            self._step, self._began = step, perf_counter()
            self._is_due = self._state.is_due(step)
        is_due = self._is_due and not self._is_given_up
        self._passes.begin(is_due, is_quick=(step + 1) & step != 0)
        return self._passes.is_second

    def end(self) -> None:
        """After them."""
        if self._is_quiet and not self._passes.may_have_suspects:
            self._state.guard.leave()
            return
        self._passes.end()
        if not self._passes.is_second and not self._is_given_up:
            is_sampled = self._state.is_repetition_due or (
                self._step in self._state.tries and self._is_affordable()
            )
            self.is_suspicious = is_sampled or self._passes.has_suspects
            self._is_quiet = not (self.is_suspicious or self._is_due)

    def _is_affordable(self) -> bool:
        """Whether there is time to repeat the step."""
        # A GPU may not have begun with these passes; workers that fetch are started again.
        passes_s = perf_counter() - self._began
        worked = self._watch.worked_s
        step_s = (worked - self._worked) / max(1, self._step - self._counted)
        self._worked, self._counted = worked, self._step
        needed = max(passes_s, step_s, self._repetition_s)
        return self._state.may_repeat(self._step, needed, self._spent, max(passes_s, step_s))

    def leave(self) -> None:
        """An exception has interrupted the passes."""
        self._is_quiet = False
        self._passes.leave()

    def forget(self) -> None:
        """Have nothing to compare with: the step was given up, or ranks compute other parts."""
        self._passes.forget()
        self._step, self._first, self._suspects = -1, None, []
        self._is_given_up = self._is_quiet = self.is_suspicious = False

    def check_failed(self) -> None:
        """See what it means that some rank's passes have failed, if it was the second time.

        An open file, say, cannot be had as it was before: what a dataset keeps is then taken for a
        cache.

        Raises:
            StepRepeated: the step has to be done once more, as it was the first time.
            TaskError: it needs what earlier passes had left.
        """
        if not self._passes.is_second:
            return
        if not all(path.startswith("dataset(") for path in self._suspects):
            raise shared(depends_on(f"step {self._step}", self._suspects))
        self._passes.trust()
        self._state.caches.leftovers.drop()
        self._state.is_repetition_due = False
        self._first, self._is_given_up = None, True
        raise StepRepeated

    def check(self, scalars: list[float], workspace: Workspace) -> None:
        """Have a step done again of which some rank is suspicious, or compare the second time.

        Args:
            scalars: sums of losses and metrics.
            workspace: has the sum of the gradients.

        Raises:
            StepRepeated: it is to be done again.
            TaskError: the second result is another one; on all ranks.
        """
        if self._passes.is_second:
            self._compare(_outcome(scalars, workspace))
            return
        transport = self._runtime.transport
        self._suspects = self._passes.suspects_of_all(transport)
        self._left = transport.gather_json(self._state.caches.leftovers.paths[:_MOST_SENT])
        self._first = _outcome(scalars, workspace)
        self._passes.is_second, self._is_quiet = True, False
        self._began = perf_counter()
        raise StepRepeated

    def _compare(self, second: _Outcome) -> None:
        self._state.is_repetition_due = False

        def check() -> None:
            if repr(second) != repr(self._first):
                left = [*dict.fromkeys(path for theirs in self._left for path in theirs)]
                suspects = self._suspects or left or self._passes.changed
                raise depends_on(f"step {self._step}", suspects, self._state.caches.paths)
            self._passes.check_unchanged()
            self._passes.trust()

        everywhere(self._runtime.transport, check)
        self._repetition_s = perf_counter() - self._began
        # What is repeated however long it takes leaves the others their time.
        if math.isfinite(self._state.seconds_to_repeat(self._step, 0.0)):
            self._spent += self._repetition_s
        self._first, self._is_given_up = None, True


def _outcome(scalars: list[float], workspace: Workspace) -> _Outcome:
    # Slices of this rank: of the others' it may have no sum.
    gradients = [checksum(own[0].gradient) for own in workspace.stepped if own]
    return _Outcome(list(scalars), gradients, [*map(checksum, workspace.own_buffer_sums())])

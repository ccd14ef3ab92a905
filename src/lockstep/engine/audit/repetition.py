"""Repeating passes of a step or evaluation that have changed state, to see whether it matters."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.comm.transport import Transport
from lockstep.data.attributes import PassAttribute
from lockstep.engine.audit.hidden_state import differing
from lockstep.engine.audit.pass_state import PassState, named, remedy
from lockstep.errors import TaskError

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
        self.is_second = False
        self._is_quick = True
        self._modes: list[object] = []
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
        self._guard.begin(cleared=self.is_second)
        if self.is_second:
            # With suspects, results of cached functions stay: `check_unchanged` would not see what
            # every pass changes in those of the functions that replace them.
            self._state.caches.forget(with_functions=not self.suspects)
        else:
            self._is_quick = is_quick
            # Read once a step: between steps nothing may change them either.
            self._modes = self._modes or self._state.modes()
            self._before = self._visible_state() if is_due else None

    def end(self) -> None:
        """Called after the passes; the first time, this is where suspicions arise."""
        self.leave()
        if self.is_second:
            return
        self._read, self._changed, self._after = list(self._guard.read), [], None
        if self._before is not None:
            self._after = self._visible_state()
            self._changed = differing(self._before, self._after)
        modes = self._state.modes()
        if modes != self._modes:
            self._changed += self._state.changed_modes(self._modes)
            self._modes = modes

    def leave(self) -> None:
        """Called when the passes are over, or were interrupted by an exception."""
        self._guard.leave()
        self._state.caches.recall()

    @property
    def has_suspects(self) -> bool:
        """Whether there are any `suspects`; read in every step."""
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

    def check_unchanged(self) -> None:
        """Refuse values that were changed again when the same passes were repeated.

        Raises:
            TaskError: naming them.
        """
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


def depends_on(what: str, suspects: Collection[str]) -> TaskError:
    """The error of a step or evaluation that gave another result the second time.

    Args:
        what: phrase that begins the message, such as `step 3`.
        suspects: paths of what passes had left behind.
    """
    first = next(iter(suspects), "")
    if not first:
        return TaskError(
            f"{what}: gave another result when it was repeated, though nothing that can be "
            "reached from the task was changed; something keeps state between microbatches "
            "elsewhere (in a module of another folder, a file, an environment variable, a thread, "
            "a setting or a random generator of a library). Let the loss depend on its batch, the "
            "model and what Task.after_step has set"
        )
    return TaskError(
        f"{what}: gave another result when it was repeated, because of what earlier microbatches "
        f"or evaluation batches have left in {named(suspects)}; which of them this rank has "
        f"computed depends on the number of ranks. {remedy(first)}"
    )

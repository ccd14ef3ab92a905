"""Which processes form the next group of ranks: all decisions on it, and nothing else.

A `Group` is told what processes say and that they have ended, and answers with orders. It knows no
sockets, processes or clocks, so whoever carries its orders out may be on one host or on several.
All decisions are made here, one after the other, so survivors need no agreement among themselves:
who belongs to a generation of the group, whether it is complete, and whether all have reached a
point before the next loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.comm.torchdist.supervision import FromRank, ToRank

KILLED = 128
"""A process with a greater exit code was ended by a signal."""


@dataclass(frozen=True)
class Order:
    """What is to be done with a process.

    Attributes:
        slot: its number.
        message: what it is to be told; None if it is to be killed.
    """

    slot: int
    message: ToRank | None


@dataclass
class Member:
    """What is known of a process.

    Attributes:
        phase: `starting` while others train, `out` of any group, `waiting` for one, `in` one, or
            `lost`.
        is_alive: whether its end was not yet reported.
        is_new: whether it has yet to be taken into a group by the ranks that were started first.
        takes_in: whether it waits for a group that may have joining ranks.
        exit_code: exit code as shells have it: 128 + the number of a signal.
        is_dying: whether it has begun to end, which takes a while.
    """

    phase: Literal["starting", "out", "waiting", "in", "lost"]
    is_new: bool
    is_alive: bool = True
    takes_in: bool = False
    exit_code: int = 0
    is_dying: bool = False


@dataclass
class Record:
    """What the agent of a process remembers of it, for a coordinator that takes over.

    Attributes:
        slot: its number.
        place: its number among the ranks of its host, from 0.
        generation: the newest that it was told of; 0 before the first.
        is_whole: whether it was told that this one is whole.
        num_agreed: how often it was told since then that all have agreed.
        is_lost: whether it was told that this one is lost.
        has_left: whether it was told that its leave was noted.
        exit_code: what it has ended with; None while it is alive.
        pending: what it has said last, while that has no answer.
    """

    slot: int
    place: int = 0
    generation: int = 0
    is_whole: bool = False
    num_agreed: int = 0
    is_lost: bool = False
    has_left: bool = False
    exit_code: int | None = None
    pending: FromRank | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        """The inverse of `asdict`."""
        pending = values["pending"]
        return cls(**values | {"pending": None if pending is None else FromRank(**pending)})

    def note_told(self, message: ToRank) -> None:
        """Take note of what it is told."""
        if message.generation is not None:
            self.generation, self.num_agreed = message.generation, 0
            self.is_whole = self.is_lost = False
        self.is_whole = self.is_whole or message.built is not None
        self.is_lost = self.is_lost or message.lost is not None
        self.num_agreed += message.agree is not None
        self.has_left = self.has_left or message.left is not None
        if message.generation is not None or message.left is not None:
            self.pending = None

    def note_said(self, message: FromRank) -> None:
        """Take note of what it says; what is said of a generation that is lost counts no more."""
        if message.say == "dying":
            self.pending = None
        elif message.say in ("meet", "leave", "abort"):
            self.pending = message
            self.has_left = self.has_left and message.say != "meet"


def vacant(records: Iterable[Record]) -> list[Record]:
    """Of the ranks of a host, those that have ended, and in whose place no other was started."""
    newest = {record.place: record for record in sorted(records, key=lambda record: record.slot)}
    return [record for record in newest.values() if record.exit_code is not None]


class Group:
    """Decides on the generations of a group, numbered from 1.

    A generation is *whole* when all its members have built it, and *broken* as soon as a member is
    lost or has given it up.

    Args:
        size: number of processes that are started first, with the slots from 0.

    Attributes:
        generation: number of the present one; 0 before the first.
        failed: slot and exit code of the process without which the others cannot start, if there
            is one.
    """

    def __init__(self, size: int) -> None:
        self.generation = 0
        self.failed: tuple[int, int] | None = None
        self._size = size
        self._all = [Member("out", is_new=False) for _ in range(size)]
        self._members: set[int] = set()
        self._built: set[int] = set()
        self._arrived: set[int] = set()
        self._broken = True
        self._is_over = False
        self._is_closed = False
        self._aborted: int | None = None
        self._orders: list[Order] = []

    def take_over(self, generation: int, num_slots: int, records: Iterable[Record]) -> list[Order]:
        """Go on with the processes of a group whose coordinator was lost, in a new generation.

        What one of them was told before of its generation, the others are told now.

        Args:
            generation: number of the newest one, which may not have been told to anybody.
            num_slots: how many slots there were when it was formed.
            records: what is known of each process; those that are missing are lost.

        Returns:
            What is to be done, in this order.
        """
        known = sorted(records, key=lambda record: record.slot)
        lost = Member("lost", is_new=False, is_alive=False, exit_code=KILLED)
        size = max([num_slots, *(record.slot + 1 for record in known)])
        self._all = [replace(lost) for _ in range(size)]
        # etcd's number may be an older one, written late.
        self.generation = max(generation, *(record.generation for record in known))
        newest = max(record.generation for record in known)
        present = [record for record in known if record.generation == newest]
        is_whole = any(record.is_whole for record in present)
        num_agreed = max(record.num_agreed for record in present)
        self._is_closed = any(record.has_left for record in known)
        for record in known:
            member = self._all[record.slot]
            member.is_alive = record.exit_code is None
            member.exit_code = record.exit_code or 0
            if record.has_left:
                member.phase = "out"
            elif member.is_alive and not record.generation:
                member.phase, member.is_new = "starting", True
            elif member.is_alive:
                member.phase = "in"
                if record.generation == newest:
                    self._catch_up(record, is_whole, num_agreed)
                if not record.is_lost:
                    self._tell([record.slot], ToRank(lost=record.generation))
        orders = self._taken()
        for record in known:
            if record.pending is None:
                continue
            # Who has ended by now may have left, or asked for the end of all, before.
            if record.exit_code is None or record.pending.say != "meet":
                orders += self.hear(record.slot, record.pending)
        return orders

    def _catch_up(self, record: Record, is_whole: bool, num_agreed: int) -> None:
        """Tell a process what others of its generation know already."""
        if is_whole and not record.is_whole:
            self._tell([record.slot], ToRank(built=record.generation))
        for _ in range(num_agreed - record.num_agreed):
            self._tell([record.slot], ToRank(agree=record.generation))

    @property
    def is_ended(self) -> bool:
        """Whether no process is left."""
        return not any(member.is_alive for member in self._all)

    @property
    def num_slots(self) -> int:
        """How many processes there have been, as far as is known."""
        return len(self._all)

    @property
    def can_grow(self) -> bool:
        """Whether a process that starts now could be taken in."""
        return (
            not self._is_closed
            and self._aborted is None
            and self.generation > 0
            and any(m.is_alive and m.phase in ("in", "waiting") for m in self._all)
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the run; ranks that the others have survived do not count."""
        if self._aborted is not None:
            return self._aborted
        if self.failed is not None:
            return self.failed[1] or 1
        ended = [member for member in self._all if member.phase != "lost"]
        return max(member.exit_code for member in ended or self._all)

    def add(self) -> int:
        """Note a process that starts while the others train; its slot."""
        self._all.append(Member("starting", is_new=True))
        return len(self._all) - 1

    def hear(self, slot: int, message: FromRank) -> list[Order]:
        """Take note of what a process says.

        Args:
            slot: its number; it is alive.
            message: the message.

        Returns:
            What is to be done, in this order.
        """
        member = self._all[slot]
        if message.say == "meet":
            member.takes_in = message.takes_in
            self._meet(slot)
        elif message.say == "leave":
            member.phase = "out"
            # Later messages to the members are not for its next group.
            self._members.discard(slot)
            self._tell([slot], ToRank(left=True))
            self._dismiss()
        elif message.say == "dying":
            self._go_on_without(slot)
        elif message.say == "abort":
            self._aborted = message.code
            self._kill(range(len(self._all)))
        elif message.generation == self.generation and not self._broken:
            self._note_arrival(slot, message.say == "built")
        return self._taken()

    def lose(self, slot: int, exit_code: int) -> list[Order]:
        """Take note of the end of a process, after all that it has said.

        Args:
            slot: its number.
            exit_code: exit code as shells have it.

        Returns:
            What is to be done, in this order.
        """
        member = self._all[slot]
        member.is_alive, member.exit_code = False, exit_code
        if member.phase != "out":
            member.phase = "lost"
            if slot in self._members:
                self._break()
        if self.generation == 0 and exit_code:
            self._give_up(slot)
        else:
            self._form()
        return self._taken()

    def excuse(self, slot: int) -> None:
        """Have the end of a process that has left not count: it ends with its host."""
        if self._all[slot].phase == "out":
            self._all[slot].phase = "lost"

    def is_replaceable(self, slot: int) -> bool:
        """Whether a process that has ended is missing, and another could take its place.

        Only what a signal has killed is replaced: a joining rank that the others refuse ends by
        itself (`ElasticTransport.withdraw`).
        """
        member = self._all[slot]
        return self.can_grow and member.phase == "lost" and member.exit_code > KILLED

    def renew(self) -> list[Order]:
        """Have all members meet again, since some may not have found each other yet."""
        self._break()
        return self._taken()

    def end(self) -> list[Order]:
        """Order all processes to be killed."""
        self._kill(range(len(self._all)))
        return self._taken()

    def _go_on_without(self, slot: int) -> None:
        """Form the next generation without a process whose exit code is not there yet."""
        if self.generation == 0 or self._all[slot].phase == "out":
            return
        self._all[slot].is_dying = True
        if slot in self._members:
            self._break()
        self._form()

    def _note_arrival(self, slot: int, has_built: bool) -> None:
        # All get the messages in one order: a point that all have reached counts, even if a loss
        # comes next.
        arrived = self._built if has_built else self._arrived
        arrived.add(slot)
        if arrived == self._members:
            arrived.clear()
            number = self.generation
            self._tell(self._members, ToRank(built=number) if has_built else ToRank(agree=number))

    def _meet(self, slot: int) -> None:
        """Handle a request for a group: the first one, or one without the lost ranks."""
        member = self._all[slot]
        if slot in self._members:  # a request for a new group gives up the present one
            self._break()
        elif member.phase == "starting":
            self._tell(self._members, ToRank(joiner=True))
        if member.phase == "out":  # the first training of a script, or one after another
            self._is_over = False
        member.phase, member.is_dying = "waiting", False  # who speaks has not ended
        self._form()

    def _dismiss(self) -> None:
        """The run is over: end the processes that have not yet taken part in it.

        A new process would begin with the script's first training, so none is started from now on.
        """
        self._is_over = self._is_closed = True
        for slot, member in enumerate(self._all):
            if slot >= self._size and member.phase in ("starting", "waiting"):
                member.phase = "lost"
                self._kill([slot])

    def _break(self) -> None:
        if not self._broken:
            self._broken = True
            self._tell(self._members, ToRank(lost=self.generation))

    def _form(self) -> None:
        """Begin a generation of all living ranks, if all of them wait for it."""
        living = {
            slot: member
            for slot, member in enumerate(self._all)
            if member.is_alive and not member.is_dying and member.phase != "starting"
        }
        if not all(member.takes_in for member in living.values()):
            living = {slot: member for slot, member in living.items() if not member.is_new}
        if self._is_over or not living or any(m.phase != "waiting" for m in living.values()):
            return
        # Later on survivors may be fewer; but a training does not start without all its ranks.
        if self.generation == 0 and len(living) < self._size:
            self._give_up(next(s for s, member in enumerate(self._all) if not member.is_alive))
            return
        self.generation += 1
        self._members = set(living)
        self._built, self._arrived = set(), set()
        self._broken = False
        for member in living.values():
            member.phase, member.is_new = "in", False
        members = tuple(sorted(self._members))
        self._tell(members, ToRank(generation=self.generation, members=members))
        if any(member.phase == "waiting" for member in self._all):
            self._tell(members, ToRank(joiner=True))

    def _give_up(self, slot: int) -> None:
        """Note that the others cannot start without this process."""
        if self.failed is None:
            self.failed = slot, self._all[slot].exit_code

    def _tell(self, slots: Iterable[int], message: ToRank) -> None:
        self._orders += [Order(slot, message) for slot in sorted(slots) if self._all[slot].is_alive]

    def _kill(self, slots: Iterable[int]) -> None:
        self._orders += [Order(slot, None) for slot in slots if self._all[slot].is_alive]

    def _taken(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

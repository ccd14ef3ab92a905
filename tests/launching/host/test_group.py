"""Which processes form the next group: whatever happens, in whatever order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.comm.torchdist.supervision import FromRank, ToRank
from lockstep.launching.host.group import Group, Order, Record, vacant
from lockstep.launching.host.supervisor import Leader

KILL, REFUSED = 137, 2


class Ranks(RuleBasedStateMachine):
    """Processes that speak in the order in which ranks do, at any time, and may be killed."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 3
        self.group = Group(self.size)
        self.heard: dict[int, list[ToRank]] = {slot: [] for slot in range(self.size)}
        self.states = dict.fromkeys(self.heard, "out")
        self.takes_in = dict.fromkeys(self.heard, True)
        self.generations = dict.fromkeys(self.heard, 0)
        self.said_built: set[tuple[int, int]] = set()
        self.members: dict[int, tuple[int, ...]] = {}
        self.has_left = False
        self.records = {slot: Record(slot, place=slot) for slot in range(self.size)}
        self.deaf: set[int] = set()
        self.num_taken_over = 0

    def carry_out(self, orders: list[Order]) -> None:
        for slot, message in [(order.slot, order.message) for order in orders]:
            if slot in self.deaf:
                if message is not None and message.generation is not None:
                    assert message.members is not None
                    self.members[message.generation] = message.members
                continue
            assert slot in self.states, "an order for a process that has ended"
            if message is not None:
                self.records[slot].note_told(message)
            if message is None:
                self.states[slot] = "killed"
                continue
            self.heard[slot].append(message)
            if message.generation is not None and message.members is not None:
                self.begin(slot, message.generation, message.members)
            if message.left:
                self.states[slot], self.generations[slot] = "out", 0

    def begin(self, slot: int, generation: int, members: tuple[int, ...]) -> None:
        assert self.states[slot] == "waiting"
        assert slot in members
        assert self.members.setdefault(generation, members) == members
        assert generation == max(self.members)
        self.states[slot], self.generations[slot] = "building", generation

    def num_slots(self) -> int:
        return 1 + max(slot for members in self.members.values() for slot in members)

    def in_state(self, *states: str) -> list[int]:
        return [slot for slot, state in self.states.items() if state in states]

    def say(self, slot: int, word: str, takes_in: bool = False) -> None:
        message = FromRank(word, self.generations[slot], takes_in)  # type: ignore[arg-type]
        self.records[slot].note_said(message)
        if slot not in self.deaf:
            self.carry_out(self.group.hear(slot, message))

    @precondition(lambda self: self.in_state("out", "starting", "building", "in"))
    @rule(data=st.data(), takes_in=st.booleans())
    def meet(self, data: st.DataObject, takes_in: bool) -> None:
        slot = data.draw(st.sampled_from(self.in_state("out", "starting", "building", "in")))
        self.takes_in[slot] = takes_in or self.states[slot] == "starting"
        self.states[slot] = "waiting"
        self.say(slot, "meet", self.takes_in[slot])

    @precondition(lambda self: self.in_state("building"))
    @rule(data=st.data())
    def build(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.in_state("building")))
        self.states[slot] = "in"
        self.said_built.add((slot, self.generations[slot]))
        self.say(slot, "built")

    @precondition(lambda self: self.in_state("in"))
    @rule(data=st.data(), word=st.sampled_from(["agree", "agree", "leave"]))
    def speak(self, data: st.DataObject, word: str) -> None:
        self.has_left = self.has_left or word == "leave"
        self.say(data.draw(st.sampled_from(self.in_state("in"))), word)

    @precondition(lambda self: self.group.generation > 0 and len(self.states) > 0)
    @rule(data=st.data(), code=st.sampled_from([KILL, KILL, REFUSED, 0]))
    def end(self, data: st.DataObject, code: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.states)))
        was = self.states.pop(slot)
        self.records[slot].exit_code = KILL if was == "killed" else code
        if slot in self.deaf:
            return
        self.carry_out(self.group.lose(slot, KILL if was == "killed" else code))
        if self.group.is_replaceable(slot):
            assert code == KILL or was == "killed"
            self.replace(self.records[slot])

    def replace(self, lost: Record) -> None:
        new = self.group.add()
        assert new >= self.num_slots()
        self.states[new], self.heard[new] = "starting", []
        self.generations[new], self.takes_in[new] = 0, True
        self.records[new] = Record(new, lost.place)

    @precondition(lambda self: self.group.generation and self.states)
    @rule(data=st.data())
    def begin_to_end(self, data: st.DataObject) -> None:
        """The others go on without one whose exit code comes later."""
        slot = data.draw(st.sampled_from(sorted(self.states)))
        self.states[slot] = "killed"
        self.say(slot, "dying")

    @precondition(lambda self: self.group.generation and not self.deaf)
    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        """From now on some hear nothing of the coordinator, which hears nothing of them."""
        self.deaf = set(data.draw(st.lists(st.sampled_from(sorted(self.records)))))

    @precondition(lambda self: self.group.generation and self.num_taken_over < 2 and self.states)
    @rule(is_host_lost=st.booleans(), data=st.data())
    def take_over(self, is_host_lost: bool, data: st.DataObject) -> None:
        """Another coordinator is elected; the host of the last one may be lost with its ranks."""
        if is_host_lost and len(self.states) > 1:
            lost = data.draw(st.sampled_from(sorted(self.states)))
            del self.states[lost], self.records[lost]
        for slot in [s for s, state in self.states.items() if not self.generations[s]]:
            # Its agent ends it if none of its ranks has begun to train.
            if state_is_new(self.records[slot]) and data.draw(st.booleans()):
                del self.states[slot], self.records[slot]
        self.num_taken_over += 1
        if not self.states:  # nobody is left whom a coordinator could be for
            self.deaf = set(self.records)
            return
        self.deaf = set()
        self.group = Group(self.size)
        self.carry_out(
            self.group.take_over(max(self.members), self.num_slots(), self.records.values())
        )
        for record in vacant(self.records.values()):
            if self.group.is_replaceable(record.slot):
                self.replace(record)

    @precondition(lambda self: not self.states)
    @rule()
    def finish(self) -> None:
        if not self.deaf and not self.num_taken_over:
            assert self.group.is_ended
            assert self.group.end() == []

    @invariant()
    def a_generation_is_whole_when_all_have_built_it_and_agrees_on_nothing_once_it_is_lost(
        self,
    ) -> None:
        for slot, messages in self.heard.items():
            lost: set[int] = set()
            for message in messages:
                for number in filter(None, (message.built, message.agree)):
                    assert number not in lost
                    assert slot in self.members[number]
                    assert all((s, number) in self.said_built for s in self.members[number])
                if message.lost is not None:
                    lost.add(message.lost)

    @invariant()
    def all_members_hear_the_same_in_the_same_order(self) -> None:
        for number, members in self.members.items():
            told = [
                [
                    (message.built, message.agree, message.lost)
                    for message in self.heard[slot]
                    if number in (message.built, message.agree, message.lost)
                ]
                for slot in members
            ]
            longest = max(told, key=len)
            # One that has ended or left has heard the beginning.
            assert all(part == longest[: len(part)] for part in told)
            heard = [slot for slot in members if slot not in self.deaf]
            present = [slot for slot in heard if self.generations.get(slot) == number]
            stay = [s for s in present if self.states.get(s) in ("building", "in", "waiting")]
            assert all(told[members.index(slot)] == longest for slot in stay)

    @invariant()
    def nobody_is_replaced_twice(self) -> None:
        places = [self.records[slot].place for slot in self.states]
        assert len(places) == len(set(places))

    @invariant()
    def nobody_waits_who_need_not(self) -> None:
        others = self.in_state("building", "in", "killed")
        waiting = [slot for slot in self.in_state("waiting") if slot < self.size]
        is_settled = not self.has_left and not self.deaf
        if self.group.generation and waiting and not others and is_settled:
            raise AssertionError(f"{waiting} wait for a group that could be formed")


def state_is_new(record: Record) -> bool:
    """Whether a process has never been in a group."""
    return not record.generation and not record.has_left


Ranks.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRanks = Ranks.TestCase


def test_a_training_does_not_start_without_all_its_ranks() -> None:
    group = Group(2)
    assert group.hear(0, FromRank("meet", 0)) == []
    assert group.lose(1, KILL) == []
    assert group.failed == (1, KILL)
    assert group.end() == [Order(0, None)]
    group.lose(0, KILL)
    assert group.is_ended
    assert group.exit_code == KILL


def test_the_ranks_that_survive_decide_on_the_exit_code() -> None:
    group = Group(2)
    for slot in range(2):
        group.hear(slot, FromRank("meet", 0))
    assert group.lose(1, KILL) == [Order(0, ToRank(lost=1))]
    assert group.can_grow
    formed = group.hear(0, FromRank("meet", 1))
    assert formed == [Order(0, ToRank(generation=2, members=(0,)))]
    group.hear(0, FromRank("leave", 2))
    assert not group.can_grow
    group.lose(0, 0)
    assert (group.is_ended, group.exit_code) == (True, 0)


class Quiet(Leader):
    """Carries no orders out."""

    def carry_out(self, orders: Iterable[Order]) -> None:
        pass

    def replace(self, lost: int) -> bool:
        return False


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_start_that_lacks_a_rank_is_given_up_whoever_comes_first(order: tuple[int, int]) -> None:
    leader = Quiet(2, replacements=0)
    reports = [(0, FromRank("meet", 0)), (1, 0)]
    for number in order:
        leader.handle(reports[number])
    assert leader.patience_s is not None

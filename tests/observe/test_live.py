from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len
from sample_events import (
    checkpointed,
    evaluated,
    finished,
    joined,
    rank_times,
    run_started,
    step_done,
)
from shown_runs import Shown

from lockstep.engine.events import Event, Improved, RankLost, RankTimes, Recovered, Resumed, Warned
from lockstep.observe.text import Item, fitted

BANNER = 4
"""Lines before anything happens."""


def improved(step: int, value: float = 0.9) -> Improved:
    return Improved(step=step, metric="accuracy", value=value)


def in_the_middle(**fields: object) -> list[Event]:
    """A run of which 200 of 500 steps are done, at half a second each."""
    return [
        run_started(world_size=1),
        joined(0),
        step_done(100, num_steps=100, seconds=50.0),
        evaluated(100),
        improved(100),
        checkpointed(100),
        step_done(200, num_steps=100, seconds=50.5, **fields),
        evaluated(200, loss=0.5, accuracy=0.75),
        checkpointed(200),
    ]


def drawn(width: int, *events: Event, per_rank: bool = False) -> list[str]:
    shown = Shown(terminal=True, width=width, per_rank=per_rank)(*events[:1])
    shown.now = 75.0
    shown(*events[1:]).view.close()
    lines = shown.screen
    assert all(cell_len(line) <= width for line in lines)
    begin = next(place for place, line in enumerate(lines) if line.startswith("run  "))
    return lines[begin + 1 :]


def test_the_area_says_where_the_run_is_and_what_it_has_come_to() -> None:
    assert drawn(100, *in_the_middle()) == [
        "digits  step 200/500 ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ "
        "0:01:15  left 0:02:31",
        "epoch 1  loss 0.3333  accuracy 0.3  lr 0.001  1.267 samples/s  efficiency 75%",
        "val at 200: loss 0.5  accuracy 0.75  best accuracy 0.9 at 100  saved at 200",
    ]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            60,
            [
                "digits  step 200/500 ━━━━━━╸━━━━━━━━━━ 0:01:15  left 0:02:31",
                "epoch 1  loss 0.3333  accuracy 0.3  1.267 samples/s",
                "val at 200: loss 0.5  best accuracy 0.9 at 100  saved at 200",
            ],
        ),
        (
            40,
            [
                "step 200/500 ━━━━━╸━━━━━━━━ left 0:02:31",
                "epoch 1  loss 0.3333  accuracy 0.3",
                "val at 200: loss 0.5",
            ],
        ),
        (20, ["step 200/500", "epoch 1  loss 0.3333", "val at 200: loss 0.5"]),
        (10, ["step 200/5", "loss 0.333", "val at 200"]),
    ],
)
def test_a_narrow_terminal_gets_what_matters_most(width: int, lines: list[str]) -> None:
    shown = Shown(terminal=True, width=width)(*in_the_middle()[:1])
    shown.now = 75.0
    shown(*in_the_middle()[1:]).view.close()
    assert shown.screen[-3:] == lines


def test_a_stream_without_an_end_has_no_bar_but_steps_and_speed() -> None:
    events = [run_started(total_steps=0, steps_per_epoch=0, world_size=1), joined(0)]
    events.extend(step_done(step, samples=6400) for step in (1200, 1300))
    assert drawn(80, *events) == [
        "digits  step 1,300  0:01:15",
        "epoch 1  loss 0.3333  accuracy 0.3  lr 0.001  12,800 samples/s  efficiency 75%",
    ]
    plain = Shown()(*events)
    plain.view.close()
    assert plain.lines[-1].startswith("step 1,300  epoch 1 ")
    assert "left" not in plain.lines[-1]


def test_no_time_is_promised_before_there_is_enough_to_go_by() -> None:
    (line,) = drawn(80, run_started(world_size=1), joined(0))
    assert line.startswith("digits  step 0/500 ━")
    assert line.endswith("━ 0:01:15")


def test_all_splits_of_one_step_are_the_newest_evaluation() -> None:
    events = [run_started(world_size=1), joined(0), evaluated(5), evaluated(9)]
    events += [evaluated(9, "easy", loss=0.125), replace(evaluated(9, "test"), model_step=5)]
    assert drawn(120, *events)[-1] == (
        "val at 9: loss 0.25  accuracy 0.9  easy at 9: loss 0.125  "
        "test at 5: loss 0.25  accuracy 0.9"
    )


def test_a_table_of_ranks_on_demand() -> None:
    idle = RankTimes(2, 0.0, 0.0, 0.0, 0.0)
    events = in_the_middle(ranks=(rank_times(0), rank_times(1), idle))
    assert drawn(80, *events, per_rank=True)[-4:] == [
        "rank  compute  exchange  data  checkpoint",
        "   0      62%       26%   13%          0%",
        "   1      81%       13%    6%          0%",
        "   2        -         -     -           -",
    ]
    assert drawn(40, *events, per_rank=True)[-4:-2] == [
        "rank compute exchange data checkpoint",
        "   0     62%      26%  13%         0%",
    ]
    assert not any("compute" in line for line in drawn(80, *events))


def test_the_table_has_gradients_of_ranks_and_of_all() -> None:
    ranks = tuple(replace(rank_times(rank), grad_norm=1.5 + rank) for rank in range(2))
    events = in_the_middle(ranks=ranks, grad_norm=0.25)
    assert drawn(80, *events, per_rank=True)[-4:] == [
        "rank  compute  exchange  data  checkpoint  gradient",
        "   0      62%       26%   13%          0%       1.5",
        "   1      81%       13%    6%          0%       2.5",
        " all                                           0.25",
    ]
    assert not any("gradient" in line for line in drawn(40, *events, per_rank=True))
    many = tuple(replace(rank_times(0), rank=rank, grad_norm=1.0) for rank in range(100))
    assert len(drawn(80, *in_the_middle(ranks=many), per_rank=True)) <= 30


def test_a_table_is_no_higher_than_the_terminal_and_has_the_busiest_ranks() -> None:
    ranks = tuple(RankTimes(rank, 1.0 + rank, 10.0, 0.0, 0.0) for rank in range(100))
    lines = drawn(80, *in_the_middle(ranks=ranks), per_rank=True)
    assert len(lines) <= 30
    assert lines[-1] == "and 77 ranks with less to do"
    assert [int(line.split()[0]) for line in lines[-24:-1]] == list(range(77, 100))


def test_plain_lines_of_ranks_on_demand() -> None:
    events = [run_started(world_size=1), joined(0), step_done(3)]
    shown = Shown(per_rank=True)(*events)
    assert shown.lines[BANNER + 1 :] == [
        "step 3: rank 0: compute 62%  exchange 26%  data 13%  checkpoint 0%",
        "step 3: rank 1: compute 81%  exchange 13%  data 6%  checkpoint 0%",
    ]
    assert "exchange" not in "".join(Shown()(*events).lines)


def test_plain_lines_of_ranks_say_what_was_exchanged() -> None:
    talks = replace(rank_times(0), num_calls=12, sent_bytes=2048, received_bytes=3 << 20)
    events = [run_started(world_size=1), joined(0), step_done(3, ranks=(talks,))]
    assert Shown(per_rank=True)(*events).lines[BANNER + 1] == (
        "step 3: rank 0: compute 62%  exchange 26%  data 13%  checkpoint 0%  "
        "sent 2.0 KiB  received 3.0 MiB  in 12 calls"
    )


def long_run(num_evaluations: int) -> list[Event]:
    events: list[Event] = [run_started(world_size=1, total_steps=num_evaluations), joined(0)]
    for step in range(1, num_evaluations + 1):
        events += [step_done(step), evaluated(step), improved(step), checkpointed(step)]
    return [*events, finished(num_evaluations)]


def test_evaluations_and_checkpoints_leave_no_lines_on_a_terminal() -> None:
    shown = Shown(terminal=True)(*long_run(1000))
    assert len(shown.screen) == BANNER + 3 + 4, "banner, area and summary"


def test_what_is_worth_keeping_stays_above_the_area() -> None:
    told: list[Event] = [
        Resumed(step=0, path="c/5"),
        Warned(step=1, message="mind"),
        RankLost(step=2, slot=1, rank=1),
        Recovered(step=2, world_size=3, seconds=0.0027, copied=False, microbatches=(3, 3, 2)),
        joined(3, "spare", step=3),
    ]
    begin = [run_started(world_size=1), joined(0)]
    shown = Shown(terminal=True)(*begin)
    for event in told:
        shown(step_done(1), event, evaluated(1), checkpointed(1))
    shown.view.close()
    assert shown.screen[BANNER:-3] == [
        "step 0: resumed from c/5",
        "step 1: warning: mind",
        "step 2: rank 1 (slot 1) is lost",
        "step 2: going on with 3 ranks, 2.7 ms after the loss was noticed; microbatches of each "
        "rank: 3, 3, 2",
        "step 3: rank 3 joined from spare (pid 1003)",
    ]


def test_the_progress_lines_of_a_long_run_thin_out() -> None:
    shown = Shown()(run_started(world_size=1, total_steps=10**6), joined(0))
    times = []
    for step in range(1, 2 * 3600 + 1):
        shown.now += 1.0
        before = shown.file.tell()
        shown(step_done(step))
        if shown.file.tell() > before:
            times.append(shown.now)
        if step % 600 == 0:
            shown(evaluated(step), checkpointed(step))
    shown(step_done(7201), finished(7201))
    assert times[0] == 1
    assert len([at for at in times if at <= 20]) == 10
    assert len([at for at in times if at > 3600]) == 12
    assert shown.count("val: ") == 1, "of 12, and of a run that has hardly begun"
    assert shown.count("^step 7,201/") == 1, "and the last one"


def test_control_characters_do_not_reach_the_area() -> None:
    shown = Shown(terminal=True)(run_started(task="a\x1b[2Jb", world_size=1), joined(0))
    shown(step_done(1, metrics={"x\x1b]0;title\x07\ny": 1.0})).view.close()
    assert "\x1b[2J" not in shown.file.getvalue()
    assert "\x1b]" not in shown.file.getvalue()
    assert shown.screen[-2].startswith("a\\x1b[2Jb  step 1/500")


def test_items_are_left_out_by_importance_and_stay_in_order() -> None:
    items = (Item(3, "ddd"), Item(0, "aaa"), Item(2, ""), Item(1, "bbb"), Item(1, "ccc"))
    assert fitted(items, 18) == "ddd  aaa  bbb  ccc"
    assert fitted(items, 17) == "aaa  bbb  ccc"
    assert fitted(items, 12) == "aaa  bbb"
    assert fitted(items, 1) == "aaa"
    assert fitted((), 10) == ""

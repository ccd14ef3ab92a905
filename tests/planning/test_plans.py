"""Plans: layouts, what a step costs in them, what is recommended, and the file."""

from __future__ import annotations

import itertools
import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, DataError
from lockstep.parallel.layout import leaves, merges, split
from lockstep.planning.measurements import Anatomy, Facts, Group, Link, Network, Timed, parse_link
from lockstep.planning.operations import OPERATIONS, Point
from lockstep.planning.plan import Plan, losses, make_plan, read_plan
from lockstep.planning.prediction import (
    SHARDINGS,
    Layout,
    excess_of_slowest,
    exchange_seconds,
    layouts,
    peak_bytes,
    predict,
    sent_bytes,
    step_seconds,
    surplus_seconds,
)
from lockstep.planning.profile import FORMAT, VERSION, Host, Measurement, Profile, Scope, write_json

MIB = 1 << 20
SIZES = (1024, 65_536, MIB, 4 * MIB, 64 * MIB)


def anatomy(**changes: Any) -> Anatomy:
    plain = Anatomy(
        num_parameters=MIB, gradient_bytes=4 * MIB, largest_bytes=4 * MIB, state_bytes=8 * MIB,
        num_blocks=1, num_shards=1, is_elementwise=True, has_tables=False,
    )  # fmt: skip
    return replace(plain, **changes)


def facts(**changes: Any) -> Facts:
    """A task of 8 microbatches: 1 ms each, and 2 ms besides."""
    timed = [Timed(8, 1, 1, 1, 0.010, 400 * MIB), Timed(4, 2, 1, 1, 0.006, 395 * MIB)]
    timed += [Timed(1, 2, 1, 1, 0.003, 390 * MIB), Timed(2, 2, 1, 1, 0.004, 392 * MIB)]
    plain = Facts(
        task="digits", overrides=(), config_hash="0" * 12, measured_at=1.0, versions={}, host="h",
        cores=2, memory_bytes=8192 * MIB, launcher="mpi", batch_size=256, num_microbatches=8,
        total_steps=100, buddy=True, anatomy=anatomy(), timed=tuple(timed),
        groups=(), messages=(), group_bytes=10 * MIB, start_s=4.0, checkpoint_bytes=MIB,
        checkpoint_s=0.02, write_s=0.05,
    )  # fmt: skip
    return replace(plain, **changes)


def point(num_bytes: int, seconds: float, factor: float) -> Point:
    speed = num_bytes / seconds
    return Point(num_bytes, 9, seconds, seconds, seconds, seconds, speed, speed * factor)


def profile(num_ranks: int, scope: Scope = "inside") -> Profile:
    """Ranks whose every message takes 100 us and 1 ns for each byte of the busiest rank."""
    names = ("ordered_sum", "all_gather", "all_to_all", "to_next")
    measured = []
    for name in names:
        factor = OPERATIONS[f"lockstep/{name}"].factor(num_ranks)
        points = [point(n, 1e-4 + 1e-9 * n * factor, factor) for n in SIZES]
        measured.append(Measurement("lockstep", name, scope, num_ranks, tuple(points), (), None))
    host = Host("h", "x86", 2, tuple(range(num_ranks)), 0.0)
    return Profile(
        format=FORMAT, version=VERSION, measured_at=1.0, date="", launcher="mpi", transport="mpi",
        torch_backend="", device="cpu", num_ranks=num_ranks, hosts=(host,), versions={},
        seconds=1.0, warnings=(), measurements=tuple(measured),
    )  # fmt: skip


def network(num_ranks: int = 2, per_host: int = 2, link: Link | None = None) -> Network:
    return Network([profile(num_ranks)], per_host, link)


@given(st.integers(1, 40), st.integers(1, 40))
def test_nodes_are_those_of_the_canonical_tree(num_microbatches: int, num_ranks: int) -> None:
    nodes = Layout(num_ranks).num_nodes(num_microbatches)
    expected = [
        len(merges(leaves(own), num_microbatches)[1]) if len(own) else 0
        for own in split(num_microbatches, num_ranks)
    ]
    assert nodes == expected
    most = max(len(own) for own in split(num_microbatches, num_ranks))
    assert Layout(num_ranks).most_microbatches(num_microbatches) == most


def test_layouts_are_those_that_the_model_can_have() -> None:
    plain = [layout.name for layout in layouts([2, 1], anatomy(), {(1, 1)})]
    assert plain == ["1x1x1", "2x1x1", "2x1x1+optimizer", "2x1x1+gradients"]
    whole = [layout.name for layout in layouts([2], anatomy(is_elementwise=False), {(1, 1)})]
    assert whole == ["2x1x1"]
    blocks = anatomy(num_blocks=4, num_shards=2)
    names = {layout.name for layout in layouts([4], blocks, {(1, 1), (2, 1), (1, 2)})}
    assert names == {
        "4x1x1", "4x1x1+optimizer", "4x1x1+gradients", "4x1x1+parameters", "2x2x1", "2x1x2",
    }  # fmt: skip


def test_a_layout_says_its_keys() -> None:
    assert Layout(1).overrides == []
    assert Layout(8, 2, 2, "optimizer").overrides == [
        "mesh.pp=2", "mesh.tp=2", "sharding=optimizer",
    ]  # fmt: skip


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_the_slowest_of_some_is_the_mean_greatest_of_all_ways_to_draw(num: int) -> None:
    jitter = (0.7, 0.9, 1.0, 1.1, 1.6)
    ways = [max(drawn) for drawn in itertools.product(jitter, repeat=num)]
    mean = sum(jitter) / len(jitter)
    expected = sum(ways) / len(ways) / mean - 1 if num > 1 else 0.0
    assert excess_of_slowest(jitter, num) == pytest.approx(expected)


def test_without_single_steps_nobody_is_known_to_wait() -> None:
    assert excess_of_slowest((), 10) == 0.0


def test_what_was_measured_is_predicted_as_it_was() -> None:
    known = facts()
    assert step_seconds(known, Layout(1), 8, 1) == 0.010
    assert step_seconds(known, Layout(2), 4, 2) == 0.006


@given(st.integers(1, 64))
def test_what_was_not_is_on_the_line(num_microbatches: int) -> None:
    found = step_seconds(facts(), Layout(2), num_microbatches, 2)
    assert found == pytest.approx(0.002 + 0.001 * num_microbatches)


def test_more_ranks_than_cores_take_turns() -> None:
    found = step_seconds(facts(), Layout(4), 2, 4)
    assert found == pytest.approx(2 * 0.004)


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(1024, 64 * MIB))
def test_a_measured_group_is_taken_as_it_is(key: str, num_bytes: int) -> None:
    _, _, name = key.partition("/")
    if profile(2).find("lockstep", name, "inside") is None:
        return
    factor = OPERATIONS[f"lockstep/{name}"].factor(2)
    assert network().seconds(name, num_bytes, 2) == pytest.approx(1e-4 + 1e-9 * num_bytes * factor)


def test_longer_messages_than_measured_are_on_the_line_through_the_longest() -> None:
    for ranks in (2, 3):
        factor = OPERATIONS["lockstep/all_gather"].factor(ranks)
        found = network(ranks, per_host=4).seconds("all_gather", 640 * MIB, ranks)
        assert found == pytest.approx(1e-4 + 640e-9 * MIB * factor)


def test_one_size_alone_says_what_a_message_takes_and_not_what_its_bytes_do() -> None:
    known = profile(2)
    short = tuple(replace(m, points=m.points[:1]) for m in known.measurements)
    seconds = Network([replace(known, measurements=short)], 2).seconds("all_gather", MIB, 2)
    (found,) = (m for m in short if m.operation == "all_gather")
    assert seconds == found.points[0].median_s


@given(st.integers(2, 10_000), st.integers(2, 10_000))
def test_messages_among_more_ranks_are_not_quicker(one: int, other: int) -> None:
    few, many = sorted((one, other))
    for name in ("ordered_sum", "all_gather", "all_to_all"):
        of_few = network(per_host=1 << 20).seconds(name, MIB, few)
        assert of_few <= network(per_host=1 << 20).seconds(name, MIB, many) * (1 + 1e-12)


@pytest.mark.parametrize("step_s", [0.002, 0.0061, 0.008, 0.05])
def test_what_was_trained_is_predicted_as_it_took(step_s: float) -> None:
    known = facts(groups=(Group(2, step_s, MIB),), messages=(profile(2),))
    way = predict(known, network(), Layout(2), 2)
    assert way.compute_s == 0.006
    assert way.step_s == pytest.approx(max(step_s, way.compute_s))
    assert min(way.exchange_s, way.waiting_s) >= 0.0


def test_what_ranks_of_a_host_lose_together_counts_in_all_layouts() -> None:
    plain = facts()
    groups = (Group(2, 0.009, MIB), Group(4, 0.05, MIB))
    slow = facts(groups=groups, messages=(profile(2), profile(4)))
    parts = predict(plain, network(), Layout(2), 2).step_s
    for layout in (Layout(2, sharding="gradients"), Layout(64)):
        lost = (
            predict(slow, network(), layout, 2).step_s - predict(plain, network(), layout, 2).step_s
        )
        assert lost == pytest.approx(0.009 - parts)
    for layout, per_host in ((Layout(1), 2), (Layout(64), 1), (Layout(2, pp=2), 2)):
        known = facts(timed=(*plain.timed, Timed(8, 1, 2, 1, 0.01, MIB)), groups=slow.groups)
        assert surplus_seconds(known, layout, per_host) == 0.0


def test_one_rank_says_nothing() -> None:
    assert network().seconds("ordered_sum", MIB, 1) == 0.0
    assert exchange_seconds(facts(), network(), Layout(1)) == 0.0
    assert sent_bytes(facts(), Layout(1)) == 0.0


def test_a_link_costs_what_leaves_a_host() -> None:
    link = parse_link("1gbit,100us")
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((125e6, 1e-4))
    joined = network(per_host=2, link=link)
    inside = joined.seconds("all_gather", 4 * MIB, 2)
    over = joined.seconds("all_gather", 4 * MIB, 4)
    assert over - inside == pytest.approx(1e-4 + 4 * MIB * 3 / 4 / 125e6)
    # Each of two ranks sends half of its 4 MiB to the other host; then the sum is gathered.
    summed = joined.seconds("ordered_sum", 4 * MIB, 4) - joined.seconds("ordered_sum", 4 * MIB, 2)
    assert summed == pytest.approx(2e-4 + 4 * MIB * (1 + 3 / 4) / 125e6)


def test_a_link_counts_where_no_messages_inside_a_host_are_known() -> None:
    bare = Network([], 2, Link(125e6, 1e-4))
    assert bare.seconds("all_gather", 4 * MIB, 4) == pytest.approx(1e-4 + 4 * MIB * 3 / 4 / 125e6)
    assert "inside a host cost nothing" in bare.assumes(4)[0]
    alone = network(per_host=1, link=Link(125e6, 1e-4))
    assert alone.seconds("all_gather", 4 * MIB, 2) == pytest.approx(1e-4 + 4 * MIB / 2 / 125e6)
    assert alone.assumes(2) == []


@pytest.mark.parametrize(
    "text",
    ["", "fast", "10gbit", "0gbit,1us", "10gbit,-1us", "1e9gbit,1us", "nangbit,1us", "1gbit;1us"],
)
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--network .*10gbit,50us"):
        parse_link(text)


def test_a_prediction_is_the_sum_of_its_parts() -> None:
    known = facts(timed=(*facts().timed, Timed(4, 2, 1, 1, 0.007, 395 * MIB, (0.9, 1.1))))
    found = predict(known, network(), Layout(2), 2)
    assert found.compute_s == 0.006
    assert found.waiting_s == pytest.approx(0.006 * 0.05)
    assert found.exchange_s == pytest.approx(1e-4 + 1e-9 * 4 * MIB)
    assert found.step_s == found.compute_s + found.waiting_s + found.exchange_s
    assert found.samples_per_s == 256 / found.step_s
    assert found.efficiency == pytest.approx(0.010 / 2 / found.step_s)
    assert found.sent_bytes == 4 * MIB
    assert (found.num_spares, found.num_hosts, found.fits) == (0, 1, True)


def test_ranks_without_microbatches_are_spares() -> None:
    found = predict(facts(), network(), Layout(12), 2)
    assert (found.num_spares, found.num_hosts) == (4, 6)


def test_slices_save_memory_and_cost_messages() -> None:
    known = facts(anatomy=anatomy(num_blocks=16, largest_bytes=MIB // 4))
    kinds = SHARDINGS
    found = [peak_bytes(known, Layout(8, sharding=kind)) for kind in kinds]
    assert found == sorted(found, reverse=True)
    # 8 MiB of state, of which a rank keeps its own eighth and that of another one; and copies of
    # as many of the 4 MiB of parameters.
    assert found[0] - found[1] == 8 * MIB - 2 * MIB - MIB
    sent = [sent_bytes(known, Layout(8, sharding=kind)) for kind in kinds]
    assert sent[0] < sent[1]
    assert sent[2] < sent[3]


def test_memory_of_one_rank_is_what_was_measured() -> None:
    assert peak_bytes(facts(), Layout(1)) == 400 * MIB
    # Beside another one: a gradient less in the fold of 4 microbatches than in that of 8, and
    # what being one of two takes.
    assert peak_bytes(facts(), Layout(2)) == (395 + 10) * MIB


def test_memory_of_ranks_that_trained_together_is_what_was_measured() -> None:
    known = facts(groups=(Group(2, 0.009, 410 * MIB), Group(4, 0.05, 430 * MIB)))
    assert [peak_bytes(known, Layout(n)) for n in (1, 2, 4)] == [400 * MIB, 410 * MIB, 430 * MIB]
    # Ranks of other hosts are as those that were alone.
    assert peak_bytes(known, Layout(8)) == peak_bytes(facts(), Layout(8))
    halved = Layout(2, sharding="optimizer")
    assert peak_bytes(replace(known, buddy=False), halved) == (410 - 4) * MIB


def test_the_best_is_the_fastest_that_fits_with_the_fewest_ranks() -> None:
    made = make_plan(facts(), network(), (1, 2, 8, 16), 2, 1000.0)
    way = made.recommended.prediction
    assert way.layout.sharding == "none"
    fastest = min(row.prediction.step_s for row in made.rows)
    assert way.step_s <= 1.05 * fastest
    ways = [row.prediction for row in made.rows]
    fewer = [other for other in ways if other.layout.num_ranks < way.layout.num_ranks]
    assert all(other.step_s > 1.05 * fastest for other in fewer)
    assert any("num_microbatches" in reason for reason in made.reasons)


def test_a_plan_is_never_empty() -> None:
    tight = make_plan(facts(memory_bytes=MIB), network(), (1, 2), 2, 1000.0)
    assert "no layout fits" in tight.reasons[0]
    assert not tight.recommended.prediction.fits
    assert not any(row.prediction.fits for row in tight.rows)


def test_what_is_believed_is_said() -> None:
    said = make_plan(facts(), network(), (1, 2, 10_000), 2, 1000.0).assumptions
    text = "\n".join(said)
    for part in ("those of 2 ranks", "between hosts", "other hosts are as fast", "single steps"):
        assert part in text
    alone = make_plan(facts(), Network([], 2), (1,), 2, 1000.0).assumptions
    assert not any("messages" in line for line in alone)
    unknown = make_plan(facts(), Network([], 2), (2,), 2, 1000.0).assumptions
    assert any("there is no profile" in line for line in unknown)
    assert not any("host by host" in line for line in unknown)
    assert any("host by host (exchange=auto)" in line for line in said)


def test_checkpoints_are_as_far_apart_as_young_says() -> None:
    prediction = predict(facts(), network(), Layout(2), 2)
    found = losses(facts(), prediction, 1000.0)
    assert found.interval_s == pytest.approx(math.sqrt(2 * 0.02 * 1000 * 3600 / 2))
    assert found.in_place is not None
    assert 0 < found.in_place < found.restarted < 1
    alone = losses(facts(), predict(facts(), network(), Layout(1), 2), 1000.0)
    assert alone.in_place is None
    torchrun = losses(facts(launcher="torchrun"), prediction, 1000.0)
    assert torchrun.in_place is None


def plan() -> Plan:
    return make_plan(facts(), network(), (1, 2, 4), 2, 1000.0)


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plän.json"
    write_json(path, plan())
    assert read_plan(path) == plan()
    found = read_plan(path).find(Layout(2, sharding="optimizer"))
    assert found is not None
    assert found.prediction.layout.name == "2x1x1+optimizer"
    assert read_plan(path).find(Layout(3)) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "lockstep comm-profile"}, "format="), ({"version": 3}, "version=3"),
        ({"best": 99}, "best=99"), ({"rows": []}, "best="), ({"reasons": 3}, "reasons"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(asdict(plan()) | change))
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        read_plan(path)
    assert "lockstep plan TASK --json FILE" in str(caught.value)


def test_times_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    values = asdict(plan())
    values["rows"][0]["prediction"] |= {"compute_s": 0.0, "exchange_s": 0.0, "waiting_s": 0.0}
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="times must be greater than 0"):
        read_plan(path)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_plan_is_an_error_and_no_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    text = json.dumps(asdict(plan())).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    path.write_bytes(text[:at] + data.draw(st.binary(max_size=4)) + text[at + 1 :])
    with suppress(DataError):
        assert isinstance(read_plan(path), Plan)


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be written"):
        write_json(tmp_path / "none" / "plan.json", plan())

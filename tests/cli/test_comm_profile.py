from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tests.planning.test_profile_files import sample
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.cli.clusters.comm_profile import (
    Options,
    check_plot,
    comm_profile,
    figure,
    heading,
    skipped_lines,
    speed_text,
    tables,
)
from lockstep.cli.clusters.comm_profile_calls import ENGINE_CALLS, TORCH_CALLS, Group, grouped
from lockstep.cli.clusters.comm_profile_meter import ENOUGH, Meter, Timed
from lockstep.cli.clusters.comm_profile_profiler import Facts, facts_of, hosts_of, warnings_of
from lockstep.cli.clusters.comm_profile_rank import Measuring, Request
from lockstep.comm.transport import Sending
from lockstep.errors import ConfigError, DataError, LaunchError, LockstepError
from lockstep.launching.job.commands import RankCommand
from lockstep.launching.rank.environment import Environment
from lockstep.observe.figures import save
from lockstep.observe.text import brief
from lockstep.planning.operations import OPERATIONS
from lockstep.planning.profile import Host, Profile

SOURCE = Path(__file__).parents[2] / "src"
CPU = torch.device("cpu")
GIB = 1 << 30


def facts(host: str, memory_bytes: int = GIB) -> Facts:
    return Facts(host, "x86", 4, 0.0, memory_bytes)


def measured(
    hosts: Sequence[str], sizes: tuple[int, ...] = (1024, 4096), **more: Any
) -> list[Profile]:
    """The profiles of ranks on hosts of these names, which are threads."""

    def body(transport: ThreadTransport) -> Profile:
        measuring = Measuring(Request(sizes, more.get("seconds", 0.3)), "mpi", transport, CPU)
        own = facts(hosts[transport.rank], more.get("memory_bytes", GIB))
        return measuring.profile(own, None)

    return on_ranks(len(hosts), body)


def test_each_operation_can_be_called() -> None:
    of = {layer: {o.name for o in OPERATIONS.values() if o.layer == layer}
          for layer in ("lockstep", "torch")}  # fmt: skip
    assert of == {"lockstep": set(ENGINE_CALLS), "torch": set(TORCH_CALLS)}


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aa", [Group("inside", ((0, 1),), frozenset())]),
        ("ab", [Group("between", ((0, 1),), frozenset())]),
        (
            "aabb",
            [
                Group("inside", ((0, 1), (2, 3)), frozenset()),
                Group("between", ((0, 2), (1, 3)), frozenset({1, 3})),
                Group("all", ((0, 1, 2, 3),), frozenset()),
            ],
        ),
        (
            "aba",
            [
                Group("inside", ((0, 2), (1,)), frozenset({1})),
                Group("between", ((0, 1), (2,)), frozenset({2})),
                Group("all", ((0, 1, 2),), frozenset()),
            ],
        ),
    ],
)
def test_hosts_are_measured_inside_and_between(hosts: str, expected: list[Group]) -> None:
    assert grouped(hosts) == expected


def test_each_rank_is_in_one_part_of_each_group() -> None:
    for hosts in ("aaaa", "abcd", "abab", "aabc", "abbb", "abcabca"):
        for group in grouped(hosts):
            assert sorted(r for part in group.parts for r in part) == [*range(len(hosts))]
            for part in group.parts:  # all of a part are idle, or none
                assert len({rank in group.idle for rank in part}) == 1
            assert group.num_ranks >= 2


def test_everything_is_measured_in_every_scope() -> None:
    profiles = measured("aabb", seconds=5.0)  # enough for all sizes on a busy machine
    for profile in profiles[1:]:  # ranks decide alike, so they have the same times
        assert profile.measurements == profiles[0].measurements
    profile = profiles[0]
    assert [(host.name, host.ranks) for host in profile.hosts] == [("a", (0, 1)), ("b", (2, 3))]
    found = {(m.scope, m.operation): m for m in profile.measurements}
    for scope, num_ranks in (("inside", 2), ("between", 2), ("all", 4)):
        for name in ENGINE_CALLS:
            assert found[scope, name].num_ranks == num_ranks
    gather = profile.find("lockstep", "all_gather", "all")
    assert gather is not None
    assert [p.num_bytes for p in gather.points] == [1024, 4096]
    assert gather.fit is not None
    barrier = profile.find("lockstep", "barrier", "all")
    assert barrier is not None
    assert [p.num_bytes for p in barrier.points] == [0]
    assert barrier.fit is None
    assert {m.layer for m in profile.measurements} == {"lockstep"}


def test_a_host_with_one_rank_takes_no_part_inside() -> None:
    profile = measured("aab", (1024,))[2]
    inside = {m.num_ranks for m in profile.measurements if m.scope == "inside"}
    assert inside == {2}


def test_a_message_goes_to_the_rank_that_is_farthest_away_and_back() -> None:
    def body(transport: ThreadTransport) -> list[int]:
        sent, send = [], transport.send

        def noted(tensor: torch.Tensor, to: int) -> Sending:
            sent.append(to)
            return send(tensor, to)

        with patch.object(transport, "send", noted):
            ENGINE_CALLS["message"](transport, 1024, CPU)()
        return sent

    assert on_ranks(4, body) == [[3], [], [], [0]]


def test_what_does_not_fit_into_memory_is_skipped_and_said() -> None:
    profile = measured("aa", (1024, 1 << 20, 4 << 20), memory_bytes=3 << 20)[0]
    by_name = {m.operation: m for m in profile.measurements}
    assert [(s.num_bytes, s.reason) for s in by_name["broadcast"].skipped] == [(4 << 20, "memory")]
    # 1 KB is too small for it, and 1 MB too large here.
    assert "ordered_sum" not in by_name
    assert profile.warnings == ("lockstep/ordered_sum: nothing was measured, for want of memory",)
    said = list(skipped_lines(profile))
    assert any(
        line.startswith("lockstep/broadcast, inside a host: skipped from 4MB") for line in said
    )


def test_too_little_memory_for_anything_is_an_error_on_all_ranks() -> None:
    with pytest.raises(ConfigError, match=r"--sizes: 1MB takes 2,097,152 bytes .* there are 9"):
        measured("aa", (1 << 20,), memory_bytes=9)


def test_time_runs_out_for_the_largest_sizes_of_all() -> None:
    sizes = tuple(1024 * 4**n for n in range(9))
    profile = measured("aa", sizes, seconds=0.001)[0]
    assert {m.operation for m in profile.measurements} == set(ENGINE_CALLS)
    skipped = {s.reason for m in profile.measurements for s in m.skipped}
    assert skipped == {"time"}
    assert all(m.points for m in profile.measurements)
    assert any("raise --seconds" in line for line in skipped_lines(profile))


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    import time

    def body(transport: ThreadTransport) -> list[float]:
        meter = Meter(transport, CPU)
        nap = 0.02 if transport.rank == 1 else 0.0
        return meter.times(Timed(lambda: time.sleep(nap), transport.barrier, counts=True), 0.2)

    first, second = on_ranks(2, body)
    assert first == second
    assert min(first) >= 0.02
    assert 3 <= len(first) < ENOUGH


def test_a_clock_that_does_not_count_does_not() -> None:
    import time

    def body(transport: ThreadTransport) -> list[float]:
        nap = 0.02 if transport.rank == 1 else 0.0
        timed = Timed(lambda: time.sleep(nap), counts=transport.rank == 0)
        return Meter(transport, CPU).times(timed, 0.05)

    assert min(on_ranks(2, body)[0]) < 0.01


def test_what_has_settled_is_not_measured_for_ever() -> None:
    def body(transport: ThreadTransport) -> tuple[int, float]:
        meter = Meter(transport, CPU)
        end = [0.0]

        def call() -> None:
            import time

            begin = time.perf_counter()
            while time.perf_counter() < begin + 1e-3:
                end[0] += 1

        return len(meter.times(Timed(call, counts=True), 60.0)), meter.elapsed_s

    (count, elapsed), _ = on_ranks(2, body)
    assert count >= ENOUGH
    assert elapsed < 30


def test_too_many_ranks_and_busy_hosts_are_warned_of() -> None:
    def said(cores: int, load: float) -> str:
        return " ".join(warnings_of([Host("node7", "x86", cores, (0, 1, 2, 3), load)]))

    assert "node7: 4 ranks on 3 cores" in said(3, 0.0)
    assert "start 3 at most" in said(3, 0.0)
    assert "node7: was busy before (load 1.2, 4 ranks on 4 cores)" in said(4, 1.2)
    assert said(4, 0.3) == said(8, 4.0) == ""


def test_this_host_is_known() -> None:
    own = facts_of("here", Environment(), CPU)
    assert 0 < own.memory_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert own.cores >= 1
    half = facts_of("here", Environment("torchrun", 0, 4, 0, 4), CPU)
    assert half.memory_bytes < own.memory_bytes / 2
    assert [h.ranks for h in hosts_of([facts("b"), facts("a"), facts("b")])] == [(0, 2), (1,)]


def test_tables_have_every_number() -> None:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        for table in tables(sample()):
            console.print(table)
        text = console.export_text()
    assert "all ranks of all hosts, 3 ranks" in text
    assert "inside a host, 2 ranks" in text
    for word in ("torch/all_reduce", "lockstep/barrier", "1KB–64KB", "2 GB/s", "15.5 µs"):
        assert word in text, word
    assert (
        heading(sample()) == "3 ranks (mpi, mpi, cpu) on a (2 ranks, 4 cores), b (1 ranks, 4 cores)"
    )
    assert list(skipped_lines(sample())) == [
        "torch/all_reduce, all ranks of all hosts: skipped from 256KB on (raise --seconds)"
    ]


def test_no_number_of_a_profile_is_parted_from_its_unit_at_80_columns() -> None:
    long = max(OPERATIONS, key=len)
    points = [
        replace(p, num_samples=99_999, min_s=8.53e-5, median_s=9.99e-5, p99_s=12345.0,
                algorithm_bytes_per_s=9.994e7, bus_bytes_per_s=9.994e9)
        for p in sample().measurements[0].points
    ]  # fmt: skip
    measured_all = [replace(m, operation=long.partition("/")[2], layer="lockstep", points=points)
                    for m in sample().measurements]  # fmt: skip
    console = Console(record=True, width=80, file=io.StringIO())
    for table in tables(replace(sample(), measurements=measured_all)):
        console.print(table)
    lines = console.export_text().splitlines()
    assert any(line.strip() == long for line in lines)
    row = "99999 85.3 µs 99.9 µs 3:25:45 99.9 MB/s 9.99 GB/s"
    assert any(line.endswith(row) for line in lines), lines
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5e-6, "1.5 µs"),
        (9.999e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1235.0, "0:20:35"),
        (0.0, "0 µs"),
    ],
)
def test_times_have_units(seconds: float, text: str) -> None:
    assert brief(seconds) == text


def test_speeds_have_units() -> None:
    assert [speed_text(s) for s in (2.5e9, 1e8, 5e7)] == ["2.5 GB/s", "100 MB/s", "50 MB/s"]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_picture_is_drawn(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"profile.{kind}"
    save(figure(sample()), path)
    content = path.read_bytes()
    assert content.startswith(b"<?xml" if kind == "svg" else b"\x89PNG")
    assert kind == "png" or b"torch/all_reduce" in content or b"<path" in content


def test_without_matplotlib_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"lockstep-train\[report\]"):
        check_plot(tmp_path / "profile.svg")


def options(**changes: Any) -> Options:
    return replace(Options(2, "local", "1KB,4KB", 1.0, "cpu", None, None), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"num_ranks": 1}, LaunchError, "-n 1: must be at least 2"),
        ({"num_ranks": -3}, LaunchError, "-n -3: must be at least 2"),
        ({"launcher": "rsh"}, LaunchError, "--launcher rsh: must be one of"),
        ({"launcher": "python"}, LaunchError, "--launcher python: starts one rank"),
        ({"sizes": "4KB:1KB"}, ConfigError, "--sizes 4KB:1KB"),
        ({"seconds": 0.0}, ConfigError, "--seconds 0"),
        ({"seconds": float("nan")}, ConfigError, "--seconds nan"),
        ({"device": "tpu"}, ConfigError, "--device tpu"),
        ({"json": Path("/nowhere/profile.json")}, DataError, "/nowhere/profile.json: cannot be"),
        ({"json": Path("/tmp")}, DataError, "/tmp: cannot be written"),
        ({"plot": Path("/nowhere/profile.svg")}, DataError, "/nowhere/profile.svg: cannot be"),
        ({"plot": Path("profile.pdf")}, ConfigError, "profile.pdf: must end in"),
    ],
)
def test_wrong_options_are_one_message_before_ranks_start(
    changes: dict[str, Any], error: type[LockstepError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lockstep.cli.clusters.comm_profile.profile_of",
        lambda *_: pytest.fail("ranks were started"),
    )
    with pytest.raises(error) as raised:
        comm_profile(options(**changes), Console())
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("with_torch", [True, False])
def test_torch_can_be_left_out(with_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile_of(ranks: RankCommand, seconds: float) -> Profile:
        asked = json.loads(next(word for word in ranks.argv if word.startswith("{")))
        raise LaunchError(f"asked for torch: {asked['with_torch']}")

    monkeypatch.setattr("lockstep.cli.clusters.comm_profile.profile_of", profile_of)
    with pytest.raises(LaunchError, match=f"asked for torch: {with_torch}"):
        comm_profile(options(with_torch=with_torch), Console())


def test_a_rank_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for changes, said in (({}, "-n 2"), ({"num_ranks": None}, "--launcher local")):
        assert comm_profile(options(**changes), Console()) == 2
        assert f"error: {said}: this process is already a rank" in capsys.readouterr().err

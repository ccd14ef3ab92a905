"""Profiles of communication: sizes, statistics, lines, and the file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from lockstep.errors import ConfigError, DataError
from lockstep.planning.operations import (
    MOST_BYTES,
    OPERATIONS,
    Fit,
    Piece,
    fitted,
    parse_sizes,
    size_text,
    summarised,
)
from lockstep.planning.profile import (
    FORMAT,
    VERSION,
    Host,
    Measurement,
    Profile,
    Skipped,
    from_json,
    read_profile,
    write_json,
)

SIZES = parse_sizes("1KB:256MB")


def test_a_range_goes_up_in_fours() -> None:
    assert list(SIZES) == [1024 * 4**n for n in range(10)]
    assert parse_sizes("1KB:10KB") == (1024, 4096, 10240)
    assert parse_sizes("64 KiB, 1k,1KB") == (1024, 65536)
    assert parse_sizes("7") == parse_sizes("7B:7b") == (7,)


@given(st.integers(1, MOST_BYTES), st.integers(1, MOST_BYTES))
def test_a_range_begins_and_ends_where_it_says(one: int, other: int) -> None:
    first, last = sorted((one, other))
    sizes = parse_sizes(f"{size_text(first)}:{size_text(last)}")
    assert (sizes[0], sizes[-1]) == (first, last)
    assert all(a < b <= 4 * a for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    "text", ["", "x", "1KB:", ":1KB", "4KB:1KB", "0", "17GB", "1TB", "1.5KB", "-1KB", "1KB:2KB:3KB",
             "1KB,,2KB", "٣KB", "1" * 400]
)  # fmt: skip
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes .*1KB:256MB"):
        parse_sizes(text)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    # doc/PERFORMANCE.md of nccl-tests.
    for num_ranks in (2, 3, 8, 1000):
        part = (num_ranks - 1) / num_ranks
        expected = {
            "torch/all_reduce": 2 * part, "torch/all_gather": part, "torch/reduce_scatter": part,
            "torch/all_to_all": part, "torch/broadcast": 1, "torch/send_recv": 1,
            "lockstep/ordered_sum": 2 * part, "lockstep/all_gather": part,
            "lockstep/all_to_all": part, "lockstep/broadcast": 1, "lockstep/message": 1,
        }  # fmt: skip
        found = {key: OPERATIONS[key].factor(num_ranks) for key in expected}
        assert found == pytest.approx(expected)


@given(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=300))
def test_statistics_are_those_of_numpy(seconds: list[float]) -> None:
    point = summarised(OPERATIONS["torch/all_reduce"], 4, 4096, seconds)
    assert point.median_s == pytest.approx(np.median(seconds))
    assert point.p99_s == np.percentile(seconds, 99, method="inverted_cdf")
    assert (point.min_s, point.max_s) == (min(seconds), max(seconds))
    assert point.num_samples == len(seconds)
    assert point.algorithm_bytes_per_s == pytest.approx(4096 / np.median(seconds))
    assert point.bus_bytes_per_s == pytest.approx(1.5 * 4096 / np.median(seconds))


alphas, betas = st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7)


@given(alphas, betas)
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    fit = fitted(SIZES, [alpha + beta * n for n in SIZES])
    assert fit.worst_residual < 1e-6
    (piece,) = fit.pieces
    for size in (1, 5000, SIZES[-1], 10 * SIZES[-1]):
        assert fit.seconds(size) == pytest.approx(alpha + beta * size, rel=1e-5)
    # Each coefficient shows only where the other does not drown it.
    if alpha > 1e-3 * beta * SIZES[0]:
        assert piece.alpha_s == pytest.approx(alpha, rel=1e-4)
    if beta * SIZES[-1] > 1e-3 * alpha:
        assert piece.beta_s_per_byte == pytest.approx(beta, rel=1e-4)


@given(alphas, betas, st.lists(st.floats(0.97, 1.03), min_size=10, max_size=10))
def test_a_line_is_found_again_in_noise(alpha: float, beta: float, noise: list[float]) -> None:
    seconds = [f * (alpha + beta * n) for n, f in zip(SIZES, noise, strict=True)]
    fit = fitted(SIZES, seconds)
    assert len(fit.pieces) == 1
    assert fit.worst_residual < 0.1
    for size in SIZES:
        assert fit.seconds(size) == pytest.approx(alpha + beta * size, rel=0.07)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=5))
def test_coefficients_are_the_best_ones_that_are_not_negative(seconds: list[float]) -> None:
    """Beside scipy's solver, with so few points that there is one piece."""
    sizes = SIZES[: len(seconds)]
    times = np.array(seconds)
    scale = np.array([1.0, sizes[-1]])
    rows = np.stack([np.ones(len(sizes)), np.array(sizes) / sizes[-1]], axis=1) / times[:, None]
    _, least = nnls(rows, np.ones(len(sizes)))
    (piece,) = fitted(sizes, seconds).pieces
    assert min(piece.alpha_s, piece.beta_s_per_byte) >= 0
    ours = np.array([piece.alpha_s, piece.beta_s_per_byte]) * scale
    assert np.linalg.norm(rows @ ours - 1) <= least * (1 + 1e-6) + 1e-9


def test_protocols_that_switch_get_lines_of_their_own() -> None:
    eager, large = Piece(0, 0, 2e-6, 2e-10), Piece(0, 0, 90e-6, 5e-10)
    seconds = [(eager if n <= 64 << 10 else large).seconds(n) for n in SIZES]
    fit = fitted(SIZES, seconds)
    assert [(p.first_bytes, p.last_bytes) for p in fit.pieces] == [
        (1 << 10, 64 << 10), (256 << 10, 256 << 20),
    ]  # fmt: skip
    assert fit.worst_residual < 1e-6
    assert [p.alpha_s for p in fit.pieces] == pytest.approx([2e-6, 90e-6])
    assert [p.beta_s_per_byte for p in fit.pieces] == pytest.approx([2e-10, 5e-10])
    assert fit.seconds(100 << 10) == fit.pieces[0].seconds(100 << 10)
    assert fit.seconds(1) == pytest.approx(2e-6, rel=1e-3)
    assert fit.seconds(1 << 30) == fit.pieces[1].seconds(1 << 30)


@given(st.lists(st.floats(1e-7, 10), min_size=10, max_size=10))
def test_the_worst_residual_is_that(seconds: list[float]) -> None:
    fit = fitted(SIZES, seconds)
    residuals = [abs(fit.seconds(n) - s) / s for n, s in zip(SIZES, seconds, strict=True)]
    assert fit.worst_residual == pytest.approx(max(residuals))
    # Each piece holds at least three of the sizes.
    held = [sum(p.first_bytes <= n <= p.last_bytes for n in SIZES) for p in fit.pieces]
    assert sum(held) == 10
    assert min(held) >= 3


def sample(**changes: Any) -> Profile:
    """A profile of two hosts."""
    operation = OPERATIONS["torch/all_reduce"]
    points = tuple(summarised(operation, 3, n, [1e-5, 2e-5 + 1e-9 * n]) for n in SIZES[:4])
    fit = fitted(SIZES[:4], [point.median_s for point in points])
    skipped = (Skipped(SIZES[4], "time"),)
    barrier = summarised(OPERATIONS["lockstep/barrier"], 2, 0, [3e-6])
    profile = Profile(
        FORMAT, VERSION, 1.5, "1970-01-01T00:00:01+00:00", "mpi", "mpi", "mpi4py", "cpu", 3,
        (Host("a", "x86", 4, (0, 1), 0.1), Host("b", "x86", 4, (2,), 0.0)), {"torch": "2.13"},
        12.5, ("busy",),
        (Measurement("torch", "all_reduce", "all", 3, points, skipped, fit),
         Measurement("lockstep", "barrier", "inside", 2, (barrier,), (), None)),
    )  # fmt: skip
    return replace(profile, **changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_json(path, sample())
    assert read_profile(path) == sample() == from_json(json.dumps(asdict(sample())))
    found = read_profile(path).find("torch", "all_reduce", "all")
    assert found is not None
    assert found.num_ranks == 3
    assert sample().find("torch", "all_reduce", "inside") is None


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/x\.json: cannot be written: No such file"):
        write_json(tmp_path / "none" / "x.json", sample())


def changed(change: Callable[[Any], object]) -> str:
    values = json.loads(json.dumps(asdict(sample())))
    change(values)
    return json.dumps(values)


def at(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


POINT = ("measurements", 0, "points", 1)
PIECE = ("measurements", 0, "fit", "pieces", 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no communication profile"),
        ("[1]", "not a JSON object"),
        ("{", "is no communication profile"),
        ('{"format": "other"}', "format='other'"),
        (changed(at("version", value=2)), "version=2: this Lockstep reads version 1"),
        (changed(lambda v: v.pop("hosts")), "'hosts': is missing"),
        (changed(at("more", value=1)), "'more': is not known"),
        (changed(at("num_ranks", value=1)), "num_ranks=1: must be 2"),
        (changed(at("num_ranks", value=1 << 40)), "num_ranks="),
        (changed(at("hosts", 0, "ranks", value=[0, 2])), "each rank"),
        (changed(at("measurements", value=[])), "there are none"),
        (changed(lambda v: v["measurements"].append(v["measurements"][0])), "comes twice"),
        (changed(at("measurements", 0, "operation", value="sum")), "'sum': is not known"),
        (changed(at("measurements", 0, "num_ranks", value=4)), "between 2 and 3"),
        (changed(at("measurements", 0, "scope", value="x")), "scope"),
        (changed(at("measurements", 0, "points", value=[])), "points"),
        (changed(lambda v: v["measurements"][0]["points"].reverse()), "ascending"),
        (changed(at(*POINT, "num_samples", value=0)), "num_samples=0"),
        (changed(at(*POINT[:3], 3, "num_bytes", value=10**40)), "num_bytes="),
        (changed(at(*POINT, "min_s", value=0)), "times"),
        (changed(at(*POINT, "median_s", value=1e-9)), "times"),
        (changed(at(*POINT, "p99_s", value=math.nan)), "not finite"),
        (changed(at(*POINT, "bus_bytes_per_s", value=1.0)), "bus_bytes_per_s=1.0: does not go"),
        (changed(at(*POINT, "algorithm_bytes_per_s", value=1)), "does not go with median_s"),
        (changed(at(*PIECE, "alpha_s", value=-1.0)), "0 or more"),
        (changed(at(*PIECE, "last_bytes", value=1)), "must ascend"),
        (changed(at("measurements", 0, "fit", "pieces", value=[])), "no pieces"),
        (changed(at("seconds", value="12")), "seconds='12'"),
    ],
    ids=itertools.count(),
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DataError) as raised:
        read_profile(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: is no communication profile: ")
    assert said in message
    assert "\n" not in message
    assert message.endswith("write one with `lockstep comm-profile --json FILE`")


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "large"])
def test_what_is_no_text_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "profile.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    with pytest.raises(DataError, match=r"profile\.json: "):
        read_profile(path)


@given(st.data())
@settings(max_examples=200)
def test_any_other_value_anywhere_is_refused_or_a_profile(data: st.DataObject) -> None:
    """Nothing but ValueError comes out, whatever one of the values is."""
    values = asdict(sample())
    place: Any = json.loads(json.dumps(values))
    whole = place
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([])
    place[key] = data.draw(junk | st.just({}) | st.integers(-(10**60), 10**60))
    try:
        profile = from_json(json.dumps(whole))
    except ValueError:
        return
    assert from_json(json.dumps(asdict(profile))) == profile


def test_a_fit_of_several_pieces_says_which_one_holds() -> None:
    fit = Fit((Piece(1, 10, 1.0, 0.0), Piece(20, 30, 2.0, 0.0)), 0.0)
    assert [fit.seconds(n) for n in (0, 5, 15, 20, 99)] == [1, 1, 1, 2, 2]

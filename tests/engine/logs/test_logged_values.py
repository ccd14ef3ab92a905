"""Values of each kind, against references; and every value that is refused, with what to do."""

from __future__ import annotations

import io
import math
import random
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from matplotlib.figure import Figure
from PIL import Image

from lockstep.engine.events import Event, Logged, picture_path
from lockstep.engine.log import Logbook, check_name, log
from lockstep.engine.log_values import NUM_BINS, encoded, histogram
from lockstep.errors import TaskError

FLOATS = st.floats(width=64)


def logged(value: Any, kind: Any = None, name: str = "x") -> Logged:
    events: list[Event] = []
    with Logbook(events.append).opened(7):
        log(name, value, kind=kind)
    (event,) = events
    assert isinstance(event, Logged)
    assert (event.step, event.name) == (7, name)
    return event


def refusal(value: Any, kind: Any = None) -> str:
    with pytest.raises(TaskError) as caught:
        logged(value, kind)
    assert str(caught.value).startswith("lockstep.log('x'): ")
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [2.5, np.float64(2.5), np.float32(2.5), torch.tensor(2.5), torch.tensor(2.5).bfloat16()],
)
def test_numbers_are_scalars(value: Any) -> None:
    event = logged(value)
    assert (event.kind, event.value) == ("scalar", 2.5)
    assert type(event.value) is float


def test_whole_numbers_and_truths_are_scalars_too() -> None:
    assert [logged(v).value for v in (3, True, np.int32(4), torch.tensor(5))] == [
        3.0,
        1.0,
        4.0,
        5.0,
    ]
    assert math.isnan(logged(math.nan).value)
    assert logged(torch.tensor([[6.0]]), "scalar").value == 6.0


def test_text_is_kept_up_to_a_bound() -> None:
    assert logged("a\nb").text == "a\nb"
    assert logged("x" * 65_540).text == "x" * 65_536 + "… (4 more characters)"


@given(arrays.arrays(np.float64, st.integers(0, 200), elements=FLOATS))
def test_a_histogram_counts_every_value_once_in_its_bin(values: np.ndarray) -> None:
    found = histogram(torch.from_numpy(values))
    finite = [float(v) for v in values if math.isfinite(v)]
    assert found["num_nan"] == sum(map(math.isnan, values))
    assert found["num_inf"] == sum(map(math.isinf, values))
    assert sum(found["counts"]) == len(finite)
    assert len(found["counts"]) == NUM_BINS
    if finite:
        assert (found["min"], found["max"]) == (min(finite), max(finite))


@given(st.lists(st.integers(0, 63), min_size=1, max_size=80), st.integers(-3, 3))
def test_bins_are_those_of_numpy_where_no_value_is_on_an_edge(bins: list[int], shift: int) -> None:
    values = np.array([shift, shift + 64.0, *(shift + number + 0.5 for number in bins)])
    expected, _ = np.histogram(values, NUM_BINS)
    assert histogram(torch.from_numpy(values))["counts"] == expected.tolist()


def test_a_histogram_is_the_same_in_one_chunk_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).reshape(100, 100).T
    whole = histogram(values)
    monkeypatch.setattr("lockstep.engine.log_values._CHUNK", 333)
    assert histogram(values) == whole


def test_a_histogram_of_the_widest_range_has_its_ends_in_the_outer_bins() -> None:
    counts = histogram(torch.tensor([-1.7e308, 1.7e308, 0.0], dtype=torch.float64))["counts"]
    assert (counts[0], counts[32], counts[63]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.zeros(3), "histogram"),
        (torch.zeros(2, 3, dtype=torch.int64), "histogram"),
        (torch.zeros(2, 2, dtype=torch.bool), "histogram"),
        (torch.zeros(2, 3, 5, 7), "histogram"),
        (np.zeros((5, 6, 7)), "histogram"),
        (torch.zeros(4, 5, dtype=torch.uint8), "image"),
        (np.zeros((4, 5, 3), np.uint8), "image"),
        (np.zeros(9, np.uint8), "histogram"),
        (Image.new("RGB", (2, 3)), "image"),
        (Figure(), "figure"),
    ],
)
def test_a_kind_follows_from_what_can_be_nothing_else(value: Any, kind: str) -> None:
    assert logged(value).kind == kind


@given(
    arrays.arrays(
        np.uint8,
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4])),
    )
)
def test_another_decoder_reads_the_pixels_of_a_picture(pixels: np.ndarray) -> None:
    with Image.open(io.BytesIO(encoded(pixels))) as image:
        image.load()
        assert image.mode == {1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[2]]
        assert np.array_equal(np.array(image).reshape(pixels.shape), pixels)


def decoded(event: Logged) -> np.ndarray:
    with Image.open(io.BytesIO(event.png)) as image:
        assert event.value["path"] == picture_path("x", 7) == "logged/x/00000007.png"
        assert (event.value["width"], event.value["height"]) == image.size
        return np.array(image)


def test_an_image_of_a_tensor_has_its_channels_where_they_are() -> None:
    pixels = torch.arange(3 * 4 * 5, dtype=torch.uint8)
    last = pixels.reshape(5, 4, 3)
    assert np.array_equal(decoded(logged(last)), last.numpy())
    assert np.array_equal(decoded(logged(last.permute(2, 0, 1))), last.numpy())
    assert np.array_equal(decoded(logged(pixels.reshape(1, 6, 10))), pixels.reshape(6, 10).numpy())
    both = torch.arange(3 * 4 * 3, dtype=torch.uint8).reshape(3, 4, 3)
    assert np.array_equal(decoded(logged(both)), both.permute(1, 2, 0).numpy())
    assert np.array_equal(decoded(logged(both.numpy())), both.numpy())


def test_floats_from_0_to_1_are_rounded_to_pixels() -> None:
    image = torch.tensor([[0.0, 0.5, 1.0, 0.1]])
    assert decoded(logged(image, "image")).tolist() == [[0, 128, 255, 26]]
    assert decoded(logged(image.numpy()[::-1], "image")).tolist() == [[0, 128, 255, 26]]


def test_images_of_pil_keep_their_colours() -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert decoded(logged(image))[0, 0].tolist() == [200, 100, 50, 255]


def test_a_figure_has_the_same_bytes_each_time() -> None:
    def picture() -> bytes:
        figure = Figure(figsize=(2, 1))
        figure.add_subplot().plot([1, 3, 2])
        return logged(figure).png

    assert picture() == picture()


def test_logging_draws_no_random_numbers_and_changes_no_tensor() -> None:
    weight = torch.nn.Parameter(torch.rand(3, 8, 8))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    before, version = weight.detach().clone(), weight._version
    for kind in ("image", "histogram"):
        logged(weight, kind)
    logged(Figure())
    assert torch.equal(weight, before)
    assert weight._version == version
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (torch.zeros(4, 4), None, "may be an image or a histogram; say kind='image'"),
        (torch.zeros(3, 4, 4), None, "may be an image or a histogram"),
        (object(), None, "is a object; log a number, text"),
        ([1, 2], None, "is a list; log a number"),
        (1 + 2j, None, "is a complex"),
        (torch.zeros(2, dtype=torch.complex64), None, "real numbers"),
        (np.array(["a"]), None, "must be of real numbers"),
        (torch.zeros(2).to_sparse(), None, "log a dense one"),
        (torch.zeros(2, device="meta"), None, "log a dense one"),
        (1.0, "curve", "kind='curve': must be one of scalar, text"),
        (10**400, None, "greater than a float64"),
        ("a", "scalar", "kind='scalar': is a str; must be a number"),
        (
            torch.zeros(2),
            "scalar",
            "is a Tensor of shape (2,); must be a number, or a tensor of one",
        ),
        (1, "text", "must be a str"),
        ("a", "histogram", "must be a tensor or array"),
        (torch.zeros(2), "image", "must be an image of PIL, or a tensor"),
        (torch.zeros(2, 5, 5), "image", "must be an image of PIL, or a tensor"),
        (torch.zeros(0, 5), "image", "at least one pixel"),
        (torch.zeros(2, 2, dtype=torch.int64), "image", "must be uint8, or float in [0, 1]"),
        (torch.full((2, 2), 1.5), "image", "values from 1.5 to 1.5; those of floats"),
        (torch.full((2, 2), math.nan), "image", "must be in [0, 1]"),
        (Image.new("I;16", (2, 2), 255), "image", "of mode I;16; must have 8 bits"),
        (Image.new("I", (2, 2), 70_000), "image", "of mode I; must have 8 bits"),
        (Image.new("F", (2, 2), 0.5), "image", "of mode F; must have 8 bits"),
        (torch.zeros(2, 2), "figure", "must be a matplotlib.figure.Figure"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_what_can(
    value: Any, kind: str | None, message: str
) -> None:
    assert message in refusal(value, kind)


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "../a", ".a", "a.", " a", "a ", "a\nb",
        "a\x00", "a\\b", "a:b", "x" * 201, "ö" * 101, "a.png", "a.png/b", "~", "-a", 3, None,
    ],
)  # fmt: skip
def test_names_that_are_no_paths_are_refused(name: Any) -> None:
    with pytest.raises(TaskError, match="a name is words with / between them"):
        logged(1.0, name=name)


@given(st.one_of(st.text(max_size=12), st.from_regex(r"[\w./ -]{1,12}", fullmatch=True)))
def test_a_name_that_is_taken_never_leaves_its_folder(name: str) -> None:
    try:
        check_name(name)
    except TaskError:
        return
    path = PurePosixPath(picture_path(name, 3))
    assert path.parts == ("logged", *name.split("/"), "00000003.png")
    assert not {"..", ".", ""} & {*path.parts}
    assert name.isprintable()


def test_outside_of_a_moment_it_says_where_it_may_be_called() -> None:
    book = Logbook(lambda event: None)
    for _ in range(2):
        with pytest.raises(TaskError, match=r"may be called in Task\.after_step.*from Task\.loss"):
            log("x", 1.0)
        with book.opened(1):
            log("x", 1.0)

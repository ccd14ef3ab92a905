"""What was logged, in histories and reports; and rows that somebody else has prepared."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import slow
from tests.observe.reading.test_histories import PLAN, done, joined

from lockstep.cli.look.report import report
from lockstep.engine.checkpoint.listing import ENTRIES, own_entries
from lockstep.engine.events import Event, Logged
from lockstep.engine.log import Logbook, log
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.listing import remove_run
from lockstep.observe.reading.report.page import Paragraph, Picture
from lockstep.observe.reading.report.pictures import pictures
from lockstep.observe.storing.files import Pictures
from lockstep.observe.storing.jsonl import EventsJsonl


def logged(step: int, **values: Any) -> list[Event]:
    found: list[Event] = []
    with Logbook(found.append).opened(step):
        for name, value in values.items():
            log(name, value)
    return found


def run(folder: Path, events: list[Event], rows: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    with (folder / "events.jsonl").open("a") as file:
        for row in (joined(0), PLAN | {"world_size": 1}, done(1, 0.5, ranks=1), *(rows or ())):
            file.write(json.dumps({"time": 100.0, "step": 0, **row}) + "\n")
    for sink in (Pictures(folder), EventsJsonl(folder / "events.jsonl")):
        for event in events:
            sink(event)
        sink.close()
    return folder


IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def test_a_history_has_curves_and_the_newest_of_the_rest(tmp_path: Path) -> None:
    events = [e for step in (1, 2, 3) for e in logged(step, a=step / 2, b=f"at {step}", c=IMAGE)]
    history = read_run(run(tmp_path, events))
    assert [*history.curves["log/a"].values] == [0.5, 1.0, 1.5]
    assert [event.text for event in history.logged["b"]] == ["at 1", "at 2", "at 3"]
    assert not any(isinstance(h.event, Logged) for h in history.happenings)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 200.0, **PLAN, "world_size": 1, "step": 1}) + "\n")
    history = read_run(tmp_path)
    assert [*history.curves["log/a"].values] == [0.5]
    assert [event.step for event in history.logged["c"]] == [1]


def test_a_report_shows_the_newest_of_each_name_and_loads_nothing(tmp_path: Path) -> None:
    values = np.array([1.0, 2.0, np.nan])
    events = [e for s in (1, 2) for e in logged(s, a=0.5, b="<b>bold</b>", c=IMAGE, d=values)]
    report([run(tmp_path, events)], None, False, None)
    page = (tmp_path / "report.html").read_text()
    png = (tmp_path / "logged" / "c" / "00000002.png").read_bytes()
    assert f'src="data:image/png;base64,{base64.b64encode(png).decode()}"' in page
    assert page.count("<img ") == 1
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "d at step 2" in page
    assert "img-src data:" in page
    report([tmp_path], None, True, None)
    assert "![c at step 2](<report_figures/logged_1.png>)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report_figures" / "logged_1.png").read_bytes() == png


def test_what_was_logged_pushes_no_metric_out_of_the_report(tmp_path: Path) -> None:
    row = {"event": "Logged", "step": 1, "kind": "scalar"}
    rows = [{**row, "name": f"scalar{n:02}", "value": n} for n in range(30)]
    late = {"event": "Evaluated", "step": 1, "split": "val", "seconds": 1.0}
    folder = run(tmp_path, [], [*rows, {**late, "metrics": {"accuracy": 0.5}}])
    blocks = list(pictures({"A": read_run(folder)}))
    (figure,) = (b.figure for b in blocks if isinstance(b, Picture) and b.name == "metrics")
    titles = [axes.get_title() for axes in figure.axes]
    assert {"loss", "accuracy", "scalar00"} < set(titles)
    assert len(titles) == 24
    num_left_out = 30 - sum(title.startswith("scalar") for title in titles)
    (said,) = (b.text for b in blocks if isinstance(b, Paragraph))
    assert said == f"{num_left_out} further metrics are in events.jsonl."


HOSTILE = [
    {"name": "../secret", "kind": "image", "value": {"path": "../secret/00000001.png"}},
    {"name": "fifo", "kind": "figure", "value": {}},
    {"name": "text", "kind": "image"},
    {"name": "h", "kind": "histogram", "value": {"min": "x"}},
    {"name": "h2", "kind": "histogram", "value": {"min": 1, "max": 0, "counts": []}},
    {"name": "h3", "kind": "histogram", "value": None},
    {"name": "h4", "kind": "histogram",
     "value": {"min": "-Infinity", "max": 1, "counts": [1], "num_nan": 0, "num_inf": 0}},
    {"name": "h5", "kind": "histogram",
     "value": {"min": 0, "max": 1, "counts": ["Infinity"], "num_nan": 0, "num_inf": 0}},
    {"name": "h6", "kind": "histogram",
     "value": {"min": 0, "max": 1, "counts": [1], "num_nan": "Infinity", "num_inf": 0}},
    {"name": "unknown", "kind": "sound"},
    {"name": "number", "kind": "scalar", "value": {"a": 1}},
]  # fmt: skip


ALIKE = ("h2", "h3", "h5", "h6")


@pytest.mark.parametrize(
    "row", [slow(r) if r["name"] in ALIKE else r for r in HOSTILE], ids=lambda row: str(row["name"])
)
def test_rows_that_somebody_else_wrote_are_told_and_lead_nowhere(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "00000001.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    (folder / "logged" / "text").mkdir(parents=True)
    (folder / "logged" / "text" / "00000001.png").write_text("is no picture")
    run(folder, [], [{"event": "Logged", "step": 1, **row}])
    report([folder], None, False, None)
    page = (folder / "report.html").read_text()
    assert "<img " not in page
    assert "cannot be shown" in page or "is no number" in page


def test_removing_a_run_removes_what_was_logged(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", logged(1, c=IMAGE))
    assert set(own_entries(folder)) >= {folder / name for name in ENTRIES}
    os.utime(folder / "events.jsonl", (1, 1))
    assert remove_run(folder) == []
    assert not folder.exists()

"""Reports: whole pages that load nothing, whatever is in the run."""

import re
from html.parser import HTMLParser

import pytest
from tests.observe.reading.test_histories import PLAN, done, joined
from tests.observe.reading.test_runs import run_in

from lockstep.errors import DataError, RunDirectoryError
from lockstep.observe.reading.follow import EVENTS
from lockstep.observe.reading.history import Curve
from lockstep.observe.reading.report.content import report_of
from lockstep.observe.reading.report.page import as_html, as_markdown, write_pictures, write_text
from lockstep.observe.reading.report.pictures import thinned

EVIL = '<script>alert("$x$")</script>|`*\x1b[31m\n# no'
ROWS = (
    *map(joined, range(3)), PLAN, *(done(n, 3.0 / n, acc=n / 9) for n in range(1, 6)),
    {"event": "Evaluated", "split": "val", "metrics": {EVIL: 1.5}, "seconds": 0.1, "step": 5},
    {"event": "Checkpointed", "path": "c/step_5", "num_bytes": 1e6, "stall_s": 0.1, "write_s": 0.2,
     "step": 5},
    {"event": "RankLost", "slot": 1, "rank": 1, "reason": "hung; more", "step": 5},
    {"event": "Recovered", "world_size": 2, "seconds": 0.01, "copied": False, "step": 5},
    {"event": "Warned", "message": EVIL, "step": 5}, done(6, "NaN", 2),
)  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page, of which each that is opened is closed."""

    VOID = ("meta", "path", "use", "!doctype", "rect")

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def runs(tmp_path):
    one = run_in(tmp_path / "one", *ROWS, metrics={"val/x": 1.5, EVIL: 2.0})
    two = run_in(tmp_path / "two", *ROWS[:6], done(3, 9.0))
    return one, two


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_page_loads_nothing_and_shows_text_as_text(runs, count):
    page = as_html(report_of(runs[:count]))
    tags = Tags(page)
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in tags.seen}
    for tag, attributes in tags.seen:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                assert value.startswith("#"), (tag, name, value)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert '<script>alert("$x$")</script>' in tags.text
    assert "\x1b" not in page
    assert "rank 1 (slot 1) is lost: it hung" in tags.text
    for identifier in (identifiers := re.findall(r'clipPath id="([^"]+)"', page)):
        assert identifiers.count(identifier) == 1
    assert as_html(report_of(runs[:count])) == page


def test_what_processes_have_said_is_in_their_table(tmp_path):
    row = done(1, 2.0, 1)
    row["ranks"][0] |= {"num_calls": 1200, "sent_bytes": 2048, "received_bytes": 3 << 20}
    run = run_in(tmp_path / "run", joined(0), {**PLAN, "world_size": 1}, row)
    text = as_markdown(report_of([run]), "figures")
    assert "sent | received | calls |" in text
    assert "2.0 KiB | 3.0 MiB | 1,200 |" in text
    assert "Gradients are norms" not in text
    row["ranks"][0]["grad_norm"], row["grad_norm"] = 1.5, 0.25
    run = run_in(tmp_path / "norms", joined(0), {**PLAN, "world_size": 1}, row)
    text = as_markdown(report_of([run]), "figures")
    assert "1,200 | 1.5 |" in text
    assert "before the sum over ranks; that of all is 0.25." in text


def test_what_steps_cost_is_beside_what_was_predicted(tmp_path):
    reports = [done(n, 2.0) for n in range(1, 22)]
    for row in reports:
        row["ranks"][0]["peak_bytes"] = row["step"] << 20
    kept = {"step_s": 0.004, "peak_bytes": 3 << 20}
    predicted = kept | {"step_s": 0.005, "by": "p|an.json"}
    one = run_in(tmp_path / "one", *map(joined, range(3)), PLAN, *reports)
    two = run_in(tmp_path / "two", *map(joined, range(3)), PLAN, *reports,
                 measured=kept, predicted=predicted, predicted_reason="")  # fmt: skip
    text = as_markdown(report_of([one]), "figures")
    assert "| time of a step | 500 ms; 500 ms predicted by the first reports |" in text
    assert "| memory of a rank | 21.0 MiB; 11.0 MiB predicted by the first reports |" in text
    text = as_markdown(report_of([one, two]), "figures").replace("\\|", "|")
    assert "| time of a step | 500 ms | 4 ms |" in text
    assert "| predicted | 500 ms (the first reports) | 5 ms (p|an.json) |" in text
    assert "| time of a step | 4 ms; 5 ms predicted by p|an.json |" in text
    early = run_in(tmp_path / "early", *map(joined, range(3)), PLAN, reports[0])
    assert "time of a step" not in as_markdown(report_of([early]), "figures")


@pytest.mark.slow
def test_markdown_has_its_pictures_beside_it(runs, tmp_path):
    blocks = list(report_of(runs))
    text = as_markdown(blocks, "figures of it")
    linked = set(re.findall(r"\(<figures of it/([^>]+)>\)", text))
    written_there = {path.name for path in write_pictures(blocks, tmp_path / "f", ("svg", "png"))}
    assert linked == {name for name in written_there if name.endswith(".svg")}
    assert len(written_there) == 2 * len(linked)
    assert all(
        (tmp_path / "f" / name).read_bytes()[:4] in (b"<?xm", b"\x89PNG") for name in written_there
    )
    assert "\x1b" not in text
    columns = [line.count("|") for line in text.replace("\\|", "").splitlines() if line[:1] == "|"]
    assert min(columns) >= 3


def test_what_is_damaged_or_missing_is_said(tmp_path):
    empty = run_in(tmp_path / "empty")
    assert "new" in as_html(report_of([empty]))
    bad = run_in(tmp_path / "bad", PLAN, done(1, 2.0))
    with (bad / EVENTS).open("ab") as file:
        file.write(b"\xff\n")
    (bad / "result.json").write_text("[]")
    (bad / "checkpoints" / "step_00000003").mkdir(parents=True)
    page = as_html(report_of([bad]))
    for said in ("What cannot be read", "is not JSON", "result.json", "cannot be read"):
        assert said in page
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        list(report_of([tmp_path / "none"]))
    with pytest.raises(DataError, match="cannot be written"):
        write_text(bad / EVENTS / "x.html", "text")
    with pytest.raises(DataError, match="cannot be written"):
        write_pictures([], bad / EVENTS / "x", ("svg",))


def test_thinned_curves_keep_their_extremes():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, float("nan") if step % 7 == 0 else float(step % 1000))
    curve.add(100_000, 5e9)
    curve.add(100_001, -5e9)
    steps, values = thinned(curve, 500)
    assert len(steps) <= 500
    assert max(values) == 5e9
    assert min(values) == -5e9
    assert steps == sorted(set(steps))
    short = Curve()
    short.add(3, 1.0)
    assert thinned(short) == ([3], [1.0])


def test_the_command_writes_into_the_run(here, tmp_path):
    run_in(tmp_path / "one", *ROWS, metrics={})
    assert here("report", "one").stdout == "report   one/report.html\n"
    assert (tmp_path / "one/report.html").stat().st_size > 10_000
    said = here("report", "one", "one", "--markdown", "--output", "x/é.md", "--figures", "pictures")
    assert said.stdout == "report   x/é.md\nfigures  pictures\n"
    assert "(<../pictures/metrics.svg>)" in (tmp_path / "x/é.md").read_text()
    assert here("runs", "remove", "one", "-y").stdout == "removed one\n"
    assert here("report", "one").returncode == 2

"""The page in a real browser: it shows what the files say, live, and asks nobody else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from run_files import PLAN, append, begin, done, finish, joined

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.slow,
]
CODE = """
import sys
from pathlib import Path
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web import serve
folder, port = sys.argv[1:]
tell = lambda url: print(url, flush=True)
serve(Watch([Path(folder)]), "127.0.0.1", int(port), None, tell, 1.0, print)
"""
HOSTILE = (
    "<script>document.title='broken'</script>", "<img src=x onerror=alert(1)>", "__proto__",
    "constructor", "x" * 10_000, "", "损失 ‮evil", "a\x00b\x1b[31m", "'\"`${1}", "toString",
)  # fmt: skip


class Server:
    """The page's server in a process of its own."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        argv = [sys.executable, "-c", CODE, str(folder), str(port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.port = urlsplit(self.url).port

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, served):
    """A page that fails its test if it says an error or asks anybody but this machine."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    said, asked = [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.excused = []
    yield opened
    context.close()
    elsewhere = [url for url in asked if urlsplit(url).hostname not in ("127.0.0.1", "localhost")]
    assert not elsewhere
    excused = [line for line in said for part in opened.excused if part in line]
    assert [line for line in said if line not in excused] == []


@pytest.fixture
def served():
    servers = []

    def start(folder: Path, port: int = 0) -> Server:
        servers.append(Server(folder, port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def open_run(page, server, name):
    page.goto(server.url)
    page.get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector(".chart canvas")


def until(page, expression, seconds=15.0):
    """Wait until an expression is true; the page's policy forbids the driver's own way."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(30)


def readout(page, metric):
    return page.locator(f'.chart[data-metric="{metric}"] .readout')


def test_each_part_shows_what_the_files_say(page, served, tmp_path):
    run = tmp_path / "my run ü"
    begin(run, lr=0.1, optimizer={"name": "adamw"})
    lost = {"event": "RankLost", "slot": 2, "rank": 2, "reason": "did nothing for 3.0 s"}
    recovered = {"event": "Recovered", "world_size": 2, "seconds": 0.5, "copied": False}
    saved = {"event": "Checkpointed", "path": "p", "num_bytes": 2048, "stall_s": 0.5, "write_s": 1}
    evaluated = {"event": "Evaluated", "split": "val", "metrics": {"loss": 0.75}, "seconds": 2.5}
    warned = {"event": "Warned", "message": "the disk is nearly full"}
    rebalanced = {"event": "Rebalanced", "microbatches": [4, 2], "slowest": 1, "slowdown": 2.0}
    later = [lost, recovered, rebalanced, saved, evaluated, warned]
    append(run, [{**row, "step": 20} for row in later])
    manifest = {"files": {"model.safetensors": {"sha256": "cd" * 32, "bytes": 8}}}
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    (run / "checkpoints" / "step_00000020" / "manifest.json").write_text(json.dumps(manifest))
    (run / "ranks.log").write_text("rank 1: first\nrank 2: second\n")
    finish(run)
    page.goto((server := served(tmp_path)).url)
    row = page.locator("tr[data-run]")
    for part in ("completed", "20 / 40", "abababababab"):
        assert part in row.text_content()
    open_run(page, server, "my run ü")
    expected = {
        "#head": ["completed", "20 / 40", "3 (local, gloo, cpu)", "all steps done"],
        "#diagnosis": ["rank 2 (slot 2) hung", "hang_timeout_s"],
        "#timeline": ["rank 0", "slot 2 (lost)", "did nothing for 3.0 s", "going on with 2 ranks"],
        "#ranks": ["node0", "node1", "512.0 MiB", "microbatches"],
        "#bits": ["ab" * 32, "No other run"],
        "#evaluations": ["val", "0.75", "2.5 s"],
        "#checkpoints": ["2.0 KiB", "0.5 s", "cdcdcdcdcdcd"],
        "#warnings": ["the disk is nearly full"],
        "#config": ["optimizer.name", "adamw"],
        "#events": ["step 20: rank 2 (slot 2) is lost"],
    }
    for place, parts in expected.items():
        text = page.locator(place).text_content()
        assert [part for part in parts if part not in text] == [], place
    rows = page.locator("#ranks tbody tr")
    assert [rows.nth(i).locator("td").nth(9).text_content() for i in range(2)] == ["4", "2"]
    assert page.locator("#ranks svg.split").count() == 4
    assert readout(page, "train/loss").text_content() == "0.05"
    page.locator("#logs input").fill("rank 2")
    until(page, "document.querySelector('pre.log').textContent === 'rank 2: second'")


def test_zoom_pan_keys_log_axis_smoothing_and_search(page, served, tmp_path):
    begin(tmp_path / "run", 40)
    open_run(page, served(tmp_path), "run")
    chart = page.locator('.chart[data-metric="train/loss"]')
    box = chart.locator(".u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    left = box["x"]

    def drag(first, last):
        page.mouse.move(left + first * box["width"], middle)
        page.mouse.down()
        page.mouse.move(left + last * box["width"], middle, steps=5)
        page.mouse.up()

    def steps_under_ends():
        found = []
        for part in (0.01, 0.99):
            page.mouse.move(left + part * box["width"], middle)
            until(page, "document.querySelector('.readout').textContent.startsWith('step')")
            page.wait_for_timeout(100)
            text = readout(page, "train/loss").text_content()
            found.append(int(re.match(r"step (\d+):", text)[1]))
        return found

    assert steps_under_ends() == [1, 40]
    drag(0.5, 0.75)
    page.wait_for_selector("#reset:enabled")
    page.wait_for_timeout(400)
    first, last = steps_under_ends()
    assert (18 <= first <= 22, 28 <= last <= 32) == (True, True)
    page.keyboard.down("Shift")
    drag(0.2, 0.7)
    page.keyboard.up("Shift")
    assert steps_under_ends()[0] < first
    chart.focus()
    page.keyboard.press("0")
    assert page.locator("#reset").is_disabled()
    page.wait_for_timeout(100)
    assert steps_under_ends() == [1, 40]
    before = chart.locator("canvas").evaluate("c => c.toDataURL()")
    page.locator("#log").check()
    assert chart.locator("canvas").evaluate("c => c.toDataURL()") != before
    page.locator("#log").uncheck()
    page.locator("#smoothing").fill("0.9")
    page.wait_for_timeout(100)
    assert chart.locator("canvas").evaluate("c => c.toDataURL()") != before
    page.locator("#metrics").fill("train acc")
    until(page, "document.querySelectorAll('.chart:not([hidden])').length === 1")


def test_a_curve_is_asked_for_again_only_when_there_is_more_of_it(page, served, tmp_path):
    rows = [done(s, 1.0 / s, **{f"m{n:02}": s * n for n in range(12)}) for s in range(1, 41)]
    append(tmp_path / "run", [*map(joined, range(3)), PLAN, *rows])
    open_run(page, served(tmp_path), "run")
    asked = []
    page.on("request", lambda r: asked.append(r.url) if "/curves?" in r.url else None)

    def asked_by(act):
        asked.clear()
        act()
        page.wait_for_timeout(700)
        return len(asked)

    def scroll():
        for metric in ("m11", "loss"):
            page.locator(f'.chart[data-metric="train/{metric}"]').scroll_into_view_if_needed()
            page.wait_for_timeout(300)

    def press(key):
        page.locator('.chart[data-metric="train/loss"]').press(key)

    scroll()
    assert asked_by(scroll) == 0
    assert asked_by(lambda: press("+")) >= 1
    scroll()
    assert asked_by(scroll) == 0
    assert asked_by(lambda: press("ArrowRight")) == 0  # what is beside it is known
    assert asked_by(lambda: press("+")) >= 1
    append(tmp_path / "run", [done(41, 9.0)])
    until(page, "document.querySelector('.readout').textContent === '9'")


def test_other_runs_are_laid_over_and_compared(page, served, tmp_path):
    for name, factor, digest in (("a", 1.0, "ab"), ("b", 2.0, "ab"), ("c", 3.0, "ef")):
        begin(tmp_path / name, factor=factor, lr=factor)
        finish(tmp_path / name, digest * 32)
    server = served(tmp_path)
    page.goto(server.url)
    for name in ("a", "b", "c"):
        page.get_by_label(f"choose {name}").check()
    page.locator("#together").click()
    until(page, "document.querySelector('.readout')?.textContent === 'a 0.05  ·  b 0.1  ·  c 0.15'")
    text = page.locator("#bits").text_content()
    assert "1 other runs have these parameters: b" in text
    assert page.locator("#bits .verdict.same").count() == 1
    assert page.locator("#bits .verdict.other").count() == 1
    page.wait_for_selector("#config th:has-text('c')")
    cells = page.locator("#config tbody tr").first.locator("td").all_text_contents()
    assert cells == ["lr", "1.0", "2.0", "3.0"]
    page.locator("#overlay summary").click()
    page.get_by_label(re.compile("^ c")).uncheck()
    until(page, "document.querySelector('.readout')?.textContent === 'a 0.05  ·  b 0.1'")


def test_a_run_grows_without_jumps_and_its_end_is_told(page, served, tmp_path):
    begin(tmp_path / "run", 5)
    open_run(page, served(tmp_path), "run")
    page.locator("#metrics").fill("loss")
    page.evaluate("scrollTo(0, 150)")
    append(tmp_path / "run", [done(s, 1.0 / s) for s in range(6, 11)])
    until(page, "document.querySelector('.readout').textContent === '0.1'")
    assert "10 / 40" in page.locator("#head").text_content()
    assert page.evaluate("scrollY") == 150
    assert page.locator("#metrics").input_value() == "loss"
    assert page.evaluate("document.activeElement.id") == "metrics"
    finish(tmp_path / "run", step=10)
    page.wait_for_selector("#head >> text=The run has ended (completed")


def test_a_killed_and_a_removed_run_are_told(page, served, tmp_path):
    begin(tmp_path / "run", 5)
    begin(tmp_path / "other", 5)
    os.utime(tmp_path / "run" / "events.jsonl", (1, 1))
    page.excused = ["404"]
    open_run(page, served(tmp_path), "run")
    assert "The run was killed" in page.locator("#head").text_content()
    assert "all processes ended without a word" in page.locator("#diagnosis").text_content()
    (tmp_path / "run").rename(tmp_path / ".away")
    page.wait_for_selector("#gone:not([hidden])")
    assert readout(page, "train/loss").text_content() == "0.2"


def test_a_server_that_comes_back_is_found_again(page, served, tmp_path):
    begin(tmp_path / "run", 5)
    server = served(tmp_path)
    open_run(page, server, "run")
    page.excused = ["ERR_", "Failed to load"]
    server.stop()
    page.wait_for_selector("#connection.lost")
    assert "not connected" in page.locator("#connection").text_content()
    append(tmp_path / "run", [done(6, 0.5)])
    served(tmp_path, server.port)
    page.wait_for_selector("#connection.live")
    until(page, "document.querySelector('.readout').textContent === '0.5'")


def test_damage_is_told_and_the_rest_is_shown(page, served, tmp_path):
    run = tmp_path / "run"
    begin(run, 5)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe<b>no row</b>\n{\n")
    append(run, [done(6, "NaN"), done(7, 0.7)])
    (run / "config.yaml").write_text("{")
    page.goto((server := served(tmp_path)).url)
    open_run(page, server, "run")
    assert "Cannot be read (2)" in page.locator("#problems").text_content()
    assert page.locator("#problems li").count() == 2
    assert readout(page, "train/loss").text_content() == "0.7"
    assert "1 place with NaN" in page.locator(".chart .odd").first.text_content()
    assert "config.yaml is not there" in page.locator("#config").text_content()
    with (run / "events.jsonl").open("w") as file:
        file.write("")
    until(page, "document.querySelectorAll('.chart').length === 0")


def test_names_and_messages_are_texts_whatever_is_in_them(page, served, tmp_path):
    run = tmp_path / "<b>run<b> #?%2f"
    rows = [*map(joined, range(2)), {**PLAN, "task": HOSTILE[0], "world_size": 2}]
    rows += [done(s, 1.0, 2, **dict.fromkeys(HOSTILE, 0.5 * s)) for s in (1, 2)]
    rows += [{"event": "Warned", "step": 2, "message": text} for text in HOSTILE]
    rows += [{"event": "Evaluated", "step": 2, "split": text, "seconds": 1.0,
              "metrics": dict.fromkeys(HOSTILE, 1.0)} for text in HOSTILE]  # fmt: skip
    append(run, rows)
    (run / "ranks.log").write_text("\n".join(HOSTILE))
    (run / "tags.json").write_text(json.dumps(HOSTILE))
    (run / "config.yaml").write_text(json.dumps(dict.fromkeys(HOSTILE[2:5], HOSTILE[0])))
    server = served(tmp_path)
    page.goto(server.url)
    page.locator("tr[data-run] a").click()
    page.wait_for_selector(".chart canvas")
    page.wait_for_timeout(500)
    assert page.locator("main script, main img, main b b").count() == 0
    assert "broken" not in page.title()
    names = page.eval_on_selector_all(".chart b", "all => all.map(b => b.textContent)")
    for name in ("train/__proto__", "train/constructor", "train/", f"train/{HOSTILE[0]}"):
        assert name in names
    assert "train/a\\u0000b\\u001b[31m" in names
    assert any("\\u202eevil" in name for name in names)
    assert max(map(len, names)) <= 220
    text = page.locator("body").text_content()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f‮]", text)
    for name in ("__proto__", "constructor", "toString"):
        page.locator("#metrics").fill(f"train/{name}")
        until(page, "document.querySelectorAll('.chart:not([hidden])').length === 1")
        card = page.locator(".chart:not([hidden])")
        card.locator("canvas").wait_for()
        assert card.locator(".readout").text_content() == "1"


def test_a_hundred_runs_are_listed_filtered_and_sorted_at_once(page, served, tmp_path):
    for number in range(100):
        begin(tmp_path / f"run{number:03d}", 3, factor=number + 1.0, lr=number)
    page.goto(served(tmp_path).url)
    until(page, "document.querySelectorAll('tr[data-run]').length === 100")
    page.locator("#filter").fill("lr>=90, train/loss<=32")
    until(page, "document.querySelectorAll('tr[data-run]').length === 6")
    page.get_by_role("button", name="train/loss").click()
    until(page, "document.querySelector('tr[data-run] a').textContent === 'run090'")
    page.locator("#filter").fill("nonsense")
    page.wait_for_selector("#filter-error:not(:empty)")
    page.excused = ["400"]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(page, served, tmp_path, width, scheme):
    begin(tmp_path / "run", 5)
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(served(tmp_path).url)
    page.locator("tr[data-run] a").click()
    page.wait_for_selector("#config table", state="attached")
    page.locator(".chart").first.scroll_into_view_if_needed()
    page.wait_for_selector(".chart canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


def test_no_request_leaves_this_machine(chromium, served, tmp_path):
    """Also where the browser is told to refuse all but the page's own server."""
    begin(tmp_path / "run", 5)
    server = served(tmp_path)
    refused = []
    context = chromium.new_context()
    context.route("**", lambda route: (
        route.continue_() if urlsplit(route.request.url).netloc == f"127.0.0.1:{server.port}"
        else (refused.append(route.request.url), route.abort())
    ))  # fmt: skip
    page = context.new_page()
    open_run(page, server, "run")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(300)
    context.close()
    assert refused == []

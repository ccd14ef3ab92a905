"""`lockstep monitor` as a command: its options, its lines, its end, and a run from start to end."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import environment
from tests.observe.monitor.watched_runs import HOSTILE, START, running
from tests.observe.reading.test_histories import PLAN, done
from tests.observe.reading.test_runs import run_in

from lockstep.errors import DataError
from lockstep.observe.monitor.watch import Monitor

RULES = "rules: [{name: high, when: {metric: train/loss, above: 1.0}}]"


def test_once_prints_a_line_for_each_run(here, tmp_path):
    run_in(tmp_path / "runs/killed", *START, done(3, 2.0))
    running(tmp_path / "runs/going", *START, done(4, 1.5))
    ended = here("monitor", "--once")
    assert ended.returncode == 0
    assert [line.split()[:5] for line in ended.stdout.splitlines()] == [
        ["going", "t", "running", "step", "4/9"],
        ["killed", "t", "killed", "step", "3/9"],
    ]


def test_once_says_all_of_a_single_run(here, tmp_path):
    folder = run_in(tmp_path / "run", *START, done(3, 2.0))
    lines = here("monitor", str(folder), "--once").stdout.splitlines()
    assert any(line.startswith("rank 2 ended: h (pid 7)  compute 86%") for line in lines)
    assert any("started on 3 ranks (local, gloo)" in line for line in lines)


def test_once_says_what_steps_take_beside_what_was_predicted(here, tmp_path):
    folder = run_in(tmp_path / "run", *START, *(done(n, 2.0) for n in range(1, 23)))
    out = here("monitor", str(folder), "--once").stdout
    assert "\na step 500 ms; 500 ms predicted by the first reports\n" in out
    hostile = {"event": "Predicted", "by": HOSTILE, "cost": {"step_s": 0.25, "peak_bytes": 1}}
    folder = run_in(tmp_path / "other", hostile, *START, *(done(n, 2.0) for n in range(1, 12)))
    out = here("monitor", str(folder), "--once").stdout
    assert r"a step 500 ms; 250 ms predicted by a\x1b[31mb\x07c" in out
    assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize(("above", "code"), [(1.0, 1), (9.0, 0)])
def test_once_with_rules_is_a_check_for_cron(here, tmp_path, above, code):
    """Whether an alert is on is the exit code; what has to last is not waited for."""
    running(tmp_path / "runs/going", *START, done(4, 1.5))
    when = f"{{metric: train/loss, above: {above}}}"
    rule = f"{{name: high, when: {when}, for_s: 600, for_steps: 100, do: [{{print: true}}, "
    mark = "{command: [touch, told]}]}"
    (tmp_path / "rules.yaml").write_text(f"rules: [{rule}{mark}]")
    ended = here("monitor", "--once", "--alerts", "rules.yaml")
    assert (ended.returncode, ended.stderr) == (code, "")
    picture, *alerts = ended.stdout.splitlines()
    assert picture.startswith("going")
    told = ["alert high on: runs/going: train/loss 1.5 is above 1"]
    assert [line for line in alerts if line.startswith("alert")] == (told if code else [])
    assert (tmp_path / "told").exists() == bool(code)


def test_once_works_before_the_first_run(here, tmp_path):
    assert here("monitor", "--once").stdout == "no runs in runs yet\n"


def test_hostile_names_are_printed_as_escapes(here, tmp_path):
    folder = running(
        tmp_path / "runs" / HOSTILE, *START[:-1], PLAN | {"task": HOSTILE}, done(1, 1.0)
    )
    (folder / "tags.json").write_text(json.dumps([HOSTILE]))
    out = here("monitor", "--once").stdout
    assert out.replace("\n", "").isprintable()
    assert r"a\x1b[31mb\x07c" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["missing"], "missing: is no folder"),
        (["--interval", "0"], "--interval 0.0: must be from 0.05 to 3600 seconds"),
        (["--interval", "nan"], "--interval nan: must be"),
        (["--prometheus", "70000"], "--prometheus 70000: must be from 0"),
        (["--prometheus", "-1"], "--prometheus -1: must be from 0"),
        (["--web", "--port", "65536"], "--port 65536: must be from 0"),
        (["--port", "80"], "--port: needs --web"),
        (["--token", "x"], "--token: needs --web"),
        (["--host", "0.0.0.0"], "--host: needs --web or --prometheus"),
        (["--prometheus", "0", "--host", ""], "--host '': must be an address"),
        (["--check"], "--check: needs --alerts FILE"),
        (["--once", "--web"], "--once: does not go with --web and --prometheus"),
        (["--once", "--prometheus", "0"], "--once: does not go with"),
        (["--alerts", "missing.yaml"], "missing.yaml: cannot be read"),
        (["--grafana", "no/folder/file"], "no/folder/file: cannot be written"),
    ],
)
def test_a_bad_option_is_one_message(here, options, said):
    ended = here("monitor", *options)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {said}")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_check_says_what_rules_would_watch(here, tmp_path):
    (tmp_path / "rules.yaml").write_text(RULES)
    ended = here("monitor", "--alerts", "rules.yaml", "--check")
    assert ended.stdout == "high: when metric train/loss above 1; in runs *; then print\n"
    (tmp_path / "rules.yaml").write_text("rules: []")
    assert here("monitor", "--alerts", "rules.yaml", "--check").returncode == 2


def test_the_dashboard_is_written(here, tmp_path):
    assert here("monitor", "--grafana", "board.json").stdout == "dashboard  board.json\n"
    assert json.loads((tmp_path / "board.json").read_text())["title"] == "Lockstep"


def test_what_is_not_installed_is_named_with_what_to_do(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "textual", None)
    ended = here("monitor", "--prometheus", "0")
    assert ended.returncode == 2
    assert 'needs prometheus_client: pip install "lockstep-train[monitor]"' in ended.stderr
    monkeypatch.setattr("lockstep.cli.look.monitor._is_terminal", lambda: True)
    ended = here("monitor")
    assert ended.returncode == 2
    assert 'needs textual: pip install "lockstep-train[monitor]"' in ended.stderr


def page_is(monkeypatch, serve):
    """Have a function of the test serve the page."""
    page = ModuleType("lockstep.observe.monitor.web")
    page.serve = serve
    monkeypatch.setitem(sys.modules, "lockstep.observe.monitor.web", page)


def test_the_page_gets_runs_and_address_and_the_exporter_goes_along(here, tmp_path, monkeypatch):
    running(tmp_path / "runs/run", *START, done(1, 3.0))
    served = []

    def serve(watch, host, port, token, announce, interval_s, failed):
        announce("page http://somewhere")
        served.append(([path.name for path in watch.runs], host, port, token, interval_s))

    page_is(monkeypatch, serve)
    options = ["--web", "--port", "0", "--token", "abc", "--prometheus", "0", "--interval", "7"]
    ended = here("monitor", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert served == [(["run"], "127.0.0.1", 0, "abc", 7.0)]
    assert re.fullmatch(r"prometheus http://127\.0\.0\.1:\d+/metrics\npage \S+\n", ended.stdout)


@pytest.mark.parametrize("takes_signals", [True, False])
def test_what_ends_the_exporter_beside_the_page_is_the_error_of_the_command(
    here, tmp_path, monkeypatch, takes_signals
):
    serving, ended = threading.Event(), threading.Event()

    def serve(*_, **__):
        before = signal.getsignal(signal.SIGTERM)
        if takes_signals:
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
        serving.set()
        try:
            # A signal that comes just before a wait does not end it.
            assert any(ended.wait(0.05) for _ in range(400))
        finally:
            signal.signal(signal.SIGTERM, before)

    def look(monitor):
        assert serving.wait(20)
        raise DataError("a disk is gone")

    (tmp_path / "runs").mkdir()
    page_is(monkeypatch, serve)
    monkeypatch.setattr(Monitor, "look", look)
    command = here("monitor", "--web", "--prometheus", "0")
    assert command.returncode == 2
    assert command.stderr == "error: a disk is gone\n"
    assert re.fullmatch(r"prometheus \S+\n", command.stdout)


def test_a_page_that_looks_no_more_ends_the_command(here, tmp_path, monkeypatch):
    running(tmp_path / "runs/run", *START, done(1, 3.0))
    page = ModuleType("lockstep.observe.monitor.web")
    page.serve = lambda *arguments: arguments[-1](DataError("no such disk"))
    monkeypatch.setitem(sys.modules, "lockstep.observe.monitor.web", page)
    ended = here("monitor", "--web")
    assert ended.returncode == 2
    assert ended.stderr == "error: no such disk\n"


@contextmanager
def started(folder, *arguments):
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "monitor", *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lines_exporter_and_alerts_go_on_until_a_signal_ends_them(tmp_path, number):
    folder = running(tmp_path / "runs/run", *START, done(1, 3.0))
    (tmp_path / "rules.yaml").write_text(RULES)
    options = ["--prometheus", "0", "--alerts", "rules.yaml", "--interval", "0.1"]
    with started(tmp_path, *options) as process:
        address = process.stdout.readline().split()[1]
        lines = [process.stdout.readline() for _ in range(2)]
        assert "alert high on: runs/run: train/loss 3 is above 1\n" in lines
        assert "run: running at step 1/9\n" in lines
        with urllib.request.urlopen(address) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        steps = [s.value for f in families if f.name == "lockstep_step" for s in f.samples]
        assert steps == [1.0]
        folder.rename(tmp_path / "runs/.gone")
        assert process.stdout.readline().startswith("alert high over after ")
        assert process.stdout.readline() == "run: is gone\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_reader_that_goes_away_ends_it(tmp_path):
    running(tmp_path / "runs/run", *START, done(1, 3.0))
    with started(tmp_path, "--interval", "0.1") as process:
        process.stdout.readline()
        process.stdout.close()
        running(tmp_path / "runs/next", *START, done(1, 3.0))
        assert process.wait(20) in (1, 141)
        assert "Traceback" not in process.stderr.read()


def test_a_training_is_watched_from_before_its_start_to_its_end(tmp_path, lockstep):
    (tmp_path / "rules.yaml").write_text("rules: [{name: gone, when: {rank_lost: true}}]")
    options = ["--prometheus", "0", "--alerts", "rules.yaml", "--interval", "0.1"]
    lines = []
    with started(tmp_path, *options) as process:
        address = process.stdout.readline().split()[1]
        train = lockstep(
            "train", "digits", "-n", "2", "--run-dir", "runs/digits", "epochs=3", "log_every=1",
            "-q",
        )  # fmt: skip
        assert train.returncode == 0, train.stderr
        while not lines or "digits: completed" not in lines[-1]:
            lines.append(process.stdout.readline())
        time.sleep(0.5)
        with urllib.request.urlopen(address) as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=20)
    result = json.loads((tmp_path / "runs/digits/result.json").read_text())
    samples = {
        (s.name, s.labels.get("kind"), s.labels.get("rank")): s
        for f in text_string_to_metric_families(text) for s in f.samples
    }  # fmt: skip
    assert samples["lockstep_step", None, None].value == result["step"]
    info = samples["lockstep_run_info", None, None].labels
    assert info["sha256"] == result["params_sha256"]
    assert info["state"] == "completed"
    told = "".join([*lines, rest])
    assert f"completed at step {result['step']}" in told
    assert err == ""
    assert "alert" not in told

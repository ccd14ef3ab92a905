"""The page's server: who may ask, and what is answered."""

from __future__ import annotations

import builtins
import json
import math
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from run_files import append, begin, done, finish, is_free
from starlette.testclient import TestClient
from tests.observe.reading.test_diagnosis import waiting_in

from lockstep.comm.host import is_loopback
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError
from lockstep.observe.monitor import watch, web
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web import serve, views
from lockstep.observe.monitor.web.application import Guard, application
from lockstep.observe.monitor.web.hub import Hub
from lockstep.observe.monitor.web.views import run_id

CODE = """
import sys
from pathlib import Path
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web import serve
folder, host, token = sys.argv[1:]
tell = lambda url: print(url, flush=True)
serve(Watch([Path(folder)]), host, 0, token or None, tell, 1.0, print)
"""


def client(folder: Path, host: str = "127.0.0.1", token: str | None = None) -> TestClient:
    guarded = Guard(application(Hub(Watch([folder]), orjson.loads, 1.0, print)), host, token, 80)
    return TestClient(guarded, base_url="http://localhost", follow_redirects=False)


@pytest.fixture
def runs(tmp_path):
    begin(tmp_path / "one", lr=0.1)
    begin(tmp_path / "two with blanks ü", factor=2.0, lr=0.2)
    finish(tmp_path / "two with blanks ü")
    return tmp_path


def test_runs_are_listed_filtered_and_sorted(runs):
    with client(runs) as ask:
        found = ask.get("/api/runs").json()
        assert [run["name"] for run in found["runs"]] == ["one", "two with blanks ü"]
        assert found["runs"][0]["state"] in ("running", "killed")
        assert found["runs"][1] | {"sha256": "ab" * 32, "step": 20} == found["runs"][1]
        query = {"where": ["lr>0.15", "state=completed"]}
        assert [r["step"] for r in ask.get("/api/runs", params=query).json()["runs"]] == [20]
        wrong = ask.get("/api/runs", params={"where": "nonsense"})
        assert (wrong.status_code, "must be a key" in wrong.json()["error"]) == (400, True)


def test_a_run_is_told_with_its_curves_config_and_log(runs):
    (runs / "one" / "ranks.log").write_text("rank 1 says <b>hello</b>\n")
    number = run_id(runs / "one")
    with client(runs) as ask:
        run = ask.get(f"/api/runs/{number}").json()
        names = run["curves"]["names"]
        assert set(names) >= {"train/loss", "train/accuracy", "lr", "grad_norm"}
        assert [p["host"] for p in run["processes"]] == ["node0", "node1", "node2"]
        assert run["processes"][1]["seconds"]["compute_s"] == 40.0
        assert run["processes"][1]["now"]["compute_s"] == 2.0
        assert run["logs"] == ["ranks.log"]
        log = ask.get(f"/api/runs/{number}/log", params={"name": "ranks.log"}).json()
        assert log["text"] == "rank 1 says <b>hello</b>\n"
        places = f"{names.index('train/loss')},999"
        found = ask.get(f"/api/runs/{number}/curves", params={"curves": places}).json()
        (curve,) = found["curves"].values()
        assert curve["value"] == [1.0 / s for s in range(1, 21)]
        assert ask.get(f"/api/runs/{number}/curves?curves=x").status_code == 400
        assert ask.get(f"/api/runs/{number}/config").json() == {"lr": "0.1"}
        both = {"run": [number, run_id(runs / "two with blanks ü"), "0" * 16]}
        assert ask.get("/api/differences", params=both).json()["keys"] == {"lr": ["0.1", "0.2"]}
        assert ask.get("/api/runs/0000000000000000").status_code == 404


def test_digests_are_read_of_checkpoints_that_are_there_and_keep_nobody_waiting(runs, monkeypatch):
    saved = {"event": "Checkpointed", "path": "p", "num_bytes": 9, "stall_s": 0.5, "write_s": 1}
    append(runs / "one", [{**saved, "step": step} for step in range(1, 21)])
    folder = runs / "one" / "checkpoints" / "step_00000020"
    folder.mkdir(parents=True)
    manifest = {"files": {"model.safetensors": {"sha256": "cd" * 32, "bytes": 8}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder.parent / "step_00000019").mkdir()
    read, real = [], views.read_text

    def read_text(path):
        with ThreadPoolExecutor() as pool:
            assert pool.submit(is_free, hub.open(runs / "one").lock).result()
        read.append(path.parent.name)
        return real(path)

    monkeypatch.setattr(views, "read_text", read_text)
    hub = Hub(Watch([runs]), orjson.loads, 1.0, print)
    with TestClient(application(hub)) as ask:
        found = ask.get(f"/api/runs/{run_id(runs / 'one')}").json()["checkpoints"]
    assert [(one["step"], one["sha256"]) for one in found[:2]] == [(20, "cd" * 32), (19, "")]
    assert len(found) == 20
    assert read == ["step_00000020", "step_00000019"]


def test_calls_are_read_once_and_keep_nobody_waiting(runs, monkeypatch):
    waiting_in(RunDirectory(runs / "one"), 0, "barrier")
    read, real = [], watch.calls_of

    def calls_of(summary):
        with ThreadPoolExecutor() as pool:
            assert pool.submit(is_free, hub.open(summary.path).lock).result()
        read.append(summary.path.name)
        return real(summary)

    monkeypatch.setattr(watch, "calls_of", calls_of)
    hub = Hub(Watch([runs]), orjson.loads, 1.0, print)
    with TestClient(application(hub)) as ask:
        for _ in range(3):
            found = ask.get(f"/api/runs/{run_id(runs / 'one')}").json()["diagnosis"]["causes"]
            assert "standstill" in [cause["name"] for cause in found]
    assert read == ["one"]


def test_what_is_not_finite_becomes_gaps_that_are_counted(tmp_path):
    rows = [done(1, 1.0), done(2, "NaN"), done(3, "-Infinity"), done(4, math.pi)]
    append(tmp_path / "run", rows)
    with client(tmp_path) as ask:
        number = run_id(tmp_path / "run")
        names = ask.get(f"/api/runs/{number}").json()["curves"]["names"]
        at = str(names.index("train/loss"))
        found = ask.get(f"/api/runs/{number}/curves", params={"curves": at}).json()["curves"][at]
        assert found["value"] == [1.0, None, None, math.pi]
        assert found["num_odd"] == 2


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "config.yaml", "run.json", "..", "", "ranks.log/..",
     "hang_of_slot_1.json\x00", "hang_of_slot_../../x.json"],
)  # fmt: skip
def test_only_logs_are_read(runs, name):
    with client(runs) as ask:
        url = f"/api/runs/{run_id(runs / 'one')}/log"
        assert ask.get(url, params={"name": name}).status_code == 404


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/app.py"])
def test_only_files_of_the_page_are_served(runs, path):
    with client(runs) as ask:
        assert ask.get(path).status_code == 404
        assert ask.get("/uplot/LICENSE.txt").status_code == 404
        assert ask.get("/app.js").headers["content-type"].startswith("text/javascript")


def test_a_log_that_is_a_link_is_not_followed(runs):
    (runs / "one" / "ranks.log").symlink_to("/etc/passwd")
    with client(runs) as ask:
        answer = ask.get(f"/api/runs/{run_id(runs / 'one')}/log?name=ranks.log")
        assert (answer.status_code, "symbolic link" in answer.json()["error"]) == (404, True)


def test_folders_whose_names_are_no_text_can_be_shown(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff\xfe"))
    begin(folder)
    with client(tmp_path) as ask:
        assert ask.get("/api/runs").json()["runs"][0]["name"] == "run\\udcff\\udcfe"
        assert ask.get(f"/api/runs/{run_id(folder)}").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8080", 200), ("[::1]:80", 200), ("evil.example", 421),
     ("localhost.evil.example", 421), ("10.0.0.1", 421), ("", 421)],
)  # fmt: skip
def test_a_page_under_another_name_is_refused(runs, host, status):
    with client(runs) as ask:
        assert ask.get("/", headers={"host": host}).status_code == status


def test_the_token_is_asked_for_and_kept_in_a_cookie(runs):
    with client(runs, "0.0.0.0", "right") as ask:
        assert ask.get("/api/runs").status_code == 403
        assert ask.get("/?token=wrong").status_code == 403
        assert ask.get("/", headers={"cookie": "lockstep_80=wrong"}).status_code == 403
        welcome = ask.get("http://localhost//evil.example/?token=right&a=1")
        assert welcome.headers["location"].startswith("/evil.example/?a=1")
        assert (welcome.status_code, ask.get("/?token=right").headers["location"]) == (303, "/")
        for part in ("HttpOnly", "SameSite=Strict"):
            assert part in welcome.headers["set-cookie"]
        assert ask.get("/api/runs").status_code == 200
        assert ask.get("/", headers={"host": "192.168.0.7"}).status_code == 200
        assert ask.get("/", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("other", ["a[b]=1", '_xsrf="2|x', "{json: 1}", "=", "ü=ü", ";;a b"])
def test_cookies_of_other_programs_lock_nobody_out(runs, other):
    with client(runs, "0.0.0.0", "right") as ask:
        for cookie in (f"{other}; lockstep_80=right", f"lockstep_80=right; {other}"):
            assert ask.get("/api/runs", headers={"cookie": cookie.encode()}).status_code == 200
        assert ask.get("/api/runs", headers={"cookie": other.encode()}).status_code == 403


def test_nothing_can_be_written_and_only_own_scripts_run(runs):
    with client(runs) as ask:
        assert ask.post("/api/runs").status_code == 405
        policy = ask.get("/").headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("node", False)],
)
def test_what_is_loopback(host, is_safe):
    assert is_loopback(host) == is_safe


def test_an_address_in_use_or_a_wrong_token_is_told(runs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot be listened on: Address already in use"):
            serve(Watch([runs]), "127.0.0.1", port, None, print, 1.0, print)
    with pytest.raises(ConfigError, match="token: must be made of"):
        serve(Watch([runs]), "127.0.0.1", 0, "a b", print, 1.0, print)


def test_a_missing_extra_is_told(runs, monkeypatch):
    monkeypatch.setattr(web, "find_spec", lambda name: None if name == "uvicorn" else builtins)
    with pytest.raises(ConfigError, match=r"uvicorn: pip install 'lockstep-train\[monitor\]'"):
        serve(Watch([runs]), "127.0.0.1", 0, None, print, 1.0, print)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_with_open_streams_and_asks_for_a_token_elsewhere(runs, number):
    argv = [sys.executable, "-c", CODE, str(runs), "0.0.0.0", ""]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        url = child.stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
        base, _, token = url.partition("?token=")
        assert len(token) >= 32
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(base + "api/runs", timeout=10)
        cookie = {"cookie": f"lockstep_{base.rpartition(':')[2].strip('/')}={token}"}
        request = urllib.request.Request(base + "api/changes", headers=cookie)
        with urllib.request.urlopen(request, timeout=10) as stream:
            lines = [stream.readline() for _ in range(3)]
            assert json.loads(lines[2].removeprefix(b"data: "))["list"]
            child.send_signal(number)
            assert child.wait(10) == 0
        assert child.stderr.read() == ""

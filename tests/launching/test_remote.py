"""Run directories that are URLs, in a store of this process and on a server of S3's protocol."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.conftest import environment

import lockstep as ls
from lockstep.engine.checkpoint.listing import own_entries
from lockstep.errors import RunDirectoryError
from lockstep.launching import remote
from lockstep.launching.api import Session
from lockstep.launching.rank.join import free_port
from lockstep.launching.remote import carried, local_copy
from lockstep.launching.remote_directory import RemoteDirectory, url_of

URL = "shelf://bucket/run"


class Shelf(MemoryFileSystem):
    """Objects in memory; writes and deletions fail where `fails` says so."""

    protocol = "shelf"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    fails = staticmethod(lambda path: False)
    calls: ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("shelf://").strip("/")

    def put_file(self, lpath, rpath, **options):
        self.calls.append(rpath.removeprefix("/bucket/run/"))
        if self.fails(rpath):
            raise TimeoutError("no answer")
        super().put_file(lpath, rpath, **options)

    def rm_file(self, path):
        self.calls.append("-" + path.removeprefix("/bucket/run/"))
        super().rm_file(path)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """An empty store, whose copies are in a folder of the test's own; what fails can be set."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    Shelf.store.clear()
    Shelf.pseudo_dirs[:] = [""]
    Shelf.calls.clear()
    monkeypatch.setattr(Shelf, "fails", staticmethod(lambda path: False))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE_S", 0.02)
    return Shelf


@pytest.fixture
def command(here):
    """Runs `lockstep` in this process: its exit code, and what it has printed."""

    def call(*arguments):
        done = here(*arguments)
        return done.returncode, done.stdout, done.stderr

    return call


def another_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{time.monotonic_ns()}"))


def content(folder):
    """The files of a run directory, but for those that depend on time."""
    names = (p for entry in own_entries(folder) for p in (entry, *entry.rglob("*")))
    return {p.relative_to(folder).as_posix() for p in names if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/a/run/", "s3://bucket/a/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("runs/mine", None),
        ("/runs/a:b", None),
        ("C:/runs", None),
        ("file:///runs/a", None),
        (None, None),
    ],
)
def test_what_is_a_url(path, url):
    assert url_of(path) == url


def train(command, *keys, url=URL):
    code, out, err = command("train", "digits", "checkpoint.every=6", *keys, "--run-dir", url)
    assert code == 0, err
    return out


def test_a_run_goes_on_and_is_read_on_another_machine(shelf, command, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    train(command, "steps=20", url=str(whole))
    out = train(command, "steps=20", "stop_at_step=9")
    assert f"lockstep resume {URL}\n" in out
    another_machine(monkeypatch, tmp_path)
    code, _, err = command("train", "digits", "steps=20", "checkpoint.every=6", "--run-dir", URL)
    assert code == 2
    assert f"{URL}: already holds this run up to step_00000009" in err
    code, out, err = command("resume", URL)
    assert code == 0, err
    assert URL in out
    another_machine(monkeypatch, tmp_path)
    copy = local_copy(URL)
    ends = [json.loads((folder / "result.json").read_text()) for folder in (whole, copy)]
    assert ends[0]["params_sha256"] == ends[1]["params_sha256"]
    assert ls.load(URL).step == ls.load(whole).step
    code, out, _ = command("runs", "list", "shelf://bucket", "--json")
    assert [Path(json.loads(line)["path"]).name for line in out.splitlines()] == ["run"]
    assert command("report", URL, "--output", str(tmp_path / "report.html"))[0] == 0
    assert command("runs", "compare", URL, str(whole))[0] == 0
    code, out, _ = command("monitor", "--once", "shelf://bucket")
    assert "completed" in out


def test_others_see_whole_checkpoints_only(shelf, command, tmp_path, monkeypatch):
    """Whichever upload is the last one before the machine is lost."""
    train(command, "steps=20", "checkpoint.keep=1")
    uploads = len(shelf.calls)
    manifests = [i for i, name in enumerate(shelf.calls) if name.endswith("manifest.json")]
    whole = set()
    for name in shelf.calls:
        if name.endswith("manifest.json"):
            (whole.discard if name.startswith("-") else whole.add)(name.removeprefix("-"))
            assert whole, "the only checkpoint was removed"
    for last in {*range(0, uploads, 24), *manifests[-2:]}:
        shelf.store.clear()
        shelf.calls.clear()
        another_machine(monkeypatch, tmp_path)
        shelf.fails = staticmethod(lambda path, last=last: len(shelf.calls) > last + 1)
        monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
        code, _, err = command(
            "train", "digits", "steps=20", "checkpoint.every=6", "checkpoint.keep=1",
            "--run-dir", URL,
        )  # fmt: skip
        assert code in (0, 75), err
        shelf.fails = staticmethod(lambda path: False)
        another_machine(monkeypatch, tmp_path)
        seen = RemoteDirectory(URL)
        seen.fetch()
        for folder in (seen.path / "checkpoints").glob("step_*"):
            ls.engine.checkpoint.format.read(folder)


def test_a_store_that_fails_for_a_while_costs_nothing(shelf, command, monkeypatch, tmp_path):
    failed = []

    def fails(path):
        if len(failed) < 5:
            failed.append(path)
            return True
        return False

    shelf.fails = staticmethod(fails)
    code, _, err = command("train", "digits", "steps=60", "checkpoint.every=6", "--run-dir", URL)
    assert code == 0
    assert err.count("cannot be written, training goes on: TimeoutError: no answer") == 1
    there = content(RemoteDirectory(URL).path)
    another_machine(monkeypatch, tmp_path)
    assert content(local_copy(URL)) == there


def test_what_was_not_carried_over_is_sent_by_the_next_start(shelf, command, monkeypatch, tmp_path):
    shelf.fails = staticmethod(lambda path: True)
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    code, _, err = command(
        "train", "digits", "steps=20", "stop_at_step=9", "checkpoint.every=6", "--run-dir", URL
    )
    assert code == 75
    assert f"{URL}: the end of the run could not be carried over: TimeoutError" in err
    assert str(RemoteDirectory(URL).path) in err
    shelf.fails = staticmethod(lambda path: False)
    code, out, _ = command("resume", URL)
    assert code == 0
    assert "step 9" in out
    another_machine(monkeypatch, tmp_path)
    assert ls.load(URL, "latest").step == 20


def test_what_another_job_has_overtaken_is_kept(shelf, command, monkeypatch, tmp_path):
    said = []
    train(command, "steps=20", "stop_at_step=9")
    shelf.fails = staticmethod(lambda path: True)
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    assert command("resume", URL, "stop_at_step=14")[0] == 75
    shelf.fails = staticmethod(lambda path: False)
    mine = os.environ["XDG_CACHE_HOME"]
    another_machine(monkeypatch, tmp_path)
    assert command("resume", URL)[0] == 0
    monkeypatch.setenv("XDG_CACHE_HOME", mine)
    own = RemoteDirectory(URL, on_warning=said.append)
    own.fetch()
    aside = own.path.with_name("run-unsent-1")
    lost = f"{aside} holds what could not be carried over to {URL} before another job did"
    assert said == [lost]
    assert (aside / "checkpoints" / "step_00000014").is_dir()
    assert (own.path / "checkpoints" / "step_00000020").is_dir()


def test_a_start_keeps_what_a_killed_one_had_sent_without_noting_it(shelf, command, monkeypatch):
    train(command, "steps=20", "stop_at_step=9")
    own = RemoteDirectory(URL, on_warning=lambda text: pytest.fail(text))
    sent = own.path / ".sent.json"
    noted = json.loads(sent.read_text())
    shelf.fails = staticmethod(lambda path: path.endswith("events.jsonl"))
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    assert command("resume", URL)[0] == 75
    sent.write_text(json.dumps(noted | {"owner": json.loads(sent.read_text())["owner"]}))
    shelf.fails = staticmethod(lambda path: False)
    own.fetch()
    own.own()
    own.send()
    assert ls.load(URL, "latest").step == 20


def test_checkpoints_that_were_pruned_elsewhere_go(shelf, command, monkeypatch, tmp_path):
    train(command, "steps=20", "stop_at_step=9", "checkpoint.keep=1")
    mine = os.environ["XDG_CACHE_HOME"]
    another_machine(monkeypatch, tmp_path)
    assert command("resume", URL)[0] == 0
    monkeypatch.setenv("XDG_CACHE_HOME", mine)
    own = RemoteDirectory(URL)
    own.fetch()
    there = {Path(name).parent.name for name in own._there() if name.endswith("manifest.json")}
    assert there == {folder.name for folder in (own.path / "checkpoints").glob("step_*")}
    assert "step_00000009" not in there


def test_a_job_stops_when_another_one_takes_over(shelf, command, tmp_path, monkeypatch):
    script = tmp_path / "two.py"
    script.write_text(
        "from lockstep.systems.digits.task import Digits\n"
        "from lockstep.launching.remote_directory import RemoteDirectory\n"
        "class Two(Digits):\n"
        "    def after_step(self, model, step):\n"
        "        if step == 10:\n"
        f"            RemoteDirectory({URL!r}).own()\n"
    )
    code, _, err = command("train", f"{script}:Two", "steps=100000", "--run-dir", URL)
    assert code == 2
    assert f"{URL}: another job (process {os.getpid()} of " in err
    own = RemoteDirectory(URL).path
    assert str(own) in err
    assert any((own / "checkpoints").glob("step_*"))  # it has stopped in order


def test_only_rank_0_of_ranks_that_others_have_started_has_the_run(shelf, monkeypatch, command):
    train(command, "steps=6")
    for name, value in {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    shelf.calls.clear()
    with carried(Session(URL)) as session:
        assert session.url == URL
        folder = Path(session.run_dir)
        assert {"run.json", "config.yaml"} <= content(folder)
        assert not [*(folder / "checkpoints").glob("step_*")]
        (folder / "config.yaml").write_text("other")
    assert shelf.calls == []


def test_a_removed_copy_removes_no_run(shelf, command):
    train(command, "steps=6")
    own = RemoteDirectory(URL)
    own.fetch()
    own.own()
    shutil.rmtree(own.path)
    shelf.calls.clear()
    own.send()
    assert shelf.calls == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://bucket/run", "foo://bucket/run: cannot be a run directory: ValueError: Protocol"),
        ("gs://bucket/run", "gs://bucket/run: needs another package: Please install gcsfs"),
        ("shelf://bucket/../run", "must not contain .."),
    ],
)
def test_urls_that_cannot_be_used(shelf, url, message, command):
    code, _, err = command("train", "digits", "steps=2", "--run-dir", url)
    assert code == 2
    assert message in err


def test_a_url_without_a_run(shelf, command):
    assert command("runs", "list", "shelf://bucket/none")[1] == "no runs in shelf://bucket/none\n"
    for subcommand in ("tag", "remove"):
        assert f"{URL}: runs in object storage cannot be" in command("runs", subcommand, URL)[2]
    with pytest.raises(RunDirectoryError, match=f"{URL}: is no run directory"):
        local_copy(URL)


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """The variables of a server of S3's protocol, with a bucket of the name `bucket`."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()  # those of another test's server
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield variables
    server.stop()


def started(how, argv, home, variables):
    """The processes of one attempt, each in a folder that nobody else sees, if it is a pod."""
    if how != "pods":
        places = [({}, ("-n", "2", "--launcher", how))]
    else:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [({**common, "JOB_COMPLETION_INDEX": str(rank)}, ()) for rank in range(2)]
    processes = []
    for number, (place, more) in enumerate(places):
        own = home / str(number)
        own.mkdir(parents=True)
        processes.append(
            subprocess.Popen(
                [*argv, *more],
                cwd=own,
                env={**environment(), **variables, **place, "XDG_CACHE_HOME": str(own)},
                start_new_session=True,
            )
        )
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["local", "mpi", "pods"])
def test_machines_are_lost_and_others_go_on_from_s3(s3, tmp_path, how):
    """All processes are killed, and what they have on their disks is gone; three times."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import time\n"
        "from lockstep.systems.digits.task import Digits\n"
        "class Slow(Digits):\n"
        "    def after_step(self, model, step):\n"
        "        time.sleep(0.05)\n"
    )
    argv = [sys.executable, "-m", "lockstep", "train", f"{script}:Slow", "steps=400"]
    argv += ["checkpoint.every=10", "--quiet", "--run-dir"]
    for attempt in range(4):
        home = tmp_path / f"machine{attempt}"
        resumed = ("--resume",) if attempt or how == "pods" else ()
        processes = started(how, [*argv, "s3://bucket/run", *resumed], home, s3)
        if attempt == 3:
            assert [process.wait(200) for process in processes] == [0] * len(processes)
            break
        time.sleep(12)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(home, ignore_errors=True)
    whole = tmp_path / "whole"
    subprocess.run([*argv, str(whole)], cwd=tmp_path, env=environment(), check=True)
    ends = [
        json.loads((p / "result.json").read_text()) for p in (whole, local_copy("s3://bucket/run"))
    ]
    assert ends[0]["params_sha256"] == ends[1]["params_sha256"]
    assert ends[1]["step"] == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "variables", "message"),
    [
        ("s3://none/run", {}, "s3://none/run: cannot be written: FileNotFoundError"),
        ("s3://bucket/run", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect"),
        ("s3://bucket/run", {"AWS_ACCESS_KEY_ID": ""}, "Unable to locate credentials"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_in_seconds(s3, lockstep, url, variables, message):
    began = time.monotonic()
    done = lockstep("train", "digits", "steps=2", "--run-dir", url, **{**s3, **variables})
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 10

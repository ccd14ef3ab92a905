"""How labs end, and what they leave: the parts that need no hosts."""

import os
import subprocess
import time

import pytest
from benchmarks.lab import Lab, leftovers, network, ranks, start_ranks

from lockstep.errors import ConfigError, EnvironError, LaunchError


class Here(Lab):
    """A lab whose hosts are this machine."""

    def command(self, host, argv):
        return list(argv)

    def bytes_between_hosts(self):
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Folders in the place of the system's, and programs that only make and remove namespaces."""
    said = []

    def call(argv, text=""):
        said.append(argv)
        if argv[:3] == ["ip", "netns", "add"]:
            (tmp_path / "netns" / argv[3]).touch(exist_ok=False)
        elif argv[:3] == ["ip", "netns", "delete"]:
            (tmp_path / "netns" / argv[3]).unlink()
        return ""

    (tmp_path / "netns").mkdir()
    for module in (network, leftovers):
        monkeypatch.setattr(module, "call", call)
        monkeypatch.setattr(module, "STATE", tmp_path / "state")
        monkeypatch.setattr(module, "FILES", tmp_path / "files")
    monkeypatch.setattr(leftovers, "NAMESPACES", tmp_path / "netns")
    monkeypatch.setattr(network, "ip_batch", lambda namespace, lines: None)
    monkeypatch.setattr(network, "check_machine", lambda: None)
    return said


def stale(tmp_path, pid):
    """Files of a host of a lab that a restart of the machine has ended."""
    folder = tmp_path / "files" / f"lockstep-lab-{pid}-0-h0"
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("old")
    return folder


def dead():
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.mark.slow
def test_ranks_that_do_not_listen_have_one_grace_together(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_S", 1.5)
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"lab: seconds=1\.5: the ranks are not done; give more"):
        start_ranks(
            Here(4), 1, ["sh", "-c", "trap '' TERM; exec sleep 60"], "torchrun", timeout_s=1.5
        )
    assert 3.0 <= time.monotonic() - started < 5.5


def test_a_command_outside_the_context_is_refused():
    with pytest.raises(ConfigError, match="there are no hosts; call this inside"):
        Lab(1).command(0, ["true"])


def test_a_folder_that_cannot_be_written_is_said_and_nothing_is_left(machine, tmp_path):
    (tmp_path / "files").write_text("no folder")
    lab = Lab(2)
    with pytest.raises(EnvironError, match=r"^lab: .*files.*: Not a directory; .* writable"), lab:
        pass
    assert lab.name == ""
    assert not list((tmp_path / "netns").iterdir())
    assert not (tmp_path / "state").exists()


def test_files_that_outlive_a_restart_are_removed_without_namespaces(machine, tmp_path):
    folder = stale(tmp_path, dead())
    assert leftovers.remove_leftovers() == [folder.name.removesuffix("-h0")]
    assert not (tmp_path / "files").exists()
    assert machine == []


def test_a_process_whose_number_an_earlier_lab_had_makes_its_hosts(machine, tmp_path):
    folder = stale(tmp_path, os.getpid())
    with Lab(1) as lab:
        assert folder.name == f"{lab.name}-h0"
        assert "10.77.0.1 h0" in (folder / "hosts").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["netns"]
    assert not list((tmp_path / "netns").iterdir())

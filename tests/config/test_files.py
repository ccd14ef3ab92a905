from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lockstep.config.files import (
    create_beside,
    leftovers,
    open_regular,
    read_bytes,
    read_text,
    replacing,
    replacing_binary,
    temporary_beside,
)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_a_fifo_is_refused_without_waiting(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="is a FIFO, socket or device, not a regular file"):
        open_regular(tmp_path / "fifo", flags)


def test_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)


def test_a_link_is_refused_unless_it_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="is a symbolic link, not a regular file"):
        read_text(tmp_path / "link")
    assert read_text(tmp_path / "link", follow_links=True) == "text"
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_above_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("text")
    (tmp_path / "link").symlink_to("there")
    assert read_text(tmp_path / "link" / "file") == "text"


def test_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", limit=5) == b"12345"
    with pytest.raises(OSError, match="is larger than 4 bytes"):
        read_bytes(tmp_path / "file", limit=4)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="is larger than"):
        read_bytes(tmp_path / "sparse")


def test_replacing_a_link_leaves_alone_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "file").read_text() == "kept"
    assert read_text(tmp_path / "link") == "new"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (tmp_path / "null", tmp_path / "out"):  # links: a failure must do no harm
        with pytest.raises(OSError, match="is a device"), replacing(path):
            pass
    assert sorted(os.listdir(tmp_path)) == ["null", "out"]


def test_new_files_have_names_of_their_own_and_the_permissions_of_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        one, descriptor = create_beside(tmp_path / "file")
        os.close(descriptor)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(one.stat().st_mode) == 0o640
    assert temporary_beside(tmp_path / "file") != temporary_beside(tmp_path / "file")
    (tmp_path / ".other.tmp").touch()
    assert leftovers(tmp_path) == [one]


@pytest.mark.parametrize(("durable", "num_flushed"), [(True, 2), (False, 0)])
def test_the_disk_is_waited_for_where_the_file_must_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, num_flushed: int
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    with replacing_binary(tmp_path / "file", durable=durable) as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(flushed) == num_flushed  # the file and its folder
    with (
        pytest.raises(ValueError, match="torn"),
        replacing_binary(tmp_path / "file", durable=durable) as file,
    ):
        raise ValueError("torn")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]

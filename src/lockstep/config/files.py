"""Opening, reading and replacing files that may come from someone else.

A run directory, a config or a dataset may be hostile. So only regular files are opened: a FIFO
would keep its reader waiting, a device would never end. In a run directory links are not followed
either, and new files get names that cannot be guessed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO, cast

MAX_TEXT_BYTES = 16 << 20
"""The largest text that is read as a whole; its parsed form takes about twenty times as much."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow_links: bool = False) -> int:
    """A file descriptor of a regular file; it never waits.

    Args:
        path: path of the file.
        flags: flags of `os.open`; `O_CREAT` makes a file with the permissions of the umask.
        follow_links: whether `path` may be a symbolic link; the folders above it may always be.

    Raises:
        OSError: the file cannot be opened, or is a link, folder, FIFO, socket or device.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        # ELOOP: a link that is not to be followed; ENXIO: a socket, or a FIFO nobody reads.
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _wrong_kind("a symbolic link", path) from None
        if error.errno == errno.ENXIO:
            raise _wrong_kind("a FIFO, socket or device", path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise _wrong_kind("a FIFO, socket or device", path)


def open_to_read(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """A regular file, open for reading bytes.

    Raises:
        OSError: as `open_regular`.
    """
    return cast(BinaryIO, os.fdopen(open_regular(path, follow_links=follow_links), "rb"))


def open_text(path: Path) -> TextIO:
    """A regular file, open for reading UTF-8 text with its line ends as they are.

    Raises:
        OSError: as `open_regular`.
    """
    return TextIOWrapper(open_to_read(path), encoding="utf-8", newline="")


def read_bytes(path: Path, limit: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        path: path of the file.
        limit: greatest number of bytes that it may hold.
        follow_links: whether `path` may be a symbolic link, as in `open_regular`.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with open_to_read(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        # A file that is too large is not read at all, and one that grows only up to the limit.
        data = file.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return data


def read_text(path: Path, limit: int = MAX_TEXT_BYTES, *, follow_links: bool = False) -> str:
    """The UTF-8 text in a regular file; see `read_bytes`.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, limit, follow_links=follow_links).decode("utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """As `replacing_binary`, for UTF-8 text; what UTF-8 cannot encode is escaped."""
    with replacing_binary(path) as binary:
        file = TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", newline="")
        yield file
        file.flush()
        file.detach()


@contextmanager
def replacing_binary(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at the end, or leaves it as it was.

    Whoever reads `path` sees the whole old or the whole new file, also after a power cut. A link
    at `path` is replaced, not followed.

    Args:
        path: path of the file.
        durable: whether to wait for the disk; if not, a power cut may leave a damaged file.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    temporary, descriptor = create_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def create_beside(path: Path) -> tuple[Path, int]:
    """A new, empty file in the folder of `path`, and its descriptor for writing.

    Raises:
        OSError: it cannot be made, or `path` is a device, which root could replace by a file.
    """
    if _is_device(path):
        raise _wrong_kind("a device", path)
    temporary = temporary_beside(path)
    return temporary, open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def temporary_beside(path: Path) -> Path:
    """A hidden name in the folder of `path` that cannot be guessed: `.name.random.tmp`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def leftovers(folder: Path) -> list[Path]:
    """The files in a folder with names of `temporary_beside`, left by killed processes."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut.

    Raises:
        OSError: the folder cannot be opened or the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_device(path: Path) -> bool:
    """Whether this is a device, as /dev/null, or stands for an open file, as /dev/stdout."""
    try:
        if path.is_symlink() and os.readlink(path).startswith("/proc/"):
            return True
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _wrong_kind(kind: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))

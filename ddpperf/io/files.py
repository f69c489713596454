"""Open files that others may have made, without waiting for a FIFO, and write files as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading in binary mode; raise OSError for anything but a regular file.

    Symbolic links are followed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_text(path: str | Path) -> str:
    """Return the text of a regular file in UTF-8; raise OSError or UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield a path for a new file beside `path`. The file is removed unless it is renamed to `path`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)

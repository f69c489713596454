"""Read files that others may have made, without waiting for a FIFO and without filling the memory.

This module imports only the standard library.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 1_000_000  # of a file that people write, and of a summary


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading in binary mode; raise OSError for anything but a regular file.

    A FIFO would block, and opening a device can change it. Symbolic links are followed.
    """
    _require_regular(os.stat(path), path)
    # Without waiting, for the case that another process has put a FIFO there meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8.

    Raises OSError for a file of more than `most_bytes` bytes, and UnicodeDecodeError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most_bytes else file.read(most_bytes + 1)
    if (size := max(size, len(content))) > most_bytes:
        why = f"it has {size / 1e6:,.1f} MB, and at most {most_bytes / 1e6:,.0f} MB are read"
        raise OSError(errno.EFBIG, why, str(path))
    return content.decode()

"""Open files of other users without waiting for a FIFO, and write files completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ddpperf.errors import Refused


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading in binary mode; raise OSError for anything but a regular file."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO would block
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(path, "rb")


def read_text(path: str | Path) -> str:
    """Return the text of a regular file in UTF-8; raise OSError or UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file completely or not at all, in place of an existing one; raise OSError on failure."""
    with temporary_file(path.parent, content) as temporary:
        os.replace(temporary, path)
    return path


@contextlib.contextmanager
def temporary_file(folder: Path, content: str | bytes) -> Iterator[Path]:
    """Yield a new file with this content in a folder. It is removed unless it is renamed.

    The kernel applies the umask to the file, as it does not to a file of the module tempfile.
    """
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    temporary = folder / f".ddpperf.{secrets.token_hex(4)}"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def require_replaceable(option: str, name: str, begins: bytes, what: str) -> None:
    """Raise Refused if an output would overwrite a file that is not an earlier output of the same kind.

    name: the output file, as the user wrote it. begins: the first bytes of such an output. what: its
    kind in the plural, such as "pages". An empty file may be replaced.
    """
    try:
        with open_regular(name) as file:
            replaceable = file.read(len(begins)) in (b"", begins)
    except FileNotFoundError:
        return
    except OSError:
        replaceable = False
    if not replaceable:
        raise Refused(f"{option} replaces earlier {what} only, got {name!r}; name another file")

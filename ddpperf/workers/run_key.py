"""The key of a run, which launched ranks and pytest prove to each other that they know."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ddpperf.errors import Refused

KEY_VARIABLE = "DDPPERF_KEY"  # holds the key where the nodes share no folder
KEY_BYTES = 32


def make_key(path: Path) -> None:
    """Write a new random key to a new file that its owner alone can read, unless KEY_VARIABLE holds one."""
    if KEY_VARIABLE not in os.environ:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(KEY_BYTES))


def read_key(path: Path) -> bytes:
    """Return the key of the run, from KEY_VARIABLE or from a file; raise Refused if it is none."""
    try:
        key = bytes.fromhex(os.environ.get(KEY_VARIABLE) or path.read_text())
    except OSError as error:
        advice = f"share its folder between the nodes, or set {KEY_VARIABLE} on all of them"
        raise Refused(f"the key file {path} cannot be read ({error.strerror}); {advice}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise Refused(f"a key has {2 * KEY_BYTES} hexadecimal digits; set another {KEY_VARIABLE}")
    return key

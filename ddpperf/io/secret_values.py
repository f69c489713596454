"""Hide values that look like secrets before a command line or a variable is stored or printed.

This module imports only the standard library.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|PWD|KEY|CREDENTIAL|AUTH|COOKIE|(\b|_)PAT(\b|_)", re.IGNORECASE
)
# The first two change how fast ranks run, and the last names a file.
NO_SECRETS = ("TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY")
OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user and password in an address


def is_secret(name: str) -> bool:
    """Return whether the name of a variable or option looks like that of a secret."""
    return name not in NO_SECRETS and SECRET_NAME.search(name) is not None


def shown_value(name: str, value: str) -> str:
    """Return the value of a variable as it may be stored and printed."""
    return HIDDEN if is_secret(name) else OF_URL.sub(HIDDEN, value)


def shown_word(word: str) -> str:
    """Return a word of a command line, such as NAME=VALUE or --option=NAME=VALUE, without secrets."""
    name, equals, value = word.partition("=")
    if not equals:
        return OF_URL.sub(HIDDEN, word)
    if re.fullmatch(r"[\w-]+", name) and is_secret(name):
        return f"{name}={HIDDEN}"
    return f"{name}={shown_word(value)}"


def shown_command_line(words: Iterable[str]) -> str:
    """Return a command line for a shell, without secrets."""
    shown, hidden = [], False
    for word in words:
        shown.append(HIDDEN if hidden else shown_word(word))
        hidden = word.startswith("--") and "=" not in word and is_secret(word)
    return shlex.join(shown)

"""Parsers of the values of command-line options.

Each parser returns a value, or raises an error with one sentence for the user. pytest-xdist sends
the values to its workers, so each value is a number, a text or a tuple.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.errors import quoted
from ddpperf.secret_values import shown_word
from ddpperf.specs import FLOAT32_BYTES, require_model

MAX_NUMBER = 10**9 - 1
MAX_BYTES = 2**33
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Variables that ddpperf sets for each rank, or relies on.
RANK_VARIABLES = r"RANK|LOCAL_RANK|TMPDIR|DDPPERF_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"

Value = str | int | bool


class Wrong(ValueError):
    """Raised for a wrong option value, with a clause that says what is wrong."""


@dataclass(frozen=True)
class Parser:
    """A parser of one option's value.

    metavar: the value's name in the help.
    takes: the accepted values, in words.
    example: an accepted value.
    parse: returns the value; raises ValueError, or Wrong with a clause.
    """

    metavar: str
    takes: str
    example: str
    parse: Callable[[str], Any] = str

    def __call__(self, text: str) -> Any:
        """Parse an option's text, or raise argparse.ArgumentTypeError with one sentence."""
        try:
            return self.parse(text)
        except ValueError as error:
            got = quoted(shown_word(text)) + (f", which {error}" if isinstance(error, Wrong) else "")
            sentence = f"takes {self.takes}, got {got}; pass for example {self.example}"
            raise argparse.ArgumentTypeError(sentence) from error


def require(condition: bool) -> None:
    """Raise ValueError if a condition is false."""
    if not condition:
        raise ValueError


def whole_number(most: int = MAX_NUMBER, least: int = 1) -> Parser:
    """Return a parser that accepts whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        text = text.strip()
        require(text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_NUMBER)))
        require(least <= int(text) <= most)
        return int(text)

    return Parser("N", f"a whole number from {least} to {most}", "2", parse)


def number(unit: str, metavar: str, most: float, example: str, scale: float = 1.0) -> Parser:
    """Return a parser that accepts numbers above 0, and multiplies them by `scale`."""

    def parse(text: str) -> float:
        require(0 < float(text) <= most)
        return float(text) * scale

    return Parser(metavar, f"{unit} above 0 and up to {most:g}", example, parse)


def choice(*names: str) -> Parser:
    """Return a parser that accepts only the given names."""
    takes = f"{', '.join(names[:-1])} or {names[-1]}"
    return Parser("NAME", takes, names[0], lambda text: names[names.index(text)])


def several(of: Parser, takes: str, example: str, order: Callable[[Any], Any] = sorted) -> Parser:
    """Return a parser that converts different values, joined by commas, to a tuple."""

    def parse(text: str) -> tuple[Any, ...]:
        values = [of(word.strip()) for word in text.split(",")]
        if len(set(values)) < len(values):
            raise Wrong("names a value twice")
        return tuple(order(values))

    return Parser(f"{of.metavar},{of.metavar}", f"{takes}, joined by commas", example, parse)


def assignment(known: dict[str, Parser]) -> Parser:
    """Return a parser that converts FIELD=VALUE to a pair of name and value."""

    def parse(text: str) -> tuple[str, Value]:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise Wrong(f"sets none of {', '.join(known)}")
        try:
            return name, known[name](value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name} {error}") from error

    return Parser("FIELD=VALUE", "FIELD=VALUE", "comm_hook=bf16", parse)


def interpreter(text: str) -> str:
    path = text if os.sep in text else shutil.which(text) or ""
    for wrong, clause in (
        (os.path.isdir(path or text), "is a folder"),
        (not path, "is not on PATH"),
        (not os.path.exists(path), "does not exist"),
        (not os.path.isfile(path), "is not a file"),
        (not os.access(path, os.X_OK), "is not executable"),
    ):
        if wrong:
            raise Wrong(clause)
    return str(Path(path).absolute())  # a link is kept: a virtual environment is found beside it


def folder(text: str) -> str:
    if not os.path.isdir(text):
        raise Wrong("is not a folder")
    return os.path.realpath(text)


def buffer_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,10})(B|KiB|MiB|GiB)?", text)
    nbytes = int(match[1]) * UNITS[match[2] or "B"] if match else 0
    require(0 < nbytes <= MAX_BYTES)
    if nbytes % FLOAT32_BYTES:
        raise Wrong(f"is no multiple of {FLOAT32_BYTES} bytes, the size of a float32")
    return nbytes


def model_name(text: str) -> str:
    require_model(text)
    return text


def new_folder(text: str) -> str:
    require(text != "")
    return os.path.realpath(text)


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    require(bool(equals and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)))
    if re.fullmatch(RANK_VARIABLES, name):
        raise Wrong(f"sets {name}, a variable that ddpperf sets for every rank")
    return name, value

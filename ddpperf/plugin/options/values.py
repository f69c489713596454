"""Parsers of option values for argparse: each one parses a text, or refuses it with one sentence.

pytest-xdist sends values to its workers, so they are plain: numbers, texts, and tuples of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ddpperf.specs import FLOAT32_BYTES, Execution, Model, require_model

MAX_WORLD_SIZE = 1024
MAX_NUMBER = 10**9 - 1
MAX_BYTES = 2**33
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
QUOTED_LETTERS = 40  # of a refused text within a sentence
# Variables that ddpperf sets for each rank, or relies on.
RANK_VARIABLES = r"RANK|LOCAL_RANK|TMPDIR|DDPPERF_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"

Value = str | int | bool


@dataclass(frozen=True)
class Parser:
    """A parser of one option's value.

    metavar: the value in the help. takes: which values are accepted, in words. example: one of them.
    parse: return the value; raise ValueError, with a clause that says what is wrong, or without.
    """

    metavar: str
    takes: str
    example: str
    parse: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        """Return the value; raise argparse.ArgumentTypeError with one sentence."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(self.refusal(text, error)) from error

    def refusal(self, text: str, error: ValueError) -> str:
        """Return the sentence that refuses a text."""
        wrong = f", which {error}" if str(error) else ""
        return f"takes {self.takes}, got {text[:QUOTED_LETTERS]!r}{wrong}; pass for example {self.example}"


def whole_number(most: int = MAX_NUMBER, least: int = 1) -> Parser:
    """Parse a whole number."""

    def parse(text: str) -> int:
        text = text.strip()
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_NUMBER))
        if not (digits and least <= int(text) <= most):
            raise ValueError
        return int(text)

    return Parser("N", f"a whole number from {least} to {most}", "2", parse)


def number(unit: str, metavar: str, most: float, example: str, scale: float = 1.0) -> Parser:
    """Parse a number above 0, and multiply it by `scale`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise ValueError
        return value * scale

    return Parser(metavar, f"{unit} above 0 and up to {most:g}", example, parse)


def seconds(most: float, example: str) -> Parser:
    return number("seconds", "SECONDS", most, example)


def choice(*names: str) -> Parser:
    """Parse one of several names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Parser("NAME", f"{', '.join(names[:-1])} or {names[-1]}", names[0], parse)


def several(of: Parser, takes: str, example: str, order: Callable[[Any], Any] = sorted) -> Parser:
    """Parse different values joined by commas into a tuple."""

    def parse(text: str) -> tuple[Any, ...]:
        values = [of(word.strip()) for word in text.split(",")]
        if len(set(values)) < len(values):
            raise ValueError("names a value twice")
        return tuple(order(values))

    return Parser(f"{of.metavar},{of.metavar}", f"{takes}, joined by commas", example, parse)


def some_text(metavar: str, takes: str, example: str) -> Parser:
    """Take any text but an empty one."""

    def parse(text: str) -> str:
        if not text:
            raise ValueError
        return text

    return Parser(metavar, takes, example, parse)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,10})(B|KiB|MiB|GiB)?", text)
    nbytes = int(match[1]) * UNITS[match[2] or "B"] if match else 0
    if not 0 < nbytes <= MAX_BYTES:
        raise ValueError
    if nbytes % FLOAT32_BYTES:
        raise ValueError(f"is no multiple of {FLOAT32_BYTES} bytes, the size of a float32")
    return nbytes


def _model(text: str) -> str:
    try:
        require_model(text)
    except ValueError:
        raise ValueError(f"is none of {', '.join(get_args(Model))}") from None
    return text


def find_interpreter(text: str) -> str:
    """Return an interpreter's absolute path. A link stays a link: a virtual environment lies beside it.

    Raises ValueError with a clause that says what the text is instead.
    """
    path = text if os.sep in text else shutil.which(text) or ""
    if os.path.isdir(path or text):
        raise ValueError("is a folder")
    if not path:
        raise ValueError("is not on PATH")
    if not os.path.exists(path):
        raise ValueError("does not exist")
    if not os.path.isfile(path):
        raise ValueError("is not a file")
    if not os.access(path, os.X_OK):
        raise ValueError("is not executable")
    return str(Path(path).absolute())


def find_folder(text: str) -> Path:
    """Return a folder's path without links; raise ValueError if it is no folder."""
    if not os.path.isdir(text):
        raise ValueError("is not a folder")
    return Path(text).resolve()


def _new_folder(text: str) -> str:
    if not text:
        raise ValueError
    return os.path.realpath(text)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError
    if re.fullmatch(RANK_VARIABLES, name):
        raise ValueError(f"sets {name}, a variable that ddpperf sets for every rank")
    return name, value


def assignment(known: dict[str, Parser]) -> Parser:
    """Parse FIELD=VALUE into the field's name and its value."""

    def parse(text: str) -> tuple[str, Value]:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise ValueError(f"names none of the fields {', '.join(known)}")
        try:
            return name, known[name](value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name} {error}") from error

    return Parser("FIELD=VALUE", "FIELD=VALUE", "comm_hook=bf16", parse)


WHOLE_NUMBER = whole_number()
WHOLE_NUMBERS = several(WHOLE_NUMBER, "whole numbers", "32,128")
WORLD_SIZES = several(whole_number(MAX_WORLD_SIZE), f"whole numbers from 1 to {MAX_WORLD_SIZE}", "1,2")
EXECUTION = choice(*get_args(Execution))
EXECUTIONS = several(EXECUTION, EXECUTION.takes, "graph,eager", tuple)  # the first one is special
BUFFER_SIZES = several(
    Parser("SIZE", "a size from 4B to 8GiB", "64KiB", _bytes), "sizes from 4B to 8GiB", "1KiB,64MiB"
)
BANDWIDTH = number("GB/s", "GB/S", 1e5, "450", scale=1e9)
MODEL = Parser("NAME", "a built-in model, torchvision:NAME or package.module:function", "resnet18", _model)
DATA = some_text("NAME", "synthetic, cifar10[:DIR] or imagefolder:DIR", "synthetic")
INTERPRETER = Parser("PYTHON", "a Python interpreter", "/nightly/bin/python", str)
CHECKOUT = Parser("DIR", "a folder, a checkout of the code under test", "../main", str)
VARIABLE = Parser("NAME=VALUE", "NAME=VALUE", "NCCL_ALGO=Ring", _variable)
NEW_FOLDER = Parser("DIR", "a folder, which is made if it does not exist", "kept", _new_folder)
NEW_FILE = some_text("FILE", "a file", "verdict.md")

INDUCTOR = Parser("", "names of torch's inductor options, joined by +", "combo_kernels", str)
YES_NO = Parser("", "true or false", "true", lambda text: choice("true", "false")(text.lower()) == "true")

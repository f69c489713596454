"""Declarations of all ddpperf options, and the parsers of their values.

Each parser returns a value, or raises an error with one sentence for the user. pytest-xdist sends
the values to its workers, so each value is a number, a text or a tuple. docs/options.md is generated
from these declarations.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpperf.errors import quoted
from ddpperf.io.secret_values import shown_word
from ddpperf.specs import FLOAT32_BYTES, CommHook, Execution, Model, Precision, require_model
from ddpperf.specs.strategy_fields import GROUPED_STRATEGIES, MOST_BUCKET_CAP_MB
from ddpperf.specs.work import MOST_DELAY_SECONDS
from ddpperf.verdict.two_stage_test import MOST_SETS
from ddpperf.workers.launcher import launcher

MAX_NUMBER = 10**9 - 1
MAX_BYTES = 2**33
MAX_WORLD_SIZE = 1024
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BUILT_IN = ", ".join(get_args(Model))
# Variables that ddpperf sets for each rank, or relies on.
RANK_VARIABLES = r"RANK|LOCAL_RANK|TMPDIR|DDPPERF_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"

Value = str | int | float | bool  # of a training field


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


def node_link(text: str) -> tuple[float, float]:
    latency, bandwidth = text.split(",")
    return LATENCY.parse(latency), BANDWIDTH.parse(bandwidth)


def field(text: str) -> tuple[str, str, Value]:
    """Parse FIELD=VALUE, a training field of --spec, into "field", its name and its value."""
    name, _, value = text.partition("=")
    if name in OWN_OPTIONS:
        raise Wrong(f"is no field, but the option {OWN_OPTIONS[name]}")
    return _parsed_field(FIELD_PARSERS, name, value)


def side(text: str) -> tuple[str, str, Value]:
    """Parse a value of --base or --candidate into its kind, a name, and the value.

    The kind is "source tree", "interpreter", "environment" or "field". The name is that of the
    environment variable or the training field, else empty.
    """
    name, equals, value = text.partition("=")
    if os.path.isdir(text):
        if os.path.exists(os.path.join(text, "pyvenv.cfg")):
            raise Wrong(f"is a virtual environment; name its interpreter, {text.rstrip('/')}/bin/python")
        return "source tree", "", os.path.realpath(text)
    if equals and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        if re.fullmatch(RANK_VARIABLES, name):
            raise Wrong(f"sets {name}, a variable that ddpperf sets for every rank")
        return "environment", name, value
    if equals and os.sep not in name:
        return _parsed_field(FIELD_PARSERS | {"execution": EXECUTION}, name, value)
    path = text if os.sep in text else shutil.which(text) or ""
    if not os.path.exists(path):
        raise Wrong("is no folder, and no interpreter on PATH" if os.sep not in text else "does not exist")
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise Wrong("is no folder, and not executable")
    return "interpreter", "", str(Path(path).absolute())  # a link is kept: its environment is beside it


def _parsed_field(known: dict[str, Parser], name: str, value: str) -> tuple[str, str, Value]:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        known_names = f"write {', '.join(known)}, or a variable in capitals"
        raise Wrong(f"sets no training field; {f'try {near[0]}' if near else known_names}")
    try:
        return "field", name, known[name](value)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name} {error}") from error


class WrongValue(str):
    """A sentence for the user about an option's value that cannot be parsed."""


@dataclass(frozen=True)
class Option:
    """One command-line option of ddpperf, or one field of --spec.

    help: what the option does.
    default: the default as typed on CPUs and on GPUs, or a description of the default.
    repeated: whether the option may be given several times.
    """

    name: str
    parser: Parser
    help: str
    default: str | tuple[str, str] = "none"
    repeated: bool = False

    def parsed(self, text: str) -> Any:
        """Return the parsed value. A wrong value gives a `WrongValue`, which `read_options` raises later.

        argparse would end pytest before the plugin has removed an earlier run's verdict page.
        """
        try:
            return self.parser(text)
        except argparse.ArgumentTypeError as error:
            return WrongValue(f"argument {self.name}: {error}")

    @property
    def default_text(self) -> str:
        """The default of a command-line option in words, for the help."""
        if isinstance(self.default, str):
            return self.default
        cpu, gpu = self.default
        return cpu if cpu == gpu else f"{cpu} on CPUs; {gpu} on GPUs"

    def default_on(self, device: str) -> Any:
        """Return the parsed default of an option on "cpu" or "cuda".

        Returns None if the default is only described in words.
        """
        return None if isinstance(self.default, str) else self.parser(self.default[device == "cuda"])


MEBIBYTES = whole_number(MOST_BUCKET_CAP_MB, least=0)
WHOLE_NUMBER = whole_number()
WHOLE_NUMBERS = several(WHOLE_NUMBER, "whole numbers", "32,128")
WORLD_SIZES = several(whole_number(MAX_WORLD_SIZE), f"whole numbers from 1 to {MAX_WORLD_SIZE}", "1,2")
PRECISION = choice(*get_args(Precision))
EXECUTION = choice(*get_args(Execution))
EXECUTIONS = several(EXECUTION, EXECUTION.takes, "graph,eager", tuple)  # the first one is special
BUFFER_SIZES = several(
    Parser("SIZE", "a size from 4B to 8GiB", "64KiB", buffer_size), "sizes from 4B to 8GiB", "1KiB,64MiB"
)
BANDWIDTH = number("GB/s", "GB/S", 1e5, "450", scale=1e9)
DELAY = number("seconds", "SECONDS", MOST_DELAY_SECONDS, "0.5")
DEADLINE = number("seconds", "SECONDS", 86400, "300")
LATENCY = number("seconds", "SECONDS", 1.0, "5e-6")
NODE_LINK = Parser(
    "LATENCY,GB/S", "seconds up to 1 and GB/s up to 100000, joined by a comma", "5e-6,50", node_link
)
MODEL = Parser(
    "NAME", "a built-in model, torchvision:NAME or package.module:function", "resnet18", model_name
)
DATA = Parser("NAME", "synthetic, cifar10[:DIR] or imagefolder:DIR", "synthetic")
NEW_FOLDER = Parser("DIR", "a folder, which is made if it does not exist", "kept", new_folder)
NEW_FILE = Parser("FILE", "a file", "verdict.md")
INDUCTOR = Parser("", "names of torch's inductor options, joined by +", "combo_kernels")
YES_NO = Parser("", "true or false", "true", lambda text: choice("true", "false")(text.lower()) == "true")
NOTHING = Parser("", "no value", "")
INTERFACE = Parser("NAME", "the name or the address of a network interface", "eth0")
LAUNCHER = Parser("CMD", "srun, mpirun or a command with placeholders (docs/nodes.md)", "srun", launcher)

FIELDS = (
    Option("strategy", choice(*GROUPED_STRATEGIES), "How several ranks train one model.", "ddp"),
    Option("comm_hook", choice(*get_args(CommHook)), "DDP's hook for averaging gradients.", "none"),
    Option("bucket_cap_mb", MEBIBYTES, "Size of DDP's gradient buckets in MiB; 0 for torch's default.", "0"),
    Option("gradient_as_bucket_view", YES_NO, "Make gradients views of DDP's buckets.", "false"),
    Option("static_graph", YES_NO, "Tell DDP that all steps have the same graph.", "false"),
    Option("buffer_sync", YES_NO, "Broadcast rank 0's BatchNorm statistics in each step.", "true"),
    Option("sync_batch_norm", YES_NO, "Synchronize BatchNorm over all ranks.", "false"),
    Option("accumulation_steps", WHOLE_NUMBER, "Parts of a batch; DDP averages their summed gradients.", "1"),
    Option(
        "inductor", INDUCTOR, "Options of torch.compile's Inductor to switch on.", ("none", "combo_kernels")
    ),
    Option("delay_seconds", DELAY, "Delay added to every measured step, to see what finds it.", "0"),
)
FIELD_PARSERS = {option.name: option.parser for option in FIELDS}
SPEC_FIELD = Parser("FIELD=VALUE", "FIELD=VALUE", "comm_hook=bf16", field)
SIDE = Parser("X", "a folder, an interpreter, NAME=value or field=value", "../main", side)
OWN_OPTIONS = {  # of training fields that --spec does not set
    "execution": "--executions",
    "model": "--model",
    "precision": "--precision",
    "world_size": "--world-sizes",
    "per_rank_batch_size": "--batch-sizes",
    "data": "--data",
}

HERE = "this environment"

GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option(
            "--full",
            NOTHING,
            "Run the full suite. Without --full, a folder's core suite runs. A named file runs whole.",
            "off",
        ),
        Option(
            "--device",
            choice("auto", "cuda", "cpu"),
            "Device of the ranks; auto is cuda if there are GPUs.",
            "auto",
        ),
        Option("--world-sizes", WORLD_SIZES, "Numbers of ranks to run.", "1,2 on CPUs; 1,2,4... on GPUs"),
        Option("--batch-sizes", WHOLE_NUMBERS, "Images per rank in a training step.", ("32", "32,128,512")),
        Option("--global-batch-sizes", WHOLE_NUMBERS, "Images of all ranks in a step.", ("64", "128,512")),
        Option(
            "--model", MODEL, f"The model to train. Built in are {BUILT_IN}.", ("resnet18", "resnet18_cifar")
        ),
        Option("--precision", PRECISION, "Number format of the training steps.", ("fp32", "bf16")),
        Option("--executions", EXECUTIONS, "How steps are executed.", ("eager", "graph,compile+graph,eager")),
        Option("--spec", SPEC_FIELD, "Set a training field, listed in docs/options.md.", repeated=True),
        Option("--data", DATA, "Images to train on. Real images are decoded once.", ("synthetic",) * 2),
        Option(
            "--epoch-images", WHOLE_NUMBER, "Images in a training epoch.", "512 on CPUs; all images on GPUs"
        ),
        Option("--buffer-sizes", BUFFER_SIZES, "Bytes per rank in each collective.", "sizes from 1KiB up"),
    ),
    "How long to measure": (
        Option(
            "--rounds", WHOLE_NUMBER, "Timed rounds of each test.", "10; 7 in an A/B run; 6 in a confirmation"
        ),
        Option(
            "--replicates",
            whole_number(MOST_SETS),
            "Process sets that measure each test, per side in an A/B run.",
            "1; 3 or more in an A/B run",
        ),
        Option(
            "--max-seconds",
            DEADLINE,
            "Seconds until no test is repeated, half of them beside the stored run's code.",
            ("480", "300"),
        ),
        Option("--deadline", DEADLINE, "Seconds until a silent rank counts as hung.", ("120",) * 2),
    ),
    "A/B runs": (
        Option("--base", SIDE, "The base's code, interpreter or environment variable.", HERE, repeated=True),
        Option("--candidate", SIDE, "The same of the candidate, or a training field.", HERE, repeated=True),
    ),
    "Where output goes": (
        Option("--verdict", NEW_FILE, "Write the verdict to this file as Markdown."),
        Option("--report", NEW_FILE, "Write an HTML page with tables and pictures to this file."),
        Option("--tables", NOTHING, "Print the tables that a report on parallel training asks for."),
        Option(
            "--worker-logs", NEW_FOLDER, "Write the output of every rank to this folder, at most 3 MiB each."
        ),
    ),
    "Several nodes": (
        Option(
            "--nodes",
            whole_number(MAX_WORLD_SIZE),
            "Number of nodes on which the launcher starts ranks.",
            ("1",) * 2,
        ),
        Option(
            "--launcher",
            LAUNCHER,
            "Command that starts the ranks, on any node.",
            "srun in a Slurm job with --nodes above 1; this machine starts its own ranks",
        ),
        Option(
            "--interface",
            INTERFACE,
            "Network interface to the other nodes. ddpperf listens on no other interface.",
            "that of the default route",
        ),
    ),
    "Links and projection": (
        Option("--project-to", WORLD_SIZES, "Numbers of devices to predict a step time for."),
        Option(
            "--node-size",
            WHOLE_NUMBER,
            "Devices (on CPUs, ranks) per node, in runs on several nodes and in predictions.",
            "all GPUs of a node; on CPUs 2; on one node the largest world size",
        ),
        Option("--node-link", NODE_LINK, "Latency and bandwidth of a device's link to other nodes."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}

# Options of the last release, and what to do now. "{}" stands for the old option's value.
OLD_OPTIONS = {
    **dict.fromkeys(
        ("--against", "--against-root", "--against-env", "--against-spec"), "type --candidate {}"
    ),
    **dict.fromkeys(("--baseline-root", "--baseline-python"), "type --base {}"),
    "--slow-down": "type --spec delay_seconds={}, or --candidate delay_seconds={} in an A/B run",
    "--recipe": "name the test, as in perf/test_large_batch.py::test_remedies[ID]",
    "--confirm-seconds": "a confirmation takes half of --max-seconds",
    "--gpu-hour-price": "type python -m ddpperf.report RUN.json --tables --gpu-hour-price {} after the run",
    "--plots": "type python -m ddpperf.report RUN.json --plots {} after the run",
    "--checkpoints": "leave it out: trainings are measured whole",
    "--traces": "leave it out: no traces are kept",
    "--link-bandwidth": "leave it out: the rate of the links is looked up or measured",
    "--node-latency": "type --node-link {},GB/S",
    "--node-bandwidth": "type --node-link LATENCY,{}",
    **dict.fromkeys(
        ("--node-port", "--node-key", "--node-seconds", "--hostfile"),
        "name what starts ranks on other nodes with --launcher, such as srun or mpirun",
    ),
}


def refused(name: str, text: str) -> WrongValue:
    """Return the sentence that says what to type instead of an option of the last release."""
    return WrongValue(f"{name} is gone; {OLD_OPTIONS[name].replace('{}', shown_word(text))}")


def add_options(parser: pytest.Parser) -> None:
    """Add ddpperf's command-line options to pytest."""
    for title, options in GROUPS.items():
        group = parser.getgroup(f"ddpperf {title}", f"ddpperf: {title}")
        for option in options:
            if option.parser is NOTHING:
                group.addoption(option.name, action="store_true", default=None, help=option.help)
                continue
            group.addoption(
                option.name,
                type=option.parsed,
                metavar=option.parser.metavar,
                action="append" if option.repeated else "store",
                default=[] if option.repeated else None,
                help=f"{option.help} Takes {option.parser.takes}. Default: {option.default_text}.",
            )
    group = parser.getgroup("ddpperf: options of the last release")
    for name in OLD_OPTIONS.keys() - OPTIONS.keys():
        group.addoption(name, nargs="?", type=partial(refused, name), const="VALUE", help=argparse.SUPPRESS)

"""Declarations of all ddpperf options, and the functions that convert their texts to values.

Each function returns a value, or raises ValueError with what the option takes. Values that only
specs use, such as those of --model and --precision, are checked by the specs. docs/options.md is
generated from these declarations.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.errors import Refused, quoted
from ddpperf.io.secret_values import shown_word
from ddpperf.specs import Execution, Model, Precision
from ddpperf.specs.collective import FLOAT32_BYTES
from ddpperf.specs.training_step import GROUPED_STRATEGIES
from ddpperf.verdict.settings import MOST_SETS
from ddpperf.workers.launcher import launcher

MAX_BYTES = 2**33
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Variables that ddpperf sets for each rank, or relies on.
RANK_VARIABLES = r"RANK|LOCAL_RANK|TMPDIR|DDPPERF_.*|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"

Value = str | int | float | bool  # of a training field


# --- texts become values


def number(text: str, *, kind: type[int] | type[float] = int, least: float = 1, most: float) -> float:
    """Return a number from `least` to `most`. Raises ValueError for any other text."""
    with contextlib.suppress(ValueError):
        if least <= (value := kind(text)) <= most:
            return value
    raise ValueError(f"takes {'whole ' if kind is int else ''}numbers from {least} to {most}")


def choice(text: str, *, names: tuple[str, ...]) -> str:
    if text not in names:
        raise ValueError(f"takes {', '.join(names)}")
    return text


def several(
    convert: Callable[[str], Any], order: Callable[[Any], Any] = sorted
) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that converts different values, joined by commas, to a tuple."""

    def values_of(text: str) -> tuple[Any, ...]:
        values = [convert(word.strip()) for word in text.split(",")]
        if len(set(values)) < len(values):
            raise ValueError("takes each value once")
        return tuple(order(values))

    return values_of


def buffer_size(text: str) -> int:
    """Return the bytes of a text such as "64KiB"."""
    match = re.fullmatch(r"([0-9]{1,10})(B|KiB|MiB|GiB|)", text)
    nbytes = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < nbytes <= MAX_BYTES or nbytes % FLOAT32_BYTES:
        raise ValueError(f"takes sizes from 4B to 8GiB, in multiples of {FLOAT32_BYTES} bytes")
    return nbytes


def node_link(text: str) -> Network:
    """Return the network of a text such as "5e-6,50", seconds and GB/s."""
    latency, _, bandwidth = text.partition(",")
    seconds = number(latency, kind=float, least=1e-9, most=1.0)
    return Network(latency=seconds, bandwidth=1e9 * number(bandwidth, kind=float, least=1e-9, most=1e5))


def field(text: str, *, others: tuple[str, ...] = ()) -> tuple[str, Value]:
    """Return the name and the value of FIELD=VALUE, a training field. A spec checks the value later.

    others: fields that are no fields of --spec.
    """
    name, _, value = text.partition("=")
    if name not in (*FIELDS, *others):
        raise ValueError(f"takes the fields {', '.join((*FIELDS, *others))}, or a variable in capitals")
    if name == "strategy":
        choice(value, names=GROUPED_STRATEGIES)
    try:
        return name, json.loads(value.lower())  # true, false and numbers
    except ValueError:
        return name, value


def side(text: str) -> tuple[str, Value | Path]:
    """Convert a value of --base or --candidate to a name and a value.

    The name is "source tree" or "interpreter", that of an environment variable, which is in capitals,
    or that of a training field.
    """
    name, equals, value = text.partition("=")
    if os.path.isdir(text):
        return "source tree", Path(os.path.realpath(text))
    if equals and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        if re.fullmatch(RANK_VARIABLES, name):
            raise ValueError(f"takes no {name}, which ddpperf sets for every rank")
        files = re.split("[: ]", value) if name == "LD_PRELOAD" else []
        for file in files:  # the loader would leave out a missing file with a warning
            if os.sep in file and not os.path.isfile(file):
                raise ValueError(f"takes existing libraries in LD_PRELOAD; check the path {file}")
        return name, value
    if equals and os.sep not in name:
        return field(text, others=("execution",))
    path = text if os.sep in text else shutil.which(text) or ""
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ValueError("takes a folder, an interpreter, NAME=value or field=value")
    return "interpreter", str(Path(path).absolute())  # a link is kept: its environment is beside it


# --- the options


@dataclass(frozen=True)
class Option:
    name: str
    metavar: str  # of its value in the help; empty for a switch
    convert: Callable[[str], Any]
    help: str
    default: str | tuple[str, str] = "none"  # in words, or as typed on CPUs and on GPUs
    repeated: bool = False  # whether the option may be given several times

    def value_of(self, text: str) -> Any:
        """Parse the text that was given for this option. Raises Refused if it is invalid."""
        try:
            return self.convert(text)
        except ValueError as error:
            raise Refused(f"{self.name} {error}, got {quoted(shown_word(text))}") from error

    def by_name(self, texts: list[str]) -> dict[str, Any]:
        """Return the values of a repeated option by name. Raises Refused if a name comes twice."""
        named = dict(map(self.value_of, texts))
        if len(named) < len(texts):
            raise Refused(f"{self.name} takes a name once, got one of {', '.join(named)} twice; drop one")
        return named

    @property
    def default_text(self) -> str:
        """The default in words, for the help."""
        if isinstance(self.default, str):
            return self.default
        cpu, gpu = self.default
        return cpu if cpu == gpu else f"{cpu} on CPUs; {gpu} on GPUs"

    def default_on(self, device: str) -> Any:
        """Return the default on "cpu" or "cuda"; None if the default is only described in words."""
        return None if isinstance(self.default, str) else self.convert(self.default[device == "cuda"])


# Training fields of --spec and --candidate, which have their defaults in the specs.
FIELDS = {
    "strategy": f"How several ranks train one model: {', '.join(GROUPED_STRATEGIES)}.",
    "comm_hook": "DDP's hook for gradients: none, avg, bf16, fp16, powersgd, symmetric_memory.",
    "bucket_cap_mb": "Size of DDP's gradient buckets in MiB; 0 for torch's default.",
    "gradient_as_bucket_view": "Make gradients views of DDP's buckets: true or false.",
    "static_graph": "Tell DDP that all steps have the same graph: true or false.",
    "buffer_sync": "Broadcast rank 0's BatchNorm statistics in each step: true or false.",
    "sync_batch_norm": "Synchronize BatchNorm over all ranks: true or false.",
    "accumulation_steps": "Forward and backward passes per all-reduce, each on a part of the batch.",
    "inductor": "Options of torch.compile's Inductor to switch on, joined by +.",
    "delay_seconds": "Seconds to delay every measured step, at most 10, to try which slow-downs are found.",
}
DEVICES = ("auto", "cuda", "cpu")
NUMBER, COUNT, SETS = (partial(number, most=most) for most in (10**9, 1024, MOST_SETS))
SECONDS = partial(number, kind=float, least=1e-9, most=86400)
TIME_LIMIT = partial(number, kind=float, least=0, most=86400)
NUMBERS, DEVICE_COUNTS = several(NUMBER), several(partial(COUNT, least=2))
SIZES = several(buffer_size)
IN_ORDER = several(str, tuple)  # the first execution is special
MODELS = f"{', '.join(get_args(Model))}, torchvision:NAME or module:function."
PRECISIONS = f"Number format of steps: {', '.join(get_args(Precision))}."
MODES = f"How steps run: {', '.join(get_args(Execution))}."
USUAL_MODES = ("eager", "graph,compile+graph,eager")
SCRIPT = "The command that starts your training; {ranks} is the number of ranks (docs/scripts.md)."
IMAGES = "Images: synthetic, cifar10[:DIR] or imagefolder:DIR."
HERE, DEFAULT_ROUTE = "this environment", "that of the default route"
SETS_DEFAULT = "1; 3 or more in A/B"
LAUNCHER_DEFAULT = "srun in a Slurm job with --nodes above 1; this machine starts its own ranks"
NODE_SIZE_DEFAULT = "all GPUs of a node; on CPUs 2; on one node the largest world size"
GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option("--full", "", str, "Run the full suite, not only a folder's core. A file runs whole.", "off"),
        Option("--device", "NAME", partial(choice, names=DEVICES), "Device: auto, cuda or cpu.", "auto"),
        Option("--world-sizes", "N,N", several(COUNT), "Numbers of ranks.", "1,2 on CPUs; 1,2,4... on GPUs"),
        Option("--batch-sizes", "N,N", NUMBERS, "Images per rank in a training step.", ("32", "32,128,512")),
        Option("--global-batch-sizes", "N,N", NUMBERS, "Images of all ranks in a step.", ("64", "128,512")),
        Option("--model", "NAME", str, MODELS, ("resnet18", "resnet18_cifar")),
        Option("--precision", "NAME", str, PRECISIONS, ("fp32", "bf16")),
        Option("--executions", "NAME,NAME", IN_ORDER, MODES, USUAL_MODES),
        Option("--spec", "FIELD=VALUE", field, "Set a training field of the table below.", repeated=True),
        Option("--script", "CMD", str, SCRIPT),
        Option("--data", "NAME", str, IMAGES, ("synthetic",) * 2),
        Option("--epoch-images", "N", NUMBER, "Images in an epoch.", "512 on CPUs; all on GPUs"),
        Option("--buffer-sizes", "SIZE,SIZE", SIZES, "Bytes per rank in a collective.", "sizes from 1KiB up"),
    ),
    "How long to measure": (
        Option("--rounds", "N", NUMBER, "Rounds of each test.", "10; 7 in A/B; 6 against stored code"),
        Option("--replicates", "N", SETS, "Process sets of each test, per side in A/B.", SETS_DEFAULT),
        Option(
            "--max-seconds",
            "SECONDS",
            TIME_LIMIT,
            "Seconds for the run; 0 for no repeats. The first repeat has at least a quarter of them.",
            ("480", "300"),
        ),
        Option("--deadline", "SECONDS", SECONDS, "Seconds until a silent rank counts as hung.", ("120",) * 2),
    ),
    "A/B runs": (
        Option("--base", "X", side, "A folder with code, an interpreter or NAME=value.", HERE, repeated=True),
        Option("--candidate", "X", side, "The same for the candidate, or field=value.", HERE, repeated=True),
    ),
    "Where output goes": (
        Option("--verdict", "FILE", str, "Write the verdict to this file as Markdown."),
        Option("--report", "FILE", str, "Write an HTML page with tables and pictures to this file."),
        Option("--tables", "", str, "Print the tables that a report on parallel training asks for."),
        Option("--worker-logs", "DIR", Path, "Write the output of every rank to this folder."),
    ),
    "Several nodes": (
        Option("--nodes", "N", COUNT, "Number of nodes on which the launcher starts ranks.", ("1",) * 2),
        Option("--launcher", "CMD", launcher, "srun, mpirun or a command (docs/nodes.md).", LAUNCHER_DEFAULT),
        Option("--interface", "NAME", str, "Network interface to the other nodes.", DEFAULT_ROUTE),
    ),
    "Links and projection": (
        Option("--project-to", "N,N", DEVICE_COUNTS, "Numbers of devices to predict a step time for."),
        Option("--node-size", "N", NUMBER, "Devices (on CPUs, ranks) per node.", NODE_SIZE_DEFAULT),
        Option("--node-link", "SECONDS,GB/S", node_link, "Latency and bandwidth of a device's network link."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}


def add_options(parser: pytest.Parser) -> None:
    """Add ddpperf's command-line options to pytest, which keeps their texts for `read_options`."""
    for title, options in GROUPS.items():
        group = parser.getgroup(f"ddpperf {title}", f"ddpperf: {title}")
        for option in options:
            text = f"{option.help} Default: {option.default_text}."
            if option.metavar:
                action = "append" if option.repeated else "store"
                group.addoption(option.name, metavar=option.metavar, action=action, help=text)
            else:
                group.addoption(option.name, action="store_true", default=None, help=text)

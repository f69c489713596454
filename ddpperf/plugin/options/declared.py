"""Declarations of all ddpperf options, with their values, help texts and defaults.

docs/options.md is generated from these declarations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from ddpperf.command import PRICE, PRICES, hour_price
from ddpperf.node.defaults import KEY_FILE, PORT
from ddpperf.plugin.options import values
from ddpperf.plugin.options.values import Parser, choice, number, several, whole_number
from ddpperf.specs import CommHook, Execution, Model, Precision
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.specs.strategy import GROUPED_STRATEGIES, MOST_BUCKET_CAP_MB
from ddpperf.verdict.two_stage_test import MOST_SETS
from ddpperf.workers.launcher import launcher

MAX_WORLD_SIZE = 1024
BUILT_IN = ", ".join(get_args(Model))


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
        """Return an option's value, or a `WrongValue` that `read_options` refuses.

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


DEVICE = choice("auto", "cuda", "cpu")
WHOLE_NUMBER = whole_number()
WHOLE_NUMBERS = several(WHOLE_NUMBER, "whole numbers", "32,128")
WORLD_SIZES = several(whole_number(MAX_WORLD_SIZE), f"whole numbers from 1 to {MAX_WORLD_SIZE}", "1,2")
SETS = whole_number(MOST_SETS)
MEBIBYTES = whole_number(MOST_BUCKET_CAP_MB, least=0)
PRECISION = choice(*get_args(Precision))
EXECUTION = choice(*get_args(Execution))
EXECUTIONS = several(EXECUTION, EXECUTION.takes, "graph,eager", tuple)  # the first one is special
BUFFER_SIZE = Parser("SIZE", "a size from 4B to 8GiB", "64KiB", values.buffer_size)
BUFFER_SIZES = several(BUFFER_SIZE, "sizes from 4B to 8GiB", "1KiB,64MiB")
BANDWIDTH = number("GB/s", "GB/S", 1e5, "450", scale=1e9)
DELAY = number("seconds", "SECONDS", MOST_DELAY_SECONDS, "0.5")
DEADLINE = number("seconds", "SECONDS", 86400, "300")
HOUR_PRICE = Parser("PRICE", PRICES, PRICE, hour_price)
LATENCY = number("seconds", "SECONDS", 1.0, "5e-6")
MODEL = Parser(
    "NAME", "a built-in model, torchvision:NAME or package.module:function", "resnet18", values.model_name
)
DATA = Parser("NAME", "synthetic, cifar10[:DIR] or imagefolder:DIR", "synthetic")
INTERPRETER = Parser("PYTHON", "a Python interpreter", "/nightly/bin/python", values.interpreter)
CHECKOUT = Parser("DIR", "a folder, a checkout of the code under test", "../main", values.folder)
VARIABLE = Parser("NAME=VALUE", "NAME=VALUE", "NCCL_ALGO=Ring", values.variable)
NEW_FOLDER = Parser("DIR", "a folder, which is made if it does not exist", "kept", values.new_folder)
NEW_FILE = Parser("FILE", "a file", "verdict.md")
INDUCTOR = Parser("", "names of torch's inductor options, joined by +", "combo_kernels")
YES_NO = Parser("", "true or false", "true", lambda text: choice("true", "false")(text.lower()) == "true")
NOTHING = Parser("", "no value", "")
NODES = whole_number(MAX_WORLD_SIZE)
PORT_NUMBER = whole_number(2**16 - 1)
INTERFACE = Parser("NAME", "the name or the address of a network interface", "eth0")
FILE = Parser("FILE", "a file with one host per line", "hosts.txt")
KEY = Parser("FILE", "a file", KEY_FILE)
LAUNCHER = Parser("CMD", "srun, mpirun or a command with placeholders (docs/nodes.md)", "srun", launcher)
RECIPE = Parser("NAME", "the name of a training recipe", "'2048, warm-up'")

FIELDS = (
    Option("strategy", choice(*GROUPED_STRATEGIES), "How several ranks train one model.", "ddp"),
    Option("comm_hook", choice(*get_args(CommHook)), "DDP's hook for averaging gradients.", "none"),
    Option("bucket_cap_mb", MEBIBYTES, "Size of DDP's gradient buckets in MiB; 0 for torch's default.", "0"),
    Option("gradient_as_bucket_view", YES_NO, "Make gradients views of DDP's buckets.", "false"),
    Option("static_graph", YES_NO, "Tell DDP that all steps have the same graph.", "false"),
    Option("buffer_sync", YES_NO, "Broadcast rank 0's BatchNorm statistics in each step.", "true"),
    Option("sync_batch_norm", YES_NO, "Synchronize BatchNorm over all ranks.", "false"),
    Option(
        "accumulation_steps",
        WHOLE_NUMBER,
        "Parts of a batch whose gradients are added before DDP averages them.",
        "1",
    ),
    Option(
        "inductor", INDUCTOR, "Options of torch.compile's Inductor to switch on.", ("none", "combo_kernels")
    ),
)
FIELD_PARSERS = {option.name: option.parser for option in FIELDS}
SPEC_FIELD = values.assignment(FIELD_PARSERS)
CANDIDATE_FIELD = values.assignment({**FIELD_PARSERS, "execution": EXECUTION})
AB_OPTIONS = (
    Option(
        "--against", INTERPRETER, "The candidate's Python interpreter, which needs torch.", "this interpreter"
    ),
    Option("--against-root", CHECKOUT, "The candidate's source tree.", "this source tree"),
    Option("--against-env", VARIABLE, "Set an environment variable of the candidate.", repeated=True),
    Option("--against-spec", CANDIDATE_FIELD, "Set a training field of the candidate.", repeated=True),
    Option("--baseline-python", INTERPRETER, "The base's Python interpreter.", "this interpreter"),
    Option("--baseline-root", CHECKOUT, "The base's source tree.", "this source tree"),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option(
            "--full",
            NOTHING,
            "Run the full suite. Without --full, a folder's core suite runs. A named file runs whole.",
            "off",
        ),
        Option(
            "--recipe",
            RECIPE,
            "Run only the trainings with this recipe of perf/recipes.toml.",
            "all recipes",
            repeated=True,
        ),
        Option("--device", DEVICE, "Device of the ranks; auto is cuda if there are GPUs.", "auto"),
        Option("--world-sizes", WORLD_SIZES, "Numbers of ranks to run.", "1,2 on CPUs; 1,2,4... on GPUs"),
        Option("--batch-sizes", WHOLE_NUMBERS, "Images per rank in a training step.", ("32", "32,128,512")),
        Option(
            "--global-batch-sizes",
            WHOLE_NUMBERS,
            "Images of all ranks together in a training step.",
            ("64", "128,512"),
        ),
        Option(
            "--model", MODEL, f"The model to train. Built in are {BUILT_IN}.", ("resnet18", "resnet18_cifar")
        ),
        Option("--precision", PRECISION, "Number format of the training steps.", ("fp32", "bf16")),
        Option(
            "--executions",
            EXECUTIONS,
            "Execution modes of training steps to measure.",
            ("eager", "graph,compile+graph,eager"),
        ),
        Option("--spec", SPEC_FIELD, "Set a training field, listed in docs/options.md.", repeated=True),
        Option("--data", DATA, "Images to train on. Real images are decoded once.", ("synthetic",) * 2),
        Option(
            "--epoch-images", WHOLE_NUMBER, "Images in a training epoch.", "512 on CPUs; all images on GPUs"
        ),
        Option("--buffer-sizes", BUFFER_SIZES, "Bytes per rank in each collective.", "sizes from 1KiB up"),
        Option("--slow-down", DELAY, "Delay every measured step; in an A/B run, only the candidate's steps."),
    ),
    "How long to measure": (
        Option(
            "--rounds",
            WHOLE_NUMBER,
            "Timed rounds of each test.",
            "10; 7 in an A/B run; 6 in a confirmation",
        ),
        Option(
            "--replicates",
            SETS,
            "Process sets that measure each test, per side in an A/B run.",
            "1; 3 or more in an A/B run",
        ),
        Option(
            "--confirm-seconds",
            DEADLINE,
            "Most seconds for measuring tests beside the stored run's code.",
            ("200", "120"),
        ),
        Option(
            "--max-seconds",
            DEADLINE,
            "Seconds until no test is repeated.",
            ("480", "300"),
        ),
        Option("--deadline", DEADLINE, "Seconds until a silent rank counts as hung.", ("120",) * 2),
    ),
    "A/B runs": AB_OPTIONS,
    "Where output goes": (
        Option("--verdict", NEW_FILE, "Write the verdict to this file as Markdown."),
        Option("--report", NEW_FILE, "Write an HTML page with tables and pictures to this file."),
        Option("--plots", NEW_FOLDER, "Write the pictures of the page to this folder, as PNG and SVG."),
        Option("--tables", NOTHING, "Print the tables that a report on parallel training asks for."),
        Option(
            "--gpu-hour-price",
            HOUR_PRICE,
            "Price of an hour of one GPU, or of one rank on CPUs, in any currency. Adds costs to --tables.",
        ),
        Option(
            "--worker-logs", NEW_FOLDER, "Write the output of every rank to this folder, at most 3 MiB each."
        ),
        Option(
            "--checkpoints", NEW_FOLDER, "Save training checkpoints in this folder, and resume from them."
        ),
        Option("--traces", NEW_FOLDER, "Keep the profiler traces of perf/test_comm_split.py in this folder."),
    ),
    "Several nodes": (
        Option(
            "--nodes",
            NODES,
            "Number of nodes, this one included. Wait until the agents of the others join.",
            ("1",) * 2,
        ),
        Option(
            "--launcher",
            LAUNCHER,
            "Command that starts the ranks, on any node.",
            "srun in a Slurm job with --nodes above 1; this machine starts its own ranks",
        ),
        Option(
            "--hostfile", FILE, "Start the agents by ssh, on the hosts in this file: all nodes but this one."
        ),
        Option(
            "--interface",
            INTERFACE,
            "Network interface to the other nodes. ddpperf listens on no other interface.",
            "that of MASTER_ADDR, or of the default route",
        ),
        Option(
            "--node-port", PORT_NUMBER, "Port of this node that agents connect to.", f"MASTER_PORT, or {PORT}"
        ),
        Option(
            "--node-key",
            KEY,
            "Key file, which the agents need, too. Without the file, ddpperf writes a new key.",
            (KEY_FILE,) * 2,
        ),
        Option(
            "--node-seconds",
            DEADLINE,
            "Seconds to wait for all nodes, before the run is refused.",
            ("120",) * 2,
        ),
    ),
    "Links and projection": (
        Option(
            "--link-bandwidth",
            BANDWIDTH,
            "Bandwidth from one device to all others, in one direction.",
            "nominal on GPUs, measured on a CPU",
        ),
        Option("--project-to", WORLD_SIZES, "Numbers of devices to predict a step time for."),
        Option(
            "--node-size",
            WHOLE_NUMBER,
            "Devices (on CPUs, ranks) per node, in runs on several nodes and in predictions.",
            "all GPUs of a node; on CPUs 2; on one node the largest world size",
        ),
        Option("--node-latency", LATENCY, "Latency of a message between nodes in predictions."),
        Option("--node-bandwidth", BANDWIDTH, "Bandwidth of a device's link to other nodes."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}


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

"""Declarations of all ddpperf options, with their values, help texts and defaults.

docs/options.md is generated from these declarations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from ddpperf.plugin.options import values
from ddpperf.plugin.options.values import Parser, choice
from ddpperf.specs import CommHook, Model
from ddpperf.specs.strategy import GROUPED_STRATEGIES

BUILT_IN = ", ".join(get_args(Model))


class WrongValue(str):
    """A sentence for the user about an option's value that cannot be parsed."""


@dataclass(frozen=True)
class Option:
    """One command-line option of ddpperf, or one field of --spec.

    help: what the option does.
    default: the default as typed on CPUs and on GPUs, or a description of the default.
    repeated: whether the option may be given several times.
    flag: whether the option takes no value.
    """

    name: str
    parser: Parser
    help: str
    default: str | tuple[str, str] = "none"
    repeated: bool = False
    flag: bool = False

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


FIELDS = (
    Option("strategy", choice(*GROUPED_STRATEGIES), "How several ranks train one model.", "ddp"),
    Option("comm_hook", choice(*get_args(CommHook)), "DDP's hook for averaging gradients.", "none"),
    Option(
        "bucket_cap_mb",
        values.MEBIBYTES,
        "Size of DDP's gradient buckets in MiB; 0 for torch's default.",
        "0",
    ),
    Option("gradient_as_bucket_view", values.YES_NO, "Make gradients views of DDP's buckets.", "false"),
    Option("static_graph", values.YES_NO, "Tell DDP that all steps have the same graph.", "false"),
    Option("buffer_sync", values.YES_NO, "Broadcast rank 0's BatchNorm statistics in each step.", "true"),
    Option("sync_batch_norm", values.YES_NO, "Synchronize BatchNorm over all ranks.", "false"),
    Option(
        "accumulation_steps",
        values.WHOLE_NUMBER,
        "Parts of a batch whose gradients are added before DDP averages them.",
        "1",
    ),
    Option(
        "inductor",
        values.INDUCTOR,
        "Options of torch.compile's Inductor to switch on.",
        ("none", "combo_kernels"),
    ),
)
FIELD_PARSERS = {option.name: option.parser for option in FIELDS}
SPEC_FIELD = values.assignment(FIELD_PARSERS)
CANDIDATE_FIELD = values.assignment({**FIELD_PARSERS, "execution": values.EXECUTION})
AB_OPTIONS = (
    Option(
        "--against",
        values.INTERPRETER,
        "The candidate's Python interpreter, which needs torch.",
        "this interpreter",
    ),
    Option("--against-root", values.CHECKOUT, "The candidate's source tree.", "this source tree"),
    Option("--against-env", values.VARIABLE, "Set an environment variable of the candidate.", repeated=True),
    Option("--against-spec", CANDIDATE_FIELD, "Set a training field of the candidate.", repeated=True),
    Option("--baseline-python", values.INTERPRETER, "The base's Python interpreter.", "this interpreter"),
    Option("--baseline-root", values.CHECKOUT, "The base's source tree.", "this source tree"),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option(
            "--full",
            values.NOTHING,
            "Run the full suite. Without --full, a folder's core suite runs. A named file runs whole.",
            "off",
            flag=True,
        ),
        Option("--device", values.DEVICE, "Device of the ranks; auto is cuda if there are GPUs.", "auto"),
        Option(
            "--world-sizes", values.WORLD_SIZES, "Numbers of ranks to run.", "1,2 on CPUs; 1,2,4... on GPUs"
        ),
        Option(
            "--batch-sizes", values.WHOLE_NUMBERS, "Images per rank in a training step.", ("32", "32,128,512")
        ),
        Option(
            "--global-batch-sizes",
            values.WHOLE_NUMBERS,
            "Images of all ranks together in a training step.",
            ("64", "128,512"),
        ),
        Option(
            "--model",
            values.MODEL,
            f"The model to train. Built in are {BUILT_IN}.",
            ("resnet18", "resnet18_cifar"),
        ),
        Option("--precision", values.PRECISION, "Number format of the training steps.", ("fp32", "bf16")),
        Option(
            "--executions",
            values.EXECUTIONS,
            "Execution modes of training steps to measure.",
            ("eager", "graph,compile+graph,eager"),
        ),
        Option("--spec", SPEC_FIELD, "Set a training field, listed in docs/options.md.", repeated=True),
        Option(
            "--data", values.DATA, "Images to train on. Real images are decoded once.", ("synthetic",) * 2
        ),
        Option(
            "--epoch-images",
            values.WHOLE_NUMBER,
            "Images in a training epoch.",
            "1024 on CPUs; all images on GPUs",
        ),
        Option(
            "--buffer-sizes", values.BUFFER_SIZES, "Bytes per rank in each collective.", "sizes from 1KiB up"
        ),
        Option(
            "--slow-down",
            values.DELAY,
            "Delay every measured step; in an A/B run, only the candidate's steps.",
        ),
    ),
    "How long to measure": (
        Option("--rounds", values.WHOLE_NUMBER, "Timed rounds of each test.", "10; 7 in an A/B run"),
        Option(
            "--replicates",
            values.SETS,
            "Process sets that measure each test, per side in an A/B run.",
            "1; 3 or more in an A/B run",
        ),
        Option("--deadline", values.DEADLINE, "Seconds until a silent rank counts as hung.", ("120",) * 2),
    ),
    "A/B runs": AB_OPTIONS,
    "Where output goes": (
        Option("--verdict", values.NEW_FILE, "Write the verdict to this file as Markdown."),
        Option("--worker-logs", values.NEW_FOLDER, "Write the output of every rank to this folder."),
        Option(
            "--checkpoints",
            values.NEW_FOLDER,
            "Save training checkpoints in this folder, and resume from them.",
        ),
        Option("--traces", values.NEW_FOLDER, "Keep test_comm_split's profiler traces in this folder."),
    ),
    "Links and projection": (
        Option(
            "--link-bandwidth",
            values.BANDWIDTH,
            "Bandwidth from one GPU to all others.",
            "the GPU driver's value",
        ),
        Option("--project-to", values.WORLD_SIZES, "Numbers of devices to predict a step time for."),
        Option(
            "--node-size", values.WHOLE_NUMBER, "Devices per node in predictions.", "the largest world size"
        ),
        Option("--node-latency", values.LATENCY, "Latency of a message between nodes in predictions."),
        Option("--node-bandwidth", values.BANDWIDTH, "Bandwidth of a device to other nodes in predictions."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}


def add_options(parser: pytest.Parser) -> None:
    """Add ddpperf's command-line options to pytest."""
    for title, options in GROUPS.items():
        group = parser.getgroup(f"ddpperf {title}", f"ddpperf: {title}")
        for option in options:
            if option.flag:
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

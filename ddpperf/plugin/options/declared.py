"""Every option of the suite: its name, values, help and default. docs/options.md is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest

from ddpperf.plugin.options import values
from ddpperf.plugin.options.values import Parser, choice, seconds, whole_number
from ddpperf.specs import CommHook, Model, Precision
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.specs.strategy import GROUPED_STRATEGIES, MOST_BUCKET_CAP_MB
from ddpperf.verdict.two_stage_test import MOST_SETS


@dataclass(frozen=True)
class Option:
    """One option of the command line, or one field of --spec.

    help: what it does. default: in words, or as it would be typed on CPUs and on GPUs.
    repeated: whether it may be given several times.
    """

    name: str
    parser: Parser
    help: str
    default: str | tuple[str, str] = "none"
    repeated: bool = False

    @property
    def default_text(self) -> str:
        """Return the default in words."""
        if isinstance(self.default, str):
            return self.default
        return "{} on CPUs; {} on GPUs".format(*self.default)

    def default_on(self, device: str) -> Any:
        """Return the default on a device, parsed."""
        if isinstance(self.default, str):
            return self.parser(self.default)
        return self.parser(self.default[device == "cuda"])


FIELDS = (
    Option(
        "strategy",
        choice(*GROUPED_STRATEGIES),
        "How several ranks train together. own_ddp is this project's own short DDP.",
        "ddp",
    ),
    Option("comm_hook", choice(*get_args(CommHook)), "DDP's communication hook.", "none"),
    Option(
        "bucket_cap_mb",
        whole_number(MOST_BUCKET_CAP_MB, least=0),
        "MiB of gradients in a bucket. 0 means torch's own sizes: 1, then 25.",
        "0",
    ),
    Option("gradient_as_bucket_view", values.YES_NO, "Keep gradients in their buckets.", "false"),
    Option("static_graph", values.YES_NO, "Let DDP trust that every step is like the first.", "false"),
    Option("buffer_sync", values.YES_NO, "Send rank 0's BatchNorm statistics before each step.", "true"),
    Option("sync_batch_norm", values.YES_NO, "Normalize over the images of all ranks.", "false"),
    Option(
        "accumulation_steps",
        values.WHOLE_NUMBER,
        "Parts of a batch, whose gradients are synchronized once.",
        "1",
    ),
    Option(
        "inductor",
        values.INDUCTOR,
        "Compiler options to switch on; none if it is empty.",
        "combo_kernels for compile+graph on GPUs",
    ),
)
FIELD_PARSERS = {option.name: option.parser for option in FIELDS}
SPEC_FIELD = values.assignment(FIELD_PARSERS)
CANDIDATE_FIELD = values.assignment({**FIELD_PARSERS, "execution": values.EXECUTION})
AB_OPTIONS = (
    Option("--against", values.INTERPRETER, "The candidate's interpreter, which needs torch.", "this one"),
    Option("--against-root", values.CHECKOUT, "The candidate's code, first on its path.", "this tree"),
    Option("--against-env", values.VARIABLE, "Set a variable of the candidate's environment.", repeated=True),
    Option("--against-spec", CANDIDATE_FIELD, "Set a field of the candidate's trainings.", repeated=True),
    Option("--baseline-python", values.INTERPRETER, "The base's interpreter.", "this one"),
    Option("--baseline-root", values.CHECKOUT, "The base's code, first on its path.", "this tree"),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option(
            "--device",
            choice("auto", "cuda", "cpu"),
            "Where the ranks run. auto means cuda if there are GPUs, else cpu.",
            "auto",
        ),
        Option(
            "--world-sizes", values.WORLD_SIZES, "Numbers of ranks.", "1,2 on CPUs; 1,2,4... and all on GPUs"
        ),
        Option("--batch-sizes", values.WHOLE_NUMBERS, "Images per rank and step.", ("32", "32,128,512")),
        Option(
            "--global-batch-sizes",
            values.WHOLE_NUMBERS,
            "Images of all ranks per step, for strong scaling.",
            ("64", "128,512"),
        ),
        Option(
            "--model",
            values.MODEL,
            f"The model to train. Built-in models are {', '.join(get_args(Model))}.",
            ("resnet18", "resnet18_cifar"),
        ),
        Option("--precision", choice(*get_args(Precision)), "The number format of a step.", ("fp32", "bf16")),
        Option(
            "--executions",
            values.EXECUTIONS,
            "How a step is executed. All experiments use the first; some compare the others.",
            ("eager", "graph,compile+graph,eager"),
        ),
        Option("--spec", SPEC_FIELD, "Set a field of all trainings that have it.", repeated=True),
        Option("--data", values.DATA, "Images to train on. Real images are decoded once.", "synthetic"),
        Option("--epoch-images", values.WHOLE_NUMBER, "Images in an epoch.", "1024 on CPUs; all on GPUs"),
        Option(
            "--buffer-sizes",
            values.BUFFER_SIZES,
            "Bytes per rank of a collective. Fitting a cost model needs four sizes.",
            "1KiB to 64MiB on CPUs; 1KiB to 1GiB on GPUs",
        ),
        Option(
            "--slow-down",
            seconds(MOST_DELAY_SECONDS, "0.5"),
            "Delay every step, in an A/B run the candidate's, to see what notices it.",
        ),
    ),
    "How long to measure": (
        Option("--rounds", values.WHOLE_NUMBER, "Timed rounds of each test.", "10; 7 in an A/B run"),
        Option(
            "--replicates",
            whole_number(MOST_SETS),
            "Process sets per side that measure each test.",
            "1; 3 or more in an A/B run",
        ),
        Option("--deadline", seconds(86400, "300"), "How long a rank may take or be silent.", "120"),
    ),
    "A/B runs": AB_OPTIONS,
    "Where output goes": (
        Option("--verdict", values.NEW_FILE, "Write the verdict and the table as Markdown."),
        Option("--worker-logs", values.NEW_FOLDER, "Keep the output of every rank."),
        Option("--checkpoints", values.NEW_FOLDER, "Keep whole trainings, and resume from there."),
        Option("--traces", values.NEW_FOLDER, "Keep the traces of test_comm_split, for Perfetto."),
    ),
    "Links and projection": (
        Option(
            "--link-bandwidth",
            values.BANDWIDTH,
            "Bandwidth from a device to the others, in one direction.",
            "what the driver reports",
        ),
        Option("--project-to", values.WORLD_SIZES, "Numbers of devices to predict a step for."),
        Option("--node-size", values.WHOLE_NUMBER, "Devices in a node.", "the largest world size"),
        Option("--node-latency", seconds(1.0, "5e-6"), "Latency of a message between nodes."),
        Option("--node-bandwidth", values.BANDWIDTH, "Bandwidth of a device between nodes."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}


def add_options(parser: pytest.Parser) -> None:
    """Declare the options to pytest, in a group for each subject."""
    for title, options in GROUPS.items():
        group = parser.getgroup(f"ddpperf {title}", f"ddpperf: {title}")
        for option in options:
            group.addoption(
                option.name,
                type=option.parser,
                metavar=option.parser.metavar,
                action="append" if option.repeated else "store",
                default=[] if option.repeated else None,
                help=f"{option.help} Takes {option.parser.takes}. Default: {option.default_text}.",
            )

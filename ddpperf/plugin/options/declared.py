"""Declarations of all ddpperf options, with their values, help texts and defaults.

docs/options.md is generated from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import pytest

from ddpperf.plugin.options import values
from ddpperf.plugin.options.values import Parser, choice
from ddpperf.specs import CommHook, Model
from ddpperf.specs.strategy import GROUPED_STRATEGIES

BUILT_IN = ", ".join(get_args(Model))


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
    Option("strategy", choice(*GROUPED_STRATEGIES), "How several ranks train the same model.", "ddp"),
    Option("comm_hook", choice(*get_args(CommHook)), "DDP's communication hook.", "none"),
    Option("bucket_cap_mb", values.MEBIBYTES, "MiB of gradients in a bucket; 0 for torch's own sizes.", "0"),
    Option("gradient_as_bucket_view", values.YES_NO, "Keep gradients in their buckets.", "false"),
    Option("static_graph", values.YES_NO, "Let DDP trust that every step is like the first.", "false"),
    Option("buffer_sync", values.YES_NO, "Send rank 0's BatchNorm statistics before each step.", "true"),
    Option("sync_batch_norm", values.YES_NO, "Normalize over the images of all ranks.", "false"),
    Option("accumulation_steps", values.WHOLE_NUMBER, "Parts of a batch; gradients are sent once.", "1"),
    Option("inductor", values.INDUCTOR, "Compiler options to switch on.", ("none", "combo_kernels")),
)
FIELD_PARSERS = {option.name: option.parser for option in FIELDS}
SPEC_FIELD = values.assignment(FIELD_PARSERS)
CANDIDATE_FIELD = values.assignment({**FIELD_PARSERS, "execution": values.EXECUTION})
AB_OPTIONS = (
    Option("--against", values.INTERPRETER, "The candidate's interpreter; it needs torch.", "this one"),
    Option("--against-root", values.CHECKOUT, "The candidate's code, first on its path.", "this tree"),
    Option("--against-env", values.VARIABLE, "Set a variable of the candidate's environment.", repeated=True),
    Option("--against-spec", CANDIDATE_FIELD, "Set a field of the candidate's trainings.", repeated=True),
    Option("--baseline-python", values.INTERPRETER, "The base's interpreter.", "this one"),
    Option("--baseline-root", values.CHECKOUT, "The base's code, first on its path.", "this tree"),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "What to measure": (
        Option("--device", values.DEVICE, "Where the ranks run; auto is cuda if there are GPUs.", "auto"),
        Option("--world-sizes", values.WORLD_SIZES, "Numbers of ranks.", "1,2 on CPUs; 1,2,4... on GPUs"),
        Option("--batch-sizes", values.WHOLE_NUMBERS, "Images per rank and step.", ("32", "32,128,512")),
        Option(
            "--global-batch-sizes", values.WHOLE_NUMBERS, "Images of all ranks per step.", ("64", "128,512")
        ),
        Option(
            "--model", values.MODEL, f"The model. {BUILT_IN} are built in.", ("resnet18", "resnet18_cifar")
        ),
        Option("--precision", values.PRECISION, "The number format of a step.", ("fp32", "bf16")),
        Option(
            "--executions",
            values.EXECUTIONS,
            "How steps are executed.",
            ("eager", "graph,compile+graph,eager"),
        ),
        Option(
            "--spec",
            SPEC_FIELD,
            "Set a field of all trainings; docs/options.md lists the fields.",
            repeated=True,
        ),
        Option(
            "--data", values.DATA, "Images to train on. Real images are decoded once.", ("synthetic",) * 2
        ),
        Option("--epoch-images", values.WHOLE_NUMBER, "Images in an epoch.", "1024 on CPUs; all on GPUs"),
        Option("--buffer-sizes", values.BUFFER_SIZES, "Bytes per rank of a collective.", "from 1KiB"),
        Option("--slow-down", values.DELAY, "Delay every step, in an A/B run only the candidate's."),
    ),
    "How long to measure": (
        Option("--rounds", values.WHOLE_NUMBER, "Timed rounds of each test.", "10; 7 in an A/B run"),
        Option("--replicates", values.SETS, "Process sets per side and test.", "1; 3 or more in an A/B run"),
        Option("--deadline", values.DEADLINE, "How long a rank may take, or be silent.", ("120",) * 2),
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
            "--link-bandwidth", values.BANDWIDTH, "From a device to all others.", "what the driver reports"
        ),
        Option("--project-to", values.WORLD_SIZES, "Numbers of devices to predict a step for."),
        Option("--node-size", values.WHOLE_NUMBER, "Devices in a node.", "the largest world size"),
        Option("--node-latency", values.LATENCY, "Latency of a message between nodes."),
        Option("--node-bandwidth", values.BANDWIDTH, "Bandwidth of a device between nodes."),
    ),
}
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}


def add_options(parser: pytest.Parser) -> None:
    """Add ddpperf's command-line options to pytest."""
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

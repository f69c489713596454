"""The values of all command-line options of a run, with the defaults of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.data.cache import Data
from ddpperf.machine.hardware import Links
from ddpperf.machine.network import Interface
from ddpperf.node.defaults import KEY_FILE, PORT
from ddpperf.node.hostfile import Hostfile
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.options.spec_fields import fitting
from ddpperf.plugin.options.values import Value
from ddpperf.specs import EpochSpec, Execution, Input, Precision, RunSpec, TrainingSpec, is_custom_model
from ddpperf.specs.strategy import SHARDED_STRATEGIES

GPU_INDUCTOR = "combo_kernels"  # joins small kernels, which makes a step at batch size 32 8% faster
CPU_EPOCH_IMAGES = 512


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a run on several nodes.

    count: the number of nodes. size: the number of ranks of each node. interface: the network
    interface to the other nodes; None on one node. port: where agents join. key: the key file.
    seconds: how long to wait for the agents. hostfile: the hosts on which ssh starts the agents.
    launcher: the command that starts the ranks; None to start them on this machine.
    """

    count: int = 1
    size: int = 1
    interface: Interface | None = None
    port: int = PORT
    key: Path = Path(KEY_FILE)
    seconds: float = 120.0
    hostfile: Hostfile | None = None
    launcher: str | None = None

    def of(self, world_size: int) -> int:
        """Return on how many nodes so many ranks run."""
        return -(-world_size // self.size) if self.count > 1 else 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a test run, which say what is measured, on which devices and how often.

    given: names of the options on the command line.
    batch_sizes: images per rank and step.
    global_batch_sizes: images of all ranks per step.
    executions: execution modes; the first one is used by every experiment.
    spec_fields: training fields that --spec sets.
    data_source: the text of --data.
    images: the data set; None until `prepare_images`.
    requested_epoch_images: the number of --epoch-images; None for the default.
    delay_seconds: an artificial delay of every step.
    replicates: number of process sets per side; None for the default.
    confirm_seconds: the longest time for measuring tests beside a stored run's code.
    max_seconds: the time after which no second repeated measurement begins, and an A/B run that has a
    worse test ends.
    slower_ratio: the limit of --benchmark-compare-fail.
    functions: the user's functions that the collected tests measure.
    gpu_hour_price: the price of an hour of one device; None for no prices.
    nodes: the options of a run on several nodes.
    """

    given: frozenset[str]
    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...]
    model: str
    precision: Precision
    executions: tuple[Execution, ...]
    spec_fields: Mapping[str, Value]
    data_source: str
    images: Data | None
    requested_epoch_images: int | None
    delay_seconds: float
    rounds: int
    replicates: int | None
    sides: Sides | None
    confirm_seconds: float
    max_seconds: float
    deadline_seconds: float
    worker_logs: Path | None
    traces: Path | None
    checkpoints: Path | None
    slower_ratio: float | None
    links: Links
    functions: tuple[str, ...] = ()
    gpu_hour_price: float | None = None
    nodes: NodeOptions = NodeOptions()

    @property
    def data(self) -> Data:
        """The data set with the images to train on."""
        assert self.images is not None, "prepare_images comes first"
        return self.images

    @property
    def epoch_images(self) -> int:
        if self.requested_epoch_images is not None:
            return self.requested_epoch_images
        most = self.data.train_images
        return most if self.device == "cuda" else min(CPU_EPOCH_IMAGES, most)

    @property
    def input(self) -> Input:
        """Where the batches of a training step come from.

        On GPUs, batches are taken from the data set in GPU memory. On CPUs, and for custom models,
        all steps use one fixed batch.
        """
        return "device" if self.device == "cuda" and not is_custom_model(self.model) else "fixed"

    @property
    def fastest_execution(self) -> Execution:
        """The execution mode that is expected to give the fastest training step."""
        return "compile+graph" if "compile+graph" in self.executions else self.executions[0]

    def step(self, **fields: Any) -> TrainingSpec:
        """Return the measurement spec of one training step with the given fields.

        world_size must be given. Other fields have defaults from the options, and --spec overrides
        both. The default strategy is "single" for one rank, and "ddp" for several ranks.
        """
        return TrainingSpec(**self.fields(**fields))

    def epoch(self, **fields: Any) -> EpochSpec:
        """Return the measurement spec of a training epoch with the given fields."""
        return EpochSpec(**self.fields(**fields))

    def run(self, **fields: Any) -> RunSpec:
        """Return the measurement spec of a whole training, with the images in device memory."""
        return RunSpec(**self.fields(**{"input": "device", **fields}))

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a training spec, with defaults from the command-line options."""
        alone = fields["world_size"] == 1
        strategy = "single" if alone else self.spec_fields.get("strategy", "ddp")
        fields = {"strategy": strategy, "execution": self.executions[0], **fields}
        gpu, flat = self.device == "cuda", fields["strategy"] in SHARDED_STRATEGIES
        any_format = gpu and not flat and not is_custom_model(self.model)
        common: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "memory_format": "channels_last" if any_format else "contiguous",
            "data": self.data.name,
            "digest": self.data.digest,
            "epoch_images": self.epoch_images,
            "inductor": GPU_INDUCTOR if gpu and fields["execution"] == "compile+graph" else "",
        } | fields
        return common | fitting(self.spec_fields, fields["strategy"], fields["execution"])


def default_world_sizes(device: str, gpu_count: int, nodes: int = 1, node_size: int = 0) -> tuple[int, ...]:
    """Return the default numbers of ranks: 1 and 2 on the CPU, and 1, 2, 4, ... on GPUs.

    On GPUs, the number of all GPUs is included. On several nodes of `node_size` ranks, the numbers
    up to one node are followed by 2, 4, ... and all whole nodes.
    """
    inside = _powers_and(node_size or (2 if device == "cpu" else gpu_count)) or (1,)
    return (*inside, *(inside[-1] * count for count in _powers_and(nodes) if count > 1))


def _powers_and(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `most`, and `most`."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return tuple(sorted({*powers, most} - {0}))


def is_experiment(test: str) -> bool:
    """Return whether a test is a performance test, whose file lies in a folder named perf."""
    return "perf" in Path(test.split("::")[0]).parts

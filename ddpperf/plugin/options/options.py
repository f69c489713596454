"""The options of a run as one frozen value, with the defaults of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.data.cache import Data
from ddpperf.machine.links import Links
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.options.spec_fields import fitting
from ddpperf.plugin.options.values import Value
from ddpperf.specs import EpochSpec, Execution, Input, Precision, RunSpec, TrainingSpec, is_custom_model
from ddpperf.specs.strategy import SHARDED_STRATEGIES

GPU_INDUCTOR = "combo_kernels"  # launches small kernels together: saves 8% of a step of 32 images
CPU_EPOCH_IMAGES = 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how.

    given: names of the options on the command line. batch_sizes: images per rank.
    batch_sweep: images on one device. global_batch_sizes: images of all ranks.
    executions: every experiment uses the first one. data_source: the text of --data.
    images: None until `prepare_images`. requested_epoch_images: None for the default.
    delay_seconds: added to every step. replicates: process sets per side, None for as many as
    the run needs. slower_ratio: the limit of --benchmark-compare-fail.
    """

    given: frozenset[str]
    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_sweep: tuple[int, ...]
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
    deadline_seconds: float
    worker_logs: Path | None
    traces: Path | None
    checkpoints: Path | None
    slower_ratio: float | None
    links: Links

    @property
    def data(self) -> Data:
        """The images to train on."""
        assert self.images is not None, "prepare_images comes first"
        return self.images

    @property
    def epoch_images(self) -> int:
        """Images in an epoch."""
        if self.requested_epoch_images is not None:
            return self.requested_epoch_images
        most = self.data.train_images
        return most if self.device == "cuda" else min(CPU_EPOCH_IMAGES, most)

    @property
    def model_given(self) -> bool:
        return "--model" in self.given

    @property
    def input(self) -> Input:
        """Where a step's batches come from: on GPUs from the data set in GPU memory."""
        return "device" if self.device == "cuda" and not is_custom_model(self.model) else "fixed"

    @property
    def fastest_execution(self) -> Execution:
        """The execution that is expected to be the fastest."""
        return "compile+graph" if "compile+graph" in self.executions else self.executions[0]

    def step(self, **fields: Any) -> TrainingSpec:
        """Return the spec of a step with these fields, of which world_size must be one.

        Other fields are as the options say; --spec overrides both. Without a strategy it is
        "single" for one rank, and "ddp" for several.
        """
        return TrainingSpec(**self.fields(**fields))

    def epoch(self, **fields: Any) -> EpochSpec:
        """Return the spec of an epoch of such steps."""
        return EpochSpec(**self.fields(**fields))

    def run(self, **fields: Any) -> RunSpec:
        """Return the spec of a whole training of such steps, with the images on the device."""
        return RunSpec(**self.fields(**{"input": "device", **fields}))

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a training: the given ones, and defaults from the options."""
        alone = fields["world_size"] == 1
        strategy = "single" if alone else self.spec_fields.get("strategy", "ddp")
        fields = {"strategy": strategy, "execution": self.executions[0], **fields}
        gpu = self.device == "cuda"
        channels_last = (
            gpu and fields["strategy"] not in SHARDED_STRATEGIES and not is_custom_model(self.model)
        )
        common: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "memory_format": "channels_last" if channels_last else "contiguous",
            "data": self.data.name,
            "digest": self.data.digest,
            "epoch_images": self.epoch_images,
            "inductor": GPU_INDUCTOR if gpu and fields["execution"] == "compile+graph" else "",
        } | fields
        return common | fitting(self.spec_fields, fields["strategy"], fields["execution"])


def default_world_sizes(device: str, gpu_count: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the number of GPUs, and that number; 1 and 2 on the CPU."""
    if device == "cpu":
        return (1, 2)
    powers = [2**exponent for exponent in range(gpu_count.bit_length())]
    return tuple(sorted({*powers, gpu_count} - {0})) or (1,)


def is_experiment(test: str) -> bool:
    """Return whether a test is an experiment: its file lies in a folder called perf."""
    return "perf" in Path(test.split("::")[0]).parts

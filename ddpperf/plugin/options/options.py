"""What the suite's options ask for, one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.data.cache import Data
from ddpperf.machine.links import Links
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.options.spec_fields import Value, fitting
from ddpperf.specs import EpochSpec, Execution, Input, Precision, RunSpec, TrainingSpec, is_custom_model
from ddpperf.specs.strategy import SHARDED_STRATEGIES

GPU_INDUCTOR = "combo_kernels"  # what is small is launched together: 8 % of a step of 32 images


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how, every default resolved for this machine.

    batch_sizes: images a rank. batch_sweep: on one device. global_batch_sizes: shared by all ranks. forms: the first one is
    every experiment's, the others stand beside it. spec_fields: what --spec sets in every cell that has it. delay_seconds: put
    into every step. checkpoints: the folder in which whole runs keep where they are. replicates: process sets a side, None for
    as many as the run needs. sides: of an A/B run.
    """

    device: str
    world_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_sweep: tuple[int, ...]
    global_batch_sizes: tuple[int, ...]
    model: str
    model_given: bool
    precision: Precision
    executions: tuple[Execution, ...]
    spec_fields: Mapping[str, Value]
    data: Data
    epoch_images: int
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
    def input(self) -> Input:
        """Where a step's batches come from: on GPUs from the data set on the device, augmented there, in every form."""
        return "device" if self.device == "cuda" and not is_custom_model(self.model) else "fixed"

    @property
    def fastest_form(self) -> Execution:
        return "compile+graph" if "compile+graph" in self.executions else self.executions[0]

    def step(self, **fields: Any) -> TrainingSpec:
        """A step with these fields, the others as the options say, where --spec outdoes both; world_size must be among them.

        Without a strategy it is "single" for one rank, else "ddp", or what --spec names.
        """
        return TrainingSpec(**self.fields(**fields))

    def epoch(self, **fields: Any) -> EpochSpec:
        """An epoch of such steps."""
        return EpochSpec(**self.fields(**fields))

    def run(self, **fields: Any) -> RunSpec:
        """A whole training of such steps, of images on the device."""
        return RunSpec(**self.fields(**{"input": "device", **fields}))

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return a training's fields: these, and the others as the options say."""
        alone = fields["world_size"] == 1
        strategy = "single" if alone else self.spec_fields.get("strategy", "ddp")
        fields = {"strategy": strategy, "execution": self.executions[0], **fields}
        channels_last = (
            self.device == "cuda"
            and fields["strategy"] not in SHARDED_STRATEGIES
            and not is_custom_model(self.model)
        )
        common: dict[str, Any] = {
            "model": self.model,
            "precision": self.precision,
            "memory_format": "channels_last" if channels_last else "contiguous",
            "data": self.data.name,
            "digest": self.data.digest,
            "epoch_images": self.epoch_images,
            "inductor": GPU_INDUCTOR
            if self.device == "cuda" and fields["execution"] == "compile+graph"
            else "",
        } | fields
        return common | fitting(self.spec_fields, fields["strategy"], fields["execution"])


def is_experiment(test: str) -> bool:
    """Whether a test id is an experiment's, by its file: one in a folder called perf."""
    return "perf" in Path(test.split("::")[0]).parts

"""Utilization and energy of a real GPU, compared with nvidia-smi and with each other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch

from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.plugin.devices import Devices
from ddpperf.results.usage import Usage
from ddpperf.specs import EpochSpec, RunSpec
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FIELDS: dict[str, Any] = {
    "world_size": 1,
    "strategy": "single",
    "per_rank_batch_size": 512,
    "model": "resnet18_cifar",
    "input": "device",
    "precision": "bf16",
    "execution": "graph",
    "memory_format": "channels_last",
    "epoch_images": 50_000,
}
EPOCH = EpochSpec(**FIELDS)
RUN = RunSpec(**FIELDS, test_images=10_000, epochs=15, rate=0.1)  # about 10 s on one H200
SMI = (
    "nvidia-smi -i {uuid} --query-gpu=timestamp,utilization.gpu,memory.used --format=csv,noheader,nounits "
    "-lms 100"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    devices = Devices(visible_gpus(), 1)
    options = SetOptions(size=1, device="cuda", rounds=10, deadline_seconds=120)
    with Pool(options, recorder=devices.recorder) as pool:
        yield pool


def usage_of(pool: Pool, spec: EpochSpec | RunSpec) -> tuple[Usage, float]:
    """Return the usage and the seconds of a measurement."""
    measured = pool.measure(spec)
    usage = measured.samples[0].usage
    assert usage is not None
    return usage, sum(measured.all_step_seconds())


class Printed(NamedTuple):
    """A line that nvidia-smi printed: when, in seconds, how busy the GPU was, and its used memory."""

    seconds: float
    utilization: float
    megabytes: float

    @classmethod
    def of(cls, line: str) -> Printed:
        time, *values = line.split(", ")
        return cls(datetime.strptime(time, "%Y/%m/%d %H:%M:%S.%f").timestamp(), *map(float, values))


def busiest(lines: Sequence[Printed], seconds: float) -> list[Printed]:
    """Return the lines of the time span of so many seconds in which the GPU was busiest."""
    last = lines[-1].seconds - seconds
    spans = (
        [line for line in lines if first.seconds <= line.seconds <= first.seconds + seconds]
        for first in lines
        if first.seconds <= last
    )
    return max(spans, key=lambda span: mean(line.utilization for line in span))


class Trained(NamedTuple):
    """The usage and the seconds of RUN, and what nvidia-smi printed beside it."""

    usage: Usage
    seconds: float
    printed: list[Printed]


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Trained:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    command = SMI.format(uuid=visible_gpus()[0].uuid).split()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as beside:
        try:
            usage, seconds = usage_of(pool, RUN)
        finally:
            beside.terminate()
        lines = beside.communicate()[0].splitlines()
    return Trained(usage, seconds, [Printed.of(line) for line in lines if line.count(",") == 2])


def test_training_agrees_with_nvidia_smi(trained: Trained) -> None:
    usage, seconds, theirs = trained
    # The first and the last second belong to the averaging of the driver.
    within = busiest(theirs, seconds - 2)
    ours = [value for value in usage.series["gpu_utilization"][0] if value is not None][10:-10]
    smi = mean(line.utilization for line in within)
    print(f"nvidia-smi {smi:.1f}%, ours {100 * mean(ours):.1f}%; {len(theirs)} and {len(ours)} samples")
    assert abs(100 * mean(ours) - smi) <= 5
    memory = mean(line.megabytes for line in within) * 2**20
    assert usage.mean["gpu_memory_bytes"][0] == pytest.approx(memory, rel=0.05)


def test_energy_is_the_integral_of_the_power(trained: Trained) -> None:
    usage, seconds, _ = trained
    watts = usage.mean["power_watts"][0]
    assert watts is not None
    print(f"counter {usage.joules[0]:.0f} J, sampled power {watts * seconds:.0f} J in {seconds:.1f} s")
    assert usage.joules[0] == pytest.approx(watts * seconds, rel=0.05)


@pytest.mark.slow
def test_epochs_and_a_training_agree_in_energy(pool: Pool, trained: Trained) -> None:
    of_run = trained.usage
    of_epoch, _ = usage_of(pool, EPOCH)
    print(
        f"{of_run.joules[0] / RUN.epochs:.1f} J an epoch with evaluation, {of_epoch.joules[0]:.1f} J without"
    )
    assert 0.8 < of_run.joules[0] / RUN.epochs / of_epoch.joules[0] < 1.4

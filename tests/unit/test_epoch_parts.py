"""The part loading of an epoch's steps: what the device waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count, cycle
from types import SimpleNamespace

import pytest
import torch

from ddpperf.data.augmentation import Batch
from ddpperf.data.inputs import Input
from ddpperf.instruments import step_parts as parts
from ddpperf.instruments.step_parts import PartedSteps, PartMarks
from ddpperf.specs import PARTS, EpochPartsSpec
from ddpperf.training import model_and_data
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep
from tests.unit.test_step_parts import SPENT, Clock, Slow, seconds

STEPS = 4
SPEC = EpochPartsSpec(
    world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=4 * STEPS, input="dataloader"
)
CPU = torch.device("cpu")
STEP_SECONDS = sum(SPENT.values())


class Gpu(Clock):
    """A CPU's clock, and a GPU beside it that works through its queue."""

    free = 0.0  # when the queue is done

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def spend(self, part: str) -> None:
        self.free = max(self.now, self.free) + SPENT[part]


class Event:
    """A GPU's event, which has no time before the GPU has reached it, as the real one."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = float("inf")

    def record(self, stream: object) -> None:
        self.at = max(self.gpu.now, self.gpu.free)

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        if max(self.at, end.at) > self.gpu.now:
            raise RuntimeError("CUDA error: device not ready")
        return (end.at - self.at) * 1e3


class SlowLoader(Input):
    """An input whose batches arrive in the CPU's memory after some seconds."""

    def __init__(self, gpu: Gpu, load_seconds: float) -> None:
        self.gpu, self.load_seconds = gpu, load_seconds

    def load(self, arrived: Callable[[], None] = lambda: None) -> None:
        self.gpu.now += self.load_seconds
        arrived()
        self.gpu.spend("data")  # the copy to the device

    def take(self) -> Batch:
        return torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    cuda = SimpleNamespace(Event=lambda **_: Event(gpu), current_stream=lambda _: "the stream")
    monkeypatch.setattr(parts, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=gpu))
    monkeypatch.setattr(model_and_data, "build", lambda _: Slow(gpu))
    return gpu


def on_gpu(gpu: Gpu, load_seconds: float, spec: EpochPartsSpec = SPEC) -> dict[str, float]:
    """Return the counters of epochs whose batches take `load_seconds` to load."""
    marks = PartMarks(torch.device("cuda"))
    step = TrainingStep(spec, rank=0, device=CPU, enter=marks.enter_part)
    step = step.with_input(SlowLoader(gpu, load_seconds))
    step.optimizer.register_step_post_hook(lambda *_: gpu.spend("optimizer"))
    steps = PartedSteps(MeasuredStep(step), marks)
    epoch = TrainingEpoch(steps.training, steps=steps)
    epoch.warm_up(2)
    for _ in range(2):
        epoch.start_round()
        gpu.synchronize()
        epoch.begin_timed()
        epoch.step()
        epoch.end_round(1)
    return epoch.finish()


@pytest.mark.parametrize("load_seconds", [10.0, STEP_SECONDS - 1, STEP_SECONDS + 100, 3 * STEP_SECONDS])
def test_loading_is_what_the_gpu_waits_for(gpu: Gpu, load_seconds: float) -> None:
    """The GPU waits for an epoch's whole first batch. It computes while later batches load."""
    counters = on_gpu(gpu, load_seconds)
    exposed = load_seconds + (STEPS - 1) * max(0.0, load_seconds - STEP_SECONDS)
    assert counters["loading_seconds"] == pytest.approx(exposed / STEPS)
    assert {**seconds(counters), "loading": 0.0} == pytest.approx({**SPENT, "loading": 0.0})


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("rounds", [3, 4])
def test_parts_are_those_of_the_median_epoch(rounds: int, steps: int, gpu: Gpu) -> None:
    """Medians of each part would not add up to an epoch: 1 + 1 + 1 s of three epochs of 5 s."""
    marks = PartMarks(torch.device("cuda"))
    parted = PartedSteps(MeasuredStep(TrainingStep(SPEC, rank=0, device=CPU)), marks)
    epochs = [
        {"loading": 3.0, "data": 1.0},
        {"data": 3.2, "loading": 1.0},
        {"forward": 9.0},
        {"forward": 0.1},
    ]
    nothing = dict.fromkeys(PARTS, 0.0)
    parted.rounds = [(steps, nothing | epoch) for epoch in epochs[:rounds]]
    found = seconds(parted.finish())
    assert sum(found.values()) == pytest.approx({3: 4.2, 4: (4.0 + 4.2) / 2}[rounds])


def test_events_of_a_graph_are_read_before_its_replay(gpu: Gpu) -> None:
    """The graphs take turns, and each replay records the events of its graph again."""
    marks = PartMarks(torch.device("cuda"))
    steps = PartedSteps(MeasuredStep(TrainingStep(SPEC, rank=0, device=CPU)), marks)
    steps.spec = dataclasses.replace(SPEC, execution="graph")
    graphs, lasted = cycle([[Event(gpu), Event(gpu)], [Event(gpu), Event(gpu)]]), count(1)

    def replay() -> None:
        forward, optimizer = next(graphs)
        marks.marks += [("forward", forward), ("optimizer", optimizer)]
        forward.record(None)
        gpu.free = max(gpu.now, gpu.free) + next(lasted)
        optimizer.record(None)
        gpu.spend("optimizer")

    steps.training.step = replay  # type: ignore[method-assign]
    for _ in range(5):
        steps.step()
    steps._read()
    assert [step["forward"] for step in steps.parted] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])

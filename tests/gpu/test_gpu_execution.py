"""Executions on a GPU: a replay trains like the eager step, or capturing is refused."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddpperf.data.inputs import DeviceInput
from ddpperf.errors import CannotTrain
from ddpperf.measuring.compile_and_capture import POOL_STREAMS, capture
from ddpperf.specs import Execution, Precision, TrainingSpec, to_json
from ddpperf.training import model_and_data
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import CAPTURE_WARMUP, MeasuredStep
from ddpperf.training.models import Stem
from ddpperf.training.step import TrainingStep
from ddpperf.workers.rank_commands import Rank
from tests.unit.test_execution import small_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_stream"),
]

GPU = torch.device("cuda", 0)
SPEC = TrainingSpec(
    world_size=1, per_rank_batch_size=16, strategy="single", input="device", epoch_images=112
)  # 7 steps
TOLERANCE: dict[Precision, float] = {
    "fp32": 1e-4,
    "bf16": 3e-3,
    "fp16": 1e-3,
}  # of losses, between forms of one precision
STEPS = 16  # to be compared, beginning in the middle of nowhere after those before a capture


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model and a rate with which every step's rate shows in the loss."""
    monkeypatch.setattr(model_and_data, "build", small_model)
    monkeypatch.setattr("ddpperf.training.schedules.PEAK_RATE", 0.5)


def losses(spec: TrainingSpec, *, frozen: bool = False) -> list[float]:
    """Return the losses of STEPS steps. frozen: keep the rate of the step before."""
    training = MeasuredStep(TrainingStep(spec, rank=0, device=GPU))
    training.warm_up(CAPTURE_WARMUP)
    schedule = training.training.schedule
    if frozen:
        schedule.rates = [schedule.rates[schedule.steps - 1]] * len(schedule.rates)
    trajectory = []
    for _ in range(STEPS):
        training.step()
        trajectory.append(training.training.loss.item())
    return trajectory


@pytest.mark.parametrize(
    ("execution", "precision"),
    [
        ("graph", "fp32"),
        ("graph", "bf16"),
        ("graph", "fp16"),
        pytest.param("compile", "fp32", marks=pytest.mark.slow),
        ("compile+graph", "bf16"),
        pytest.param("compile+graph", "fp16", marks=pytest.mark.slow),
    ],
)
def test_every_execution_trains_like_the_eager_one(execution: Execution, precision: Precision) -> None:
    eager = losses(replace(SPEC, precision=precision))
    assert losses(replace(SPEC, precision=precision, execution=execution)) == pytest.approx(
        eager, rel=TOLERANCE[precision]
    )
    assert max(eager) - min(eager) > 0.1


def test_a_frozen_rate_changes_the_loss() -> None:
    """The change is larger than the largest tolerance between executions."""
    spec = replace(SPEC, precision="bf16")
    assert losses(spec, frozen=True) != pytest.approx(losses(spec), rel=2 * TOLERANCE["bf16"])


def test_every_execution_takes_each_image_once() -> None:
    """After an epoch the counter on the device is at the end of a list of all images."""
    for execution in ("eager", "graph"):
        step = TrainingStep(replace(SPEC, execution=execution), rank=0, device=GPU)
        epoch, source = TrainingEpoch(MeasuredStep(step)), step.input
        epoch.warm_up(CAPTURE_WARMUP)
        for _ in range(2):
            begun = epoch.training.epoch
            epoch.step()
            assert epoch.training.epoch == begun + 1
            assert isinstance(source, DeviceInput)
            assert int(source.first) == 112
            source.begin(epoch.training.epoch - 1)
            assert source.plan[0].sort().values.tolist() == list(range(112))


def test_capture_and_launch_costs_are_counted() -> None:
    """A replay costs less CPU time than its operations, and the GPU does not wait."""
    counters = {}
    for execution in ("eager", "graph"):
        training = MeasuredStep(TrainingStep(replace(SPEC, execution=execution), rank=0, device=GPU))
        began = time.perf_counter()
        training.warm_up(10)
        lasted = time.perf_counter() - began
        training.start_round()
        training.step()
        training.end_round(1)
        counters[execution] = training.finish()
    assert "capture_seconds" not in counters["eager"]
    assert 0 < counters["graph"]["capture_seconds"] < lasted
    assert counters["graph"]["cpu_seconds"] < counters["eager"]["cpu_seconds"] / 2
    assert 0 < counters["graph"]["device_seconds"] < counters["eager"]["device_seconds"]


def test_no_callback_of_a_captured_collective_is_on_the_stream_of_the_step() -> None:
    """Nor on that of a hook, which is built next. Callbacks take the streams of torch's pool in turn."""
    numbers, used = torch.ones(1, device=GPU), []
    own, of_hook = torch.cuda.Stream(), torch.cuda.Stream()

    def note(done: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        used.append(torch.cuda.current_stream())
        return done.value()

    def step() -> None:
        sent: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[GPU])
        sent.set_result([numbers])
        for _ in range(30):
            sent.then(note).wait()

    for taken_before in range(POOL_STREAMS):
        for _ in range(taken_before):
            torch.cuda.Stream()
        used.clear()
        with torch.cuda.stream(own):
            capture(step, "graph")
        assert len(used) == 30
        assert own not in used
        assert of_hook not in used


def test_a_measurement_frees_its_memory() -> None:
    """The next measurement's peak would count it. Each captured step has a new stream."""
    rank = Rank(0)
    rank.device = GPU
    rank.open(to_json(SPEC))
    rank.close()  # drops what earlier tests left, too
    before = torch.cuda.memory_allocated()
    peaks = []
    for _ in range(3):
        rank.open(to_json(replace(SPEC, execution="graph", precision="bf16")))
        rank.sample(1)
        peaks.append(rank.finish()["counters"]["peak_memory_bytes"])
        rank.close()
        assert torch.cuda.memory_allocated() <= before
    assert peaks[0] == peaks[1] == peaks[2]


def test_data_dependent_control_flow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hesitant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model("")

        def forward(self, images: Tensor) -> Tensor:
            outputs: Tensor = self.inner(images)
            return outputs if outputs.sum().item() > 0 else outputs * 1.1

    monkeypatch.setattr(model_and_data, "build", lambda name: Hesitant())
    training = MeasuredStep(TrainingStep(replace(SPEC, execution="graph"), rank=0, device=GPU))
    with pytest.raises(
        CannotTrain,
        match=r"execution graph cannot capture this step .*control flow that depends on data .*eager",
    ):
        training.warm_up(10)
    torch.cuda.synchronize()  # the device is still there
    generator = torch.cuda.default_generators[GPU.index]
    generator.graphsafe_set_state(
        generator.clone_state()
    )  # torch leaves it in the capture; a rank ends after a refusal


@pytest.mark.slow
def test_compiled_stem_is_the_convolution() -> None:
    torch.manual_seed(0)
    stem: nn.Module = Stem(64).to(GPU).to(memory_format=torch.channels_last)
    images = torch.randn(64, 3, 32, 32, device=GPU).to(memory_format=torch.channels_last)
    found = []
    for forward in (stem, torch.compile(stem, dynamic=False)):
        with torch.autocast("cuda", torch.bfloat16):
            outputs = forward(images)
        found.append((outputs, *torch.autograd.grad(outputs.float().square().mean(), [*stem.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)

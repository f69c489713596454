"""Executions on a GPU: a replay trains like the eager step, or capturing is refused; kernels are named."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import Tensor, nn

from ddpperf.data.inputs import DeviceInput
from ddpperf.errors import CannotTrain
from ddpperf.instruments.kernels import kernel_names
from ddpperf.measuring.clock import seconds_of
from ddpperf.measuring.compile_and_capture import POOL_STREAMS, capture
from ddpperf.specs import Execution, Precision, TrainingSpec, to_json
from ddpperf.training import model_and_data
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import CAPTURE_WARMUP, MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from ddpperf.workers.rank_commands import Rank
from tests.gpu.shared import ALONE, DDP, GPU
from tests.unit.test_execution import small_model

pytestmark = pytest.mark.usefixtures("own_stream")

SPEC = TrainingSpec(
    world_size=1, per_rank_batch_size=16, strategy="single", input="device", epoch_images=112
)  # 7 steps
# Of losses, between executions of one precision. A rate that a graph had captured would change them more.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 3e-3, "fp16": 1e-3}
STEPS = 16  # to be compared, beginning in the middle of nowhere after those before a capture


@pytest.fixture
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model and a rate with which every step's rate shows in the loss."""
    monkeypatch.setattr(model_and_data, "build", small_model)
    monkeypatch.setattr("ddpperf.training.schedules.PEAK_RATE", 0.5)


def training(spec: TrainingSpec, warmup: int = CAPTURE_WARMUP) -> MeasuredStep:
    step = MeasuredStep(TrainingStep(spec, rank=0, device=GPU))
    step.warm_up(warmup)
    return step


def losses(spec: TrainingSpec) -> list[float]:
    step = training(spec)
    trajectory = []
    for _ in range(STEPS):
        step.step()
        trajectory.append(step.training.loss.item())
    return trajectory


@pytest.mark.usefixtures("small_and_fast")
@pytest.mark.parametrize(
    ("execution", "precision"),
    [
        ("graph", "fp32"),
        ("graph", "bf16"),
        ("graph", "fp16"),
        pytest.param("compile+graph", "bf16", marks=pytest.mark.slow),
        pytest.param("compile", "fp32", marks=pytest.mark.slow),
        pytest.param("compile+graph", "fp16", marks=pytest.mark.slow),
    ],
)
def test_every_execution_trains_like_the_eager_one(execution: Execution, precision: Precision) -> None:
    eager = losses(replace(SPEC, precision=precision))
    assert losses(replace(SPEC, precision=precision, execution=execution)) == pytest.approx(
        eager, rel=TOLERANCE[precision]
    )
    assert max(eager) - min(eager) > 0.1


@pytest.mark.usefixtures("small_and_fast")
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_every_execution_takes_each_image_once(execution: Execution) -> None:
    """After an epoch the counter on the device is at the end of a list of all images."""
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


@pytest.mark.usefixtures("small_and_fast")
def test_capture_and_launch_costs_are_counted() -> None:
    """A replay costs less CPU time than its operations, and the GPU does not wait."""
    counters = {}
    for execution in ("eager", "graph"):
        began = time.perf_counter()
        step = training(replace(SPEC, execution=execution), warmup=10)
        lasted = time.perf_counter() - began
        step.start_round()
        step.step()
        step.end_round(1)
        counters[execution] = step.finish()
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


@pytest.mark.usefixtures("small_and_fast")
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


class Hesitant(nn.Module):
    """A model whose control flow depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model("")

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images)
        return outputs if outputs.sum().item() > 0 else outputs * 1.1


def test_data_dependent_control_flow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_and_data, "build", lambda name: Hesitant())
    with pytest.raises(CannotTrain, match=r"cannot capture this step .*control flow that depends on data"):
        training(replace(SPEC, execution="graph"), warmup=10)
    torch.cuda.synchronize()  # the device is still there
    generator = torch.cuda.default_generators[GPU.index]
    # torch leaves it in the capture; a rank ends after a refusal
    generator.graphsafe_set_state(generator.clone_state())


# --- kernels


@pytest.mark.parametrize("execution", ["graph", "eager"])
def test_a_step_always_has_the_same_kernels(execution: Execution) -> None:
    step = training(replace(ALONE, execution=execution), warmup=10)
    step.step()  # which begins an epoch
    names = kernel_names(step.step, GPU)
    assert len(names) > 20, "convolutions, BatchNorm, the optimizer, ..."
    assert any("batch_norm" in name for name in names)
    assert not [name for name in names if name.startswith(("Mem", "cuda", "aten::", "Optimizer", "autograd"))]
    for _ in range(3):
        assert kernel_names(step.step, GPU) == names


def test_a_profile_does_not_slow_later_steps() -> None:
    step = training(replace(ALONE, input="fixed"), warmup=10)

    def step_seconds() -> float:
        return median(seconds_of(step.step, 25, GPU) for _ in range(20)) / 25

    step_seconds()  # while the clocks settle
    before = min(step_seconds() for _ in range(3))
    assert kernel_names(step.step, GPU)
    assert min(step_seconds() for _ in range(3)) == pytest.approx(before, rel=0.02)


@pytest.mark.slow
def test_fresh_process_sets_have_equal_digests() -> None:
    """All ranks of a set are profiled together."""
    N = min(2, torch.cuda.device_count())
    with Pool(SetOptions(size=N, device="cuda", rounds=1, deadline_seconds=120), replicates=2) as pool:
        for execution in ("graph", "eager"):
            one, other = pool.measure(replace((ALONE, DDP)[N - 1], execution=execution)).samples
            assert one.kernels == other.kernels != ""

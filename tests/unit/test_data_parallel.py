"""DataParallel without its communication, on the CPU: gradients, waits, autocast."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.instruments.data_parallel_trace import RANGE, mark_parts
from ddpperf.measuring.trace_split import trace_of
from ddpperf.specs import EpochSpec, TrainingSpec
from ddpperf.training.models import MODELS
from ddpperf.training.separate_replicas import SeparateReplicas
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import parallelize
from ddpperf.workers.rank_commands import open_measurement

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tests torch's own DataParallel")
CPU = torch.device("cpu")
SPEC = TrainingSpec(world_size=2, per_rank_batch_size=4, strategy="data_parallel", epoch_images=64)


class CpuDataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas can be kept on the CPU, where torch's has no devices."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__(module)
        self.device_ids = [0] * len(device_ids)


def in_threads(functions: Any, inputs: Any, *, devices: Any) -> list[Any]:
    """Call the functions in new threads, as torch's parallel_apply does on GPUs."""
    assert len(functions) == len(inputs) == len(devices)
    results: list[Any] = []
    for function, arguments in zip(functions, inputs, strict=True):
        call = partial(function, *arguments)
        thread = threading.Thread(target=lambda call=call: results.append(call()))
        thread.start()
        thread.join()
    return results


@pytest.fixture(autouse=True)
def _two_replicas_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.ReLU(), nn.Linear(8, 1000))

    monkeypatch.setitem(MODELS, "resnet18", model)
    monkeypatch.setattr("ddpperf.training.step.gpu_reason", lambda *_: "")
    monkeypatch.setattr("ddpperf.training.strategies.DataParallel", CpuDataParallel)
    monkeypatch.setattr("ddpperf.training.separate_replicas.parallel_apply", in_threads)


def step_of(spec: TrainingSpec = SPEC) -> TrainingStep:
    kind = SeparateReplicas if spec.communication == "no_sync" else TrainingStep
    return kind(spec, rank=0, device=CPU)


def trained(step: TrainingStep) -> TrainingStep:
    step.input.begin(0)
    step.input.load()
    step.train()
    return step


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def gradients_of(step: TrainingStep, part: slice) -> list[Tensor]:
    """The gradients of the initial model on a part of the batch."""
    inputs, targets = step.take()
    fresh = step_of().module
    F.cross_entropy(fresh(inputs[part]), targets[part]).backward()
    return gradients(fresh)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_parts_of_the_forward_pass_have_ranges() -> None:
    model = SimpleNamespace(**dict.fromkeys(("replicate", "scatter", "gather"), lambda part: part))
    mark_parts(model)
    parts = model.replicate(1), model.scatter(2), model.gather(3)
    assert parts == (1, 2, 3)
    names = [event.get("name") for event in trace_of(lambda: model.gather(model.scatter(1)), CPU)]
    counts = [names.count(f"{RANGE}{part}") for part in ("replicate", "scatter", "gather")]
    assert counts == [0, 1, 1]


def test_separate_replicas_compute_their_own_gradients() -> None:
    step = step_of(SPEC.no_sync())
    assert isinstance(step, SeparateReplicas)
    before = [parameter.clone() for parameter in step.replicas[1].parameters()]
    trained(step)
    for replica, part in zip(step.replicas, (slice(4), slice(4, 8)), strict=True):
        assert_equal(gradients(replica), gradients_of(step, part))
    assert_equal(list(step.replicas[1].parameters()), before)
    first = zip(step.replicas[0].parameters(), before, strict=True)
    assert not any(torch.equal(updated, initial) for updated, initial in first)


def test_separate_replicas_accumulate_gradients() -> None:
    """The micro-batches 0 to 3 and 4 to 7 are divided over the devices, so device 1 has 2, 3, 6 and 7."""
    step = step_of(TrainingSpec(**vars(SPEC) | {"accumulation_steps": 2}).no_sync())
    assert isinstance(step, SeparateReplicas)
    trained(step)
    parts = [gradients_of(step, part) for part in (slice(2, 4), slice(6, 8))]
    mean = [(one + other) / 2 for one, other in zip(*parts, strict=True)]
    assert_equal(gradients(step.replicas[1]), mean)


def test_step_ends_when_all_replicas_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events that time a step are on the first GPU's stream, which must wait for the other GPUs."""
    waits: list[tuple[str, str]] = []

    class Stream(str):
        def wait_stream(self, other: Stream) -> None:
            waits.append((self, other))

    step = trained(step_of(SPEC.no_sync()))  # the parts of the batch are on their devices now
    assert isinstance(step, SeparateReplicas)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device))
    step.optimizer.register_step_post_hook(lambda *_: setattr(step, "device", torch.device("cuda:0")))
    step.devices[1] = torch.device("cuda:1")
    trained(step)
    assert waits == [("cuda:0", "cuda:1")]


@pytest.mark.parametrize("kind", [TrainingSpec, EpochSpec])
def test_steps_and_epochs_train_separate_replicas(kind: type[TrainingSpec]) -> None:
    spec = kind(**vars(SPEC)).no_sync()
    opened = open_measurement(spec, rank=0, device=CPU, report=lambda fraction: None)
    assert opened.training is not None
    assert isinstance(opened.training.training, SeparateReplicas)


def test_threads_of_data_parallel_run_under_autocast() -> None:
    """A new thread's own data type of autocast is bf16 on CPUs, and fp16 on GPUs."""
    dtypes: list[torch.dtype] = []

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            found = super().forward(input)
            dtypes.append(found.dtype)
            return found

    spec = TrainingSpec(**vars(SPEC) | {"precision": "fp16"})
    inner: Any = parallelize(Linear(2, 2), spec, CPU)
    thread = threading.Thread(target=inner.module, args=(torch.ones(1, 2),))
    thread.start()
    thread.join()
    assert dtypes == [torch.float16]

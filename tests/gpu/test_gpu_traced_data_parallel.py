"""torch's DataParallel on one GPU with two replicas, or on two GPUs: gradients and traces.

The file is the last by its name. With torch 2.11, a CUDA graph of an fp16 step that was captured in the
same process after these traces of two GPUs failed with "invalid argument".
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ddpperf.instruments.data_parallel_trace import mark_parts
from ddpperf.specs import DATA_PARALLEL_PARTS, TraceSpec, TrainingSpec, measured_as
from ddpperf.training.separate_replicas import SeparateReplicas
from ddpperf.training.step import TrainingStep
from ddpperf.workers.rank_commands import open_measurement
from tests.gpu.shared import GPU

SPEC = TrainingSpec(
    world_size=2,
    per_rank_batch_size=16,
    model="resnet18_cifar",
    strategy="data_parallel",
    epoch_images=32 * 16,
)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The GPUs of the two replicas, which share one if there is only one."""
    found = (0, min(1, torch.cuda.device_count() - 1))
    monkeypatch.setattr(
        "ddpperf.training.strategies.DataParallel",
        lambda module, device_ids: nn.DataParallel(module, device_ids=list(found)),
    )
    torch.cuda.set_device(GPU)
    yield found
    torch.cuda.empty_cache()


def trained(spec: TrainingSpec, *, marked: bool = False) -> TrainingStep:
    step = (SeparateReplicas if spec.communication == "no_sync" else TrainingStep)(spec, rank=0, device=GPU)
    if marked:
        mark_parts(step.model)
    step.input.begin(0)
    step.input.load()
    step.train()
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    return step


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.to(GPU) for parameter in module.parameters() if parameter.grad is not None]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare with the largest gradient of a parameter: kernels add up in any order."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * other.abs().max().item() + 1e-6)


def test_separate_and_marked_replicas_compute_the_reduced_gradients(places: tuple[int, int]) -> None:
    """DataParallel's gradient is the mean of its replicas' gradients, each over its own images."""
    separate, marked, together = trained(SPEC.no_sync()), trained(SPEC, marked=True), trained(SPEC)
    expected = gradients(together.module)
    assert_close(gradients(marked.module), expected)
    assert isinstance(separate, SeparateReplicas)
    assert [next(replica.parameters()).device.index for replica in separate.replicas] == list(places)
    pairs = zip(*map(gradients, separate.replicas), strict=True)
    assert_close([(one + other) / 2 for one, other in pairs], expected)


def test_trace_assigns_every_kernel_to_a_part(places: tuple[int, int]) -> None:
    """Replicas on one GPU share its memory, so there is no input to scatter."""
    counters = traced(SPEC)
    assert counters["unassigned_operations"] == 0
    parts = {part: counters[f"{part}_seconds"] for part in DATA_PARALLEL_PARTS}
    silent = {"scatter"} if places == (0, 0) else set()
    assert {part for part, seconds in parts.items() if not seconds} == silent
    assert max(parts.values()) <= counters["comm_seconds"] <= sum(parts.values()) * (1 + 1e-6)
    assert 0 < counters["compute_seconds"] < counters["traced_step_seconds"]
    assert traced(SPEC.no_sync())["comm_seconds"] == 0


def traced(spec: TrainingSpec) -> dict[str, float]:
    opened = open_measurement(measured_as(TraceSpec, spec), rank=0, device=GPU, report=lambda fraction: None)
    opened.measurement.start_round()
    opened.measurement.warm_up(3)
    opened.step()
    counters = opened.measurement.finish()
    opened.close()
    return counters

"""Strategies on GPUs train like one process on the global batch, eager or captured."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.specs import TrainingSpec
from ddpperf.specs.training import EQUAL_STRATEGIES
from ddpperf.training import model_and_data, own_ddp
from ddpperf.training.measured_step import CAPTURE_WARMUP, MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import require_equal_parameters
from ddpperf.workers.pool import Pool
from tests.two_ranks import whole
from tests.unit.test_execution import small_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MOST_SECONDS = 120  # for all cases
STEPS = 7  # after those before a capture
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single", epoch_images=224)
DDP = replace(SINGLE, world_size=2, per_rank_batch_size=16, strategy="ddp")
CASES = {
    "single": SINGLE,
    "sync_batch_norm alone": replace(SINGLE, model="resnet18_cifar"),
    "ddp": DDP,
    "ddp graph": replace(DDP, execution="graph"),
    "avg graph": replace(DDP, execution="graph", comm_hook="avg", gradient_as_bucket_view=True),
    "static graph": replace(DDP, execution="graph", static_graph=True, buffer_sync=False),
    "symmetric_memory": replace(DDP, comm_hook="symmetric_memory"),
    "symmetric_memory graph": replace(DDP, execution="graph", comm_hook="symmetric_memory", bucket_cap_mb=1),
    "accumulation graph": replace(DDP, execution="graph", accumulation_steps=2),
    "compile+graph": replace(DDP, execution="compile+graph"),
    "bf16 graph": replace(DDP, execution="graph", comm_hook="bf16"),
    "fp16 graph": replace(DDP, execution="graph", comm_hook="fp16"),
    "powersgd": replace(DDP, comm_hook="powersgd"),
    "own_ddp": replace(DDP, strategy="own_ddp"),
    "own_ddp graph": replace(DDP, strategy="own_ddp", execution="graph", bucket_cap_mb=1),
    "own_ddp compile+graph": replace(DDP, strategy="own_ddp", execution="compile+graph"),
    "own_ddp mapped": replace(DDP, strategy="own_ddp", comm_hook="symmetric_memory"),
    "own_ddp mapped graph": replace(DDP, strategy="own_ddp", comm_hook="symmetric_memory", execution="graph"),
    "own_ddp mapped parts": replace(
        DDP,
        strategy="own_ddp",
        comm_hook="symmetric_memory",
        execution="graph",
        bucket_cap_mb=1,
        accumulation_steps=2,
    ),
    "zero1 graph": replace(DDP, strategy="zero1", execution="graph"),
    "zero1": replace(DDP, strategy="zero1"),
    "fsdp": replace(DDP, strategy="fsdp"),
    "sync_batch_norm": replace(DDP, model="resnet18_cifar", sync_batch_norm=True),
    "sync_batch_norm graph": replace(DDP, model="resnet18_cifar", sync_batch_norm=True, execution="graph"),
}
INEXACT = ("bf16", "fp16", "powersgd", "single", "sync")
COMPILED = [name for name, spec in CASES.items() if spec.compiled]
EXACT = [name for name in CASES if name not in COMPILED and not name.startswith(INEXACT)]


def model(name: str) -> nn.Module:
    if name != "resnet18_cifar":
        return small_model(name)
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(
        convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    )


def train(rank: int, folder: str, names: list[str]) -> None:
    """Train some cases as one of two ranks; rank 0 stores the final parameters."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device
    )
    vars(model_and_data)["build"] = model
    vars(own_ddp)["TWO_SHOT_BYTES"] = 2**12  # of a small model's buckets some go by copy engines, too
    stored: dict[str, list[Tensor] | str] = {}
    for name in names:
        (Path(folder) / f"rank{rank}").write_text(name)
        try:
            stored[name] = parameters(CASES[name], rank, device)
        except Exception as error:
            stored[name] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(stored, Path(folder) / "stored")
    (Path(folder) / f"rank{rank}").write_text("ending")
    dist.barrier()
    dist.destroy_process_group()


def parameters(spec: TrainingSpec, rank: int, device: torch.device) -> list[Tensor]:
    torch.cuda.set_stream(torch.cuda.Stream(device) if spec.captured else torch.cuda.default_stream(device))
    training = MeasuredStep(TrainingStep(spec, rank=rank if spec.grouped else 0, device=device))
    training.warm_up(CAPTURE_WARMUP)
    for _ in range(STEPS):
        training.step()
    if spec.strategy in EQUAL_STRATEGIES:
        require_equal_parameters(training.training.model)
    values = [whole(value).cpu() for value in training.training.model.parameters()]
    vars(training.training).clear()  # a group does not end before the graphs that captured it
    vars(training).clear()
    gc.collect()
    return values


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor] | str]:
    return trained(tmp_path_factory.mktemp("strategies"), [name for name in CASES if name not in COMPILED])


def trained(folder: Path, names: list[str]) -> dict[str, list[Tensor] | str]:
    """Train some cases on two ranks, and return the final parameters of each."""
    processes = torch.multiprocessing.spawn(train, args=(str(folder), names), nprocs=2, join=False)
    end = time.monotonic() + MOST_SECONDS
    while not processes.join(timeout=1):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            pytest.fail(
                f"not done in {MOST_SECONDS} s: {[(folder / f'rank{rank}').read_text() for rank in range(2)]}"
            )
    stored: dict[str, list[Tensor] | str] = torch.load(folder / "stored")
    return stored


def difference(stored: dict[str, list[Tensor] | str], one: str, other: str) -> float:
    """Return the largest difference of two cases' parameters over the largest parameter."""
    first, second = stored[one], stored[other]
    assert not isinstance(first, str), f"{one}: {first}"
    assert not isinstance(second, str), f"{other}: {second}"
    largest = max(value.abs().max().item() for value in first)
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True)) / largest


@pytest.mark.parametrize("name", EXACT)
def test_strategies_train_like_one_process(stored: dict[str, list[Tensor] | str], name: str) -> None:
    assert difference(stored, "single", name) < 1e-4


@pytest.mark.slow
def test_compiled_strategies_train_like_one_process(tmp_path: Path) -> None:
    stored = trained(tmp_path, ["single", *COMPILED])
    for name in COMPILED:
        assert difference(stored, "single", name) < 1e-4


@pytest.mark.parametrize("name", ["bf16 graph", "fp16 graph", "powersgd"])
def test_compressed_gradients_train_nearly_the_same(stored: dict[str, list[Tensor] | str], name: str) -> None:
    assert 0 < difference(stored, "single", name) < 3e-2


@pytest.mark.parametrize("name", ["sync_batch_norm", "sync_batch_norm graph"])
def test_sync_batch_norm_has_global_statistics(stored: dict[str, list[Tensor] | str], name: str) -> None:
    assert difference(stored, "sync_batch_norm alone", name) < 1e-4


def test_the_same_step_needs_the_same_memory(gpus: Pool) -> None:
    """A group's memory of an earlier measurement does not count."""
    spec = replace(DDP, model="resnet18_cifar", execution="graph", precision="bf16")
    peaks = [gpus.measure(spec).counter("peak_memory_bytes") for _ in range(3)]
    assert peaks[1] == pytest.approx(peaks[0], rel=5e-3)
    assert peaks[2] == pytest.approx(peaks[0], rel=5e-3)

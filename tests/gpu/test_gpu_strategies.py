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
from ddpperf.specs.training_step import EQUAL_STRATEGIES
from ddpperf.training import model_and_data, own_ddp
from ddpperf.training.measured_step import CAPTURE_WARMUP, MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import require_equal_parameters
from ddpperf.workers.pool import Pool
from tests.gpu.shared import two_gpus
from tests.two_ranks import whole
from tests.unit.test_execution import small_model

pytestmark = two_gpus

MOST_SECONDS = 120  # for all cases
STEPS = 7  # after those before a capture
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single", epoch_images=224)
DDP = replace(SINGLE, world_size=2, per_rank_batch_size=16, strategy="ddp")
CAPTURED = replace(DDP, execution="graph")
OWN = replace(DDP, strategy="own_ddp")
MAPPED = replace(OWN, comm_hook="symmetric_memory")
SYNC = replace(DDP, model="resnet18_cifar", sync_batch_norm=True)
CASES = {
    "single": SINGLE,
    "sync_batch_norm alone": replace(SINGLE, model="resnet18_cifar"),
    "ddp": DDP,
    "ddp graph": CAPTURED,
    "avg graph": replace(CAPTURED, comm_hook="avg", gradient_as_bucket_view=True),
    "static graph": replace(CAPTURED, static_graph=True, buffer_sync=False),
    "symmetric_memory": replace(DDP, comm_hook="symmetric_memory"),
    "symmetric_memory graph": replace(CAPTURED, comm_hook="symmetric_memory", bucket_cap_mb=1),
    "accumulation graph": replace(CAPTURED, accumulation_steps=2),
    "compile+graph": replace(DDP, execution="compile+graph"),
    "bf16 graph": replace(CAPTURED, comm_hook="bf16"),
    "fp16 graph": replace(CAPTURED, comm_hook="fp16"),
    "powersgd": replace(DDP, comm_hook="powersgd"),
    "own_ddp": OWN,
    "own_ddp graph": replace(OWN, execution="graph", bucket_cap_mb=1),
    "own_ddp compile+graph": replace(OWN, execution="compile+graph"),
    "own_ddp mapped": MAPPED,
    "own_ddp mapped graph": replace(MAPPED, execution="graph"),
    "own_ddp mapped parts": replace(MAPPED, execution="graph", bucket_cap_mb=1, accumulation_steps=2),
    "zero1 graph": replace(CAPTURED, strategy="zero1"),
    "zero1": replace(DDP, strategy="zero1"),
    "fsdp": replace(DDP, strategy="fsdp"),
    "sync_batch_norm": SYNC,
    "sync_batch_norm graph": replace(SYNC, execution="graph"),
}
COMPILED = [name for name, spec in CASES.items() if spec.compiled]
NEARLY = ("bf16 graph", "fp16 graph", "powersgd")  # compressed gradients
REFERENCE = {"sync_batch_norm": "sync_batch_norm alone", "sync_batch_norm graph": "sync_batch_norm alone"}


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
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2, device_id=device)
    vars(model_and_data)["build"] = model
    vars(own_ddp)["TWO_SHOT_BYTES"] = 2**12  # of a small model's buckets some go by copy engines, too
    stored: dict[str, list[Tensor] | str] = {}
    for name in names:
        (Path(folder) / f"doing{rank}").write_text(name)
        try:
            stored[name] = parameters(CASES[name], rank, device)
        except Exception as error:
            stored[name] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(stored, Path(folder) / "stored")
    dist.barrier()
    dist.destroy_process_group()


def parameters(spec: TrainingSpec, rank: int, device: torch.device) -> list[Tensor]:
    torch.cuda.set_stream(torch.cuda.Stream(device) if spec.captured else torch.cuda.default_stream(device))
    training = MeasuredStep(TrainingStep(spec, rank=rank if spec.grouped else 0, device=device))
    training.warm_up(CAPTURE_WARMUP)
    for _ in range(STEPS):
        training.step()
    if spec.strategy in EQUAL_STRATEGIES:
        require_equal_parameters(training.training.module, spec)
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
    ranks = torch.multiprocessing.spawn(train, args=(str(folder), names), nprocs=2, join=False)
    end = time.monotonic() + MOST_SECONDS
    while not ranks.join(timeout=1):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            doing = [path.read_text() for path in folder.glob("doing*")]
            pytest.fail(f"not done in {MOST_SECONDS} s: {doing}")
    stored: dict[str, list[Tensor] | str] = torch.load(folder / "stored")
    return stored


def difference(stored: dict[str, list[Tensor] | str], one: str, other: str) -> float:
    """Return the largest difference of two cases' parameters over the largest parameter."""
    first, second = stored[one], stored[other]
    assert not isinstance(first, str), f"{one}: {first}"
    assert not isinstance(second, str), f"{other}: {second}"
    largest = max(value.abs().max().item() for value in first)
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True)) / largest


@pytest.mark.parametrize("name", [name for name, spec in CASES.items() if spec.grouped and not spec.compiled])
def test_strategies_train_like_one_process(stored: dict[str, list[Tensor] | str], name: str) -> None:
    """With sync_batch_norm, like one process whose BatchNorm has the statistics of all images."""
    found = difference(stored, REFERENCE.get(name, "single"), name)
    assert 0 < found < 3e-2 if name in NEARLY else found < 1e-4


@pytest.mark.slow
def test_compiled_strategies_train_like_one_process(tmp_path: Path) -> None:
    stored = trained(tmp_path, ["single", *COMPILED])
    for name in COMPILED:
        assert difference(stored, "single", name) < 1e-4


def test_the_same_step_needs_the_same_memory(gpus: Pool) -> None:
    """A group's memory of an earlier measurement does not count."""
    spec = replace(DDP, model="resnet18_cifar", execution="graph", precision="bf16")
    peaks = [gpus.measure(spec).counter("peak_memory_bytes") for _ in range(2)]
    assert peaks[1] == pytest.approx(peaks[0], rel=5e-3)

"""Two real gloo ranks that train by every strategy, and what tests compare of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo.utils as dynamo
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.specs import TrainingSpec
from ddpperf.specs.labels import training_labels
from ddpperf.training import model_and_data
from ddpperf.training import step as training
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import synchronization
from tests.project import HANG_SECONDS

RANKS = 2
STEPS = 6  # past an epoch of 4 steps, after which the learning rate begins anew
Trained = dict[str, Any]
Ranks = tuple[dict[str, Trained], dict[str, Trained]]  # of one rank: with GroupNorm, with BatchNorm

# By the words for their strategy.
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp+view": {"gradient_as_bucket_view": True},
    "ddp+static": {"static_graph": True},
    "ddp+bucket1": {"bucket_cap_mb": 1},
    "ddp+accumulate2": {"accumulation_steps": 2},
    "ddp+bucket1+view+accumulate2": {
        "bucket_cap_mb": 1,
        "gradient_as_bucket_view": True,
        "accumulation_steps": 2,
    },
    "own_ddp": {"strategy": "own_ddp"},
    "own_ddp+bucket1+accumulate2": {"strategy": "own_ddp", "bucket_cap_mb": 1, "accumulation_steps": 2},
    "zero1": {"strategy": "zero1"},
    "zero1+accumulate2": {"strategy": "zero1", "accumulation_steps": 2},
    "fsdp": {"strategy": "fsdp"},
    "fsdp+accumulate2": {"strategy": "fsdp", "accumulation_steps": 2},
    "ddp+bf16": {"comm_hook": "bf16"},
    "ddp+fp16": {"comm_hook": "fp16"},
    "zero1+bf16": {"strategy": "zero1", "comm_hook": "bf16"},
}
COMPILED: dict[str, dict[str, Any]] = {
    "ddp-fp32-compile": {"execution": "compile"},
    "own_ddp+bucket1-fp32-compile": {"strategy": "own_ddp", "bucket_cap_mb": 1, "execution": "compile"},
}
NORMALIZED_BY_BATCH: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp+no_buffer_sync": {"buffer_sync": False},
    "fsdp": {"strategy": "fsdp"},
}


def normalized_by_group(_: str) -> nn.Module:
    """Return a model of 5 MB, several buckets of 1 MiB, that normalizes each image by itself."""
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten()
    return nn.Sequential(
        *layers, nn.Linear(1800, 320), nn.ReLU(), nn.Linear(320, 2000), nn.ReLU(), nn.Linear(2000, 10)
    )


def normalized_by_batch(_: str) -> nn.Module:
    """Return a model that normalizes by the mean and variance of a rank's own batch."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10)
    )


def train(build: Callable[[str], nn.Module], rank: int, **fields: Any) -> Trained:
    """Train a few steps on 4 images per rank, and return what can be compared.

    before, parameters: all parameters before and after. buffers: a BatchNorm's running mean before
    each forward pass. gradients: the first parameter's after each part of each step, or None.
    held, momentum: elements of parameters and of the optimizer's state on this rank.
    gradient_storages: the number of memory blocks that hold gradients.
    compiled_calls, compiled_parts: compiled operations of the forward pass, and in how many parts.
    """
    values: dict[str, Any] = {
        "world_size": RANKS,
        "per_rank_batch_size": 4,
        "strategy": "ddp",
        "epoch_images": 32,
    } | fields
    spec = TrainingSpec(**values)
    buffers: list[Tensor] = []
    gradients: list[Tensor | None] = []

    @contextlib.contextmanager
    def watched(model: nn.Module, last: bool) -> Iterator[None]:
        with synchronization(model, last):
            yield
        gradient = next(model.parameters()).grad
        gradients.append(None if gradient is None else whole(gradient))

    calls, parts = dynamo.counters["stats"]["calls_captured"], dynamo.counters["aot_autograd"]["ok"]
    with (
        mock.patch.object(model_and_data, "build", build),
        mock.patch.object(training, "synchronization", watched),
    ):
        step = TrainingStep(spec, rank=rank, device=torch.device("cpu"))
        measured = MeasuredStep(step)
        for module in step.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(
                    lambda module, _: buffers.append(module.running_mean.clone())
                )
        parameters = list(step.model.parameters())
        before = list(map(whole, parameters))
        measured.start_round()
        for _ in range(STEPS):
            measured.step()
        measured.end_round(STEPS)
        counters = measured.finish()
    optimizer: Any = getattr(step.optimizer, "optim", step.optimizer)  # zero1's own one of this rank
    return {
        "words": training_labels(spec)["strategy"],
        "before": before,
        "parameters": list(map(whole, parameters)),
        "buffers": buffers,
        "gradients": gradients,
        "loss": step.loss,
        "counters": counters,
        "held": sum(local(each).numel() for each in parameters),
        "momentum": sum(local(state["momentum_buffer"]).numel() for state in optimizer.state.values()),
        "gradient_storages": len({local(each.grad).untyped_storage().data_ptr() for each in parameters}),
        "static": getattr(step.model, "static_graph", False),
        "compiled_calls": dynamo.counters["stats"]["calls_captured"] - calls,
        "compiled_parts": dynamo.counters["aot_autograd"]["ok"] - parts,
    }


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor; all of it if it is not sharded."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def whole(tensor: Any) -> Tensor:
    """Return a copy of a tensor, gathered from all ranks if it is sharded."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def train_as_rank(rank: int, folder: Path, compiled: bool) -> None:
    """Train all variants, eager or compiled, in a group with the other ranks, and store the results."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=HANG_SECONDS)
    )
    variants = COMPILED if compiled else VARIANTS
    by_group = {name: train(normalized_by_group, rank, **fields) for name, fields in variants.items()}
    by_batch = {
        name: train(normalized_by_batch, rank, **fields)
        for name, fields in ({} if compiled else NORMALIZED_BY_BATCH).items()
    }
    torch.save((by_group, by_batch), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()

"""Specs with values or combinations of values that cannot be measured are refused with one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ddpperf.specs import (
    AllReduceSpec,
    BucketReplaySpec,
    CollectiveSpec,
    EpochSpec,
    MessagesSpec,
    PartsSpec,
    SamplerSpec,
    TraceSpec,
    TrainingSpec,
)
from ddpperf.specs.training_step import MOST_BUCKET_CAP_MB, gpu_reason
from ddpperf.training.step import TrainingStep

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
STEP = partial(TrainingSpec, **TRAINING)
EPOCH = partial(EpochSpec, **TRAINING)
SINGLE = partial(EpochSpec, world_size=1, per_rank_batch_size=128, strategy="single", input="device")
FSDP, ZERO1, OWN_DDP, DATA_PARALLEL = (
    partial(STEP, strategy=strategy) for strategy in ("fsdp", "zero1", "own_ddp", "data_parallel")
)
TWO_GPUS = partial(
    EpochSpec, world_size=2, per_rank_batch_size=2, strategy="data_parallel", input="device", epoch_images=8
)
COMPILED = partial(STEP, execution="compile")
CAPTURED = partial(SINGLE, epoch_images=260, execution="graph")
ALL_REDUCE = partial(AllReduceSpec, world_size=4, nbytes=4096)
COLLECTIVE = partial(CollectiveSpec, world_size=4, nbytes=4096, kind="all_gather")
NODES = partial(ALL_REDUCE, algorithm="hierarchical", node_size=2)
SAMPLER = partial(SamplerSpec, world_size=3, epoch_images=10)
MAPPED: dict[str, Any] = {"strategy": "own_ddp", "comm_hook": "symmetric_memory"}

Make = Callable[..., object]
LEAST: list[tuple[Make, str, int]] = [  # whole numbers, and the least that a spec takes
    (STEP, "world_size", 1),
    (STEP, "bucket_cap_mb", 0),
    (ALL_REDUCE, "world_size", 2),
    (ALL_REDUCE, "nbytes", 4),
]
CHOICES: list[tuple[Make, str]] = [
    *((STEP, name) for name in ("precision", "memory_format", "input", "strategy", "execution", "comm_hook")),
    *((ALL_REDUCE, name) for name in ("algorithm", "execution")),
]
REFUSED: list[tuple[Make, dict[str, Any], str]] = [
    (STEP, {"drop_last": "no"}, "drop_last must be a bool, got 'no'"),
    (STEP, {"model": ["resnet18"]}, "model must be one of resnet18, "),
    (STEP, {"bucket_cap_mb": MOST_BUCKET_CAP_MB + 1}, "bucket_cap_mb must be a whole number of at least 0"),
    (STEP, {"model": "my.models:small", "input": "device"}, "my.models:small makes its own batches: use"),
    (STEP, {"input": "dataloader"}, "a dataloader runs ahead between the rounds of a step; measure an epoch"),
    (EPOCH, {"loader_workers": 2}, "loader_workers=2 needs input dataloader, got fixed"),
    (EPOCH, {"epoch_images": 3}, "epoch_images must be a whole number of at least 4, got 3"),
    (SAMPLER, {"epoch_images": 2}, "epoch_images must be a whole number of at least 3, got 2"),
    # batches
    (STEP, {"accumulation_steps": 3}, "accumulation_steps=3 does not divide a batch of 128 images; use a"),
    (DATA_PARALLEL, {"accumulation_steps": 3}, "accumulation_steps=3 does not divide a batch of 512 images"),
    (
        partial(SINGLE, model="resnet18_cifar", epoch_images=258, drop_last=False),
        {"epoch_images": 259, "accumulation_steps": 2},
        "accumulation_steps=2 does not divide a batch of 3 images",
    ),
    (
        partial(STEP, per_rank_batch_size=8, accumulation_steps=4),
        {"accumulation_steps": 8},
        "resnet18's last BatchNorm needs 2 images, got a batch of 8 in 8 parts; use batches of at least 16",
    ),
    (SINGLE, {"epoch_images": 129, "drop_last": False}, "resnet18's last BatchNorm needs 2 images, got"),
    # its last 3 images are 2 on one device and 1 on the other
    (TWO_GPUS, {"epoch_images": 7, "drop_last": False}, "resnet18's last BatchNorm needs 2 images, got a"),
    (CAPTURED, {"drop_last": False}, "execution graph needs batches of one size; use drop_last"),
    # strategies
    (STEP, {"strategy": "single"}, "strategy=single needs world_size 1, got 4"),
    (DATA_PARALLEL, {"world_size": 1}, "world_size must be a whole number of at least 2, got 1"),
    (SINGLE, {"comm_hook": "bf16"}, "comm_hook=bf16 needs strategy ddp or own_ddp or zero1, got single"),
    (FSDP, {"bucket_cap_mb": 4}, "bucket_cap_mb=4 needs strategy ddp or own_ddp or zero1, got fsdp"),
    (OWN_DDP, {"static_graph": True}, "static_graph=True needs strategy ddp or zero1, got own_ddp"),
    (OWN_DDP, {"comm_hook": "bf16"}, "strategy=own_ddp needs comm_hook none or symmetric_memory, got bf16"),
    (SINGLE, {"sync_batch_norm": True}, "sync_batch_norm=True needs strategy ddp or zero1 or own_ddp or fs"),
    (ZERO1, {"memory_format": "channels_last"}, "strategy=zero1 needs memory_format contiguous, got"),
    (FSDP, {"precision": "fp16"}, "strategy=fsdp needs precision fp32 or tf32 or bf16, got fp16"),
    (STEP, {"static_graph": True, "accumulation_steps": 2}, "static_graph=True needs accumulation_steps 1"),
    (SINGLE, {"communication": "no_sync"}, "communication=no_sync needs strategy ddp or data_parallel, got"),
    (DATA_PARALLEL, {"communication": "local"}, "communication=local needs strategy ddp, got data_parallel"),
    (STEP, {"communication": "local", "comm_hook": "powersgd"}, "communication=local needs comm_hook none"),
    (ZERO1, {"comm_delay_seconds": 1.0}, "comm_delay_seconds=1.0 needs strategy ddp, got zero1"),
    (STEP, {"comm_delay_seconds": 1.0, "comm_delay_rank": 4}, "comm_delay_rank=4 must be less than world_si"),
    # executions
    (FSDP, {"execution": "graph"}, "execution=graph needs strategy single or ddp or own_ddp or zero1, got f"),
    (STEP, {"execution": "compile+graph", "comm_hook": "powersgd"}, "execution=compile+graph needs comm_h"),
    (ZERO1, {"execution": "graph", "precision": "fp16"}, "execution graph cannot capture zero1, which waits"),
    (DATA_PARALLEL, {"execution": "compile"}, "execution=compile needs strategy single or ddp or own_ddp or"),
    (STEP, {"inductor": "a", "execution": "graph"}, "inductor=a needs execution compile or compile+graph, g"),
    # instruments
    (partial(TraceSpec, **TRAINING), MAPPED, "strategy=own_ddp needs comm_hook none, got symmetric_memory"),
    (partial(MessagesSpec, **TRAINING), MAPPED, "strategy=own_ddp needs comm_hook none, got symmetric_mem"),
    (partial(MessagesSpec, **TRAINING), {"execution": "compile"}, "training_messages needs execution eager"),
    (partial(MessagesSpec, **TRAINING), {"strategy": "data_parallel"}, "training_messages needs strategy"),
    (partial(PartsSpec, **TRAINING), {"strategy": "fsdp"}, "training_parts needs strategy single or ddp or"),
    (partial(BucketReplaySpec, **TRAINING), {"strategy": "zero1"}, "bucket_replay needs strategy ddp, got"),
    # collectives
    (ALL_REDUCE, {"nbytes": 1023}, "nbytes must be a multiple of 4, a float32, got 1023"),
    (COLLECTIVE, {"nbytes": 4100}, "nbytes must be a multiple of 16, a float32 for each rank, got 4100"),
    (ALL_REDUCE, {"algorithm": "ring", "execution": "graph"}, "execution=graph needs algorithm backend or"),
    (ALL_REDUCE, {"algorithm": "low_latency", "nbytes": 2**28 + 4}, "algorithm low_latency sums up to 256"),
    *((NODES, {"node_size": size}, "algorithm hierarchical takes a node_size above 1") for size in (1, 3, 4)),
    (ALL_REDUCE, {"node_size": 2}, "node_size=2 needs algorithm hierarchical, got backend"),
]


def refused() -> Iterator[tuple[Make, dict[str, Any], str]]:
    yield from REFUSED
    for make, name, least in LEAST:
        for value in (least - 1, float(least), True, None):
            yield make, {name: value}, f"{name} must be a whole number of at least {least}, got {value!r}"
    for make, name in CHOICES:
        for wrong in ("odd", ["eager"]):
            yield make, {name: wrong}, f"{name} must be one of "
    for delay in (-1e-9, 10.1, math.nan, math.inf, True, "0.1", None):
        yield STEP, {"delay_seconds": delay}, "delay_seconds must be a number from 0 to 10, got"
    for model in ("vgg16", "torchvision:", "torchvision:a.b", "my.models:", "my.models:small\n", "../a:b"):
        yield STEP, {"model": model}, "model must be one of "
    for inductor in ("a b", "a++b", "A", "a=1", "a.", "a\n"):
        yield COMPILED, {"inductor": inductor}, "inductor must be names of torch's options joined by +"


@pytest.mark.parametrize(("make", "change", "sentence"), list(refused()))
def test_a_wrong_value_is_refused(make: Make, change: dict[str, Any], sentence: str) -> None:
    make()
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        make(**change)


def test_inductor_options_are_joined_by_plus() -> None:
    COMPILED(inductor="_a+b2+triton.cooperative_reductions")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"execution": "compile+graph"}, "execution compile+graph is captured by a GPU's driver"),
        ({"strategy": "data_parallel"}, "strategy data_parallel drives several GPUs from one process"),
        ({"comm_hook": "avg"}, "comm_hook avg needs NCCL"),
        ({"comm_hook": "symmetric_memory"}, "comm_hook symmetric_memory maps the memory of GPUs"),
        ({"sync_batch_norm": True}, "sync_batch_norm works on GPUs only"),
    ],
)
def test_the_cpu_refuses_what_needs_a_gpu(fields: dict[str, Any], what: str) -> None:
    spec = STEP(**fields)
    assert gpu_reason(STEP(), "cpu") == gpu_reason(spec, "cuda") == ""
    with pytest.raises(ValueError, match=f"^{re.escape(what)}; this runs on the CPU$"):
        TrainingStep(spec, rank=0, device=torch.device("cpu"))

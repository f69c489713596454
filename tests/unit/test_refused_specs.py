"""Specs with values that cannot be measured are refused with one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from ddpperf.specs import (
    AllReduceSpec,
    BucketReplaySpec,
    CollectiveSpec,
    EpochSpec,
    Fault,
    MessagesSpec,
    PartsSpec,
    SamplerSpec,
    TrainingSpec,
)

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
STEP = partial(TrainingSpec, **TRAINING)
EPOCH = partial(EpochSpec, **TRAINING)
TWO_GPUS = TRAINING | {"world_size": 2, "per_rank_batch_size": 2, "strategy": "data_parallel"}
ALL_REDUCE = partial(AllReduceSpec, world_size=4, nbytes=4096)
COLLECTIVE = partial(CollectiveSpec, world_size=4, nbytes=4096, kind="all_gather")
NODES = partial(ALL_REDUCE, algorithm="hierarchical", node_size=2)
SAMPLER = partial(SamplerSpec, world_size=3, epoch_images=10)
SINGLE = partial(TrainingSpec, world_size=1, per_rank_batch_size=4, strategy="single")
REPLAY = partial(BucketReplaySpec, **TRAINING)
MESSAGES = partial(MessagesSpec, **TRAINING)
PARTS = partial(PartsSpec, **TRAINING)
FAULT = partial(Fault, kind="raise", rank=0)
TWO_IMAGES = "resnet18's last BatchNorm needs 2 images, got a batch of 1; use batches of at least 2"
NO_MODELS = [
    *("vgg16", "torchvision:", "torchvision:a.b", "my.models:", ":small", "my..models:small"),
    *("my.models:a b", "my.models:small\n", "../models:small", "1models:small"),
]

Make = Callable[..., object]
LEAST: list[tuple[Make, str, int]] = [  # whole numbers, and the least that a spec takes
    (STEP, "world_size", 1),
    (STEP, "per_rank_batch_size", 1),
    (partial(EPOCH, input="dataloader"), "loader_workers", 0),
    (SAMPLER, "world_size", 1),
    (ALL_REDUCE, "world_size", 2),
    (ALL_REDUCE, "nbytes", 4),
    (FAULT, "rank", 0),
]
REFUSED: list[tuple[Make, dict[str, Any], str]] = [
    *((STEP, {"model": name}, f"model must be one of .*{re.escape(repr(name))}") for name in NO_MODELS),
    (STEP, {"precision": "fp8"}, "precision must be one of fp32, tf32, bf16, fp16, got 'fp8'"),
    (STEP, {"memory_format": "nhwc"}, "memory_format must be one of contiguous, channels_last, got 'nhwc'"),
    (STEP, {"input": "disk"}, "input must be one of fixed, device, dataloader, got 'disk'"),
    (STEP, {"drop_last": "no"}, "drop_last must be a bool, got 'no'"),
    (STEP, {"data": []}, r"data must be a str, got \[\]"),
    (STEP, {"model": ["resnet18"]}, r"model must be a str, got \['resnet18'\]"),
    (STEP, {"fault": "hang"}, "fault must be a .*, got 'hang'"),
    (STEP, {"per_rank_batch_size": 1}, TWO_IMAGES),
    (partial(EPOCH, input="device", epoch_images=512), {"epoch_images": 516, "drop_last": False}, TWO_IMAGES),
    # its last 3 images are 2 on one device and 1 on the other
    (partial(EpochSpec, **TWO_GPUS, input="device"), {"epoch_images": 7, "drop_last": False}, TWO_IMAGES),
    (STEP, {"model": "my.models:small", "memory_format": "channels_last"}, "has its own memory format, got"),
    (STEP, {"model": "my.models:small", "input": "device"}, "makes its own batches, got input device; use"),
    (STEP, {"input": "dataloader"}, "runs ahead between the rounds of a step; measure an epoch"),
    (EPOCH, {"loader_workers": 2}, "loader_workers=2 needs input dataloader, got fixed"),
    (EPOCH, {"epoch_images": 3}, "epoch_images must be a whole number of at least 4, got 3"),
    (SAMPLER, {"epoch_images": 2}, "epoch_images must be a whole number of at least 3, got 2"),
    (STEP, {"strategy": "data_parallel", "world_size": 1}, "world_size must be a .* of at least 2, got 1"),
    (STEP, {"strategy": "single"}, "strategy single is one device, got world_size=4; use world_size=1"),
    (ALL_REDUCE, {"nbytes": 1023}, "nbytes must be a multiple of a float32's 4 bytes, got 1023"),
    (ALL_REDUCE, {"algorithm": "star"}, "algorithm must be one of backend, one_shot, .*, got 'star'"),
    (
        ALL_REDUCE,
        {"algorithm": "ring", "execution": "graph"},
        "execution graph cannot capture algorithm ring",
    ),
    (ALL_REDUCE, {"algorithm": "low_latency", "nbytes": 2**28 + 4}, "sums up to 256MiB, got 268435460 bytes"),
    (COLLECTIVE, {"nbytes": 4100}, "nbytes must be a multiple of 16, a float32 for each"),
    (ALL_REDUCE, {"execution": "compile"}, "execution must be one of eager, graph, got 'compile'"),
    *(
        (NODES, {"node_size": size}, f"a node_size above 1 that divides 4 ranks into two .*, got {size}")
        for size in (0, 1, 3, 4, 8)
    ),
    (ALL_REDUCE, {"algorithm": "ring", "node_size": 2}, "algorithm ring takes no node_size, got 2; use 0"),
    (SINGLE, {"communication": "local"}, "takes DDP's communication apart, got strategy single; use ddp"),
    (STEP, {"comm_delay_seconds": 1.0, "comm_delay_rank": 4}, "comm_delay_rank=4 must be less than world_si"),
    (STEP, {"communication": "local", "comm_hook": "powersgd"}, "hook powersgd cannot have communication=lo"),
    (
        REPLAY,
        {"strategy": "zero1"},
        "a bucket replay needs strategy ddp with comm_hook none, avg",
    ),
    (
        MESSAGES,
        {"strategy": "data_parallel"},
        "strategy data_parallel has no process group",
    ),
    (MESSAGES, {"execution": "compile"}, "counted where torch dispatches them, got execution compile; use"),
    (
        PARTS,
        {"strategy": "fsdp"},
        "parts are timed for strategy single, ddp, zero1, got fsdp; use ddp",
    ),
    (FAULT, {"kind": "sulk"}, "kind must be one of raise, hang, kill, exit, got 'sulk'"),
    (FAULT, {"command": "join"}, "command must be one of open, sample, finish, close, got 'join'"),
]


def refused() -> Iterator[tuple[Make, dict[str, Any], str]]:
    yield from REFUSED
    for make, name, least in LEAST:
        for value in (least - 1, float(least), True, None):
            found = re.escape(repr(value))
            yield make, {name: value}, f"{name} must be a whole number of at least {least}, got {found}"
    for delay in (-1e-9, 10.1, math.nan, math.inf, True, "0.1", None):
        yield STEP, {"delay_seconds": delay}, "delay_seconds must be a number from 0 to 10, got"


@pytest.mark.parametrize(("make", "change", "sentence"), list(refused()))
def test_a_wrong_value_is_refused(make: Make, change: dict[str, Any], sentence: str) -> None:
    make()
    with pytest.raises(ValueError, match=sentence):
        make(**change)

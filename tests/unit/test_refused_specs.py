"""Specs with values that cannot be measured are refused with one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from ddpperf.specs import AllReduceSpec, EpochSpec, Fault, SamplerSpec, TrainingSpec

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
ALL_REDUCE: dict[str, Any] = {"world_size": 4, "nbytes": 4096}
SAMPLER: dict[str, Any] = {"world_size": 3, "epoch_images": 10}
FAULT: dict[str, Any] = {"kind": "raise", "rank": 0}


REFUSED: list[tuple[Callable[..., object], dict[str, Any], dict[str, Any], str]] = [
    *(
        (
            TrainingSpec,
            TRAINING,
            {"model": name},
            f"model must be one of resnet18, .*, got {re.escape(repr(name))}",
        )
        for name in (
            "vgg16",
            "torchvision:",
            "torchvision:a.b",
            "my.models:",
            ":small",
            "my..models:small",
            "my.models:a b",
            "my.models:small\n",
            "../models:small",
            "1models:small",
        )
    ),
    (
        TrainingSpec,
        TRAINING,
        {"precision": "fp8"},
        "precision must be one of fp32, tf32, bf16, fp16, got 'fp8'",
    ),
    (TrainingSpec, TRAINING, {"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
    (TrainingSpec, TRAINING, {"world_size": 2.0}, "world_size must be a whole number of at least 1, got 2.0"),
    (TrainingSpec, TRAINING, {"world_size": "2"}, "world_size must be a whole number of at least 1, got '2'"),
    (
        TrainingSpec,
        TRAINING,
        {"world_size": True},
        "world_size must be a whole number of at least 1, got True",
    ),
    (
        TrainingSpec,
        TRAINING,
        {"per_rank_batch_size": 0},
        "per_rank_batch_size must be a whole number of at least 1, got 0",
    ),
    (
        TrainingSpec,
        TRAINING,
        {"per_rank_batch_size": 1},
        "resnet18's last BatchNorm needs at least two images, got a batch of 1; use batches of at least 2",
    ),
    (
        EpochSpec,
        TRAINING | {"epoch_images": 4 * 128},
        {"epoch_images": 4 * 129, "drop_last": False, "input": "device"},
        "resnet18's last BatchNorm needs at least two images, got a batch of 1; use batches of at least 2",
    ),
    (
        EpochSpec,
        TRAINING
        | {"world_size": 2, "per_rank_batch_size": 2, "strategy": "data_parallel", "input": "device"},
        {"epoch_images": 7, "drop_last": False},  # its last 3 images are 2 on one device and 1 on the other
        "resnet18's last BatchNorm needs at least two images, got a batch of 1; use batches of at least 2",
    ),
    (TrainingSpec, TRAINING, {"drop_last": "no"}, "drop_last must be a bool, got 'no'"),
    (TrainingSpec, TRAINING, {"data": []}, r"data must be a str, got \[\]"),
    (TrainingSpec, TRAINING, {"digest": 5}, "digest must be a str, got 5"),
    (TrainingSpec, TRAINING, {"model": ["resnet18"]}, r"model must be a str, got \['resnet18'\]"),
    (TrainingSpec, TRAINING, {"fault": "hang"}, "fault must be a .*, got 'hang'"),
    (
        TrainingSpec,
        TRAINING,
        {"model": "my.models:small", "memory_format": "channels_last"},
        "my.models:small has its own memory format, got channels_last; use contiguous",
    ),
    (
        TrainingSpec,
        TRAINING,
        {"memory_format": "nhwc"},
        "memory_format must be one of contiguous, channels_last, got 'nhwc'",
    ),
    (TrainingSpec, TRAINING, {"input": "disk"}, "input must be one of fixed, device, dataloader, got 'disk'"),
    (
        TrainingSpec,
        TRAINING,
        {"input": "dataloader"},
        r"runs ahead between the rounds of a step; measure an epoch .*EpochSpec",
    ),
    (
        EpochSpec,
        TRAINING | {"input": "dataloader"},
        {"loader_workers": -1},
        "loader_workers must be a whole number of at least 0",
    ),
    (EpochSpec, TRAINING, {"loader_workers": 2}, "loader_workers=2 needs input dataloader, got fixed"),
    (
        EpochSpec,
        TRAINING,
        {"input": "device", "loader_workers": 2},
        "loader_workers=2 needs input dataloader, got device",
    ),
    (EpochSpec, TRAINING, {"epoch_images": 3}, "epoch_images must be a whole number of at least 4, got 3"),
    (
        EpochSpec,
        TRAINING,
        {"model": "my.models:small", "input": "device"},
        "my.models:small makes its own batches, got input device; use input fixed",
    ),
    (
        TrainingSpec,
        TRAINING,
        {"strategy": "data_parallel", "world_size": 1},
        "world_size must be a whole number of at least 2, got 1",
    ),
    *(
        (make, fields, {"delay_seconds": delay}, "delay_seconds must be a number from 0 to 10, got")
        for make, fields in (
            (TrainingSpec, TRAINING),
            (EpochSpec, TRAINING),
            (AllReduceSpec, ALL_REDUCE),
            (SamplerSpec, SAMPLER),
        )
        for delay in (-1e-9, 10.1, math.nan, math.inf, True, "0.1", None)
    ),
    (SamplerSpec, SAMPLER, {"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
    (SamplerSpec, SAMPLER, {"epoch_images": 2}, "epoch_images must be a whole number of at least 3, got 2"),
    (
        TrainingSpec,
        TRAINING,
        {"strategy": "single"},
        "strategy single is one device, got world_size=4; use world_size=1 or ddp",
    ),
    (AllReduceSpec, ALL_REDUCE, {"world_size": 1}, "world_size must be a whole number of at least 2, got 1"),
    (AllReduceSpec, ALL_REDUCE, {"nbytes": 0}, "nbytes must be a whole number of at least 4, got 0"),
    (AllReduceSpec, ALL_REDUCE, {"nbytes": 4.0}, "nbytes must be a whole number of at least 4, got 4.0"),
    (
        AllReduceSpec,
        ALL_REDUCE,
        {"nbytes": 1023},
        "nbytes must be a multiple of a float32's 4 bytes, got 1023",
    ),
    (
        AllReduceSpec,
        ALL_REDUCE,
        {"algorithm": "star"},
        "algorithm must be one of backend, one_shot, .*, got 'star'",
    ),
    (
        AllReduceSpec,
        ALL_REDUCE,
        {"execution": "compile"},
        "execution must be one of eager, graph, got 'compile'",
    ),
    *(
        (
            AllReduceSpec,
            ALL_REDUCE | {"algorithm": "hierarchical", "node_size": 2},
            {"node_size": node_size},
            "algorithm hierarchical takes a node_size above 1 that divides 4 ranks into two nodes or more, "
            f"got {node_size}; use another node_size or ring",
        )
        for node_size in (0, 1, 3, 4, 8)
    ),
    (
        AllReduceSpec,
        ALL_REDUCE | {"algorithm": "ring"},
        {"node_size": 2},
        "algorithm ring takes no node_size, got 2; use 0, or algorithm hierarchical",
    ),
    (Fault, FAULT, {"kind": "sulk"}, "kind must be one of raise, hang, kill, exit, got 'sulk'"),
    (Fault, FAULT, {"rank": -1}, "rank must be a whole number of at least 0, got -1"),
    (Fault, FAULT, {"command": "join"}, "command must be one of open, sample, finish, close, got 'join'"),
]


@pytest.mark.parametrize(("make", "fields", "change", "sentence"), REFUSED)
def test_a_wrong_value_is_refused(
    make: Callable[..., object], fields: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    make(**fields)
    with pytest.raises(ValueError, match=sentence):
        make(**fields | change)

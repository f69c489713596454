"""Strategies, options and executions of a spec: wrong combinations are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpperf.specs import CommHook, EpochSpec, Strategy, TrainingSpec, gpu_reason
from ddpperf.specs.strategy_fields import DDP_OPTIONS, MOST_BUCKET_CAP_MB, NOT_CAPTURED
from ddpperf.training.step import TrainingStep

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
ALONE: dict[str, Any] = {"world_size": 1, "per_rank_batch_size": 128, "strategy": "single"}
FSDP, ZERO1, OWN_DDP, DATA_PARALLEL = (
    TRAINING | {"strategy": strategy} for strategy in ("fsdp", "zero1", "own_ddp", "data_parallel")
)
COMPILED = TRAINING | {"execution": "compile"}
# An option of DDP, not as it is by default.
CHANGED: dict[str, Any] = {
    "comm_hook": "bf16",
    "bucket_cap_mb": 4,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "buffer_sync": False,
}
LARGEST_LAST = ALONE | {"epoch_images": 258, "drop_last": False, "input": "device", "model": "resnet18_cifar"}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TRAINING, {"strategy": "pipeline"}, "strategy must be one of single, ddp, own_ddp, data_parallel"),
    (TRAINING, {"execution": ["eager"]}, "execution must be one of eager, compile, graph, compile+graph"),
    (TRAINING, {"comm_hook": "int8"}, "comm_hook must be one of none, avg, bf16, fp16, powersgd, symmetric_"),
    (TRAINING, {"bucket_cap_mb": -1}, "bucket_cap_mb must be a whole number of at least 0, got -1"),
    (TRAINING, {"bucket_cap_mb": MOST_BUCKET_CAP_MB + 1}, "bucket_cap_mb must be a whole number of at least"),
    (TRAINING, {"accumulation_steps": 0}, "accumulation_steps must be a whole number of at least 1, got 0"),
    (TRAINING, {"static_graph": "true"}, "static_graph must be a bool, got 'true'"),
    *(
        (fields, {name: value}, f"{name}={value} is an option of DDP, got strategy {fields['strategy']}; use")
        for fields in (ALONE, FSDP, DATA_PARALLEL)
        for name, value in CHANGED.items()
    ),
    (OWN_DDP, {"comm_hook": "bf16"}, "comm_hook=bf16 is no hook of own_ddp; use none or symmetric_memory"),
    (ALONE, {"sync_batch_norm": True}, "sync_batch_norm needs a process group, got strategy single;"),
    (FSDP, {"memory_format": "channels_last"}, "fsdp stores parameters in one flat buffer; use"),
    (FSDP, {"precision": "fp16"}, "fp16's gradient scaler checks a rank's own shard of fsdp only; use"),
    (TRAINING | {"static_graph": True}, {"accumulation_steps": 2}, "static_graph does not work with"),
    *(
        (TRAINING | {"strategy": name}, {"execution": graph}, f"execution {graph} cannot capture {name}")
        for name in NOT_CAPTURED
        if name != "powersgd"
        for graph in ("graph", "compile+graph")
    ),
    (COMPILED | {"comm_hook": "powersgd"}, {"execution": "graph"}, "execution graph cannot capture powersgd"),
    (ZERO1 | {"execution": "graph"}, {"precision": "fp16"}, "execution graph cannot capture zero1"),
    (FSDP, {"execution": "compile"}, "execution compile cannot compile strategy fsdp; use eager"),
    (DATA_PARALLEL, {"execution": "compile"}, "execution compile cannot compile strategy data_parallel; use"),
    (TRAINING, {"inductor": "a", "execution": "graph"}, "inductor=a needs execution compile"),
    *(
        (COMPILED, {"inductor": value}, "inductor must be names of torch's options joined by +")
        for value in ("a b", "a++b", "A", "a=1", "a.", "a\n")
    ),
    *(
        (fields, {"accumulation_steps": 3}, f"accumulation_steps=3 does not divide a batch of {size} images")
        for fields, size in ((TRAINING, 128), (DATA_PARALLEL, 512))
    ),
    (
        LARGEST_LAST,
        {"epoch_images": 259, "accumulation_steps": 2},
        "accumulation_steps=2 does not divide a batch of 3 images; use a divisor",
    ),
    (
        TRAINING | {"per_rank_batch_size": 8, "accumulation_steps": 4},
        {"accumulation_steps": 8},
        "resnet18's last BatchNorm needs 2 images, got a batch of 8 in 8 parts; use batches of at least 16",
    ),
    (
        ALONE | {"epoch_images": 260, "input": "device", "execution": "graph"},
        {"drop_last": False},
        "execution graph needs batches of one size; use drop_last",
    ),
]


@pytest.mark.parametrize("kind", [TrainingSpec, EpochSpec])
@pytest.mark.parametrize(("fields", "change", "sentence"), REFUSED)
def test_wrong_combinations_are_refused(
    kind: type[TrainingSpec], fields: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    kind(**fields)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        kind(**fields | change)


@pytest.mark.parametrize("inductor", ["combo_kernels", "_a+b2+c_d", "triton.cooperative_reductions+a"])
def test_inductor_options_are_joined_by_plus(inductor: str) -> None:
    assert TrainingSpec(**COMPILED, inductor=inductor).inductor == inductor


def test_every_ddp_option_is_tested() -> None:
    assert CHANGED.keys() == DDP_OPTIONS.keys()
    spec = TrainingSpec(**TRAINING)
    for name, value in DDP_OPTIONS.items():
        assert getattr(spec, name) == value != CHANGED[name]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_ddp_has_no_options(strategy: str) -> None:
    changed = CHANGED | {"static_graph": False} if strategy != "fsdp" else {}
    by: dict[str, Any] = {**changed, "strategy": strategy, "sync_batch_norm": True, "accumulation_steps": 2}
    same: dict[str, Any] = {"precision": "bf16", "input": "device", "delay_seconds": 0.5}
    assert TrainingSpec(**TRAINING | by | same).ddp() == TrainingSpec(**TRAINING | same)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"execution": "compile+graph"}, "execution compile+graph is captured by a GPU's driver"),
        ({"strategy": "data_parallel"}, "strategy data_parallel drives several GPUs from one process"),
        ({"comm_hook": "avg"}, "comm_hook avg needs NCCL"),
        ({"comm_hook": "powersgd"}, "comm_hook powersgd needs NCCL"),
        ({"comm_hook": "symmetric_memory"}, "comm_hook symmetric_memory maps the memory of GPUs"),
        ({"sync_batch_norm": True}, "sync_batch_norm works on GPUs only"),
    ],
)
def test_the_cpu_refuses_what_needs_a_gpu(fields: dict[str, Any], what: str) -> None:
    spec = EpochSpec(**TRAINING | fields)
    assert gpu_reason(spec, "cpu") == f"{what}; this runs on the CPU"
    assert gpu_reason(spec, "cuda") == ""
    with pytest.raises(ValueError, match=f"^{re.escape(what)}; this runs on the CPU$"):
        TrainingStep(spec, rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("hook", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_the_cpu_accepts_everything_else(strategy: Strategy, hook: CommHook) -> None:
    options: dict[str, Any] = CHANGED | {"comm_hook": hook, "strategy": strategy, "execution": "compile"}
    assert gpu_reason(TrainingSpec(**TRAINING | options), "cpu") == ""
    alone = TrainingSpec(**ALONE, accumulation_steps=2)
    assert gpu_reason(alone, "cpu") == gpu_reason(replace(alone, world_size=4, strategy="fsdp"), "cpu") == ""

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
FSDP, ZERO1, DATA_PARALLEL = (
    TRAINING | {"strategy": strategy} for strategy in ("fsdp", "zero1", "data_parallel")
)
STRATEGIES = "strategy must be one of single, ddp, own_ddp, data_parallel, fsdp, zero1, got "
FORMS = "execution must be one of eager, compile, graph, compile+graph, got "
HOOKS = "comm_hook must be one of none, avg, bf16, fp16, powersgd, symmetric_memory, got "
INDUCTOR = "inductor must be names of torch's inductor options joined by +, got "
# An option of DDP, not as it is by default.
CHANGED: dict[str, Any] = {
    "comm_hook": "bf16",
    "bucket_cap_mb": 4,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "buffer_sync": False,
}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *((TRAINING, {"strategy": name}, f"{STRATEGIES}{name!r}") for name in ("pipeline", None)),
    *((TRAINING, {"execution": name}, f"{FORMS}{name!r}") for name in ("fast", "", ["eager"])),
    *((TRAINING, {"comm_hook": name}, f"{HOOKS}{name!r}") for name in ("int8", None)),
    *(
        (TRAINING, {name: value}, f"{name} must be a whole number of at least {least}, got {value!r}")
        for name, least in (("bucket_cap_mb", 0), ("accumulation_steps", 1))
        for value in (least - 1, 1.5, True, "2", None)
    ),
    (TRAINING, {"bucket_cap_mb": MOST_BUCKET_CAP_MB + 1}, "bucket_cap_mb goes up to 1048576, got 1048577"),
    *(
        (TRAINING, {name: value}, f"{name} must be a bool, got {value!r}")
        for name in ("gradient_as_bucket_view", "static_graph", "buffer_sync", "sync_batch_norm")
        for value in (0, "true", None)
    ),
    *(
        (TRAINING | {"execution": "compile"}, {"inductor": value}, INDUCTOR + repr(value))
        for value in (
            "a b",
            "+a",
            "a+",
            "a++b",
            "A",
            "1a",
            "a-b",
            "a=1",
            "a.",
            ".a",
            "a..b",
            "a\n",
        )
    ),
    *(
        (
            fields,
            {name: value},
            f"{name}={value} is an option of DDP, got strategy {fields['strategy']}; use ddp or zero1",
        )
        for fields in (ALONE, FSDP, DATA_PARALLEL)
        for name, value in CHANGED.items()
    ),
    *(
        (
            fields,
            {"sync_batch_norm": True},
            f"sync_batch_norm needs a process group, got strategy {fields['strategy']};",
        )
        for fields in (ALONE, DATA_PARALLEL)
    ),
    *(
        (
            fields,
            {"memory_format": "channels_last"},
            f"{fields['strategy']} stores parameters in one flat buffer, got channels_",
        )
        for fields in (FSDP, ZERO1)
    ),
    (
        FSDP,
        {"precision": "fp16"},
        "fp16's gradient scaler checks a rank's own shard only, got strategy fsdp; use precision",
    ),
    (
        TRAINING | {"static_graph": True},
        {"accumulation_steps": 2},
        "static_graph does not work with accumulation_steps above 1; leave one of them out",
    ),
    *(
        (
            TRAINING | {"strategy": name},
            {"execution": execution},
            f"execution {execution} cannot capture {name}, {why}; use eager",
        )
        for name, why in NOT_CAPTURED.items()
        if name != "powersgd"
        for execution in ("graph", "compile+graph")
    ),
    *(
        (
            ZERO1 | {"execution": execution},
            {"precision": "fp16"},
            f"execution {execution} cannot capture fp16's scaler with zero1, which waits",
        )
        for execution in ("graph", "compile+graph")
    ),
    (
        TRAINING | {"comm_hook": "powersgd", "execution": "compile"},
        {"execution": "graph"},
        "execution graph cannot capture powersgd, which waits for the device where it compresses; use eager",
    ),
    *(
        (
            fields,
            {"execution": "compile"},
            f"execution compile cannot compile strategy {fields['strategy']}; use eager",
        )
        for fields in (FSDP, DATA_PARALLEL)
    ),
    *(
        (
            TRAINING,
            {"inductor": "a", "execution": execution},
            f"inductor=a needs execution compile or compile+graph, got {execution}",
        )
        for execution in ("eager", "graph")
    ),
    *((TRAINING, {"inductor": value}, f"inductor must be a str, got {value}") for value in (None, True)),
    # of a batch
    *(
        (
            fields,
            {"accumulation_steps": 3},
            f"accumulation_steps=3 does not divide a batch of {size} images; use a divisor",
        )
        for fields, size in ((TRAINING, 128), (ALONE, 128), (DATA_PARALLEL, 512))
    ),
    (
        ALONE | {"epoch_images": 258, "drop_last": False, "input": "device", "model": "resnet18_cifar"},
        {"epoch_images": 259, "accumulation_steps": 2},
        "accumulation_steps=2 does not divide a batch of 3 images; use a divisor",
    ),
    (
        TRAINING | {"per_rank_batch_size": 8, "accumulation_steps": 4},
        {"accumulation_steps": 8},
        "resnet18's last BatchNorm needs at least two images, "
        "got a batch of 8 in 8 parts; use batches of at least 16",
    ),
    *(
        (
            ALONE | {"epoch_images": 260, "input": "device", "execution": execution},
            {"drop_last": False},
            f"execution {execution} needs batches of one size, but an epoch's last batch is smaller",
        )
        for execution in ("graph", "compile+graph")
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


@pytest.mark.parametrize("inductor", ["combo_kernels", "a", "_a+b2+c_d", "triton.cooperative_reductions+a"])
def test_inductor_options_are_joined_by_plus(inductor: str) -> None:
    assert TrainingSpec(**TRAINING, execution="compile", inductor=inductor).inductor == inductor


def test_every_ddp_option_is_tested() -> None:
    assert CHANGED.keys() == DDP_OPTIONS.keys()
    spec = TrainingSpec(**TRAINING)
    for name, value in DDP_OPTIONS.items():
        assert getattr(spec, name) == value != CHANGED[name]


# --- the same work in another way


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_ddp_has_no_options(strategy: str) -> None:
    changed = CHANGED if strategy != "fsdp" else {}
    by: dict[str, Any] = {**changed, "strategy": strategy, "sync_batch_norm": True}
    same: dict[str, Any] = {"precision": "bf16", "input": "device", "delay_seconds": 0.5}
    assert TrainingSpec(**TRAINING | by | same).ddp() == TrainingSpec(**TRAINING | same)
    by |= {"static_graph": False, "accumulation_steps": 2}
    assert TrainingSpec(**TRAINING | by | same).ddp() == TrainingSpec(**TRAINING | same)


# --- what the CPU cannot do

ON_GPUS: list[tuple[dict[str, Any], str]] = [
    ({"execution": "graph"}, "execution graph is captured by a GPU's driver"),
    ({"execution": "compile+graph"}, "execution compile+graph is captured by a GPU's driver"),
    ({"strategy": "data_parallel"}, "strategy data_parallel drives several GPUs from one process"),
    ({"comm_hook": "avg"}, "comm_hook avg needs NCCL"),
    ({"comm_hook": "powersgd"}, "comm_hook powersgd needs NCCL"),
    ({"comm_hook": "symmetric_memory"}, "comm_hook symmetric_memory maps the memory of GPUs"),
    ({"sync_batch_norm": True}, "sync_batch_norm works on GPUs only"),
]


@pytest.mark.parametrize(("fields", "what"), ON_GPUS)
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

"""Specs of all kinds, and what Hypothesis generates: measured results of such specs."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from ddpperf.results.samples import Measured, Sample, Usage
from ddpperf.specs import (
    AllReduceSpec,
    BucketReplaySpec,
    CollectiveSpec,
    CopySpec,
    CustomCollectiveSpec,
    CustomStepSpec,
    EpochPartsSpec,
    EpochSpec,
    MessagesSpec,
    PartsSpec,
    RunSpec,
    SamplerSpec,
    ScriptSpec,
    SingleCallsSpec,
    Spec,
    TraceSpec,
    TrainingSpec,
)

# What a stored run keeps of a text: all but what a terminal would obey.
PRINTABLE = st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
NAMES = st.text(PRINTABLE, max_size=4)
BOUNDED = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no defect
seconds = st.floats(min_value=1e-7, max_value=1e3)

TWO: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": 4}
COLLECTIVE: dict[str, Any] = {"world_size": 4, "nbytes": 4096}
OPTIONS: dict[str, Any] = {  # of a training by DDP, all other than by default
    "precision": "bf16",
    "memory_format": "channels_last",
    "execution": "compile",
    "inductor": "max_autotune+epilogue_fusion",
    "comm_hook": "fp16",
    "bucket_cap_mb": 4,
    "gradient_as_bucket_view": True,
    "buffer_sync": False,
    "sync_batch_norm": True,
    "communication": "local",
    "comm_delay_seconds": 0.1,
    "comm_delay_rank": 1,
}
DATA: dict[str, Any] = {
    "model": "resnet18_cifar",
    "input": "dataloader",
    "loader_workers": 2,
    "data": "cifar10",
    "digest": "0123abcd",
    "epoch_images": 11,
    "drop_last": False,
}
RECIPE: dict[str, Any] = {
    **TWO,
    **{"strategy": "ddp", "input": "device", "epochs": 3, "test_images": 8, "rate": 0.1, "momentum": 0.8},
    **{"weight_decay": 0.1, "schedule": "cosine", "warmup_epochs": 1, "label_smoothing": 0.1, "cutmix": 0.5},
    **{"crop_padding": 2, "uncropped_epochs": 1, "clip_norm": 1.0, "grow_from": 2, "average_weights": True},
    **{"recompute_statistics": True, "nesterov": False, "decay_vectors": True, "may_diverge": True},
    **{"set_epoch": False, "seed": 3},
}
SPECS: tuple[Spec, ...] = (
    TrainingSpec(strategy="ddp", **TWO),
    TrainingSpec(strategy="ddp", **TWO, **OPTIONS),
    TrainingSpec(strategy="ddp", **TWO, static_graph=True, delay_seconds=0.5),
    TrainingSpec(strategy="zero1", **TWO, accumulation_steps=2),
    TrainingSpec(strategy="fsdp", **TWO, model="torchvision:mobilenet_v3_small"),
    TrainingSpec(strategy="data_parallel", **TWO, communication="no_sync", model="my.models:small"),
    EpochSpec(strategy="ddp", **TWO, **DATA),
    EpochSpec(strategy="own_ddp", **TWO, comm_hook="symmetric_memory", execution="graph"),
    EpochSpec(strategy="single", world_size=1, per_rank_batch_size=32),
    RunSpec(**RECIPE),
    RunSpec(**TWO, strategy="ddp", input="device", epochs=1, test_images=8, rate=0.1, optimizer="muon"),
    TraceSpec(**TWO, strategy="ddp"),
    PartsSpec(**TWO, strategy="ddp"),
    EpochPartsSpec(**TWO, strategy="ddp"),
    MessagesSpec(**TWO, strategy="ddp"),
    BucketReplaySpec(**TWO, strategy="ddp"),
    AllReduceSpec(**COLLECTIVE),
    AllReduceSpec(**COLLECTIVE, algorithm="hierarchical", node_size=2, in_place=False),
    AllReduceSpec(**COLLECTIVE, execution="graph", dtype="bf16"),
    CollectiveSpec(**COLLECTIVE, kind="all_gather", dtype="fp16"),
    SingleCallsSpec(**COLLECTIVE, kind="broadcast", dtype="bf16"),
    ScriptSpec(command="torchrun train.py", world_size=2, first_step=20, steps=30),
    CopySpec(**COLLECTIVE),
    CopySpec(**COLLECTIVE, memory="host"),
    CustomStepSpec(**TWO, function="my.steps:make", execution="graph"),
    CustomCollectiveSpec(**COLLECTIVE, function="my.calls:sum", kind="broadcast", dtype="bf16"),
    SamplerSpec(world_size=3, epoch_images=10, set_epoch=False, drop_last=True),
)


@st.composite
def samples(draw: st.DrawFn, ranks: int) -> Sample:
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    of_ranks = st.dictionaries(NAMES, st.tuples(*[numbers] * ranks), max_size=2)
    usage = st.builds(
        Usage,
        joules=st.lists(numbers, max_size=2).map(tuple),
        series=st.dictionaries(NAMES, st.tuples(st.tuples(numbers | st.none())), max_size=2),
        mean=of_ranks,
    )
    return Sample(
        set=draw(NAMES),
        side=draw(st.sampled_from(("A", "B"))),
        torch=draw(NAMES),
        seconds=tuple(draw(st.lists(st.tuples(*[seconds] * ranks), min_size=1, max_size=5))),
        counters=draw(of_ranks),
        usage=draw(st.none() | usage),
    )


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    ranks = draw(st.integers(1, 3))
    return Measured(
        spec=draw(st.sampled_from(SPECS)),
        iterations=draw(st.integers(1, 1024)),
        samples=tuple(draw(st.lists(samples(ranks), min_size=1, max_size=3))),
    )

"""What Hypothesis generates: specs and measured results."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import settings
from hypothesis import strategies as st

from ddpperf.results.samples import Measured, Sample
from ddpperf.results.usage import Usage
from ddpperf.specs import (
    FLOAT32_BYTES,
    AllReduceSpec,
    CommHook,
    EpochSpec,
    Execution,
    Fault,
    FaultCommand,
    FaultKind,
    Input,
    MemoryFormat,
    Model,
    Precision,
    SamplerSpec,
    Spec,
    Strategy,
    TrainingSpec,
    is_custom_model,
)
from ddpperf.specs.common_fields import MOST_DELAY_SECONDS
from ddpperf.specs.training import (
    DDP_STRATEGIES,
    GROUPED_STRATEGIES,
    IMAGENET_STEM,
    MOST_BUCKET_CAP_MB,
    NOT_CAPTURED,
    OWN_DDP_HOOKS,
    SHARDED_STRATEGIES,
    options_of,
)

# What a stored run keeps of a text: all but what a terminal would obey.
PRINTABLE = st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
NAMES = st.text(PRINTABLE, max_size=4)
BOUNDED = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no defect


seconds = st.floats(min_value=1e-7, max_value=1e3)

faults = st.builds(
    Fault,
    kind=st.sampled_from(get_args(FaultKind)),
    rank=st.integers(0, 7),
    command=st.sampled_from(get_args(FaultCommand)),
)


delays = st.just(0.0) | st.floats(0, MOST_DELAY_SECONDS)
models = st.sampled_from((*get_args(Model), "torchvision:mobilenet_v3_small", "my.models:small"))


inductors = st.sampled_from(("", "combo_kernels", "max_autotune+epilogue_fusion"))


@st.composite
def strategy_fields(draw: st.DrawFn) -> dict[str, Any]:
    """A strategy with its options and a form that go together, of which any may differ from its default."""
    strategy: Strategy = draw(st.sampled_from(get_args(Strategy)))
    by_ddp, accumulation = strategy in DDP_STRATEGIES, draw(st.integers(1, 4))
    hooks = OWN_DDP_HOOKS if strategy == "own_ddp" else get_args(CommHook)
    hook: CommHook = draw(st.sampled_from(hooks)) if "comm_hook" in options_of(strategy) else "none"
    executions = [
        execution
        for execution in get_args(Execution)
        if "graph" not in execution or not {strategy, hook}.intersection(NOT_CAPTURED)
    ]
    execution: Execution = (
        "eager" if strategy in ("data_parallel", "fsdp") else draw(st.sampled_from(executions))
    )
    unscaled = strategy == "fsdp" or (strategy == "zero1" and "graph" in execution)
    precisions = [each for each in get_args(Precision) if not (unscaled and each == "fp16")]
    return {
        "strategy": strategy,
        "precision": draw(st.sampled_from(precisions)),
        "execution": execution,
        "inductor": draw(inductors) if "compile" in execution else "",
        "comm_hook": hook,
        "bucket_cap_mb": draw(st.integers(0, MOST_BUCKET_CAP_MB))
        if "bucket_cap_mb" in options_of(strategy)
        else 0,
        "gradient_as_bucket_view": by_ddp and draw(st.booleans()),
        "static_graph": by_ddp and accumulation == 1 and draw(st.booleans()),
        "buffer_sync": not by_ddp or draw(st.booleans()),
        "sync_batch_norm": strategy in GROUPED_STRATEGIES and draw(st.booleans()),
        "accumulation_steps": accumulation,
    }


@st.composite
def training_fields(draw: st.DrawFn, kinds: tuple[Input, ...]) -> dict[str, Any]:
    """A training's fields, of which any may differ from its default, with an input of one of these kinds."""
    by = draw(strategy_fields())
    strategy, parts, model, drop_last = (
        by["strategy"],
        by["accumulation_steps"],
        draw(models),
        draw(st.booleans()),
    )
    world_size = (
        1 if strategy == "single" else draw(st.integers(2 if strategy == "data_parallel" else 1, 1024))
    )
    batch = parts * draw(st.integers(2, 1024))
    if drop_last:
        unit = 1
    elif model in IMAGENET_STEM or "graph" in by["execution"]:
        unit = (
            world_size * batch
        )  # an epoch's last batch is whole: one of a single image, or of another size, is refused
    else:
        unit = world_size * parts if parts > 1 else 1
    kind = "fixed" if is_custom_model(model) else draw(st.sampled_from(kinds))
    any_format = not is_custom_model(model) and strategy not in SHARDED_STRATEGIES
    return by | {
        "model": model,
        "world_size": world_size,
        "per_rank_batch_size": batch,
        "memory_format": draw(st.sampled_from(get_args(MemoryFormat))) if any_format else "contiguous",
        "input": kind,
        "loader_workers": draw(st.integers(0, 8)) if kind == "dataloader" else 0,
        "data": draw(st.sampled_from(("synthetic", "cifar10"))),
        "digest": draw(st.text("0123456789abcdef", max_size=4)),
        "epoch_images": unit * draw(st.integers(-(-world_size // unit), 10**6)),
        "drop_last": drop_last,
        "delay_seconds": draw(delays),
        "fault": draw(st.none() | faults),
    }


def training_specs() -> st.SearchStrategy[TrainingSpec]:
    return training_fields(("fixed", "device")).map(lambda fields: TrainingSpec(**fields))


def epoch_specs() -> st.SearchStrategy[EpochSpec]:
    return training_fields(get_args(Input)).map(lambda fields: EpochSpec(**fields))


@st.composite
def all_reduce_specs(draw: st.DrawFn) -> AllReduceSpec:
    nodes, node_size = draw(st.integers(2, 32)), draw(st.integers(2, 32))
    hierarchical: dict[str, Any] = {"algorithm": "hierarchical", "node_size": node_size}
    return AllReduceSpec(
        world_size=nodes * node_size,
        **draw(st.sampled_from([{}, hierarchical])),
        nbytes=FLOAT32_BYTES * draw(st.integers(1, 2**30)),
        delay_seconds=draw(delays),
        fault=draw(st.none() | faults),
    )


@st.composite
def sampler_specs(draw: st.DrawFn) -> SamplerSpec:
    world_size = draw(st.integers(1, 1024))
    return SamplerSpec(
        world_size=world_size,
        epoch_images=draw(st.integers(world_size, 10**6)),
        set_epoch=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        delay_seconds=draw(delays),
        fault=draw(st.none() | faults),
    )


specs: st.SearchStrategy[Spec] = training_specs() | epoch_specs() | all_reduce_specs() | sampler_specs()


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    value = st.floats(allow_nan=False, allow_infinity=False)
    points = draw(st.integers(0, 3))
    rows = st.tuples(*[st.tuples(*[value | st.none()] * points)] * draw(st.integers(1, 2)))
    of_devices = st.dictionaries(NAMES, st.tuples(value, value | st.none()), max_size=2)
    joules = draw(st.lists(value, max_size=2))
    return Usage(
        joules=tuple(joules),
        seconds=tuple(draw(st.tuples(*[value] * points))),
        series=draw(st.dictionaries(NAMES, rows, max_size=2)),
        mean=draw(of_devices),
        peak=draw(of_devices),
        sampler_cpu_fraction=draw(value),
    )


@st.composite
def samples(draw: st.DrawFn, ranks: int) -> Sample:
    counters = st.floats(allow_nan=False, allow_infinity=False)
    return Sample(
        set=draw(NAMES),
        side=draw(st.sampled_from(("A", "B"))),
        torch=draw(NAMES),
        seconds=tuple(draw(st.lists(st.tuples(*[seconds] * ranks), min_size=1, max_size=5))),
        counters=draw(st.dictionaries(NAMES, st.tuples(*[counters] * ranks), max_size=2)),
        usage=draw(st.none() | usages()),
    )


@st.composite
def measurements(draw: st.DrawFn, of: st.SearchStrategy[Spec] = specs) -> Measured:
    ranks = draw(st.integers(1, 3))
    return Measured(
        spec=draw(of),
        iterations=draw(st.integers(1, 1024)),
        samples=tuple(draw(st.lists(samples(ranks), min_size=1, max_size=3))),
    )

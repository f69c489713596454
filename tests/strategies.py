"""Hypothesis strategies for what travels between the rooms: specs, and what was measured of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from ddpperf.results import Measured, Sample
from ddpperf.specs import FAULT_COMMANDS, FAULT_KINDS, FLOAT32_BYTES, MODELS, AllReduceSpec, Fault, Spec, TrainingSpec

BOUNDED = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no defect

seconds = st.floats(min_value=1e-7, max_value=1e3)

faults = st.builds(
    Fault, kind=st.sampled_from(FAULT_KINDS), rank=st.integers(0, 7), command=st.sampled_from(FAULT_COMMANDS)
)  # fmt: skip


@st.composite
def training_specs(draw: st.DrawFn) -> TrainingSpec:
    world_size = draw(st.integers(1, 1024))
    return TrainingSpec(
        model=draw(st.sampled_from(MODELS)),
        world_size=world_size,
        per_rank_batch_size=draw(st.integers(1, 4096)),
        strategy=draw(st.sampled_from(("single", "ddp"))) if world_size == 1 else "ddp",
        fault=draw(st.none() | faults),
    )


@st.composite
def all_reduce_specs(draw: st.DrawFn) -> AllReduceSpec:
    return AllReduceSpec(
        world_size=draw(st.integers(2, 1024)),
        nbytes=FLOAT32_BYTES * draw(st.integers(1, 2**30)),
        fault=draw(st.none() | faults),
    )


specs: st.SearchStrategy[Spec] = training_specs() | all_reduce_specs()


@st.composite
def samples(draw: st.DrawFn, ranks: int) -> Sample:
    counters = st.floats(allow_nan=False, allow_infinity=False)
    return Sample(
        set=draw(st.text(max_size=4)),
        side=draw(st.sampled_from(("A", "B"))),
        torch=draw(st.text(max_size=4)),
        seconds=tuple(draw(st.lists(st.tuples(*[seconds] * ranks), min_size=1, max_size=5))),
        counters=draw(st.dictionaries(st.text(max_size=4), st.tuples(*[counters] * ranks), max_size=2)),
    )


@st.composite
def measurements(draw: st.DrawFn, of: st.SearchStrategy[Spec] = specs) -> Measured:
    ranks = draw(st.integers(1, 3))
    return Measured(
        spec=draw(of),
        iterations=draw(st.integers(1, 1024)),
        samples=tuple(draw(st.lists(samples(ranks), min_size=1, max_size=3))),
    )

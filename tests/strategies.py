"""Hypothesis strategies for what travels between the rooms: specs, and what was measured of them; and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from hypothesis import settings
from hypothesis import strategies as st

from ddpperf.results import Measured, Sample
from ddpperf.specs import FLOAT32_BYTES, AllReduceSpec, Fault, FaultCommand, FaultKind, Model, Spec, Strategy, TrainingSpec

BOUNDED = settings(deadline=None, max_examples=50)  # no deadline: a busy machine is no defect


def one_thread() -> Iterator[None]:
    """Compute as every rank does: two threads would wait for each other on a busy machine. Made a fixture where it is used."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


seconds = st.floats(min_value=1e-7, max_value=1e3)

faults = st.builds(
    Fault,
    kind=st.sampled_from(get_args(FaultKind)),
    rank=st.integers(0, 7),
    command=st.sampled_from(get_args(FaultCommand)),
)


@st.composite
def training_specs(draw: st.DrawFn) -> TrainingSpec:
    world_size = draw(st.just(1) | st.integers(2, 1024))
    return TrainingSpec(
        model=draw(st.sampled_from(get_args(Model))),
        world_size=world_size,
        per_rank_batch_size=draw(st.integers(2, 4096)),
        strategy=draw(st.sampled_from(get_args(Strategy))) if world_size == 1 else "ddp",
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

"""Specs: what cannot be measured is refused, and JSON and ids tell every two of them apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.specs import AllReduceSpec, Fault, Spec, TrainingSpec, format_bytes, from_json, to_json
from tests.strategies import BOUNDED, all_reduce_specs, faults, specs, training_specs

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
ALL_REDUCE: dict[str, Any] = {"world_size": 4, "nbytes": 4096}
FAULT: dict[str, Any] = {"kind": "raise", "rank": 0}


@BOUNDED
@given(specs)
def test_json_gives_the_same_spec_back(spec: Spec) -> None:
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec


def test_reading_leaves_the_json_as_it_was() -> None:
    spec = AllReduceSpec(**ALL_REDUCE, fault=Fault(kind="hang", rank=1))
    fields = to_json(spec)
    from_json(fields)
    assert fields == to_json(spec)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "measurement must be one of training_step, all_reduce, got None"),
        ({"measurement": "broadcast", **ALL_REDUCE}, "measurement must be one of .*, got 'broadcast'"),
        ({"measurement": ["all_reduce"], **ALL_REDUCE}, "measurement must be one of"),
        ({"measurement": "all_reduce", **TRAINING}, "all_reduce has other fields than these: .*per_rank_batch_size"),
        ({"measurement": "all_reduce", "world_size": 4}, "all_reduce has other fields than these: world_size .*nbytes"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "nbytes": 6}, "multiple of a float32's 4 bytes, got 6"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": {"kind": "hang"}}, "fields"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": {"kind": "hang", "rank": 0, "when": 1}}, "fields"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": "hang"}, "fault"),
    ],
)
def test_other_json_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(fields)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "vgg16"}, "model must be one of resnet18, .*, got 'vgg16'"),
        ({"strategy": "fsdp"}, "strategy must be one of single, ddp, got 'fsdp'"),
        ({"precision": "fp8"}, "precision must be one of fp32, got 'fp8'"),
        ({"form": "graph"}, "form must be one of eager, got 'graph'"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
        ({"world_size": 2.0}, "world_size must be a whole number of at least 1, got 2.0"),
        ({"world_size": "2"}, "world_size must be a whole number of at least 1, got '2'"),
        ({"world_size": True}, "world_size must be a whole number of at least 1, got True"),
        ({"per_rank_batch_size": 0}, "per_rank_batch_size must be a whole number of at least 1, got 0"),
        ({"strategy": "single"}, "strategy single is one device, got world_size=4; use world_size=1 or ddp"),
    ],
)
def test_a_training_step_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    TrainingSpec(**TRAINING)
    with pytest.raises(ValueError, match=sentence):
        TrainingSpec(**TRAINING | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"world_size": 1}, "world_size must be a whole number of at least 2, got 1"),
        ({"nbytes": 0}, "nbytes must be a whole number of at least 4, got 0"),
        ({"nbytes": 4.0}, "nbytes must be a whole number of at least 4, got 4.0"),
        ({"nbytes": 1023}, "nbytes must be a multiple of a float32's 4 bytes, got 1023"),
        ({"algorithm": "ring"}, "algorithm must be one of backend, got 'ring'"),
        ({"form": "graph"}, "form must be one of eager, got 'graph'"),
    ],
)
def test_an_all_reduce_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    AllReduceSpec(**ALL_REDUCE)
    with pytest.raises(ValueError, match=sentence):
        AllReduceSpec(**ALL_REDUCE | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "sulk"}, "fault kind must be one of raise, hang, kill, exit, got 'sulk'"),
        ({"rank": -1}, "fault rank must be a whole number of at least 0, got -1"),
        ({"command": "join"}, "fault command must be one of open, sample, close, got 'join'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(change: dict[str, Any], sentence: str) -> None:
    Fault(**FAULT)
    with pytest.raises(ValueError, match=sentence):
        Fault(**FAULT | change)


@pytest.mark.parametrize(
    ("spec", "id"),
    [
        (TrainingSpec(**TRAINING), "world_size=4-batch=128-ddp-fp32-eager"),
        (TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single"), "world_size=1-batch=32-single-fp32-eager"),
        (AllReduceSpec(world_size=8, nbytes=2**22), "world_size=8-4MiB-backend-eager"),
        (AllReduceSpec(world_size=2, nbytes=1000), "world_size=2-1000B-backend-eager"),
    ],
)
def test_ids_are_the_stored_keys(spec: Spec, id: str) -> None:
    assert spec.id == id


@BOUNDED
@given(training_specs(), training_specs(), st.booleans())
def test_other_training_cells_have_other_ids(first: TrainingSpec, second: TrainingSpec, same_batch: bool) -> None:
    """Of one model; the model is the test function's part of the id, and a fault is no cell."""
    a, b = (
        TrainingSpec(
            world_size=spec.world_size,
            per_rank_batch_size=first.per_rank_batch_size if same_batch else spec.per_rank_batch_size,
            strategy=spec.strategy,
        )
        for spec in (first, second)
    )
    assert (a.id == b.id) == (a == b)


@BOUNDED
@given(all_reduce_specs(), all_reduce_specs(), st.booleans())
def test_other_all_reduce_cells_have_other_ids(first: AllReduceSpec, second: AllReduceSpec, same_size: bool) -> None:
    a = AllReduceSpec(world_size=first.world_size, nbytes=first.nbytes)
    b = AllReduceSpec(world_size=second.world_size, nbytes=first.nbytes if same_size else second.nbytes)
    assert (a.id == b.id) == (a == b)


@BOUNDED
@given(specs, faults)
def test_a_fault_makes_another_spec(spec: Spec, fault: Fault) -> None:
    assert (type(spec)(**{**vars(spec), "fault": fault}) == spec) == (spec.fault == fault)


@BOUNDED
@given(training_specs())
def test_one_device_is_the_same_step_alone(spec: TrainingSpec) -> None:
    alone = spec.one_device()
    assert (alone.world_size, alone.strategy, alone.fault, alone.in_turn) == (1, "single", None, True)
    assert (alone.model, alone.per_rank_batch_size, alone.precision, alone.form) == (
        spec.model,
        spec.per_rank_batch_size,
        spec.precision,
        spec.form,
    )
    assert alone.one_device() == alone


@BOUNDED
@given(specs)
def test_ranks_work_in_turn_only_without_a_group(spec: Spec) -> None:
    assert spec.in_turn == (isinstance(spec, TrainingSpec) and spec.strategy == "single")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(4, "4B"), (1000, "1000B"), (1024, "1KiB"), (1536, "1536B"), (2**20, "1MiB"), (3 * 2**19, "1536KiB"), (2**30, "1GiB")],
)
def test_sizes_are_spelled_in_the_largest_whole_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@BOUNDED
@given(st.integers(1, 2**40) | st.integers(1, 2**20).map(lambda kib: kib * 1024))
def test_a_spelled_size_can_be_read_back(nbytes: int) -> None:
    text = format_bytes(nbytes)
    scale = next(scale for unit, scale in {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1}.items() if text.endswith(unit))
    assert int(text.rstrip("KMGiB")) * scale == nbytes

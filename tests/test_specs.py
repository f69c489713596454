"""Specs: what cannot be measured is refused, and JSON and ids tell every two of them apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.models import MODELS
from ddpperf.specs import AllReduceSpec, Fault, Model, Spec, TrainingSpec, format_bytes, from_json, to_json
from tests.strategies import BOUNDED, specs, training_specs

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
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": {"kind": "hang"}}, "other fields than these: .*'rank'"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": {"kind": "hang", "rank": 0, "when": 1}}, "other fields .*'when'"),
        ({"measurement": "all_reduce", **ALL_REDUCE, "fault": "hang"}, "other fields than these: .*mapping"),
    ],
)
def test_other_json_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(fields)


REFUSED: list[tuple[Callable[..., object], dict[str, Any], dict[str, Any], str]] = [
    (TrainingSpec, TRAINING, {"model": "vgg16"}, "model must be one of resnet18, .*, got 'vgg16'"),
    (TrainingSpec, TRAINING, {"strategy": "fsdp"}, "strategy must be one of single, ddp, got 'fsdp'"),
    (TrainingSpec, TRAINING, {"precision": "fp8"}, "precision must be one of fp32, tf32, bf16, fp16, got 'fp8'"),
    (TrainingSpec, TRAINING, {"form": "graph"}, "form must be one of eager, got 'graph'"),
    (TrainingSpec, TRAINING, {"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
    (TrainingSpec, TRAINING, {"world_size": 2.0}, "world_size must be a whole number of at least 1, got 2.0"),
    (TrainingSpec, TRAINING, {"world_size": "2"}, "world_size must be a whole number of at least 1, got '2'"),
    (TrainingSpec, TRAINING, {"world_size": True}, "world_size must be a whole number of at least 1, got True"),
    (TrainingSpec, TRAINING, {"per_rank_batch_size": 0}, "per_rank_batch_size must be a whole number of at least 1, got 0"),
    (TrainingSpec, TRAINING, {"per_rank_batch_size": 1}, "resnet18 normalizes one value .*: use a batch of at least 2"),
    (
        TrainingSpec,
        TRAINING,
        {"strategy": "single"},
        "strategy single is one device, got world_size=4; use world_size=1 or ddp",
    ),
    (AllReduceSpec, ALL_REDUCE, {"world_size": 1}, "world_size must be a whole number of at least 2, got 1"),
    (AllReduceSpec, ALL_REDUCE, {"nbytes": 0}, "nbytes must be a whole number of at least 4, got 0"),
    (AllReduceSpec, ALL_REDUCE, {"nbytes": 4.0}, "nbytes must be a whole number of at least 4, got 4.0"),
    (AllReduceSpec, ALL_REDUCE, {"nbytes": 1023}, "nbytes must be a multiple of a float32's 4 bytes, got 1023"),
    (AllReduceSpec, ALL_REDUCE, {"algorithm": "ring"}, "algorithm must be one of backend, got 'ring'"),
    (AllReduceSpec, ALL_REDUCE, {"form": "graph"}, "form must be one of eager, got 'graph'"),
    (Fault, FAULT, {"kind": "sulk"}, "fault kind must be one of raise, hang, kill, exit, got 'sulk'"),
    (Fault, FAULT, {"rank": -1}, "fault rank must be a whole number of at least 0, got -1"),
    (Fault, FAULT, {"command": "join"}, "fault command must be one of open, sample, close, got 'join'"),
]


@pytest.mark.parametrize(("make", "fields", "change", "sentence"), REFUSED)
def test_what_cannot_be_measured_is_refused(
    make: Callable[..., object], fields: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    make(**fields)
    with pytest.raises(ValueError, match=sentence):
        make(**fields | change)


def test_every_model_that_a_spec_may_name_can_be_built() -> None:
    assert set(MODELS) == set(get_args(Model))


@pytest.mark.parametrize("model", ["resnet18_cifar", "resnet50_cifar"])
def test_a_cifar_form_may_have_a_batch_of_one(model: Model) -> None:
    """Its last stage has 16 values an image, where resnet18's has one."""
    assert TrainingSpec(model=model, world_size=1, per_rank_batch_size=1, strategy="ddp").per_rank_batch_size == 1


@pytest.mark.parametrize(
    ("spec", "id"),
    [
        (TrainingSpec(**TRAINING), "world_size=4-batch=128-resnet18-ddp-fp32-eager"),
        (
            TrainingSpec(model="resnet50_cifar", world_size=1, per_rank_batch_size=32, strategy="single"),
            "world_size=1-batch=32-resnet50_cifar-single-fp32-eager",
        ),
        (AllReduceSpec(world_size=8, nbytes=2**22), "world_size=8-4MiB-backend-eager"),
        (AllReduceSpec(world_size=2, nbytes=1000), "world_size=2-1000B-backend-eager"),
    ],
)
def test_ids_are_the_stored_keys(spec: Spec, id: str) -> None:
    assert spec.id == id


def test_every_cell_has_an_id_of_its_own() -> None:
    numbers = (2, 4, 12, 24, 124)
    training = [
        TrainingSpec(model=model, world_size=world_size, per_rank_batch_size=batch, strategy="ddp")
        for model, world_size, batch in itertools.product(get_args(Model), (1, *numbers), numbers)
    ]
    cells: list[Spec] = [*training, *{spec.one_device() for spec in training}]
    cells += [AllReduceSpec(world_size=N, nbytes=4 * count) for N in numbers for count in (*numbers, 256, 2**18, 2**28)]
    assert len({spec.id for spec in cells}) == len(cells)


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
    assert not TrainingSpec(**TRAINING).in_turn


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

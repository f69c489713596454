"""Specs: JSON round trips, ids, turns and sizes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from ddpperf.specs import (
    AllReduceSpec,
    CustomStepSpec,
    EpochSpec,
    Model,
    RunSpec,
    SamplerSpec,
    Spec,
    TrainingSpec,
    format_bytes,
    from_json,
    to_json,
)
from ddpperf.specs.training_step import DDP_OPTIONS
from ddpperf.training.models import MODELS
from tests.generated import SPECS

TRAINING: dict[str, Any] = {"world_size": 4, "per_rank_batch_size": 128, "strategy": "ddp"}
ALL_REDUCE: dict[str, Any] = {"world_size": 4, "nbytes": 4096}
STEP = CustomStepSpec(world_size=4, per_rank_batch_size=8, function="my.steps:make")
SAMPLER: dict[str, Any] = {"world_size": 3, "epoch_images": 10}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_json_round_trips_a_spec(spec: Spec) -> None:
    """Older runs store all fields."""
    whole = {"measurement": spec.measurement, **dataclasses.asdict(spec)}
    for stored in (to_json(spec), whole):
        assert from_json(json.loads(json.dumps(stored))) == spec


def test_each_field_of_each_kind_was_converted() -> None:
    assert {type(spec) for spec in SPECS} == {*Spec.kinds.values()}
    training = {field.name for field in dataclasses.fields(TrainingSpec)}
    for kind in Spec.kinds.values():
        same = {field.name for field in dataclasses.fields(kind)} - {"delay_seconds"}
        for spec in SPECS:
            same -= spec.changed_fields.keys() if isinstance(spec, kind) else set()
        assert same - (training if kind is not TrainingSpec else set()) == set(), kind


def test_default_fields_are_left_out_for_older_readers() -> None:
    assert to_json(AllReduceSpec(**ALL_REDUCE)) == {"measurement": "all_reduce", **ALL_REDUCE}
    assert to_json(AllReduceSpec(**ALL_REDUCE, algorithm="ring"))["algorithm"] == "ring"


@pytest.mark.parametrize("value", [0, 12, None, "odd"])
def test_retired_field_is_ignored_with_any_value(value: object) -> None:
    fields = to_json(AllReduceSpec(**ALL_REDUCE))
    assert from_json(fields | {"cutout": value}) == AllReduceSpec(**ALL_REDUCE)


CALL = {"measurement": "all_reduce", **ALL_REDUCE}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "measurement is None; it must be one of .*, training_step, .*training_epoch"),
        (CALL | {"measurement": ["all_reduce"]}, "it must be one of"),
        (CALL | TRAINING, "all_reduce has other fields than these: .*per_rank_batch_size"),
        ({"measurement": "all_reduce", "world_size": 4}, "other fields than these: world_size .*nbytes"),
        (CALL | {"nbytes": 6}, "nbytes must be a multiple of 4, a float32, got 6"),
    ],
)
def test_other_json_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(fields)


def test_every_built_in_model_can_be_built() -> None:
    assert set(MODELS) == set(get_args(Model))


def test_different_specs_have_different_ids() -> None:
    assert len({spec.id for spec in SPECS}) == len(SPECS)


def test_one_device_drops_communication_and_delays() -> None:
    changed = {
        **{"world_size": 1, "strategy": "single", "delay_seconds": 0.0},
        **{"communication": "on", "comm_delay_seconds": 0.0, "comm_delay_rank": 0, "sync_batch_norm": False},
    }
    for spec in SPECS:
        if isinstance(spec, TrainingSpec) and type(spec) in (TrainingSpec, EpochSpec, RunSpec):
            alone = spec.one_device()
            assert type(alone) is type(spec)
            assert dataclasses.asdict(alone) == dataclasses.asdict(spec) | DDP_OPTIONS | changed


@pytest.mark.parametrize(
    ("spec", "turns", "grouped"),
    [
        (TrainingSpec(**TRAINING), [[0, 1, 2, 3]], True),
        (TrainingSpec(**TRAINING).one_device(), [[0], [1], [2], [3], [4], [5]], False),
        (TrainingSpec(**TRAINING | {"strategy": "data_parallel"}), [[0]], False),
        (EpochSpec(**TRAINING), [[0, 1, 2, 3]], True),
        (EpochSpec(**TRAINING).one_device(), [[0]], False),
        (EpochSpec(**TRAINING | {"strategy": "data_parallel"}), [[0]], False),
        (AllReduceSpec(**ALL_REDUCE), [[0, 1, 2, 3]], True),
        (SamplerSpec(**SAMPLER), [[0, 1, 2]], True),
        (STEP, [[0, 1, 2, 3]], True),
        (STEP.one_device(), [[0], [1], [2], [3], [4], [5]], False),
    ],
)
def test_ranks_of_a_larger_set_take_turns(spec: Spec, turns: list[list[int]], grouped: bool) -> None:
    assert (spec.turns(6), spec.grouped) == (turns, grouped)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(4, "4B"), (1024, "1KiB"), (1536, "1536B"), (3 * 2**19, "1536KiB"), (2**30, "1GiB")],
)
def test_sizes_have_the_largest_whole_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_a_fixed_inputs_last_batch_is_whole() -> None:
    """Three steps on the same 4 images train on 12 images, although the epoch has 10."""
    spec = EpochSpec(
        model="resnet18_cifar",
        world_size=1,
        per_rank_batch_size=4,
        strategy="single",
        epoch_images=10,
        drop_last=False,
    )
    assert (spec.steps_per_epoch, spec.images_per_epoch) == (3, 12)
    assert dataclasses.replace(spec, input="device").images_per_epoch == 10

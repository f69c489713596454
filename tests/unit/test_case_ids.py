"""Test ids: numbers first, then what differs from the run's defaults; short, and one for each case."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import FASTEST_DDP, case, case_id, parameters, size_id
from ddpperf.plugin.session import storage_for
from ddpperf.specs import AllReduceSpec, CollectiveSpec, CopySpec, SamplerSpec, Spec, TrainingSpec
from tests.command_line import Read, suite

LONGEST = 62  # letters of a test's name with its brackets


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_default_suite_has_short_unique_ids(gpus: int, read: Read) -> None:
    names = [name for cases in suite(read(gpus=gpus)).values() for name in cases]
    assert len(set(names)) == len(names) > 40
    assert [name for name in names if len(name) > LONGEST] == []
    device, other = ("gpu", "rank") if gpus else ("rank", "gpu")
    assert any(f"[1{device}-b32" in name for name in names)
    assert not any(f"1{other}" in name for name in names)


def test_runs_on_other_nodes_or_links_are_not_compared(read: Read, tmp_path: Path) -> None:
    options = read("--nodes=2", "--interface=lo", "--launcher=srun")
    here, several = (storage_for(one, [], tmp_path).hardware_key for one in (read(), options))
    assert several == f"2x{here}-lo"
    assert [size_id(options, N) for N in options.world_sizes] == ["1rank", "2rank", "2x2rank"]


STEP: dict[str, Any] = {"per_rank_batch_size": 32}
FOUR: dict[str, Any] = {"world_size": 4, "input": "device"}
SYMMETRIC: dict[str, Any] = {"strategy": "own_ddp", "comm_hook": "symmetric_memory"}


@pytest.mark.parametrize(
    ("gpus", "fields", "expected"),
    [
        (0, {"world_size": 2}, "2rank-b32"),
        (0, {"world_size": 2, "strategy": "zero1"}, "2rank-b32-zero1"),
        (0, {"world_size": 2, "comm_hook": "bf16", "bucket_cap_mb": 4}, "2rank-b32-ddp+bf16+bucket4"),
        (0, {"world_size": 2, "static_graph": True}, "2rank-b32-ddp+static"),
        (0, {"world_size": 2, "comm_delay_seconds": 0.5}, "2rank-b32-ddp+comm_delay0.5s@0"),
        (0, {"world_size": 2, "accumulation_steps": 2}, "2rank-b32-ddp+accumulate2"),
        (0, {"world_size": 1, "model": "resnet50_cifar"}, "1rank-b32-resnet50_cifar"),
        (0, {"world_size": 1, "precision": "bf16"}, "1rank-b32-bf16"),
        (0, {"world_size": 1, "execution": "graph"}, "1rank-b32-graph"),
        (0, {"world_size": 1, "execution": "compile", "inductor": "a"}, "1rank-b32-compile-a"),
        (0, {"world_size": 1, "input": "device"}, "1rank-b32-device"),
        (4, FOUR | FASTEST_DDP, "4gpu-b32"),
        (4, FOUR, "4gpu-b32-ddp"),
        (4, FOUR | FASTEST_DDP | {"execution": "compile+graph"}, "4gpu-b32-compile+graph"),
        (4, {"world_size": 1, "precision": "tf32"}, "1gpu-b32-tf32-fixed"),
        (4, FOUR | SYMMETRIC, "4gpu-b32-own_ddp+symm"),
    ],
)
def test_id_names_what_differs(gpus: int, fields: dict[str, Any], expected: str, read: Read) -> None:
    options = read(gpus=gpus)
    assert case_id(options.step(**STEP | fields), options) == expected


def test_options_of_the_run_are_not_in_the_id(read: Read) -> None:
    options = read("--precision", "bf16", "--model", "resnet50_cifar", "--spec", "comm_hook=bf16")
    assert case_id(options.step(**STEP, world_size=2), options) == "2rank-b32"
    own = read("--spec", "strategy=own_ddp", gpus=4)
    assert case_id(own.step(**STEP, **FOUR, **SYMMETRIC), own) == "4gpu-b32"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (AllReduceSpec(world_size=2, nbytes=2**26), "2rank-64MiB"),
        (AllReduceSpec(world_size=2, nbytes=2**26, algorithm="ring"), "2rank-64MiB-ring"),
        (
            AllReduceSpec(world_size=2, nbytes=4, in_place=False, execution="graph"),
            "2rank-4B-graph-out_of_place",
        ),
        (CollectiveSpec(world_size=2, nbytes=2**24, kind="broadcast"), "2rank-16MiB-broadcast"),
        (
            SamplerSpec(world_size=3, epoch_images=10, drop_last=True, set_epoch=False),
            "3rank-drop_last-no_set_epoch",
        ),
        (CopySpec(world_size=1, nbytes=2**20), "1rank-1MiB"),
        (CopySpec(world_size=1, nbytes=2**20, memory="host"), "1rank-1MiB-host"),
    ],
)
def test_ids_of_other_work(spec: Spec, expected: str, read: Read) -> None:
    assert case_id(spec, read()) == expected


HYPERPARAMETERS = """optimizer schedule grow_from momentum weight_decay label_smoothing cutmix crop_padding
uncropped_epochs average_weights nesterov decay_vectors clip_norm set_epoch seed rate"""


def test_run_id_names_its_recipe(read: Read) -> None:
    options = read()
    plain = options.run(world_size=1, per_rank_batch_size=8, epochs=2, test_images=16, rate=0.1)
    assert case_id(plain, options) == "1rank-b8-lr0.1"
    values = ("lars", "cosine", 4, 0.5, 0.1, 0.1, 0.5, 1, 1, True, False, True, 1.0, False, 1, 0.2)
    changed: dict[str, Any] = dict(zip(HYPERPARAMETERS.split(), values, strict=True))
    specs = [dataclasses.replace(plain, **{name: value}) for name, value in changed.items()]
    assert len({case_id(spec, options) for spec in [plain, *specs]}) == 1 + len(changed)


def test_named_case_keeps_its_id(read: Read) -> None:
    options = read("--spec", "delay_seconds=0.5")
    named = case(options.step(**STEP, world_size=2), id="mine", gate=True)
    (found,) = parameters("test_it", pytest.mark.specs(cases=lambda _: [named]).mark, options, Machine())
    assert (found.id, [mark.name for mark in found.marks]) == ("mine", ["gate"])
    assert isinstance(found.values[0], TrainingSpec)
    assert found.values[0].delay_seconds == 0.5

"""The cases of the precision experiment, and over which precisions they store a speedup."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.plugin.options.options import Options
from ddpperf.specs import Precision, RunSpec
from perf import test_precision
from tests.command_line import Read, specs_of
from tests.unit.test_training_metrics import LONG, Costs


def trainings(chosen: Options) -> list[RunSpec]:
    return specs_of(test_precision.trainings(chosen))


def test_gpus_train_every_precision_with_two_batches(read: Read) -> None:
    found = trainings(read(gpus=2))
    assert {(spec.precision, spec.per_rank_batch_size) for spec in found} == {
        (precision, batch) for precision in ("fp32", "tf32", "bf16", "fp16") for batch in (128, 2048)
    }
    assert {spec.world_size for spec in found} == {1}


def test_cpus_without_bf16_instructions_skip_it(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_precision, "computes_bf16", lambda: False)
    chosen = read(gpus=0)
    assert {spec.precision for spec in trainings(chosen)} == {"fp32"}
    cases: list[Any] = list(test_precision.trainings(chosen))
    assert [case.id for case in cases if not isinstance(case.values[0], RunSpec)] == ["b16-bf16", "b64-bf16"]


@pytest.mark.parametrize(
    ("precision", "device", "bases"),
    [
        ("fp32", "cuda", ()),
        ("tf32", "cuda", ("fp32",)),
        ("bf16", "cuda", ("fp32", "tf32")),
        ("fp16", "cuda", ("fp32", "tf32")),
        ("fp32", "cpu", ()),
        ("bf16", "cpu", ("fp32",)),
    ],
)
def test_speedups_are_over_slower_precisions(
    precision: Precision, device: str, bases: tuple[str, ...]
) -> None:
    assert test_precision.slower_precisions(precision, device) == bases


def test_trainings_are_compared_in_their_own_time() -> None:
    """An fp16 training takes 2 s an epoch. It takes 3 s in tf32, and 5 s in fp32."""
    seconds = {"fp16": 2.0, "tf32": 3.0, "fp32": 5.0}
    spec = RunSpec(world_size=1, per_rank_batch_size=4, strategy="single", precision="fp16", **LONG)
    measure: Any = Costs(lambda spec: seconds[spec.precision])
    test_precision.test_precision_accuracy(measure, spec)
    found = {base: measure.metrics[f"speedup_over_{base}"]["by_set"]["A1"] for base in ("fp32", "tf32")}
    assert found == {"fp32": 2.5, "tf32": 1.5}
    assert measure.metrics["accuracy_over_fp32"]["by_set"] == {"A1": 0.0}

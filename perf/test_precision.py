"""Precision: how much faster are tf32, bf16 and fp16 than fp32, and does a model still learn?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from operator import truediv

import pytest

from ddpperf.machine.hardware import computes_bf16
from ddpperf.plugin.cases import Case, case, if_valid, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Precision, RunSpec, TrainingSpec, is_custom_model
from perf.common.by_set import per_set
from perf.common.recipes import read_recipes
from perf.common.seeds import by_seed, over_epochs, references
from perf.common.step_metrics import speedup_over, training_metrics
from perf.common.step_specs import step_case
from perf.test_large_batch import compare, learned

PRECISIONS: Mapping[str, tuple[Precision, ...]] = {
    "cpu": ("fp32", "bf16"),
    "cuda": ("fp32", "tf32", "bf16", "fp16"),
}
SLOW_BF16 = (
    "this CPU has no bf16 instructions, so a step takes tens of times as long; --precision bf16 measures it"
)
LARGER_BATCH = {"cpu": 64, "cuda": 2048}  # images of a step in the trainings besides the small batch
SEEDS = {"cpu": 2, "cuda": 1}  # on an H200, the trainings of one seed in fp32 take 70 s


def precisions(options: Options) -> Iterator[Case]:
    """Yield a single-device training spec for each precision of the device and each batch size.

    On GPUs the core suite has the largest batch. The gate has reduced precision on a CPU only,
    where every other test computes in fp32.
    """
    on_cpu = options.device == "cpu"
    for precision in PRECISIONS[options.device]:
        for batch_size in options.batch_sizes:
            core = on_cpu or batch_size == max(options.batch_sizes)
            gate = on_cpu and precision != options.precision
            step = step_case(options, 1, batch_size, input="fixed", precision=precision)
            yield case(unless_emulated(options, step), core=core, gate=gate)


def trainings(options: Options) -> Iterator[Case]:
    """Yield the reports' plain loop on one device in each precision, with a small and with a larger batch."""
    if is_custom_model(options.model):
        yield skipped("trainings", f"{options.model} makes its own batches and has no test images")
        return
    plain, *_ = read_recipes(options.device, "remedy")
    for precision in PRECISIONS[options.device]:
        for batch_size in (plain.global_batch_size, LARGER_BATCH[options.device]):
            recipe = dataclasses.replace(plain, devices=1, global_batch_size=batch_size)
            identity = f"b{batch_size}-{precision}"
            training = if_valid(identity, recipe.spec, options, precision=precision)
            yield case(unless_emulated(options, training, identity), id=identity, core=False)


def unless_emulated(options: Options, found: Case, identity: str = "") -> Case:
    """Return a case, which is skipped if it trains in bf16 on a CPU without bf16 instructions.

    identity: the id of the skipped test, instead of the id that the spec gives.
    """
    is_bf16 = isinstance(found, TrainingSpec) and found.precision == "bf16" != options.precision
    if isinstance(found, TrainingSpec) and is_bf16 and options.device == "cpu" and not computes_bf16():
        return skipped(identity or found, SLOW_BF16)
    return found


def slower_precisions(precision: Precision, device: str) -> tuple[Precision, ...]:
    """Return the slower precisions with which a precision is compared."""
    bases: tuple[Precision, ...] = ("fp32", "tf32") if device == "cuda" else ("fp32",)
    return bases[: bases.index(precision)] if precision in bases else bases


@pytest.mark.specs(cases=precisions)
def test_precision(measure: Measure, spec: TrainingSpec) -> None:
    """How long is a training step in one precision, and what is the loss after five steps?"""
    step = measure(spec)
    training_metrics(measure, step)
    measure.metric("loss_after_5_steps", step.counter("loss_after_5_steps"))
    for base in slower_precisions(spec.precision, measure.machine.device):
        speedup_over(measure, base, step, dataclasses.replace(spec, precision=base))


@pytest.mark.specs(cases=trainings)
def test_precision_accuracy(measure: Measure, spec: RunSpec) -> None:
    """Which accuracy does a whole training reach in one precision, and how much faster is it?"""
    runs = by_seed(measure, spec, SEEDS[measure.machine.device])
    learned(measure, runs)
    for base in slower_precisions(spec.precision, measure.machine.device):
        bases = references(measure, base, dataclasses.replace(spec, precision=base), runs)
        seconds = (over_epochs(trainings, "train_seconds") for trainings in (bases, runs))
        measure.metric(f"speedup_over_{base}", per_set(truediv, *seconds))
        if base == "fp32":
            compare(measure, "accuracy_over_fp32", runs, bases)

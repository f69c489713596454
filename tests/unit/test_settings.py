"""The values of [decision]: those in the file, defaults for the rest, and refusals."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest

from ddpperf.errors import Refused
from ddpperf.specs import AllReduceSpec, RunSpec, Spec, TrainingSpec
from ddpperf.verdict.noise_classes import usual_spread
from ddpperf.verdict.settings import Limits, Settings, read_decision
from tests.generated import TWO
from tests.project import REPOSITORY

BUILT_IN = read_decision({})
GPU, CPU = BUILT_IN["gpu"], BUILT_IN["cpu"]
STEP = TrainingSpec(**TWO, strategy="ddp")


def read(text: str) -> dict[str, Settings]:
    return read_decision(tomllib.loads(text))


# --- what is built in


def test_without_values_those_built_in_hold() -> None:
    assert read("[decision.gpu]\n[decision.cpu.metrics.mean_time]\n")["gpu"] == GPU
    path = REPOSITORY / "perf" / "thresholds.toml"
    assert read_decision(tomllib.loads(path.read_text())) == BUILT_IN


@pytest.mark.parametrize(
    ("settings", "tolerance", "sets"), [(GPU, 0.03, (3, 3)), (CPU, 0.25, (3, 3))], ids=["gpu", "cpu"]
)
def test_comparison_has_its_own_tolerance_and_sets(
    settings: Settings, tolerance: float, sets: tuple[int, int]
) -> None:
    found = settings.comparing()
    assert found.tolerance == tolerance
    assert (found.first_sets, found.repeat_sets) == sets
    assert (found.margin, found.metrics) == (settings.margin, settings.metrics)
    wide = read(f"[decision.{settings.hardware}]\ncompare_tolerance = 0.5\n")[settings.hardware]
    assert wide.comparing().tolerance == 0.5
    wide = read(f"[decision.{settings.hardware}]\ntolerance = 0.4\n")[settings.hardware]
    assert wide.comparing().tolerance == 0.4, "a comparison has less time, so it need not find more"


@pytest.mark.parametrize(("ratio", "margin", "tolerance"), [(1.05, 0.05, 0.1), (1.01, 0.01, 0.03)])
def test_requested_margin_widens_the_tolerance(ratio: float, margin: float, tolerance: float) -> None:
    """The mean has the margin, too, and at least its own tolerance. Memory keeps its limits."""
    found = GPU.comparing(ratio)
    assert (found.margin, found.tolerance) == pytest.approx((margin, tolerance))
    mean = found.metrics["mean_time"]
    assert (mean.margin, mean.tolerance) == pytest.approx((margin, max(0.05, 2 * margin)))
    own = read("[decision.gpu.metrics.time]\ntolerance = 0.01")["gpu"].comparing(ratio).metrics["time"]
    assert (own.margin, own.tolerance) == pytest.approx((margin, 2 * margin))
    assert found.metrics["peak_memory_bytes"] == GPU.metrics["peak_memory_bytes"]


def test_requested_sets_hold_for_repeats_too() -> None:
    assert (GPU.with_sets(9).first_sets, GPU.with_sets(9).repeat_sets) == (9, 9)
    assert (GPU.with_sets(2).first_sets, GPU.with_sets(2).repeat_sets) == (2, 6)


# --- what the file says goes before it


def test_class_value_reaches_its_metrics() -> None:
    """What a metric's own table leaves out is built in or, without a built-in value, that of the class."""
    found = read(
        "[decision.cpu]\ntolerance = 0.3\nfirst_sets = 4\n"
        "[decision.cpu.metrics.mean_time]\nmargin = 0.1\n"
        "[decision.gpu.metrics.mean_time]\ntolerance = 0.1\n"
    )
    assert (found["cpu"].tolerance, found["cpu"].first_sets, found["cpu"].margin) == (0.3, 4, CPU.margin)
    assert found["cpu"].metrics["mean_time"] == Limits(margin=0.1, tolerance=0.3)
    assert found["gpu"].metrics["mean_time"] == Limits(margin=0.005, tolerance=0.1)
    assert replace(found["gpu"], metrics=GPU.metrics) == GPU


def test_margin_of_one_metric_keeps_the_tolerance_of_comparisons() -> None:
    found = read("[decision.cpu.metrics.mean_time]\nmargin = 0.02\n")["cpu"]
    assert found.comparing().metrics["mean_time"] == Limits(margin=0.02, tolerance=CPU.compare_tolerance)


@pytest.mark.parametrize(
    ("key", "hardware", "spec"),
    [
        ("run_spread", "cpu", STEP),
        ("run_spread", "gpu", replace(STEP, execution="graph")),
        ("noisy_run_spread", "gpu", STEP),
        ("call_spread", "gpu", AllReduceSpec(world_size=2, nbytes=1024)),
        ("call_spread", "cpu", AllReduceSpec(world_size=2, nbytes=1024)),
        (
            "call_spread",
            "gpu",
            RunSpec(**TWO, strategy="ddp", input="device", epochs=1, test_images=8, rate=0.1),
        ),
    ],
)
def test_usual_spread_follows_the_kind_of_work(key: str, hardware: str, spec: Spec) -> None:
    found = read(f"[decision.{hardware}]\n{key} = 0.19\n")[hardware]
    assert usual_spread("time", spec, found) == 0.19
    assert usual_spread("time", spec, BUILT_IN[hardware]) == getattr(BUILT_IN[hardware], key) != 0.19


# --- refusals


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("decision.gpu.metrics.time = 0.1", "perf/thresholds.toml has decision.gpu.metrics.time = 0.1; wri"),
        ("[decision.gpus]", "[decision] of perf/thresholds.toml has the unknown key 'gpus'; write gpu"),
        ("[decision.gpu]\nmargn = 0.1", "[decision.gpu] of perf/thresholds.toml has the unknown key 'margn'"),
        ("[decision.gpu.metrics.peak]", "[decision.gpu.metrics] of perf/thresholds.toml has the unknown ke"),
        ("[decision.gpu.metrics.time]\nfirst_sets=4", "[decision.gpu.metrics.time] of perf/thresholds.toml"),
    ],
)
def test_unknown_name_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}"):
        read(text)


@pytest.mark.parametrize(
    ("keys", "wanted", "values"),
    [
        ("margin tolerance compare_tolerance metrics.time.margin", "a fraction from 0 to 10", "-1e-9 11"),
        ("run_spread noisy_run_spread call_spread", "a fraction above 0 and below 1", "-1e-9 0 1"),
        ("false_alarms", "a probability above 0 and below 0.5", "0 0.5 1"),
        ("first_sets repeat_sets", "a whole number from 2 to 64", "0 1 -3 3.5 65"),
    ],
)
def test_value_of_another_kind_is_refused(keys: str, wanted: str, values: str) -> None:
    for key in keys.split():
        for value in ("nan", "inf", "true", "'0.1'", "[0.1]", "9" * 400, *values.split()):
            with pytest.raises(Refused, match=rf"has {key.rpartition('.')[2]} = .*; write {wanted}"):
                read(f"decision.gpu.{key} = {value}")


def test_contradicting_values_are_refused() -> None:
    sentence = re.escape("[decision.gpu] of perf/thresholds.toml contradicts itself or a default (")
    with pytest.raises(Refused, match=f"^{sentence}margin 0.02 must be at least 0 and below tolerance 0.02"):
        read("[decision.gpu]\nmargin = 0.02")

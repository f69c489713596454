"""The values of [decision]: those in the file, defaults for the rest, and refusals."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from ddpperf.results.metrics import Better, registered
from ddpperf.verdict.settings import DecisionSettings, read_decision
from ddpperf.verdict.thresholds import bounded_metrics, read_document
from ddpperf.verdict.two_stage_test import CPU, GPU
from tests.project import REPOSITORY

BUILT_IN = read_decision({})
METRICS_DECIDED = {metric.name for metric in registered() if metric.better and not metric.exact}


def read(text: str) -> dict[str, DecisionSettings]:
    return read_decision(read_document(text))


def written(decision: dict[str, DecisionSettings]) -> dict[str, Any]:
    """All values of all classes and metrics, as the table of a file."""
    tables: dict[str, Any] = {}
    for name, settings in decision.items():
        values = asdict(settings.default) | asdict(settings)
        for absent in ("default", "tolerance_between_runs", "confirms"):
            del values[absent]
        values["metrics"] = {
            metric: {"margin": own.margin, "tolerance": own.tolerance}
            for metric, own in settings.metrics.items()
        }
        tables[name] = values
    return tables


# --- what is built in


def test_without_values_those_built_in_hold() -> None:
    assert read("[decision.gpu]\n[decision.cpu.metrics.tail_seconds]\n") == BUILT_IN
    assert {name: settings.default for name, settings in BUILT_IN.items()} == {"gpu": GPU, "cpu": CPU}


def test_repositorys_file_equals_the_built_in_values() -> None:
    path = REPOSITORY / "perf" / "thresholds.toml"
    document = read_document(path.read_text())
    assert read_decision(document) == BUILT_IN
    assert document["decision"] == written(BUILT_IN), "every value, so that a reader sees it"


def test_every_metric_with_a_threshold_can_be_decided() -> None:
    assert set(bounded_metrics(Better.HIGHER)) < METRICS_DECIDED


@pytest.mark.parametrize(
    ("device", "hardware", "tolerance", "sets"),
    [("cuda", "gpu", 0.03, (3, 3)), ("cpu", "cpu", 0.25, (2, 3))],
)
def test_confirmation_has_its_own_tolerance_and_sets(
    device: str, hardware: str, tolerance: float, sets: tuple[int, int]
) -> None:
    usual, beside = BUILT_IN[hardware], BUILT_IN[hardware].beside_stored_code(device)
    assert beside.default.tolerance == pytest.approx(math.log1p(tolerance))
    for metric in ("time", "speedup", "tail_seconds", "peak_memory_bytes"):
        found = beside.of(metric)
        assert (found.screen_sets, found.confirm_sets) == sets
        assert (found.margin, found.suite_alpha) == (usual.of(metric).margin, usual.of(metric).suite_alpha)
    assert beside.of("tail_seconds").tolerance == usual.of("tail_seconds").tolerance
    wide = read("[decision.gpu]\nmargin = 0.05\ntolerance = 0.1\n[decision.gpu.metrics.cpu_seconds]\n")
    assert wide["gpu"].beside_stored_code("cuda").default.tolerance == 0.1, "as large as the file says"


# --- what the file says goes before it


def test_class_value_reaches_its_metrics() -> None:
    found = read(
        "[decision.gpu]\ntolerance = 0.03\nscreen_sets = 4\n"
        "[decision.gpu.metrics.cpu_seconds]\ntolerance = 0.3\n"
    )
    gpu = replace(GPU, tolerance=0.03, screen_sets=4)
    assert (found["gpu"].default, found["gpu"].of("time"), found["cpu"]) == (gpu, gpu, BUILT_IN["cpu"])
    assert found["gpu"].of("cpu_seconds") == replace(gpu, margin=0.05, tolerance=0.3), (
        "its margin is built in"
    )
    assert found["gpu"].of("tail_seconds") == replace(gpu, margin=0.02, tolerance=0.10)


# --- refusals


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("decision.gpu.metrics.time = 0.1", "perf/thresholds.toml has decision.gpu.metrics.time = 0.1; wri"),
        ("[decision.gpus]", "[decision] of perf/thresholds.toml has the unknown class 'gpus'; write gpu"),
        ("[decision.gpu]\nmargn = 0.1", "[decision.gpu] of perf/thresholds.toml has the unknown key 'margn'"),
        ("[decision.gpu.metrics.cpu_second]", "[decision.gpu.metrics] of perf/thresholds.toml has the unk"),
        ("[decision.gpu.metrics.time]\nscreen_sets=4", "[decision.gpu.metrics.time] of perf/thresholds.tom"),
    ],
)
def test_unknown_name_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        read(text)


@pytest.mark.parametrize(
    ("keys", "wanted", "values"),
    [
        ("margin tolerance metrics.time.margin", "a fraction from 0 to below 1", "-1e-9"),
        ("quiet_iqr run_spread noisy_run_spread", "a fraction above 0 and below 1", "-1e-9 0"),
        ("screen_alpha suite_alpha", "a probability above 0 and below 0.5", "0 0.5"),
        ("screen_sets confirm_sets", "a whole number from 2 to 64", "0 -3 3.5 65"),
    ],
)
def test_value_of_another_kind_is_refused(keys: str, wanted: str, values: str) -> None:
    for key in keys.split():
        for value in ("1", "nan", "inf", "true", "'0.1'", "[0.1]", *values.split()):
            with pytest.raises(ValueError, match=rf"has {key.rpartition('.')[2]} = .*; write {wanted}"):
                read(f"decision.gpu.{key} = {value}")


@pytest.mark.parametrize(
    ("text", "table", "what"),
    [
        ("margin = 0.02", "gpu", "margin 0.02 must be at least 0 and below tolerance 0.02"),
        ("screen_alpha = 0.01", "cpu", "screen_alpha must lie between 0.01 and 0.5, got 0.01"),
        ("noisy_run_spread = 0.04", "cpu", "run_spread 0.06 must lie above 0, up to noisy_run_spread 0.04"),
    ],
)
def test_contradicting_values_are_refused(text: str, table: str, what: str) -> None:
    sentence = re.escape(f"[decision.{table}] of perf/thresholds.toml contradicts itself, ")
    with pytest.raises(ValueError, match=f"^{sentence}.*{re.escape(what)}"):
        read(f"[decision.{table}]\n{text}")

"""The values of [decision]: those in the file, defaults for the rest, and refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.metrics import Better, registered
from ddpperf.verdict.settings import DecisionSettings, read_decision
from ddpperf.verdict.thresholds import bounded_metrics, read_document
from ddpperf.verdict.two_stage_test import CPU, GPU, MOST_SETS, Settings
from tests.generated import BOUNDED
from tests.project import REPOSITORY

KEYS = tuple(field.name for field in fields(Settings))
SPREADS = ("quiet_iqr", "run_spread", "noisy_run_spread", "call_spread")
BUILT_IN = read_decision({})

classes = st.sampled_from(("gpu", "cpu"))
METRICS_DECIDED = [each.name for each in registered() if each.better and not each.exact]
metrics = st.sampled_from(METRICS_DECIDED)
fractions = st.floats(0, 0.999)
pairs = st.tuples(fractions, fractions).filter(lambda pair: pair[0] < pair[1])


def read(text: str) -> dict[str, DecisionSettings]:
    return read_decision(read_document(text))


def refusal(document: Mapping[str, Any]) -> str:
    """Why `document` is refused; empty if it is not."""
    try:
        read_decision(document)
    except ValueError as error:
        return str(error)
    return ""


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    margin, tolerance = draw(pairs)
    suite_alpha, screen_alpha = sorted(
        draw(st.lists(st.floats(1e-9, 0.49), min_size=2, max_size=2, unique=True))
    )
    sets = st.integers(2, MOST_SETS)
    return Settings(
        margin=margin,
        tolerance=tolerance,
        screen_alpha=screen_alpha,
        screen_sets=draw(sets),
        confirm_sets=draw(sets),
        suite_alpha=suite_alpha,
    )


def own(one: Settings) -> dict[str, Any]:
    return {"margin": one.margin, "tolerance": one.tolerance}


def written(decision: Mapping[str, DecisionSettings]) -> dict[str, Any]:
    """All values of all classes and metrics, as the table of a file."""
    tables: dict[str, Any] = {name: asdict(each.default) | asdict(each) for name, each in decision.items()}
    for name, each in decision.items():
        tables[name]["metrics"] = {metric: own(one) for metric, one in each.metrics.items()}
        del (
            tables[name]["default"],
            tables[name]["tolerance_between_runs"],
            tables[name]["confirms"],
        )  # these are not in the file
    return tables


# --- what is built in


@pytest.mark.parametrize(
    "text", ["", "[[threshold]]\n", "[decision]\n", "[decision.gpu]\n[decision.cpu.metrics.tail_seconds]\n"]
)
def test_without_values_those_built_in_hold(text: str) -> None:
    found = read(text)
    assert found == BUILT_IN
    assert (list(found), found["gpu"].default, found["cpu"].default) == (["gpu", "cpu"], GPU, CPU)


@pytest.mark.parametrize(
    ("hardware", "metric", "margin", "tolerance"),
    [
        ("gpu", "time", 0.005, 0.02),
        ("gpu", "tail_seconds", 0.02, 0.10),
        ("gpu", "cpu_seconds", 0.05, 0.25),
        ("gpu", "peak_memory_bytes", 0.005, 0.02),
        ("cpu", "time", 0.01, 0.15),
        ("cpu", "tail_seconds", 0.10, 0.50),
        ("cpu", "cpu_seconds", 0.01, 0.15),
        ("cpu", "peak_memory_bytes", 0.005, 0.02),
    ],
)
def test_metric_has_its_own_values_or_defaults(
    hardware: str, metric: str, margin: float, tolerance: float
) -> None:
    decided = BUILT_IN[hardware]
    assert decided.of(metric) == replace(decided.default, margin=margin, tolerance=tolerance)


def test_repositorys_file_equals_the_built_in_values() -> None:
    path = REPOSITORY / "perf" / "thresholds.toml"
    document = read_document(path.read_text())
    assert read_decision(document) == BUILT_IN
    assert document["decision"] == written(BUILT_IN), "every value, so that a reader sees it"


def test_every_metric_with_a_threshold_can_be_decided() -> None:
    assert set(bounded_metrics(Better.HIGHER)) < set(METRICS_DECIDED)


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


def test_wide_margin_keeps_its_tolerance_beside_stored_code() -> None:
    wide = read("[decision.gpu]\nmargin = 0.05\ntolerance = 0.1\n[decision.gpu.metrics.cpu_seconds]\n")
    assert wide["gpu"].beside_stored_code("cuda").default.tolerance == 0.1


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


def test_metric_inherits_from_its_class() -> None:
    found = read(
        "[decision.cpu]\nmargin = 0.02\ntolerance = 0.2\n[decision.cpu.metrics.speedup]\nmargin = 0.1\n"
    )
    assert found["cpu"].of("speedup") == replace(CPU, margin=0.1, tolerance=0.2)


@given(classes, settings(), metrics, pairs)
@BOUNDED
def test_what_is_written_is_read(
    hardware: str, default: Settings, metric: str, pair: tuple[float, float]
) -> None:
    values = asdict(default) | {"metrics": {metric: dict(zip(("margin", "tolerance"), pair, strict=True))}}
    found = read_decision({"decision": {hardware: values}})
    other = "cpu" if hardware == "gpu" else "gpu"
    assert (found[hardware].default, found[other]) == (default, BUILT_IN[other])
    assert found[hardware].of(metric) == replace(default, margin=pair[0], tolerance=pair[1])
    for unnamed in set(METRICS_DECIDED) - {metric}:
        built_in = BUILT_IN[hardware].metrics.get(unnamed)
        assert found[hardware].of(unnamed) == (replace(default, **own(built_in)) if built_in else default)
    assert read_decision({"decision": written(found)}) == found


@given(classes, settings(), st.sets(st.sampled_from(KEYS)))
@BOUNDED
def test_any_of_the_values_may_be_given(hardware: str, wanted: Settings, given: set[str]) -> None:
    """The others are built in, and all together must make settings."""
    together = asdict(BUILT_IN[hardware].default) | {key: getattr(wanted, key) for key in given}
    document = {"decision": {hardware: {key: together[key] for key in given}}}
    agree = together["margin"] < together["tolerance"] and together["suite_alpha"] < together["screen_alpha"]
    assert (refusal(document) == "") == agree
    assert not agree or read_decision(document)[hardware].default == Settings(**together)


# --- refusals


@pytest.mark.parametrize(
    ("text", "header", "found"),
    [
        ("decision = 1", "decision", "1"),
        ("[[decision]]", "decision", "[{}]"),
        ("decision.gpu = 0.1", "decision.gpu", "0.1"),
        ("[[decision.cpu]]", "decision.cpu", "[{}]"),
        ("decision.gpu.metrics = 'time'", "decision.gpu.metrics", "'time'"),
        ("decision.gpu.metrics.time = 0.1", "decision.gpu.metrics.time", "0.1"),
        (
            "decision.gpu.metrics.cpu_seconds = false",
            "decision.gpu.metrics.cpu_seconds",
            "False",
        ),  # one that is built in
    ],
)
def test_a_value_where_a_table_belongs_is_refused(text: str, header: str, found: str) -> None:
    sentence = f"perf/thresholds.toml has {header} = {found}; write a table, which begins with [{header}]"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read(text)


@pytest.mark.parametrize(
    ("text", "table", "found"),
    [
        ("[decision.gpus]", "decision", "class 'gpus'; write gpu"),
        ("[decision.h200x4]", "decision", "class 'h200x4'; use gpu, cpu"),
        ("[decision]\nmargin = 0.1", "decision", "class 'margin'; use gpu, cpu"),
        ("[decision.gpu]\nmargn = 0.1", "decision.gpu", "key 'margn'; write margin"),
        (
            "[decision.cpu]\nzzz = 1",
            "decision.cpu",
            f"key 'zzz'; use {', '.join((*KEYS, *SPREADS))}, metrics",
        ),
        ("[decision.gpu.metric.time]", "decision.gpu", "key 'metric'; write metrics"),
        (
            "[decision.gpu.metrics.cpu_second]",
            "decision.gpu.metrics",
            "metric 'cpu_second'; write cpu_seconds",
        ),
        (
            "[decision.cpu.metrics]\nmargin = 0.1",
            "decision.cpu.metrics",
            f"metric 'margin'; use {', '.join(METRICS_DECIDED[:9])}, ...",
        ),
        (
            "[decision.gpu.metrics.time]\ntolerence = 1",
            "decision.gpu.metrics.time",
            "key 'tolerence'; write tolerance",
        ),
        (
            "[decision.gpu.metrics.time]\nscreen_sets=4",
            "decision.gpu.metrics.time",
            "key 'screen_sets'; use margin, tolerance",
        ),
    ],
)
def test_an_unknown_name_is_refused(text: str, table: str, found: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'[{table}] of perf/thresholds.toml has the unknown {found}')}$"
    ):
        read(text)


@pytest.mark.parametrize(
    ("keys", "wanted", "values"),
    [
        (
            "margin tolerance metrics.time.margin metrics.time.tolerance",
            "a fraction from 0 to below 1, such as 0.02",
            "-1e-9",
        ),
        (
            "quiet_iqr run_spread noisy_run_spread",
            "a fraction above 0 and below 1, such as 0.02",
            "-1e-9 0 0.0",
        ),
        ("screen_alpha suite_alpha", "a probability above 0 and below 0.5, such as 0.02", "0 0.0 0.5"),
        ("screen_sets confirm_sets", "a whole number from 2 to 64", "0 -3 3.5 65"),
    ],
)
def test_a_value_of_another_kind_is_refused(keys: str, wanted: str, values: str) -> None:
    for table, _, key in (f"decision.gpu.{each}".rpartition(".") for each in keys.split()):
        sentence = (
            rf"^\[{re.escape(table)}\] of perf/thresholds\.toml has {key} = .*; write {re.escape(wanted)}$"
        )
        for value in (
            "1",
            "2.0",
            "nan",
            "inf",
            "-inf",
            "true",
            "false",
            "'0.1'",
            "[0.1]",
            "{}",
            "2026-11-20",
            *values.split(),
        ):
            with pytest.raises(ValueError, match=sentence):
                read(f"[{table}]\n{key} = {value}")


@pytest.mark.parametrize(
    ("text", "table", "what"),
    [
        ("margin = 0.1\ntolerance = 0.1", "gpu", "margin 0.1 must be at least 0 and below tolerance 0.1"),
        ("margin = 0.02", "gpu", "margin 0.02 must be at least 0 and below tolerance 0.02"),
        ("tolerance = 0.01", "cpu", "margin 0.01 must be at least 0 and below tolerance 0.01"),
        ("suite_alpha = 0.02", "gpu", "screen_alpha must lie between 0.02 and 0.5, got 0.02"),
        ("screen_alpha = 0.01", "cpu", "screen_alpha must lie between 0.01 and 0.5, got 0.01"),
        ("noisy_run_spread = 0.04", "cpu", "run_spread 0.06 must lie above 0, up to noisy_run_spread 0.04"),
        ("margin = 0.05", "gpu.metrics.time", "margin 0.05 must be at least 0 and below tolerance 0.02"),
        (
            "tolerance = 0.05",
            "gpu.metrics.cpu_seconds",
            "margin 0.05 must be at least 0 and below tolerance 0.05",
        ),
        (
            "margin = 0.1\n[decision.cpu]\ntolerance = 0.05",
            "cpu.metrics.time",
            "margin 0.1 must be at least 0 and below tolerance 0.05",
        ),
    ],
)
def test_contradicting_values_are_refused(text: str, table: str, what: str) -> None:
    sentence = (
        f"[decision.{table}] of perf/thresholds.toml contradicts itself, together with the defaults for what "
        f"it leaves out ({what}); change one of the two values"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read(f"[decision.{table}]\n{text}")


tables = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(("decision", "gpu", "cpu", "metrics", *KEYS, *METRICS_DECIDED)), inner, max_size=3
        )
    ),
)


@given(st.fixed_dictionaries({"decision": tables | st.fixed_dictionaries({"gpu": tables})}))
@BOUNDED
def test_any_other_table_is_refused_in_one_sentence(document: dict[str, Any]) -> None:
    assert re.fullmatch(r"(.*\bperf/thresholds\.toml\b.*; .+)?", refusal(document)), (
        "a point matches no end of line"
    )

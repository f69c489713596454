"""The definitions of metrics: unit and heading by name, and what may decide a run."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results import metrics
from ddpperf.results.metrics import Better
from ddpperf.results.stored_runs import read_document
from tests.fake_measure import measuring
from tests.project import REPOSITORY


@pytest.mark.parametrize(
    ("name", "value", "unit", "text"),
    [
        ("mean_time", 0.1, "s", "mean time 100.0 ms"),
        ("step_seconds_at_32", 0.1, "s", "step of batch 32 100.0 ms"),
        ("projected_excess_on_16_low", 0.1, "s", "projected excess on 16 devices at least 100.0 ms"),
        ("reduce_byte_seconds", 2e-9, "s/B", "addition 2 s/GB"),
        ("ring_bytes_over_measured", 0.5, "1", "ring bytes over measured 0.50x"),
        ("accuracy_over_fp32", 0.012, "1", "accuracy over fp32 +1.2%"),
        ("inside_bytes_per_second", 2e9, "B/s", "bandwidth inside a node 2 GB/s"),
        ("control_messages", 12345, "1", "control messages 12,345"),
        ("exposed_comm_seconds", 0.1, "s", "exposed (difference) 100.0 ms"),
        ("exposed_comm_seconds", -0.1759, "s", "exposed (difference) none"),
        ("ddp_traced_exposed_comm_seconds", -0.1, "s", "DDP traced exposed communication none"),
        ("step_minus_one_device_seconds", -0.1, "s", "t(N) - t(1) -100.0 ms"),
        ("images_per_second_at_64", 12345, "1/s", "throughput of batch 64 12,345 images/s"),
    ],
)
def test_name_says_unit_and_heading(name: str, value: float, unit: str, text: str) -> None:
    assert (metrics.find(name).unit, metrics.find(name).text(value)) == (unit, text)


@pytest.mark.parametrize("name", ["", "speed", "tokens_per_second"])
def test_unknown_name_fails_its_test(name: str) -> None:
    with pytest.raises(KeyError, match=f"^{name!r}$"):
        metrics.find(name)
    nothing: Any = None
    measure = Measure(nothing, measuring())
    with pytest.raises(pytest.fail.Exception, match=f"the metric {name} is not registered; register it with"):
        measure.metric(name, {"A1": 1.0})
    assert measure.metrics == {}


def test_interval_ends_decide_nothing() -> None:
    assert metrics.find("test_accuracy").threshold
    assert not metrics.find("test_accuracy_low").threshold
    assert metrics.find("test_accuracy_high").better is None


def test_what_decides_a_comparison() -> None:
    """A loss of speedup shows in its times. Thresholds may still bound it."""
    gates = {metric.name for metric in metrics.registered() if metric.gate and not metric.exact}
    assert gates == {"time", "mean_time", "idle_cpus", "peak_memory_bytes"}
    assert metrics.find("speedup").threshold
    exact = {metric.name for metric in metrics.registered() if metric.exact}
    assert exact == {
        "communicated_bytes_per_epoch",
        "gradients_over_parameters",
        *(f"{kind}_bytes" for kind in ("gradients", "buffers", "parameters", "metrics", "control", "model")),
    }


def test_kept_runs_have_the_units_of_their_metrics() -> None:
    runs = sorted([*REPOSITORY.glob("perf/baselines/*/*.json*"), *REPOSITORY.glob("docs/runs/*.json.gz")])
    assert runs
    for run in runs:
        for benchmark in read_document(run)["benchmarks"]:
            for name, stored in benchmark["extra_info"]["ddpperf"]["metrics"].items():
                assert metrics.find(name).unit == stored["unit"], (run, name)


def test_column_has_no_negative_exposed_time() -> None:
    heading, unit, text = metrics.column("exposed_comm_seconds", [0.002, -0.001], "s")
    assert (heading, unit, text(0.002), text(-0.001)) == ("exposed (difference)", "ms", "2.000", "none")


def test_equal_metric_may_be_registered_twice() -> None:
    """pytest-benchmark's command imports conftest.py a second time."""
    fields: dict[str, Any] = {"name": "tokens_for_tests", "unit": "1/s", "heading": "tokens"}
    metrics.register(metrics.Metric(**fields, format=str))
    metrics.register(metrics.Metric(**fields, format=repr))
    with pytest.raises(ValueError, match="a metric tokens_for_tests is registered already; choose another"):
        metrics.register(metrics.Metric(**fields | {"unit": "s"}, format=str))
    heading, unit, text = metrics.column("tokens_for_tests", [1.0], "1/s")
    assert (f"{heading}{unit}", text(1.0)) == ("tokens/s", "1.0")


def test_name_of_another_suite_keeps_its_stored_unit() -> None:
    assert metrics.find_or_plain("wait_seconds", "ms").text(5.0) == "wait_seconds 5 ms"
    assert metrics.column("cache_spread", [2e6], "B")[:2] == ("cache_spread", "B")
    assert metrics.column("cache_spread", [0.5], "1")[2](0.5) == "50.0%"


def test_metric_that_decides_needs_a_direction() -> None:
    with pytest.raises(ValueError, match="metric joules can decide nothing without better"):
        metrics.Metric(name="joules", unit="J", heading="energy", format=str, gate=True)


@pytest.mark.parametrize("fields", [{"better": Better.LOWER}, {"better": Better.HIGHER, "exact": True}])
def test_metric_that_no_comparison_judges_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="gate=True, which needs exact=True and better=lower; leave"):
        metrics.Metric(name="first_token", unit="s", heading="first token", format=str, gate=True, **fields)

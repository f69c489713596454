"""The registry of metrics: names that are found, families of names, and what may decide a run."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results import metrics
from ddpperf.results.metrics import Gate
from ddpperf.results.stored_runs import read_document
from tests.project import REPOSITORY


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("speedup", "speedup"),
        ("speedup_of_4", "speedup on 4 devices"),
        ("halving_doubling_over_backend", "halving_doubling over backend"),
        ("predicted_over_measured_64KiB", "predicted over measured of 64KiB"),
        ("projected_excess_on_16_low", "projected excess on 16 devices at least"),
    ],
)
def test_families_carry_their_number_in_the_heading(name: str, heading: str) -> None:
    found = metrics.find(name)
    assert (found.name, found.heading) == (name, heading)


@pytest.mark.parametrize("name", ["", "speed", "speedup_of_", "speedup_of_x", "speedup_of_4_low"])
def test_unknown_name_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError, match=f"^{name!r}$"):
        metrics.find(name)


def test_each_name_belongs_to_one_metric() -> None:
    names = [metric.name for metric in metrics.registered()]
    assert len(set(names)) == len(names)
    for metric in metrics.registered():
        example = metric.name.format(N=4, size="64KiB", algorithm="ring", report="A")
        matching = [other.name for other in metrics.registered() if metrics.find(example).name == other.name]
        assert matching == ([] if "{" in metric.name else [example])


def test_interval_ends_decide_nothing() -> None:
    assert metrics.find("test_accuracy").threshold
    assert not metrics.find("test_accuracy_low").threshold
    assert metrics.find("test_accuracy_high").better is None


def test_what_decides_an_ab_run() -> None:
    gates = {metric.name: metric.gate for metric in metrics.registered() if metric.gate and not metric.exact}
    assert gates == {
        "time": Gate.UNLESS_LAUNCH_BOUND,
        "tail_seconds": Gate.UNLESS_LAUNCH_BOUND,
        "speedup": Gate.UNLESS_LAUNCH_BOUND,
        "cpu_seconds": Gate.LAUNCH_BOUND,
        "peak_memory_bytes": Gate.ALWAYS,
    }
    exact = {metric.name for metric in metrics.registered() if metric.exact}
    assert exact == {
        "communicated_bytes_per_epoch",
        "gradients_over_parameters",
        *(f"{kind}_bytes" for kind in ("gradients", "buffers", "parameters", "metrics", "control")),
    }


def test_unregistered_metric_fails_its_test() -> None:
    nothing: Any = None
    measure = Measure(nothing, nothing, nothing)
    with pytest.raises(pytest.fail.Exception, match="the metric joules is not registered; register it with"):
        measure.metric("joules", {"A1": 1.0})
    assert measure.metrics == {}


# Metrics that are no longer measured, because they meant nothing. Kept runs still have them.
DROPPED = {"gradient_busbw_exposed_bytes_per_second", "exposed_link_utilization"}


def test_kept_runs_store_only_registered_metrics() -> None:
    runs = sorted([*REPOSITORY.glob("perf/baselines/*/*.json*"), *REPOSITORY.glob("docs/runs/*.json.gz")])
    assert runs
    for run in runs:
        for benchmark in read_document(run)["benchmarks"]:
            stored = benchmark["extra_info"]["ddpperf"]["metrics"]
            for name in stored.keys() - DROPPED:
                assert metrics.find(name).unit == stored[name]["unit"], (run, name)


def test_equal_metric_may_be_registered_twice() -> None:
    """pytest-benchmark's command imports conftest.py a second time."""
    fields: dict[str, Any] = {"name": "tokens_for_tests", "unit": "1/s", "heading": "tokens"}
    metrics.register(metrics.Metric(**fields, format=str))
    metrics.register(metrics.Metric(**fields, format=repr))
    with pytest.raises(ValueError, match="a metric tokens_for_tests is registered already; choose another"):
        metrics.register(metrics.Metric(**fields | {"unit": "s"}, format=str))
    heading, unit, text = metrics.column("tokens_for_tests", [1.0], "1/s")
    assert (f"{heading}{unit}", text(1.0)) == ("tokens/s", "1.0")


def test_odd_metric_name_is_refused() -> None:
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        metrics.Metric(name="tokens/s", unit="1", heading="odd", format=str)


def test_metric_that_decides_needs_a_direction() -> None:
    with pytest.raises(ValueError, match="metric joules can decide nothing without better"):
        metrics.Metric(name="joules", unit="J", heading="energy", format=str, gate=Gate.ALWAYS)

"""Export the metrics of a stored run for other programs: as CSV, and as a Prometheus text file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from statistics import median
from typing import Any

from ddpperf.errors import Refused
from ddpperf.report.cases import Case, ab_of, cases_of
from ddpperf.report.curves import BY_EPOCH, curve_points
from ddpperf.report.facets import timed_work
from ddpperf.results import metrics
from ddpperf.results.outcomes import OutcomeKind, Status

CSV_BEGINS = b"datetime,hardware,commit,verdict,test,"
CURVES_BEGINS = b"datetime,hardware,commit,verdict,epoch,"
UTILIZATION_BEGINS = b"test,process_set,quantity,"
PROMETHEUS_BEGINS = b"# HELP ddpperf_"
OWN_GAUGES = ("verdict", "run_timestamp_seconds", "run_info", "test_passed")
UNITS = {
    "1": "ratio or count",
    "s": "seconds",
    "B": "bytes",
    "B/s": "bytes per second",
    "1/s": "per second",
    "J": "joules",
    "1/J": "per joule",
    "W": "watts",
    "Hz": "hertz",
    "degC": "degrees Celsius",
}
TIME = "{work}_time_seconds"  # the metric that stands for the time of a test, such as step_time_seconds


@dataclass(frozen=True, kw_only=True)
class Value:
    """One metric of one test, in SI units.

    value: the median over the process sets. least, most: the values of the process sets range from
    `least` to `most`. better: "lower", "higher", or "" if neither is better.
    """

    test: str
    metric: str
    value: float
    unit: str
    better: str
    least: float
    most: float
    process_sets: int


def values_of(document: Mapping[str, Any]) -> Iterator[Value]:
    """Yield the time and all metrics of each measured test of a stored run."""
    for case in cases_of(document):
        times = case.measured.median_step_seconds()
        yield _value(case, TIME.format(work=timed_work(case.measured.spec)), "s", "lower", times)
        for name, metric in case.metrics.items():
            yield _value(case, name, metric["unit"], _better(name), metric["by_set"])


def _utf8(text: str) -> str:
    """Return a text that UTF-8 can hold: a test's id has its file's name, which may be of other bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _value(case: Case, name: str, unit: str, better: str, by_set: Mapping[str, float]) -> Value:
    found = list(by_set.values())
    return Value(
        test=case.test,
        metric=name,
        value=median(found),
        unit=unit,
        better=better,
        least=min(found),
        most=max(found),
        process_sets=len(found),
    )


def _better(name: str) -> str:
    try:
        return metrics.find(name).better or ""
    except KeyError:  # a metric of another test suite
        return ""


def csv_text(document: Mapping[str, Any]) -> str:
    """Return all metrics of a stored run as CSV, with one line for each test and metric."""
    names = [field.name for field in fields(Value)]
    return _csv(document, names, map(asdict, values_of(document)))


def curves_csv_text(document: Mapping[str, Any]) -> str:
    """Return the figures of all trainings of a stored run as CSV, with one line for each epoch and seed.

    Raises Refused for a run without whole trainings.
    """
    rows = [
        {"epoch": point.epoch, "seed": point.seed, "process_set": point.process_set, "test": case.test}
        | dict(point.figures)
        for case in cases_of(document)
        for point in curve_points(case)
    ]
    if not rows:
        where = "measure some with python -m pytest perf/test_large_batch.py"
        raise Refused(f"--curves writes whole trainings, and the run holds none; {where}")
    return _csv(document, ["epoch", "seed", "process_set", "test", *BY_EPOCH], rows)


def _csv(document: Mapping[str, Any], names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, each after the columns that name the stored run."""
    header = document["ddpperf"]
    run = {
        "datetime": document.get("datetime", ""),
        "hardware": header["hardware_key"],
        "commit": header["environment"]["commit"],
        "verdict": header["verdict"]["status"],
    }
    output = io.StringIO()
    writer = csv.DictWriter(output, [*run, *names], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(run | dict(row))
    return output.getvalue()


def utilization_text(document: Mapping[str, Any]) -> str:
    """Return the utilization over time of epochs and trainings as CSV, with one line for each value.

    A value that the driver did not report has no line. device: the number of the GPU or rank.
    """
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(["test", "process_set", "quantity", "device", "seconds", "value"])
    columns = output.tell()
    for case in cases_of(document):
        for sample in case.measured.samples:
            if sample.usage is None:
                continue
            for quantity, rows in sample.usage.series.items():
                for device, row in enumerate(rows):
                    for seconds, value in zip(sample.usage.seconds, row, strict=True):
                        if value is not None:
                            writer.writerow([case.test, sample.set, quantity, device, seconds, value])
    if output.tell() == columns:
        where = "measure some with python -m pytest perf/test_scaling.py"
        raise Refused(f"--utilization writes sampled epochs and trainings, and the run holds none; {where}")
    return output.getvalue()


def prometheus_text(document: Mapping[str, Any]) -> str:
    """Return a stored run as text for the textfile collector of Prometheus' node exporter.

    Each metric is a gauge with the labels `hardware` and `test`. ddpperf_verdict is 1 for the verdict
    of the run, and 0 for the other verdicts. ddpperf_run_timestamp_seconds is the time of the run.
    """
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # used here only

    header = document["ddpperf"]
    hardware = header["hardware_key"]
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        if name not in gauges:
            gauges[name] = Gauge(f"ddpperf_{name}", text, ["hardware", *labels], registry=registry)
        return gauges[name]

    verdict = gauge("verdict", "1 for the verdict of the run, 0 for the other verdicts", "status")
    for status in Status:
        verdict.labels(hardware, status).set(status == header["verdict"]["status"])
    when = datetime.fromisoformat(document["datetime"]).timestamp()
    gauge("run_timestamp_seconds", "the time of the run").labels(hardware).set(when)
    info = gauge("run_info", "the measured commit and the version of torch", "commit", "torch")
    torch = ab_of(header).get("candidate", header["environment"]).get("torch") or ""
    info.labels(hardware, header["environment"]["commit"], torch).set(1)
    passed = gauge("test_passed", "1 for a test that passed, 0 for a test that did not", "test")
    for test, outcome in header["outcomes"].items():
        if not OutcomeKind(outcome["kind"]).skipped:
            passed.labels(hardware, _utf8(test)).set(outcome["kind"] == OutcomeKind.PASSED)
    for value in values_of(document):
        name = re.sub(r"[^a-zA-Z0-9_]", "_", value.metric)
        name = f"metric_{name}" if name in OWN_GAUGES else name
        text = f"{UNITS.get(value.unit, value.unit)}, the median over process sets"
        gauge(name, text, "test").labels(hardware, _utf8(value.test)).set(value.value)
    return generate_latest(registry).decode()

"""Export the metrics of a stored run, and the curves of its trainings, as CSV for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from ddpperf.errors import Refused
from ddpperf.report.cases import Case, cases_of
from ddpperf.report.curves import BY_EPOCH, curve_points
from ddpperf.report.facets import timed_work
from ddpperf.results import metrics

CSV_BEGINS = b"datetime,hardware,commit,verdict,test,"
CURVES_BEGINS = b"datetime,hardware,commit,verdict,epoch,"
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

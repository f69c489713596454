"""Export the metrics of a stored run, and the curves of its trainings, as CSV for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ddpperf.errors import Refused
from ddpperf.report.stored_cases import BY_EPOCH, cases_of, curve_points
from ddpperf.results import metrics

CSV_BEGINS = b"datetime,hardware,commit,verdict,test,"
CURVES_BEGINS = b"datetime,hardware,commit,verdict,epoch,"
FIELDS = ("test", "metric", "value", "unit", "better", "least", "most", "process_sets")


def metrics_csv(document: Mapping[str, Any]) -> str:
    """Return the time and all metrics of each measured test of a stored run as CSV, in SI units.

    value: the median over the process sets, whose values range from `least` to `most`. better:
    "lower", "higher", or "" if neither is better.
    """
    rows = []
    for case in cases_of(document):
        time = f"{case.timed_work}_time_seconds"
        stored = {time: {"unit": "s", "by_set": case.measured.median_step_seconds()}, **case.metrics}
        for name, metric in stored.items():
            values = list(metric["by_set"].values())
            better = metrics.find_or_plain("time" if name == time else name).better or ""
            figures = median(values), metric["unit"], better, min(values), max(values), len(values)
            rows.append(dict(zip(FIELDS, (case.test, name, *figures), strict=True)))
    return _csv(document, FIELDS, rows)


def curves_csv(document: Mapping[str, Any]) -> str:
    """Return the figures of all trainings of a stored run as CSV, with one line for each epoch and seed.

    Raises Refused for a run without whole trainings.
    """
    rows = [point | {"test": case.test} for case in cases_of(document) for point in curve_points(case)]
    if not rows:
        where = "measure some with python -m pytest perf/test_large_batch.py"
        raise Refused(f"--curves writes whole trainings, and the run holds none; {where}")
    return _csv(document, ["epoch", "seed", "process_set", "test", *BY_EPOCH], rows)


def _csv(document: Mapping[str, Any], names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, in which the first columns of each row name the stored run."""
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
    writer.writerows(run | dict(row) for row in rows)
    return output.getvalue()

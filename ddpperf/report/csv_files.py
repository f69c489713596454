"""Export the metrics of a stored run, and the curves of its trainings, as CSV for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ddpperf.errors import Refused
from ddpperf.report.stored_cases import BY_EPOCH, cases_of, curve_points
from ddpperf.results import metrics

CSV_BEGINS = b"datetime,hardware,commit,verdict,test,"
CURVES_BEGINS = b"datetime,hardware,commit,verdict,epoch,"
FIELDS = ("test", "metric", "value", "unit", "better", "least", "most", "process_sets")


def _rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the time and all metrics of each measured test of a stored run, in SI units.

    value: the median over the process sets, whose values range from `least` to `most`. better:
    "lower", "higher", or "" if neither is better.
    """
    for case in cases_of(document):
        time = f"{case.timed_work}_time_seconds"
        by_set = {time: case.measured.median_step_seconds()}
        by_set |= {name: metric["by_set"] for name, metric in case.metrics.items()}
        for name, values in by_set.items():
            found = list(values.values())
            yield {
                "test": case.test,
                "metric": name,
                "value": median(found),
                "unit": "s" if name == time else case.metrics[name]["unit"],
                "better": "lower" if name == time else metrics.find_or_plain(name).better or "",
                "least": min(found),
                "most": max(found),
                "process_sets": len(found),
            }


def metrics_csv(document: Mapping[str, Any]) -> str:
    """Return all metrics of a stored run as CSV, with one line for each test and metric."""
    return _csv(document, FIELDS, _rows(document))


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
    for row in rows:
        writer.writerow(run | dict(row))
    return output.getvalue()

"""Sentences on what a run found, made from its metrics and its comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpperf.analysis.comm_split import AGREEMENT
from ddpperf.report.stored_cases import Case, ab_of, cases_of, of_functions, without_file
from ddpperf.report.tables import interval
from ddpperf.results import units


def highlights(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on a stored run, the most important first.

    An A/B run answers what changed, so its sentences say nothing else.
    """
    header = document["ddpperf"]
    found = [*_changed(header)]
    if "against" not in header:
        found += _scaling(cases_of(document))
    return found


def _changed(header: Mapping[str, Any]) -> Iterator[str]:
    """Say which time changed most compared with the base."""
    rows = [
        row
        for row in ab_of(header).get("rows", ())
        if row["primary"] and row["gated"] and row["control"] is None
    ]
    if rows:
        most = max(rows, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
        unchanged = all(row["finding"] == "unchanged" for row in rows)
        which = "No test changed. The largest ratio is" if unchanged else "The largest change is"
        yield f"{which} {most['ratio']:.3f} ({interval(most)}), of {without_file(most['test'])}."


def _scaling(cases: Sequence[Case]) -> Iterator[str]:
    """Name the step with the lowest efficiency, and its exposed communication by difference and by trace."""
    scaled = [
        case
        for case in of_functions(cases, "test_weak_scaling", "test_strong_scaling")
        if "efficiency" in case.metrics and case.properties["strategy"] != "data_parallel"
    ]
    if not scaled:
        return
    worst = min(scaled, key=lambda case: case.value("efficiency") or 0.0)
    speedup, efficiency = worst.value("speedup") or 0.0, worst.value("efficiency") or 0.0
    slower = ", slower than one device" if speedup < 1 else ""
    yield (
        f"Lowest efficiency: {units.percent(efficiency)} ({worst.experiment.kind} scaling, speedup "
        f"{units.factor(speedup)}{slower}): {worst.described()}."
    )
    for split in of_functions(cases, "test_comm_split"):
        difference, trace = split.value("exposed_comm_seconds"), split.value("traced_exposed_comm_seconds")
        if split.measured.spec == worst.measured.spec and difference is not None and trace is not None:
            by_difference, by_trace = difference / split.seconds, trace / split.seconds
            uncertain = ", so it is not known well" if abs(by_difference - by_trace) > AGREEMENT else ""
            yield (
                f"Exposed communication is {by_difference:.0%} of this step by difference, {by_trace:.0%} "
                f"by trace{uncertain}."
            )

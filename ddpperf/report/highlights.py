"""Sentences on what a run found, made from its metrics and its comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

from ddpperf.analysis.comm_split import AGREEMENT
from ddpperf.analysis.statistics import not_longer
from ddpperf.report.questions.costs import EPOCH_COST
from ddpperf.report.questions.question import answering
from ddpperf.report.round_warnings import NOISY_IQR, spread
from ddpperf.report.spec_properties import size
from ddpperf.report.stored_cases import Case, ab_of, cases_of, of_functions
from ddpperf.report.text import interval, without_file
from ddpperf.results import units
from ddpperf.specs import AllReduceSpec

MOST = 5  # sentences
LEAST_GAIN = 1.05  # a smaller speedup is not worth a sentence


def highlights(document: Mapping[str, Any]) -> list[str]:
    """Return at most five sentences on a stored run, the most important first.

    An A/B run answers what changed, so its sentences say nothing else.
    """
    header = document["ddpperf"]
    cases = cases_of(document)
    found = [_changed(header)]
    if "against" not in header:
        backend = header["environment"].get("backend") or "the library"
        found += [
            _priced(cases),
            _scaling(cases),
            _fastest(cases, backend),
            _strategy(cases),
            _least_certain(cases),
        ]
    return list(islice((sentence for sentences in found for sentence in sentences), MOST))


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


def _priced(cases: Sequence[Case]) -> Iterator[str]:
    """Say what an epoch costs, if the run has a price for an hour of a device."""
    priced = [case for case in answering(cases, EPOCH_COST) if case.hour_price is not None]
    if priced:
        yield EPOCH_COST.sentence(priced)


def _scaling(cases: Sequence[Case]) -> Iterator[str]:
    """Say what scaled worst, and how much of this step only waits for communication."""
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
        if split.measured.spec == worst.measured.spec:
            yield from _waiting(split)


def _waiting(split: Case) -> Iterator[str]:
    """Say how much of a step only waits for communication, by both methods."""
    difference, trace = split.value("exposed_comm_seconds"), split.value("traced_exposed_comm_seconds")
    if difference is not None and trace is not None:
        by_difference, by_trace = difference / split.seconds, trace / split.seconds
        uncertain = ", so it is not known well" if abs(by_difference - by_trace) > AGREEMENT else ""
        yield (
            f"Exposed communication is {by_difference:.0%} of this step by difference, {by_trace:.0%} by "
            f"trace{uncertain}."
        )
    if (between := split.value("exposed_between_nodes_seconds")) is not None:
        yield (
            f"Waiting for other nodes takes {between / split.seconds:.0%} of this step, by difference: the "
            "rest of the exposed communication is the same on one node."
        )


def _fastest(cases: Sequence[Case], backend: str) -> Iterator[str]:
    """Say whether an all-reduce algorithm is faster than that of NCCL or gloo."""
    for case in of_functions(cases, "test_fastest_all_reduce"):
        others = {name: measured.all_step_seconds() for name, measured in case.references.items()}
        spec = case.measured.spec
        if not others or not isinstance(spec, AllReduceSpec):
            continue
        best = min(others, key=lambda name: median(others[name]))
        own = case.measured.all_step_seconds()
        if not_longer(own, others[best]):
            yield f"No all_reduce is faster than {backend}'s at {size(spec.nbytes)}, within the error."
        else:
            gain = units.factor(median(own) / median(others[best]))
            yield f"At {size(spec.nbytes)}, {best} is {gain} as fast as {backend}'s all_reduce."
        return


def _strategy(cases: Sequence[Case]) -> Iterator[str]:
    """Name the strategy or DDP option with the largest speedup over plain DDP."""
    gains = {
        case.properties["strategy"]: gain
        for case in of_functions(cases, "test_strategies")
        if (gain := case.value("speedup_over_ddp"))
    }
    if gains and gains[best := max(gains, key=gains.__getitem__)] >= LEAST_GAIN:
        yield f"The fastest strategy, {best}, is {units.factor(gains[best])} as fast as plain DDP."


def _least_certain(cases: Sequence[Case]) -> Iterator[str]:
    """Name the test whose rounds spread most."""
    spreads = {case.test: found for case in cases if (found := spread(case.measured)) is not None}
    if spreads and spreads[noisiest := max(spreads, key=spreads.__getitem__)] > NOISY_IQR:
        yield f"The rounds of {without_file(noisiest)} spread most, by {spreads[noisiest]:.0%} (IQR)."

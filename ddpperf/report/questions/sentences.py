"""What no figure of a grid says: sentences that are computed from the cases of a question."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.analysis.batch_size import LEAST_FRACTION
from ddpperf.analysis.scaling import not_predictable
from ddpperf.report.questions.figures import fitted, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS

# More devices are worth it up to such an efficiency; one at 50% takes twice the device time of one device.
EFFICIENCY_LIMITS = (0.8, 0.5)


def about_speedup(cases: Sequence[Case]) -> str:
    return (
        "t(1) of a speedup is that of the slowest device, measured in the same processes. It may differ from "
        "the row of one device."
    )


def about_workers(cases: Sequence[Case]) -> str:
    (case, *_) = cases
    limit, enough = f"{LEAST_FRACTION:.0%} of an epoch", case.value("enough_workers")
    if enough is None:
        return f"No number of workers makes loading take less than {limit}."
    return f"With {units.counted(int(enough), 'worker')}, loading takes less than {limit}."


def about_formulas(cases: Sequence[Case]) -> str:
    return (
        "Predicted over measured is in parentheses; for 2 (N-1) S / N it is the link utilization. 2 (N-1) S "
        "adds up the times of links that send at the same time. No formula includes latency, so all times "
        "are too short for small buffers."
    )


def about_messages(cases: Sequence[Case]) -> str:
    for case in cases:
        if case.properties["strategy"] == "ddp":
            sent = {kind: case.value(f"{kind}_bytes") or 0.0 for kind in MESSAGE_KINDS}
            others = 1 - sent["gradients"] / sum(sent.values())
            return f"In a step of DDP, {others:.2%} of the bytes are not gradients."
    return "Plain DDP was not measured."


def about_buffers(cases: Sequence[Case]) -> str:
    """Compare steps that send only gradients with steps that also synchronize the BatchNorm buffers."""
    found = {tuple(case.properties.items()): case for case in cases}
    for case in cases:
        with_buffers = case.properties["strategy"].replace("+no_buffer_sync", "")
        other = found.get(tuple({**case.properties, "strategy": with_buffers}.items()))
        if other is not None and other is not case:
            change = units.change(other.seconds / case.seconds - 1)
            return (
                f"Do gradients suffice? With {case.described()}, a step that sends nothing else takes "
                f"{units.seconds(case.seconds)}. If it also sends the buffers of BatchNorm, it takes "
                f"{units.seconds(other.seconds)} ({change}). The weights are the same with both. Only the "
                "statistics with which a rank evaluates differ."
            )
    return ""


def about_enough(cases: Sequence[Case]) -> str:
    """Count the trainings that keep an efficiency on the most devices, and those that get slower."""
    most = max(training_of(case).world_size for case in cases)
    on_most = [case for case in cases if training_of(case).world_size == most]
    efficiencies = [case.value("efficiency") or 0.0 for case in on_most]
    devices = "GPUs" if "GPUs" in cases[0].properties else "ranks"
    counts = ((limit, sum(value >= limit for value in efficiencies)) for limit in EFFICIENCY_LIMITS)
    kept = ", ".join(f"{count} reach {limit:.0%}" for limit, count in counts)
    slower = sum((case.value("speedup") or 1.0) < 1 for case in on_most)
    trainings = units.counted(len(on_most), "training")
    return f"Efficiency of {trainings} on {most} {devices}: {kept}. Slower than one device: {slower}."


def about_laws(cases: Sequence[Case]) -> str:
    """Return why a law predicts nothing."""
    found = {
        f"{case.experiment.title}, {case.described()}: {reason}, so nothing is predicted."
        for case in cases
        if (reason := not_predictable(fitted(case).value))
    }
    return " ".join(sorted(found))

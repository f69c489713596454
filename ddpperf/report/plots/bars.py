"""Pictures with a row for each case: parts of a step, messages, accuracies, and ratios of an A/B run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpperf.report.plots.picture import COLOURS, MOST_ROWS, Picture, bar_frame, draw_interval, label, legend
from ddpperf.report.stored_cases import Case, ab_of
from ddpperf.report.text import without_file
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
OF_FINDINGS = {"worse": COLOURS[5], "suspect": COLOURS[1], "better": COLOURS[2], "undecided": COLOURS[3]}


Bars = list[tuple[str, dict[str, float]]]  # the label of each case, and its parts by name


def _stacked(bars: Bars, names: Sequence[str], what: str) -> Figure | None:
    """Return a stack of parts for each case. names: the parts from left to right. what: their unit."""
    drawn = [bar for bar in bars if bar[1]][:MOST_ROWS]
    if not drawn:
        return None
    figure, axes = bar_frame([name for name, _ in drawn], what)
    left = [0.0] * len(drawn)
    for number, part in enumerate(names):
        widths = [max(0.0, parts.get(part, 0.0)) for _, parts in drawn]
        look: dict[str, Any] = {"color": COLOURS[number], "hatch": HATCHES[number], "edgecolor": "white"}
        axes.barh(range(len(drawn)), widths, 0.6, left=left, label=part, **look)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    legend(figure, [axes])
    return figure


def _parts_of(
    cases: Sequence[Case], header: Mapping[str, Any], metrics: Mapping[str, str], scale: float
) -> Bars:
    """Return the metrics of each case, each under its name in the picture. scale: of their values."""
    return [
        (
            label(case, header),
            {name: scale * value for name, metric in metrics.items() if (value := case.value(metric))},
        )
        for case in cases
    ]


def communication(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    bars: Bars = []
    for case in cases:
        exposed = case.value("traced_exposed_comm_seconds")
        whole, compute = case.value("traced_comm_seconds"), case.value("compute_seconds")
        parts: dict[str, float] = {}
        if exposed is not None:
            parts = {"exposed communication": exposed * 1e3}
            if whole is not None:
                parts["compute and communication overlap"] = hidden = (whole - exposed) * 1e3
                if compute is not None:
                    parts["compute alone"] = compute * 1e3 - hidden
        bars.append((label(case, header), parts))
    names = ("compute alone", "compute and communication overlap", "exposed communication")
    return _stacked(bars, names, "ms of a profiled step")


def step_parts(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    found = [part for part in PARTS if any(f"{part}_seconds" in case.metrics for case in cases)]
    metrics = {part.replace("_", " "): f"{part}_seconds" for part in found}
    return _stacked(_parts_of(cases, header, metrics, 1e3), [*metrics], "ms of a step")


def messages(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    metrics = {kind: f"{kind}_bytes" for kind in MESSAGE_KINDS}
    return _stacked(_parts_of(cases, header, metrics, 1e-6), [*metrics], "MB that a rank sends in a step")


def accuracies(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    from matplotlib.ticker import PercentFormatter

    found = [case for case in cases if case.value("test_accuracy") is not None][:MOST_ROWS]
    if len(found) < 2:
        return None
    names = [label(case, header, without=("model", "input")) for case in found]
    figure, axes = bar_frame(names, "test accuracy (95% interval)")
    for row, case in enumerate(found):
        middle = case.metrics["test_accuracy"]["value"]
        low, high = case.interval("test_accuracy") or (middle, middle)
        draw_interval(axes, row, (low, middle, high), fmt="o", color=COLOURS[0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def ab_ratios(header: Mapping[str, Any]) -> Picture | None:
    rows = [row for row in ab_of(header).get("rows", ()) if row["primary"] or row["control"] is not None]
    rows = sorted(rows, key=lambda row: -row["ratio"])[:MOST_ROWS]
    if not rows:
        return None
    names = [
        without_file(row["test"]) + f": {row['finding']}" * (row["finding"] != "unchanged") for row in rows
    ]
    figure, axes = bar_frame(names, "time of the candidate over the base, with 95% interval")
    axes.tick_params("y", labelsize=7)
    axes.axvline(1.0, color="gray", linestyle="--")
    for number, row in enumerate(rows):
        look = {
            "fmt": "X" if row["finding"] == "worse" else "o",
            "color": OF_FINDINGS.get(row["finding"], COLOURS[0]),
        }
        draw_interval(axes, number, (row["low"], row["ratio"], row["high"]), **look)
    description = "Time ratio of each test in the A/B run, with its 95% interval"
    return Picture(name="ab", experiment="", description=description, figure=figure)

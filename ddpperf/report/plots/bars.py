"""Pictures with a row for each case: the parts of a step, and the ratios of an A/B run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpperf.report.plots.picture import COLOURS, Picture, label, legend, row_frame
from ddpperf.report.stored_cases import Case, judged_rows, without_file
from ddpperf.specs import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 40
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
OF_FINDINGS = {"worse": COLOURS[5], "undecided": COLOURS[1]}
Bars = list[tuple[str, dict[str, float]]]  # the label of each case, and the seconds of its parts


def _stacked(bars: Bars, names: Sequence[str], what: str) -> Figure | None:
    """Return a stack of parts for each case; None without any parts. names: from left to right."""
    drawn = [bar for bar in bars if bar[1]][:MOST_ROWS]
    if not drawn:
        return None
    figure, axes = row_frame([name for name, _ in drawn], f"ms of a {what}")
    left = [0.0] * len(drawn)
    for number, part in enumerate(names):
        widths = [1e3 * max(0.0, parts.get(part, 0.0)) for _, parts in drawn]
        look: dict[str, Any] = {"color": COLOURS[number], "hatch": HATCHES[number], "edgecolor": "white"}
        axes.barh(range(len(drawn)), widths, 0.6, left=left, label=part, **look)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    legend(figure, axes)
    return figure


def communication(cases: Sequence[Case]) -> Figure | None:
    names = ("compute alone", "compute and communication overlap", "exposed communication")
    bars: Bars = []
    for case in cases:
        exposed, whole = case.value("traced_exposed_comm_seconds"), case.value("traced_comm_seconds")
        compute = case.value("compute_seconds")
        if exposed is not None and whole is not None and compute is not None:
            parts = (compute - (whole - exposed), whole - exposed, exposed)
            bars.append((label(case), dict(zip(names, parts, strict=True))))
    return _stacked(bars, names, "profiled step")


def step_parts(cases: Sequence[Case]) -> Figure | None:
    parts = [part for part in PARTS if any(f"{part}_seconds" in case.metrics for case in cases)]
    bars: Bars = []
    for case in cases:
        seconds = {part.replace("_", " "): case.value(f"{part}_seconds") or 0.0 for part in parts}
        bars.append((label(case), seconds))
    return _stacked(bars, [part.replace("_", " ") for part in parts], "step")


def ab_ratios(header: Mapping[str, Any]) -> Picture | None:
    times = [
        row
        for row in judged_rows(header)
        if row["metric"] == "time" and row["high"] is not None and row["tests"]
        if row["finding"] != "for information" and row["stages"] != ["stored run"]
    ]
    rows = sorted(times, key=lambda row: -row["ratio"])[:MOST_ROWS]
    if not rows:
        return None
    names = [
        without_file(row["tests"][0])
        + f" and {len(row['tests']) - 1} more" * (len(row["tests"]) > 1)
        + f": {row['finding']}" * (row["finding"] != "not worse")
        for row in rows
    ]
    figure, axes = row_frame(names, "time of the candidate over the base, with its interval")
    axes.tick_params("y", labelsize=7)
    axes.axvline(1.0, color="gray", linestyle="--")
    for number, row in enumerate(rows):
        ends = [[max(0.0, row["ratio"] - row["low"])], [max(0.0, row["high"] - row["ratio"])]]
        marker = "X" if row["finding"] == "worse" else "o"
        colour = OF_FINDINGS.get(row["finding"], COLOURS[0])
        axes.errorbar(row["ratio"], number, xerr=ends, fmt=marker, color=colour, capsize=3)
    description = "Time ratio of each test in the A/B run, with its interval"
    return Picture(name="ab", experiment="", description=description, figure=figure)

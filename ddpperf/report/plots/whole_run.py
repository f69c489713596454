"""Pictures of a whole run: an A/B run's ratios, and the times of all kept runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpperf.report.cases import ab_of
from ddpperf.report.plots.picture import COLOURS, MOST_ROWS, Picture, new_figure
from ddpperf.report.text import without_file

History = Sequence[tuple[str, Mapping[str, float]]]  # name and step seconds by test, oldest first


def ab_ratios(header: Mapping[str, Any]) -> Picture | None:
    rows = [row for row in ab_of(header).get("rows", ()) if row["primary"] or row["control"] is not None]
    rows = sorted(rows, key=lambda row: -row["ratio"])[:MOST_ROWS]
    if not rows:
        return None
    figure, axes = new_figure(len(rows))
    colours = {"worse": COLOURS[5], "suspect": COLOURS[1], "better": COLOURS[2], "undecided": COLOURS[3]}
    for place, row in enumerate(rows):
        ends = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
        worse = row["finding"] == "worse"
        colour = colours.get(row["finding"], COLOURS[0])
        axes.errorbar(row["ratio"], place, xerr=ends, fmt="X" if worse else "o", color=colour, capsize=3)
    axes.axvline(1.0, color="gray", linestyle="--")
    names = [
        without_file(row["test"]) + f": {row['finding']}" * (row["finding"] != "unchanged") for row in rows
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of the candidate over the base, with 95% interval")
    axes.grid(alpha=0.3)
    description = "Time ratio of each test in the A/B run, with its 95% interval"
    return Picture(name="ab", experiment="", description=description, figure=figure)


def kept_runs(history: History) -> Picture | None:
    counts = Counter(test for _, seconds in history for test in seconds)
    tests = [test for test, runs in counts.items() if runs > 1][: 2 * MOST_ROWS]
    if not tests:
        return None
    usual = {test: median(seconds[test] for _, seconds in history if test in seconds) for test in tests}
    nothing = float("nan")
    ratios = [[seconds.get(test, nothing) / usual[test] for _, seconds in history] for test in tests]
    figure, axes = new_figure(len(tests) // 2)
    image = axes.imshow(ratios, aspect="auto", cmap="cividis", vmin=0.8, vmax=1.25, interpolation="none")
    axes.set_yticks(range(len(tests)), [without_file(test) for test in tests], fontsize=5)
    axes.set_xticks(range(len(history)), [name for name, _ in history], rotation=90, fontsize=6)
    figure.colorbar(image, label="time over the median of all kept runs")
    description = "Time of each test in each kept run, relative to the median of all kept runs"
    return Picture(name="history", experiment="", description=description, figure=figure)

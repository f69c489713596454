"""Pictures with lines: speedups, the laws of scaling, and all_reduce by buffer size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.analysis.scaling import PREDICTED_DEVICES
from ddpperf.analysis.statistics import mean_interval
from ddpperf.report.plots.picture import label, legend, line_frame, line_look, new_figure
from ddpperf.report.questions.figures import devices_of, measured_speedups, predicted_by
from ddpperf.report.stored_cases import Case, of_functions, usual_strategy
from ddpperf.specs import AllReduceSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 6  # of a panel with speedups
MOST_COLUMNS = 3  # of panels
Points = list[tuple[float, float, Case]]  # x, y, and the case that was measured


def _series(cases: Sequence[Case], y: str, without: Sequence[str], *, usual: str = "") -> dict[str, Points]:
    """Return the points of each line by its label: a metric by world size, or by a collective's bytes.

    without: the properties to leave out of the labels. usual: a strategy that labels leave out, too.
    """
    series: dict[str, Points] = {}
    for case in cases:
        spec = case.measured.spec
        at = spec.nbytes if isinstance(spec, AllReduceSpec) else spec.world_size
        if (value := case.value(y)) is not None:
            hidden = ["strategy"] if case.properties.get("strategy") == usual else []
            name = label(case, without=[*without, *hidden])
            series.setdefault(name, []).append((float(at), value, case))
    return {name: sorted(points, key=lambda point: point[:2]) for name, points in series.items()}


def scaling(cases: Sequence[Case]) -> Figure | None:
    """Draw speedups, in panels for weak and for strong scaling, each with at most MOST_LINES lines."""
    header, usual = cases[0].header, usual_strategy(cases)
    x = devices_of(cases[0])
    panels: list[tuple[str, list[tuple[str, Points]]]] = []
    for kind in dict.fromkeys(case.experiment.kind for case in cases):
        of_kind = [case for case in cases if case.experiment.kind == kind]
        series = _series(of_kind, "speedup", [x, "kind"], usual=usual)
        lines = sorted(series.items(), key=lambda line: -max(speedup for _, speedup, _ in line[1]))
        count = -(-len(lines) // MOST_LINES)  # of panels with about the same number of lines
        ends = [len(lines) * part // max(1, count) for part in range(count + 1)]
        panels += [(f"{kind} scaling".strip(), lines[first:last]) for first, last in pairwise(ends)]
    if not panels:
        return None
    floors = {
        check["test"]: check["bound"]
        for check in header.get("thresholds", {}).get("checks", ())
        if check["metric"] == "efficiency"
    }
    rows = -(-len(panels) // MOST_COLUMNS)
    figure = new_figure(3.4 * rows)
    grid = list(figure.subplots(rows, -(-len(panels) // rows), squeeze=False).flat)
    drawn = 0
    for axes, (title, series_of_panel) in zip(grid, panels, strict=False):
        _speedups(axes, dict(series_of_panel), floors, first=drawn)
        drawn += len(series_of_panel)
        axes.set(title=title, ylabel="speedup", xlabel=f"{x} (bars: thresholds)" if floors else x)
    for axes in grid[len(panels) :]:
        axes.remove()
    others = f"{usual} unless named" if usual else None
    figure.legend(loc="outside right upper", title=others, title_fontsize=7)
    return figure


def _speedups(axes: Axes, series: Mapping[str, Points], floors: Mapping[str, float], *, first: int) -> None:
    """Draw a line for each series, the ideal line, and the thresholds of efficiency as speedups.

    first: the number of the first line in the whole picture, in which no colour means two things.
    """
    ticks = sorted({1.0, *(at for points in series.values() for at, _, _ in points)})
    ideal = None if first else "ideal"  # the legend of the whole picture names it once
    axes.plot([1, ticks[-1]], [1, ticks[-1]], color="gray", linestyle="--", label=ideal)
    for number, (name, points) in enumerate(series.items(), start=first):
        at, speedups, measured = zip((1.0, 1.0, None), *points, strict=True)
        errors = [0.0 if case is None else _half_width(case) for case in measured]
        axes.errorbar(at, speedups, yerr=errors, **line_look(number), capsize=3, label=name)
        bounds = [(N, floors[case.test] * N) for N, _, case in points if case.test in floors]
        if bounds:
            counts, values = zip(*bounds, strict=True)
            axes.scatter(counts, values, marker="_", s=150, color=line_look(number)["color"])
    axes.set_xticks(ticks)


def _half_width(case: Case) -> float:
    """Return half of the speedup's 95% interval over process sets; 0 if there is a single process set."""
    values = list(case.metrics["speedup"]["by_set"].values())
    if len(values) < 2:
        return 0.0
    low, high = mean_interval(values)
    return (high - low) / 2


def law(cases: Sequence[Case]) -> Figure | None:
    """Draw measured speedups, and the fitted law with its 95% interval up to 32 devices."""
    drawn = [case for case in cases if measured_speedups(case)]
    if not drawn:
        return None
    figure, axes = line_frame(lines=2 * len(drawn))
    most = max([PREDICTED_DEVICES[-1], *(max(measured_speedups(case)) for case in drawn)])
    axes.plot([1, most], [1, most], color="gray", linestyle="--", label="ideal")
    for number, case in enumerate(drawn):
        look, name = line_look(number), label(case, without=("GPUs", "ranks"))
        points = measured_speedups(case)
        axes.plot(list(points), list(points.values()), **look | {"linestyle": ""}, label=f"{name}, measured")
        _draw_prediction(axes, case, most, label=f"{name}, fitted", **look | {"marker": ""})
    ticks = [1, *PREDICTED_DEVICES]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="devices (band: 95% interval)", ylabel="speedup")
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_yticks(ticks, map(str, ticks))
    least = min(min(measured_speedups(case).values()) for case in drawn)
    axes.set_ylim(min(0.8, least / 1.2), 1.2 * most)
    legend(figure, axes)
    return figure


def _draw_prediction(axes: Axes, case: Case, most: float, **look: Any) -> None:
    """Draw the speedups that a fitted law predicts for 1 to `most` devices, if it predicts any."""
    curve = [most ** (step / 50) for step in range(51)]
    predicted = [found for N in curve if (found := predicted_by(case, N)) is not None]
    if not predicted:
        return
    axes.plot(curve, [found.value for found in predicted], **look)
    if case.interval("serial_fraction"):
        low, high = [found.low for found in predicted], [found.high for found in predicted]
        axes.fill_between(curve, low, high, color=look["color"], alpha=0.15)


def all_reduce(cases: Sequence[Case]) -> Figure | None:
    measured = of_functions(cases, "test_all_reduce")
    calls = _series(measured, "busbw_bytes_per_second", ("buffer", "collective"))
    if not calls:
        return None
    figure, axes = line_frame(lines=len(calls))
    for number, (name, points) in enumerate(calls.items()):
        sizes, bandwidths, _ = zip(*points, strict=True)
        axes.plot(sizes, [found / 1e9 for found in bandwidths], label=name or "all", **line_look(number))
    sizes = tuple(sorted({nbytes for points in calls.values() for nbytes, _, _ in points}))
    for case in of_functions(cases, "test_backend_model"):
        latency, best = case.value("latency_seconds"), case.value("asymptotic_busbw_bytes_per_second")
        if latency and best and latency > 0:
            N = case.measured.spec.world_size
            scale = all_reduce_busbw(1, 1, N)
            modelled = [size * scale / (latency + size * scale / best) / 1e9 for size in sizes]
            axes.plot(sizes, modelled, color="gray", linestyle=":", label=f"model, {N} ranks")
    for link in {round(link, -6) for case in cases if (link := case.link_bytes_per_second)}:
        axes.axhline(link / 1e9, color="black", linestyle="--", label="link")
    axes.set(xscale="log", yscale="log", xlabel="buffer (bytes)", ylabel="bus bandwidth (GB/s)")
    legend(figure, axes)
    return figure

"""Pictures of speedups, of the laws of scaling, and of batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.scaling import PREDICTED_DEVICES, over_sets
from ddpperf.report.cases import Case
from ddpperf.report.plots.picture import label, legend, line_look, new_figure
from ddpperf.report.questions.laws import measured_speedups, predicted_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _series(
    cases: Sequence[Case], header: Mapping[str, Any], x: str, metric: str
) -> dict[str, list[tuple[float, float, Case]]]:
    """Return points (x, metric, case) for each label of cases, where x is a property such as batch."""
    series: dict[str, list[tuple[float, float, Case]]] = {}
    for case in cases:
        at = case.properties.get(x, "").replace(",", "")
        value = case.value(metric) if metric else case.seconds
        if at.isdigit() and value is not None:
            name = label(case, header, without=(x,))
            series.setdefault(name, []).append((float(at), value, case))
    return {name: sorted(points, key=lambda point: point[:2]) for name, points in series.items()}


def scaling(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    x = "GPUs" if header["options"].get("device") == "cuda" else "ranks"
    series = _series(cases, header, x, "speedup")
    if not series:
        return None
    figure, axes = new_figure(lines=len(series))
    most = max(point[0] for points in series.values() for point in points)
    axes.plot([1, most], [1, most], color="gray", linestyle="--", label="ideal")
    floors = {
        check["test"]: check["bound"]
        for check in header.get("thresholds", {}).get("checks", ())
        if check["metric"] == "efficiency"
    }
    for number, (name, points) in enumerate(series.items()):
        axes.errorbar(
            [1.0, *(point[0] for point in points)],
            [1.0, *(point[1] for point in points)],
            yerr=[0.0, *(_half_width(point[2], "speedup") for point in points)],
            **line_look(number),
            capsize=3,
            label=name,
        )
        bounds = [(N, floors[case.test] * N) for N, _, case in points if case.test in floors]
        if bounds:
            axes.scatter(*zip(*bounds, strict=True), marker="_", s=150, color="black")
    axes.set_xlabel(f"{x} (black bars: thresholds)" if floors else x)
    axes.set_ylabel("speedup")
    axes.set_xticks(sorted({1.0, *(point[0] for points in series.values() for point in points)}))
    legend(figure, axes)
    return figure


def law(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    """Draw measured speedups, and the fitted law with its 95% interval up to 32 devices."""
    drawn = [case for case in cases if measured_speedups(case)]
    if not drawn:
        return None
    figure, axes = new_figure(lines=2 * len(drawn))
    most = max([PREDICTED_DEVICES[-1], *(max(measured_speedups(case)) for case in drawn)])
    axes.plot([1, most], [1, most], color="gray", linestyle="--", label="ideal")
    curve = [most ** (step / 50) for step in range(51)]
    for number, case in enumerate(drawn):
        look, name = line_look(number), label(case, header, without=("GPUs", "ranks"))
        points = measured_speedups(case)
        axes.plot(points.keys(), points.values(), **look | {"linestyle": ""}, label=f"{name}, measured")
        predicted = [predicted_by(case, N) for N in curve]
        values = [found.value for found in predicted if found is not None]
        if not values:
            continue
        axes.plot(curve, values, color=look["color"], linestyle=look["linestyle"], label=f"{name}, fitted")
        low, high = zip(*((found.low, found.high) for found in predicted if found is not None), strict=True)
        if all(map(math.isfinite, (*low, *high))):
            axes.fill_between(curve, low, high, color=look["color"], alpha=0.15)
    ticks = [1, *PREDICTED_DEVICES]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_yticks(ticks, map(str, ticks))
    least = min(min(measured_speedups(case).values()) for case in drawn)
    axes.set(
        xlabel="devices (band: 95% interval)", ylabel="speedup", ylim=(min(0.8, least / 1.2), 1.2 * most)
    )
    legend(figure, axes)
    return figure


def _half_width(case: Case, metric: str) -> float:
    """Return half of the 95% interval over process sets; 0 if there is a single process set."""
    values = list(case.metrics[metric]["by_set"].values())
    if len(values) < 2:
        return 0.0
    interval = over_sets(values)
    return (interval.high - interval.low) / 2


def batch_sizes(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    epochs, speeds = (_series(cases, header, "batch", metric) for metric in ("", "images_per_second"))
    if sum(map(len, speeds.values())) < 2:
        return None
    figure, (left, right) = new_figure(columns=2, lines=len(epochs))
    for axes, series, what in ((left, epochs, "epoch (s)"), (right, speeds, "images/s")):
        for number, (name, points) in enumerate(series.items()):
            at, values, _ = zip(*points, strict=True)
            axes.plot(at, values, label=name or "all", **line_look(number))
        axes.set(xscale="log", xlabel="batch size", ylabel=what, ylim=(0, None))
    legend(figure, left, right)
    return figure

"""Pictures over time: trainings by epoch, and the utilization of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import mean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ddpperf.report.plots.picture import COLOURS, Picture, label, line_look, new_figure
from ddpperf.report.stored_cases import Case, curve_points, without_file
from ddpperf.specs import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_IN_A_ROW, CURVES_HEIGHT = 4, 1.5  # panels of curves by epoch; inches
PANEL_HEIGHT = 1.3  # inches, of a panel of utilization
# The panels of utilization: for each unit, the quantities by their names in the legend, and their scale.
PANELS: tuple[tuple[str, dict[str, str], float], ...] = (
    ("utilization (%)", {"GPU": "gpu_utilization", "CPU cores, mean": "cpu_utilization"}, 100.0),
    ("memory (GB)", {"GPU": "gpu_memory_bytes", "rank": "rank_memory_bytes"}, 1e-9),
    ("power (W)", {"GPU": "power_watts"}, 1.0),
    ("temperature (C)", {"GPU": "temperature_celsius"}, 1.0),
)


def curves(cases: Sequence[Case], of: str) -> Figure | None:
    """Draw the loss or the accuracy of trainings by epoch, in a panel for each training.

    of: "loss" or "accuracy". A panel has lines for the training images and for the test images: the
    mean over seeds, with a band from the least to the largest value.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    runs = [(spec, case) for case in cases if isinstance(spec := case.measured.spec, RunSpec)]
    runs.sort(key=lambda run: (run[0].epochs, run[0].global_batch_size))
    if not runs:
        return None
    columns = min(len(runs), PANELS_IN_A_ROW)
    rows = -(-len(runs) // columns)
    figure = new_figure(1.0 + CURVES_HEIGHT * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for axes, (spec, case) in zip(panels, runs, strict=False):
        look = {"marker": "." if spec.epochs <= 10 else ""}
        _curve(axes, case, f"train_{of}", "training images", color=COLOURS[0], linestyle="--", **look)
        _curve(axes, case, f"test_{of}", "test images", color=COLOURS[1], linestyle="-", **look)
        batch = "" if case.recipe else f"batch {spec.global_batch_size:,}"
        name = ", ".join(filter(None, (batch, label(case, without=("model", "input", "batch")))))
        axes.set_title("\n".join(wrap(name, 36)), fontsize=6)
        if of == "loss":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.tick_params(labelsize=6)
    figure.supxlabel("epoch", fontsize=8)
    figure.supylabel(f"{of} (band: range over seeds)", fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def _curve(axes: Axes, case: Case, name: str, what: str, **look: Any) -> None:
    """Draw a curve of a training by epoch: the mean over seeds, with a band."""
    by_epoch: dict[int, list[float]] = {}
    for point in curve_points(case):
        if math.isfinite(value := point.get(name, math.nan)):
            by_epoch.setdefault(point["epoch"], []).append(value)
    epochs = sorted(by_epoch)
    axes.plot(epochs, [mean(by_epoch[epoch]) for epoch in epochs], label=what, **look)
    low, high = ([end(by_epoch[epoch]) for epoch in epochs] for end in (min, max))
    axes.fill_between(epochs, low, high, color=look["color"], alpha=0.2, linewidth=0)


def utilization(case: Case) -> Picture | None:
    usage = case.measured.samples[0].usage
    if usage is None or len(usage.seconds) < 2:
        return None
    panels = [panel for panel in PANELS if panel[1].values() & usage.series.keys()]
    figure = new_figure(0.8 + PANEL_HEIGHT * len(panels))
    places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (unit, quantities, scale) in zip(places, panels, strict=True):
        lines = [
            (f"{name} {number}" if len(rows) > 1 else name, row)
            for name, quantity in quantities.items()
            for rows in [usage.series.get(quantity, ())]
            for number, row in enumerate(rows)
        ]
        for number, (name, row) in enumerate(lines):
            values = [math.nan if value is None else value * scale for value in row]
            look = {**line_look(number), "marker": "." if len(values) < 50 else ""}
            axes.plot(usage.seconds, values, label=name, linewidth=1, **look)
        axes.set(ylabel=unit, ylim=(0, None))
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    places[-1].set_xlabel("seconds since the start of the training")
    figure.suptitle(label(case) or case.experiment.title, fontsize=8)
    test = without_file(case.test)
    return Picture(
        name=f"utilization-{re.sub(r'[^A-Za-z0-9.]+', '-', test).strip('-')}",
        experiment=case.experiment.title,
        description=f"Utilization over time while {test} trained",
        figure=figure,
    )

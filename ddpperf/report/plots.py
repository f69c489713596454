"""Pictures of a stored run's experiments, made with matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.analysis.scaling import PREDICTED_DEVICES, over_sets
from ddpperf.report.cases import Case, ab_of, cases_of, of_functions
from ddpperf.report.curves import curve_points
from ddpperf.report.experiments import WHOLE_TRAININGS
from ddpperf.report.facets import facets, in_words, usual_properties
from ddpperf.report.questions.laws import measured_speedups, predicted_by
from ddpperf.report.text import short
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import write_atomically
from ddpperf.specs import PARTS, AllReduceSpec, RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
WIDTH, ROW_HEIGHT, LEGEND_HEIGHT, LEAST_HEIGHT, PANEL_HEIGHT = 7.5, 0.32, 0.16, 2.6, 1.3  # inches
PANELS_IN_A_ROW, CURVES_HEIGHT = 4, 1.5  # panels of curves by epoch; inches
NOT_IN_LABELS = ("epochs", "seed", "seeds", "memory format")
MOST_ROWS = 40  # of a picture with a bar for each case
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "ddpperf", "font.size": 9}
FORMS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 150},
    "svg": {"metadata": {"Date": None}},  # so that equal runs give equal files
}
History = Sequence[tuple[str, Mapping[str, float]]]  # name and step seconds by test, oldest first


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of an experiment.

    name: the name of its files. experiment: the title of the experiment's table, or "" for the whole
    run. description: what the picture shows, for readers who cannot see it.
    """

    name: str
    experiment: str
    description: str
    figure: Figure

    def rendered(self, form: str) -> bytes:
        """Return the picture as a file, where `form` is png or svg."""
        from matplotlib import rc_context

        file = io.BytesIO()
        with rc_context(STYLE):
            self.figure.savefig(file, format=form, **FORMS[form])
        return file.getvalue()


def write_plots(folder: Path, document: Mapping[str, Any], history: History = ()) -> Path:
    """Write each picture of a stored run as PNG and SVG to a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures_of(document, history):
        for form in FORMS:
            write_atomically(folder / f"{picture.name}.{form}", picture.rendered(form))
    return folder


def pictures_of(document: Mapping[str, Any], history: History = ()) -> list[Picture]:
    """Return the pictures of a stored run.

    history: the name and the step seconds by test of each kept run, oldest first.
    """
    from matplotlib import rc_context

    header, cases = document["ddpperf"], cases_of(document)
    drawn: list[Picture | None] = []
    with rc_context(STYLE):
        for name, tests, draw, description in DRAWN:
            chosen = of_functions(cases, *tests)
            figure = draw(chosen, header) if chosen else None
            if figure is not None:
                title = chosen[0].experiment.title
                drawn.append(Picture(name=name, experiment=title, description=description, figure=figure))
        drawn += [_utilization(case, header) for case in of_functions(cases, *WHOLE_TRAININGS)]
        drawn += [_forest(header), _history(history)]
    return [picture for picture in drawn if picture is not None]


def label(case: Case, header: Mapping[str, Any], *, without: Sequence[str] = ()) -> str:
    """Return the properties of a case in one line, without properties that the options give."""
    usual = usual_properties(header) | {"algorithm": ""}  # a legend compares algorithms
    found = dict(case.properties)
    if case.experiment.kind == "strong":  # whose global batch is constant
        device = header["options"].get("device", "cpu")
        own = facets(case.measured.spec, device=device, global_batch=True)
        found |= {"batch": "", "global batch": own["global batch"]}
    return ", ".join(
        in_words(name, value)
        for name, value in found.items()
        if value and usual.get(name) != value and name not in (*without, *NOT_IN_LABELS)
    )


def _series(
    cases: Sequence[Case], header: Mapping[str, Any], x: str, metric: str, without: Sequence[str] = ()
) -> dict[str, list[tuple[float, float, Case]]]:
    """Return points (x, metric, case) for each label of cases, where x is a property such as batch."""
    series: dict[str, list[tuple[float, float, Case]]] = {}
    for case in cases:
        at = case.properties.get(x, "").replace(",", "")
        value = case.value(metric) if metric else case.seconds
        if at.isdigit() and value is not None:
            name = label(case, header, without=(x, *without))
            series.setdefault(name, []).append((float(at), value, case))
    return {name: sorted(points, key=lambda point: point[:2]) for name, points in series.items()}


def _figure(rows: int = 0, columns: int = 1, lines: int = 0) -> tuple[Figure, Any]:
    """Return a figure for a number of bars, or for a number of lines with their legend."""
    from matplotlib.figure import Figure

    height = max(LEAST_HEIGHT, 1.2 + ROW_HEIGHT * rows) if rows else 3.4 + LEGEND_HEIGHT * lines
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _look(number: int) -> dict[str, Any]:
    """Return colour, marker and line style of a line; the first 32 lines differ."""
    which = number % len(COLOURS)
    return {
        "color": COLOURS[which],
        "marker": MARKERS[which],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def _legend(figure: Figure, *axes: Axes) -> None:
    """Put the legend of the first axes below the figure, where it hides nothing."""
    for part in axes:
        part.grid(alpha=0.3)
        part.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside lower left", ncols=1)


Part = Callable[[Case], "float | None"]


def _metric(name: str, scale: float = 1.0) -> Part:
    """Return a function that returns a metric of a case in the unit of a picture."""

    def scaled(case: Case) -> float | None:
        found = case.value(name)
        return None if found is None else found * scale

    return scaled


def _stacked(
    cases: Sequence[Case], header: Mapping[str, Any], parts: Mapping[str, Part], unit: str
) -> Figure | None:
    """Return horizontal bars, one for each case, each a stack of parts."""
    rows = [case for case in cases if any(part(case) is not None for part in parts.values())][:MOST_ROWS]
    if not rows or len(rows) == len(parts) == 1:  # the table says a single figure better
        return None
    figure, axes = _figure(len(rows))
    left = [0.0] * len(rows)
    names = [label(case, header) for case in rows]
    places = range(len(rows))
    for number, (name, part) in enumerate(parts.items()):
        widths = [max(0.0, part(case) or 0.0) for case in rows]
        look: dict[str, Any] = {"color": COLOURS[number], "hatch": HATCHES[number], "edgecolor": "white"}
        axes.barh(places, widths, 0.6, left=left, label=name, **look)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(unit)
    _legend(figure, axes)
    return figure


# --- one function for each picture; it returns None if there is nothing to show


def _scaling(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    x = "GPUs" if header["options"].get("device") == "cuda" else "ranks"
    series = _series(cases, header, x, "speedup")
    if not series:
        return None
    figure, axes = _figure(lines=len(series))
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
            **_look(number),
            capsize=3,
            label=name,
        )
        bounds = [(N, floors[case.test] * N) for N, _, case in points if case.test in floors]
        if bounds:
            axes.scatter(*zip(*bounds, strict=True), marker="_", s=150, color="black")
    axes.set_xlabel(f"{x} (black bars: thresholds)" if floors else x)
    axes.set_ylabel("speedup")
    axes.set_xticks(sorted({1.0, *(point[0] for points in series.values() for point in points)}))
    _legend(figure, axes)
    return figure


def _law(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    """Draw measured speedups, and the fitted law with its 95% interval up to 32 devices."""
    drawn = [case for case in cases if measured_speedups(case)]
    if not drawn:
        return None
    figure, axes = _figure(lines=2 * len(drawn))
    most = max([PREDICTED_DEVICES[-1], *(max(measured_speedups(case)) for case in drawn)])
    axes.plot([1, most], [1, most], color="gray", linestyle="--", label="ideal")
    curve = [most ** (step / 50) for step in range(51)]
    for number, case in enumerate(drawn):
        look, name = _look(number), label(case, header, without=("GPUs", "ranks"))
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
    _legend(figure, axes)
    return figure


def _half_width(case: Case, metric: str) -> float:
    """Return half of the 95% interval over process sets; 0 if there is a single process set."""
    values = list(case.metrics[metric]["by_set"].values())
    if len(values) < 2:
        return 0.0
    interval = over_sets(values)
    return (interval.high - interval.low) / 2


def _batch(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    epochs, speeds = (_series(cases, header, "batch", metric) for metric in ("", "images_per_second"))
    if sum(map(len, speeds.values())) < 2:
        return None
    figure, (left, right) = _figure(columns=2, lines=len(epochs))
    for axes, series, what in ((left, epochs, "epoch (s)"), (right, speeds, "images/s")):
        for number, (name, points) in enumerate(series.items()):
            at, values, _ = zip(*points, strict=True)
            axes.plot(at, values, label=name or "all", **_look(number))
        axes.set(xscale="log", xlabel="batch size", ylabel=what, ylim=(0, None))
    _legend(figure, left, right)
    return figure


def _comm(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    def overlapped(case: Case) -> float | None:
        whole, exposed = case.value("traced_comm_seconds"), case.value("traced_exposed_comm_seconds")
        return None if whole is None or exposed is None else (whole - exposed) * 1e3

    def computed(case: Case) -> float | None:
        compute, hidden = case.value("compute_seconds"), overlapped(case)
        return None if compute is None or hidden is None else compute * 1e3 - hidden

    parts = {
        "compute alone": computed,
        "compute and communication overlap": overlapped,
        "exposed communication": _metric("traced_exposed_comm_seconds", 1e3),
    }
    return _stacked(cases, header, parts, "ms of a profiled step")


def _bandwidth(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    busbw = _metric("gradient_busbw_bytes_per_second", 1e-9)
    return _stacked(cases, header, {"gradients' bus bandwidth": busbw}, "GB/s")


def _parts(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    found = [part for part in PARTS if any(f"{part}_seconds" in case.metrics for case in cases)]
    parts = {part.replace("_", " "): _metric(f"{part}_seconds", 1e3) for part in found}
    return _stacked(cases, header, parts, "ms of a step")


def _cost(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    device = "GPU" if header["options"].get("device") == "cuda" else "rank"
    minutes = {"all devices together": _metric("device_seconds_per_epoch", 1 / 60)}
    return _stacked(cases, header, minutes, f"{device}-minutes of an epoch")


def _messages(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    kinds = {kind: _metric(f"{kind}_bytes", 1e-6) for kind in MESSAGE_KINDS}
    return _stacked(cases, header, kinds, "MB that a rank sends in a step")


def _all_reduce(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    calls: dict[str, list[tuple[float, float]]] = {}
    for case in of_functions(cases, "test_all_reduce"):
        spec, busbw = case.measured.spec, case.value("busbw_bytes_per_second")
        if isinstance(spec, AllReduceSpec) and busbw:
            name = label(case, header, without=("buffer", "collective"))
            calls.setdefault(name, []).append((spec.nbytes, busbw / 1e9))
    if not calls:
        return None
    figure, axes = _figure(lines=len(calls))
    for number, (name, points) in enumerate(calls.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            **_look(number),
            label=name,
        )
    sizes = sorted({nbytes for points in calls.values() for nbytes, _ in points})
    for case in of_functions(cases, "test_backend_model"):
        latency, best = case.value("latency_seconds"), case.value("asymptotic_busbw_bytes_per_second")
        if latency and best and latency > 0:
            N = case.measured.spec.world_size
            scale = all_reduce_busbw(1, 1, N)
            modelled = [size * scale / (latency + size * scale / best) / 1e9 for size in sizes]
            axes.plot(sizes, modelled, color="gray", linestyle=":", label=f"model, {N} ranks")
    links = {round(link, -6) for case in cases if (link := case.link_bytes_per_second)}
    for link in links:
        axes.axhline(link / 1e9, color="black", linestyle="--", label="link")
    axes.set(xscale="log", yscale="log", xlabel="buffer (bytes)", ylabel="bus bandwidth (GB/s)")
    _legend(figure, axes)
    return figure


def _loss_curves(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    from matplotlib.ticker import LogLocator

    def scale(axes: Axes) -> None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")

    return _curves(cases, header, "loss", scale)


def _accuracy_curves(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    from matplotlib.ticker import PercentFormatter

    def scale(axes: Axes) -> None:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return _curves(cases, header, "accuracy", scale)


def _curves(
    cases: Sequence[Case], header: Mapping[str, Any], figure_name: str, scale: Callable[[Axes], None]
) -> Figure | None:
    """Draw the loss or the accuracy of trainings by epoch, in a panel for each training.

    A panel has lines for the training images and for the test images: the mean over seeds, with a band
    from the least to the largest value. Gray lines are the test images of the other trainings with the
    same batch size and number of epochs. scale: sets the vertical axis of a panel.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = [(spec, case) for case in cases if isinstance(spec := case.measured.spec, RunSpec)]
    runs.sort(key=lambda run: (run[0].epochs, run[0].global_batch_size))
    if not runs:
        return None
    columns = min(len(runs), PANELS_IN_A_ROW)
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(WIDTH, 1.0 + CURVES_HEIGHT * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    gray: dict[str, Any] = {"color": "lightgray", "linewidth": 0.8, "zorder": 1}
    for axes, (spec, case) in zip(panels, runs, strict=False):
        for other_spec, other in runs:
            alike = (other_spec.global_batch_size, other_spec.epochs) == (spec.global_batch_size, spec.epochs)
            if alike and other is not case:
                _curve(axes, other, f"test_{figure_name}", **gray)
        for number, (images, line) in enumerate((("train", "--"), ("test", "-"))):
            look: dict[str, Any] = {"color": COLOURS[number], "linestyle": line}
            _curve(axes, case, f"{images}_{figure_name}", **look, marker="." if spec.epochs <= 10 else "")
        name = label(case, header, without=("model", "input", "batch"))
        title = ", ".join(filter(None, (f"batch {spec.global_batch_size:,}", name)))
        axes.set_title("\n".join(wrap(title, 36)), fontsize=6)
        scale(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
    figure.supxlabel("epoch", fontsize=8)
    figure.supylabel(figure_name, fontsize=8)
    lines = panels[0].plot([], [], color=COLOURS[0], linestyle="--")
    lines += panels[0].plot([], [], color=COLOURS[1]) + panels[0].plot([], [], **gray)
    names = ["training images", "test images (band: range over seeds)", "test images, other trainings"]
    names[-1] += " with this batch size"
    figure.legend(lines, names, fontsize=7, frameon=False, loc="outside upper left", ncols=3)
    return figure


def _curve(axes: Axes, case: Case, name: str, **look: Any) -> None:
    """Draw a figure of a training by epoch: the mean over seeds, and a band if it is no gray line."""
    by_epoch: dict[int, list[float]] = {}
    for point in curve_points(case):
        if math.isfinite(value := point.figures.get(name, math.nan)):
            by_epoch.setdefault(point.epoch, []).append(value)
    epochs = sorted(by_epoch)
    axes.plot(epochs, [mean(by_epoch[epoch]) for epoch in epochs], **look)
    if look["color"] != "lightgray":
        low, high = ([end(by_epoch[epoch]) for epoch in epochs] for end in (min, max))
        axes.fill_between(epochs, low, high, color=look["color"], alpha=0.2, linewidth=0)


def _accuracy(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    found = [case for case in cases if case.value("test_accuracy") is not None][:MOST_ROWS]
    if len(found) < 2:
        return None
    figure, axes = _figure(len(found))
    for place, case in enumerate(found):
        middle = case.metrics["test_accuracy"]["value"]
        low, high = case.interval("test_accuracy") or (middle, middle)
        ends = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar(middle, place, xerr=ends, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(range(len(found)), [label(case, header, without=("model", "input")) for case in found])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, with 95% interval over seeds")
    axes.grid(alpha=0.3)
    return figure


Draw = Callable[[Sequence[Case], Mapping[str, Any]], "Figure | None"]
CURVES = (*WHOLE_TRAININGS, "test_precision_accuracy")
# The name of a picture, its test functions, the function that draws it, and its description.
DRAWN: tuple[tuple[str, tuple[str, ...], Draw, str], ...] = (
    (
        "scaling",
        ("test_weak_scaling", "test_strong_scaling"),
        _scaling,
        "Speedup of weak and strong scaling by number of devices",
    ),
    ("epoch_scaling", ("test_epoch_scaling",), _scaling, "Speedup of an epoch by number of devices"),
    ("amdahl", ("test_amdahl",), _law, "Speedups by Amdahl's law up to 32 devices, and measured ones"),
    (
        "gustafson",
        ("test_gustafson",),
        _law,
        "Speedups by Gustafson's law up to 32 devices, and measured ones",
    ),
    ("batch_size", ("test_batch_size",), _batch, "Epoch time and images per second by batch size"),
    (
        "communication",
        ("test_comm_split", "test_data_parallel_split"),
        _comm,
        "Compute, overlapped and exposed communication",
    ),
    ("bandwidth", ("test_comm_split",), _bandwidth, "Bus bandwidth of gradients while training"),
    ("step_parts", ("test_step_breakdown",), _parts, "Time of the parts of a training step"),
    ("epoch_parts", ("test_epoch_breakdown",), _parts, "Time of the parts of a step with a DataLoader"),
    ("cost", ("test_step_breakdown",), _cost, "Device time of an epoch on all devices together"),
    (
        "all_reduce",
        ("test_all_reduce", "test_backend_model"),
        _all_reduce,
        "Bus bandwidth of all_reduce by buffer size and algorithm, with the fitted model and the link",
    ),
    ("messages", ("test_messages",), _messages, "Bytes that a rank sends in a step, by kind"),
    (
        "loss_by_epoch",
        CURVES,
        _loss_curves,
        "Loss on the training and the test images by epoch, a panel for each training",
    ),
    (
        "accuracy_by_epoch",
        CURVES,
        _accuracy_curves,
        "Accuracy on the training and the test images by epoch, a panel for each training",
    ),
    ("accuracy", WHOLE_TRAININGS, _accuracy, "Test accuracy by batch size and recipe"),
)


# --- one picture for each training


# The panels: for each unit, the quantities by their names in the legend, and their scale.
PANELS: tuple[tuple[str, dict[str, str], float], ...] = (
    ("utilization (%)", {"GPU": "gpu_utilization", "CPU cores, mean": "cpu_utilization"}, 100.0),
    ("memory (GB)", {"GPU": "gpu_memory_bytes", "rank": "rank_memory_bytes"}, 1e-9),
    ("power (W)", {"GPU": "power_watts"}, 1.0),
    ("temperature (C)", {"GPU": "temperature_celsius"}, 1.0),
)


def _utilization(case: Case, header: Mapping[str, Any]) -> Picture | None:
    from matplotlib.figure import Figure

    usage = case.measured.samples[0].usage
    if usage is None or len(usage.seconds) < 2:
        return None
    panels = [panel for panel in PANELS if panel[1].values() & usage.series.keys()]
    figure = Figure(figsize=(WIDTH, 0.8 + PANEL_HEIGHT * len(panels)), layout="constrained")
    places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (unit, quantities, scale) in zip(places, panels, strict=True):
        lines = [
            (f"{name} {number}" if len(rows) > 1 else name, row)
            for name, quantity in quantities.items()
            for rows in [usage.series.get(quantity, ())]
            for number, row in enumerate(rows)
        ]
        for number, (name, row) in enumerate(lines):
            values = [float("nan") if value is None else value * scale for value in row]
            look = {**_look(number), "marker": "." if len(values) < 50 else ""}
            axes.plot(usage.seconds, values, label=name, linewidth=1, **look)
        for ended in _epoch_ends(case.measured):
            axes.axvline(ended, color="gray", linewidth=0.5, linestyle=":")
        axes.set_ylabel(unit)
        known = [value * scale for _, row in lines for value in row if value is not None]
        axes.set_ylim(0, 1.08 * max(known, default=1.0) or 1.0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    places[-1].set_xlabel("seconds since the start of the training (dotted lines: ends of epochs)")
    figure.suptitle(label(case, header) or case.experiment.title, fontsize=8)
    return Picture(
        name=f"utilization-{re.sub(r'[^A-Za-z0-9.]+', '-', short(case.test)).strip('-')}",
        experiment=case.experiment.title,
        description=f"Utilization over time while {short(case.test)} trained",
        figure=figure,
    )


def _epoch_ends(measured: Measured) -> list[float]:
    """Return when each epoch of a training ended, with its evaluation; nothing if it was resumed."""
    spec, counters = measured.spec, measured.samples[0].counters
    if not isinstance(spec, RunSpec) or max(counters.get("resumed_epochs", (0.0,))):
        return []
    names = [f"epoch_seconds_{epoch}" for epoch in range(1, spec.epochs + 1)]
    return list(accumulate(counters[name][0] for name in names if name in counters))


# --- pictures of the whole run


def _forest(header: Mapping[str, Any]) -> Picture | None:
    rows = [row for row in ab_of(header).get("rows", ()) if row["primary"] or row["control"] is not None]
    rows = sorted(rows, key=lambda row: -row["ratio"])[:MOST_ROWS]
    if not rows:
        return None
    figure, axes = _figure(len(rows))
    colours = {"worse": COLOURS[5], "suspect": COLOURS[1], "better": COLOURS[2], "undecided": COLOURS[3]}
    for place, row in enumerate(rows):
        ends = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
        worse = row["finding"] == "worse"
        colour = colours.get(row["finding"], COLOURS[0])
        axes.errorbar(row["ratio"], place, xerr=ends, fmt="X" if worse else "o", color=colour, capsize=3)
    axes.axvline(1.0, color="gray", linestyle="--")
    names = [short(row["test"]) + f": {row['finding']}" * (row["finding"] != "unchanged") for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of the candidate over the base, with 95% interval")
    axes.grid(alpha=0.3)
    description = "Time ratio of each test in the A/B run, with its 95% interval"
    return Picture(name="ab", experiment="", description=description, figure=figure)


def _history(history: History) -> Picture | None:
    counts = Counter(test for _, seconds in history for test in seconds)
    tests = [test for test, runs in counts.items() if runs > 1][: 2 * MOST_ROWS]
    if not tests:
        return None
    usual = {test: median(seconds[test] for _, seconds in history if test in seconds) for test in tests}
    nothing = float("nan")
    ratios = [[seconds.get(test, nothing) / usual[test] for _, seconds in history] for test in tests]
    figure, axes = _figure(len(tests) // 2)
    image = axes.imshow(ratios, aspect="auto", cmap="cividis", vmin=0.8, vmax=1.25, interpolation="none")
    axes.set_yticks(range(len(tests)), [short(test) for test in tests], fontsize=5)
    axes.set_xticks(range(len(history)), [name for name, _ in history], rotation=90, fontsize=6)
    figure.colorbar(image, label="time over the median of all kept runs")
    description = "Time of each test in each kept run, relative to the median of all kept runs"
    return Picture(name="history", experiment="", description=description, figure=figure)

"""Pictures of the parts, the communication and the messages of training steps, and of all_reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.report.cases import Case, of_functions
from ddpperf.report.plots.picture import COLOURS, HATCHES, MOST_ROWS, label, legend, line_look, new_figure
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import PARTS, AllReduceSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    figure, axes = new_figure(len(rows))
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
    legend(figure, axes)
    return figure


def communication(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
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


def bandwidth(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    busbw = _metric("gradient_busbw_bytes_per_second", 1e-9)
    return _stacked(cases, header, {"gradients' bus bandwidth": busbw}, "GB/s")


def step_parts(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    found = [part for part in PARTS if any(f"{part}_seconds" in case.metrics for case in cases)]
    parts = {part.replace("_", " "): _metric(f"{part}_seconds", 1e3) for part in found}
    return _stacked(cases, header, parts, "ms of a step")


def cost(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    device = "GPU" if header["options"].get("device") == "cuda" else "rank"
    minutes = {"all devices together": _metric("device_seconds_per_epoch", 1 / 60)}
    return _stacked(cases, header, minutes, f"{device}-minutes of an epoch")


def messages(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    kinds = {kind: _metric(f"{kind}_bytes", 1e-6) for kind in MESSAGE_KINDS}
    return _stacked(cases, header, kinds, "MB that a rank sends in a step")


def all_reduce(cases: Sequence[Case], header: Mapping[str, Any]) -> Figure | None:
    calls: dict[str, list[tuple[float, float]]] = {}
    for case in of_functions(cases, "test_all_reduce"):
        spec, busbw = case.measured.spec, case.value("busbw_bytes_per_second")
        if isinstance(spec, AllReduceSpec) and busbw:
            name = label(case, header, without=("buffer", "collective"))
            calls.setdefault(name, []).append((spec.nbytes, busbw / 1e9))
    if not calls:
        return None
    figure, axes = new_figure(lines=len(calls))
    for number, (name, points) in enumerate(calls.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            **line_look(number),
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
    legend(figure, axes)
    return figure

"""The figures of a grid: stored metrics, what is computed from them, cases of several rows, and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

from ddpperf.analysis.cost_models import REPORT_FORMULAS
from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    amdahl_speedup,
    gustafson_speedup,
    not_predictable,
    predicted_speedup,
    strong_speedup,
    weak_speedup,
)
from ddpperf.analysis.statistics import Estimate
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS, find
from ddpperf.specs import PARTS, AllReduceSpec, RunSpec, TrainingSpec

Value = float | str  # a string is printed as it is
Texts = dict[str, str]  # by the headings of columns, or by the names of properties
ENDS = ("mean", "peak")  # of a quantity
OF_IMAGES = re.compile(r"\w*(accuracy|loss)\w*")  # means nothing for synthetic images


def training_of(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def is_of_the_library(case: Case) -> bool:
    spec, known = case.measured.spec, "link_utilization" in case.metrics
    if not (known and isinstance(spec, AllReduceSpec)):
        return False
    return spec.algorithm == "backend" and spec.in_place and spec.dtype == "fp32"


def is_synthetic(case: Case) -> bool:
    return isinstance(case.measured.spec, RunSpec) and case.measured.spec.data == "synthetic"


def text_of(case: Case, name: str, *, per_epoch: bool = False) -> str:
    """Return a figure as text, with its 95% interval if it has one, or "" if the case does not have it.

    name: a metric, a quantity with a mean and a peak, or a key of COMPUTED. per_epoch: whether the
    figure is that of a step and is shown for all steps of an epoch.
    """
    scale = training_of(case).steps_per_epoch if per_epoch else 1
    if name in COMPUTED:
        computed, form = COMPUTED[name]
        try:
            value = computed(case)
        except KeyError:  # a metric that the figure needs
            return ""
        return value if isinstance(value, str) else form(scale * value)
    metric = find(name)
    form = units.points if name.startswith("accuracy_") else metric.format
    scale = scale if metric.unit in ("s", "B") else 1
    if OF_IMAGES.fullmatch(name) and is_synthetic(case):
        return ""
    values = [case.value(name)] if name in case.metrics else [case.value(f"{name}_{end}") for end in ENDS]
    texts = [form(scale * value) for value in values if value is not None]
    ends = case.interval(name)
    return " / ".join(texts) + (f" ({' to '.join(form(scale * end) for end in ends)})" if ends else "")


# --- what is computed from metrics


def _stored(case: Case, name: str) -> float:
    """Return the value of a metric; raise KeyError if the case does not have it."""
    return float(case.metrics[name]["value"])


def _cost(case: Case, name: str) -> float:
    """Return device, saved or extra device seconds of the epoch or the training that a case measures."""
    of = "of_training" if isinstance(case.measured.spec, RunSpec) else "per_epoch"
    return _stored(case, f"{name}_seconds_{of}")


def _saved_fraction(case: Case) -> float:
    """Return the fraction of the time on one device that more devices save."""
    saved = _cost(case, "saved")
    return saved / (saved + _cost(case, "device") / case.measured.spec.world_size)


def _price(case: Case, name: str) -> float:
    """Return the price of device seconds; raise KeyError without --gpu-hour-price."""
    if (price := case.header["options"].get("gpu_hour_price")) is None:
        raise KeyError("gpu_hour_price")
    return float(price * _cost(case, name) / 3600)


def _price_of_saved_hour(case: Case) -> Value:
    saved = _cost(case, "saved")
    return _price(case, "extra_device") / (saved / 3600) if saved > 0 else ""


def _training_time(case: Case) -> Value:
    """Return the seconds of a training without its evaluations, as mean over the seeds."""
    spec = case.measured.spec
    return spec.images / _stored(case, "images_per_second") if isinstance(spec, RunSpec) else ""


def _sending(case: Case) -> float:
    """Return the seconds of communication of the rank that waits least; DataParallel has one process."""
    return case.value("comm_without_waiting_seconds") or _stored(case, "traced_comm_seconds")


def _sent_at(case: Case, formula: str) -> float:
    """Return the bandwidth of the gradients by a formula; busbw is that of the first formula."""
    N, busbw = case.measured.spec.world_size, _stored(case, "gradient_busbw_bytes_per_second")
    return busbw * REPORT_FORMULAS[formula](N, 1.0, 1.0) / REPORT_FORMULAS["2 (N-1) S / N"](N, 1.0, 1.0)


def _predicted(case: Case, formula: str) -> str:
    """Return the time of an all_reduce by a formula, and this time over the measured one."""
    spec, link = case.measured.spec, case.link_bytes_per_second
    if not isinstance(spec, AllReduceSpec) or not link:
        return ""
    seconds = REPORT_FORMULAS[formula](spec.world_size, spec.nbytes, link)
    return f"{units.seconds(seconds)} ({units.factor(seconds / case.seconds)})"


def _messages(case: Case, kind: str) -> str:
    """Return the bytes and the number of a kind of messages."""
    if not (nbytes := case.value(f"{kind}_bytes")):
        return ""
    return f"{units.nbytes(nbytes)} in {int(case.value(f'{kind}_messages') or 0)}"


def _accuracy_after(case: Case, epoch: int) -> Value:
    """Return the training accuracy of an epoch, with the first seed."""
    found = case.measured.samples[0].counters[f"train_accuracy_{epoch}"]
    return "" if is_synthetic(case) else max(found)


COMPUTED: Mapping[str, tuple[Callable[[Case], Value], Callable[[float], str]]] = {
    "time": (lambda case: case.seconds, units.seconds),
    "ddp_step": (lambda case: median(case.references["ddp"].median_step_seconds().values()), units.seconds),
    "seeds": (lambda case: str(len(case.seeds)), str),
    "training_time": (_training_time, units.seconds),
    "whole_step": (lambda case: case.step_seconds, units.seconds),
    "other_seconds": (lambda case: case.other_seconds, units.seconds),
    "extra_device_time": (lambda case: 1 / _stored(case, "efficiency") - 1, units.change),
    "saved_fraction": (_saved_fraction, units.percent),
    "device_minutes": (lambda case: _cost(case, "device"), lambda seconds: f"{seconds / 60:.4f}"),
    "saved": (lambda case: _cost(case, "saved"), units.seconds),
    "extra_device": (lambda case: _cost(case, "extra_device"), units.seconds),
    "price": (lambda case: _price(case, "device"), units.money),
    "extra_price": (lambda case: _price(case, "extra_device"), units.money),
    "price_of_saved_hour": (_price_of_saved_hour, units.money),
    "sending": (_sending, units.seconds),
    "fraction_of_step": (lambda case: _sending(case) / case.seconds, units.percent),
    **{f"epoch {epoch}": (partial(_accuracy_after, epoch=epoch), units.percent) for epoch in (1, 2)},
    **{f"sent by {by}": (partial(_sent_at, formula=by), units.bandwidth) for by in REPORT_FORMULAS},
    **{f"time by {by}": (partial(_predicted, formula=by), str) for by in REPORT_FORMULAS},
    **{kind: (partial(_messages, kind=kind), str) for kind in MESSAGE_KINDS},
}

# --- cases of several rows: each row has properties, which are its place, and figures by heading

Rows = Iterator[tuple[Texts, Texts]]


def devices_of(case: Case) -> str:
    return "GPUs" if "GPUs" in case.properties else "ranks"


def numbered(case: Case, name: str) -> dict[int, str]:
    """Return the metrics whose names differ in a number, by this number; name: with # for the number."""
    pattern = name.replace("#", r"(\d+)")
    found = (re.fullmatch(pattern, metric) for metric in case.metrics)
    return {int(match[1]): match[0] for match in found if match}


def batches_tried(case: Case) -> Rows:
    """Yield the figures of each batch size that the search measured, and the smallest one that failed."""
    failed = [int(size) for size in re.findall(r"a batch of (\d+) does not fit", " ".join(case.notes))]
    images = case.header["options"]["epoch_images"]
    for size, step in sorted(numbered(case, "step_seconds_at_#").items()):
        figures = {"step": text_of(case, step)}
        if size <= images:
            figures["epoch"] = units.seconds(images / size * (case.value(step) or 0.0))
        figures["throughput"] = text_of(case, f"images_per_second_at_{size}")
        figures["peak memory"] = text_of(case, f"peak_memory_bytes_at_{size}")
        yield {"batch": f"{size:,}"}, figures
    if failed:
        yield {"batch": f"{min(failed):,}"}, {"step": "does not fit"}


def workers_tried(case: Case) -> Rows:
    """Yield the fraction of an epoch that loading takes with each number of workers."""
    for workers, name in numbered(case, "loading_fraction_with_#_workers").items():
        yield {"workers": str(workers), "input": ""}, {"loading": text_of(case, name)}


def changed_trainings(case: Case) -> Rows:
    """Yield the effect of more devices and of two mistakes on the test accuracy."""
    changes = {
        "N devices instead of one": "accuracy_over_one_device",
        "without scaling the learning rate": "accuracy_unscaled_rate",
        "without set_epoch": "accuracy_without_set_epoch",
    }
    for change, name in changes.items():
        yield {"change": change, "training": ""}, {"points of test accuracy": text_of(case, name)}


def beside_reports(case: Case) -> Rows:
    """Yield each figure that a course report states, beside that of the same training here."""
    names = [re.fullmatch(r"reported_(\w+)_([A-E])", name) for name in case.metrics]
    stated: dict[str, Texts] = {}
    for found in filter(None, names):
        value, digits = case.value(found[0]) or 0.0, ".3f" if "loss" in found[1] else ".2%"
        stated.setdefault(found[1], {})[f"report {found[2]}"] = f"{value:{digits}}"  # as the report states it
    for name, reports in stated.items():
        place = {
            "figure": find(name).heading,
            "training": case.recipe,
            "global batch": "",
            devices_of(case): "",
        }
        yield place, {"ddpperf": text_of(case, name), **reports}


def part_speedups_of(case: Case) -> Rows:
    """Yield the seconds of each part of a step alone and on N devices, with its speedup, and of all parts."""
    law = weak_speedup if case.experiment.kind == "weak" else strong_speedup
    devices = devices_of(case)
    place = {devices: "", "together": f"{case.properties[devices]} {devices}"}
    names = {"alone": "{}_seconds_on_one_device", "together": "{}_seconds", "speedup": "{}_speedup"}
    for part in PARTS:
        figures = {heading: text_of(case, name.format(part)) for heading, name in names.items()}
        yield place | {"part": part.replace("_", " ")}, figures
    alone, together = (
        math.fsum(case.value(names[name].format(part)) or 0.0 for part in PARTS)
        for name in ("alone", "together")
    )
    if not alone or not together:  # the test failed before its parts were known
        return
    speedup = units.factor(law(alone, together, training_of(case).world_size))
    texts = {"alone": units.seconds(alone), "together": units.seconds(together), "speedup": speedup}
    yield place | {"part": "all parts"}, texts


def measured_speedups(case: Case) -> dict[int, float]:
    """Return the measured speedups of a law's test by the number of devices."""
    return {N: case.metrics[name]["value"] for N, name in sorted(numbered(case, "speedup_of_#").items())}


def predicted_by(case: Case, N: float) -> Estimate | None:
    """Return the speedup that a law predicts for N devices; None if the law predicts nothing."""
    fraction = case.value("serial_fraction") or 0.0
    if not_predictable(fraction):
        return None
    low, high = case.interval("serial_fraction") or (-math.inf, math.inf)
    law = amdahl_speedup if case.experiment.global_batch else gustafson_speedup
    return predicted_speedup(law, Estimate(value=fraction, low=low, high=high), N)


def law_rows(case: Case) -> Rows:
    """Yield the measured and the predicted speedup, and the time of an epoch, for each number of devices.

    On one device, an epoch takes as long as the measured one on N devices times its speedup.
    """
    if "serial_fraction" not in case.metrics:
        return
    unknown = "" if case.interval("serial_fraction") else " (interval not known)"
    known = f"a serial fraction of {text_of(case, 'serial_fraction')}{unknown}"
    place = {"kind": "", "law": case.experiment.title, "fraction": known}
    spec, measured = training_of(case), {1: 1.0} | measured_speedups(case)
    N = spec.world_size
    steps = spec.steps_per_epoch if case.experiment.global_batch else spec.one_device().steps_per_epoch / N
    alone = steps * case.seconds * measured.get(N, math.nan)
    for N in sorted({*measured, *PREDICTED_DEVICES}):
        figures: Texts = {}
        if N in measured:
            figures |= {"epoch": units.seconds(alone / measured[N]), "speedup": units.factor(measured[N])}
        if N > 1 and (predicted := predicted_by(case, N)) is not None:
            ends = f" ({units.factor(predicted.low)} to {units.factor(predicted.high)})"
            figures["predicted speedup"] = units.factor(predicted.value) + (unknown or ends)
            figures["predicted epoch"] = units.seconds(alone / predicted.value)
            if N in measured:
                figures["error of the speedup"] = units.change(predicted.value / measured[N] - 1)
        yield place | {devices_of(case): str(N)}, figures


def projected(case: Case) -> Rows:
    """Yield the projected excess over one device and the projected efficiency on more devices."""
    for N in numbered(case, r"projected_\w+_on_#"):
        names = {"projected excess": f"projected_excess_on_{N}", "efficiency": f"projected_efficiency_on_{N}"}
        if training_of(case).world_size == N:
            names = {"excess": "excess_seconds", "error": "projection_error"} | names
        yield {devices_of(case): str(N)}, {heading: text_of(case, name) for heading, name in names.items()}


# --- sentences below a grid, on what no figure of it says


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


def about_laws(cases: Sequence[Case]) -> str:
    """Return why a law predicts nothing."""
    found = {
        f"{case.experiment.title}, {case.described()}: {reason}, so nothing is predicted."
        for case in cases
        if (reason := not_predictable(case.value("serial_fraction") or 0.0))
    }
    return " ".join(sorted(found))

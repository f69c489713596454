"""The figures of a grid: stored metrics, what is computed from them, and cases of several rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from ddpperf.analysis.cost_models import REPORT_FORMULAS, ReportFormula
from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    Law,
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

Value = float | str | None  # a string is printed as it is
Texts = dict[str, str]  # by the headings of columns, or by the names of properties
OF_IMAGES = re.compile(r"\w*(accuracy|loss)\w*")  # means nothing for synthetic images


def training_of(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def nbytes_of(case: Case) -> int:
    assert isinstance(case.measured.spec, AllReduceSpec)
    return case.measured.spec.nbytes


def without_batch(recipe: str, batch_size: int) -> str:
    """Return the name of a recipe without its batch size: "2048, LARS" becomes "LARS"."""
    return re.sub(rf"^{batch_size},? ", "", recipe)


def is_of_the_library(case: Case) -> bool:
    spec, known = case.measured.spec, "link_utilization" in case.metrics
    return known and isinstance(spec, AllReduceSpec) and spec.algorithm == "backend" and spec.in_place


def has_other_rate(case: Case) -> bool:
    """Return whether a remedy changes the learning rate of plain SGD, or nothing."""
    spec, names = case.measured.spec, ("as it is", "scaling", "warm-up", "rate")
    changed = any(name in case.recipe for name in names)
    return isinstance(spec, RunSpec) and (spec.schedule != "constant" or changed)


def has_other_remedy(case: Case) -> bool:
    return "as it is" in case.recipe or not has_other_rate(case)


def has_nodes(case: Case) -> bool:
    return "between_bytes_per_second" in case.metrics


def is_synthetic(case: Case) -> bool:
    return isinstance(case.measured.spec, RunSpec) and case.measured.spec.data == "synthetic"


def text_of(case: Case, name: str, *, per_epoch: bool = False) -> str:
    """Return a figure as text, with its 95% interval if it has one, or "" if the case does not have it.

    name: a metric, a quantity with a mean and a peak, or a key of COMPUTED. per_epoch: whether the
    figure is that of a step and is shown for all steps of an epoch.
    """
    scale = training_of(case).steps_per_epoch if per_epoch else 1
    if name in COMPUTED:
        found, form = COMPUTED[name]
        value = found(case)
        return value if isinstance(value, str) else "" if value is None else form(scale * value)
    metric = find(name)
    form = units.points if name.startswith("accuracy_") else metric.format
    scale = scale if metric.unit in ("s", "B") else 1
    if OF_IMAGES.fullmatch(name) and is_synthetic(case):
        return ""
    values = [case.value(name)] if name in case.metrics else [case.value(f"{name}_{end}") for end in ENDS]
    texts = [form(scale * value) for value in values if value is not None]
    ends = case.interval(name)
    return " / ".join(texts) + (f" ({' to '.join(form(scale * end) for end in ends)})" if ends else "")


ENDS = ("mean", "peak")


# --- what is computed from metrics


def _extra_device_time(case: Case) -> float | None:
    efficiency = case.value("efficiency")
    return 1 / efficiency - 1 if efficiency else None


def _saved_fraction(case: Case) -> float | None:
    """Return the fraction of the time on one device that more devices save."""
    saved, device = _cost(case, "saved"), _cost(case, "device")
    if saved is None or device is None:
        return None
    return saved / (saved + device / case.measured.spec.world_size)


def _cost(case: Case, name: str) -> float | None:
    """Return device, saved or extra device seconds of the epoch or the training that a case measures."""
    of = "of_training" if isinstance(case.measured.spec, RunSpec) else "per_epoch"
    return case.value(f"{name}_seconds_{of}")


def _price(case: Case, name: str) -> float | None:
    """Return the price of device seconds, if --gpu-hour-price was given."""
    price, seconds = case.header["options"].get("gpu_hour_price"), _cost(case, name)
    return None if price is None or seconds is None else price * seconds / 3600


def _price_of_saved_hour(case: Case) -> float | None:
    price, saved = _price(case, "extra_device"), _cost(case, "saved")
    return price / (saved / 3600) if price is not None and saved and saved > 0 else None


def _training_time(case: Case) -> float | None:
    """Return the seconds of a training without its evaluations, as mean over the seeds."""
    spec, rate = case.measured.spec, case.value("images_per_second")
    return spec.images / rate if isinstance(spec, RunSpec) and rate else None


def _ddp_step(case: Case) -> float | None:
    """Return the seconds of a DDP step with the same execution and memory format."""
    ddp = case.references.get("ddp")
    return None if ddp is None else median(ddp.median_step_seconds().values())


def _over_ddp(case: Case) -> str:
    """Return DataParallel's communication over DDP's; older runs divided by the time of a rank that waits."""
    known, over = case.value("ddp_comm_without_waiting_seconds"), case.value("comm_over_ddp")
    return units.factor(over) if known and over else ""


def _sending(case: Case) -> float | None:
    """Return the seconds of communication of the rank that waits least; DataParallel has one process."""
    return case.value("comm_without_waiting_seconds") or case.value("traced_comm_seconds")


def _fraction_of_step(case: Case) -> float | None:
    sending = _sending(case)
    return None if sending is None else sending / case.seconds


def _sent_at(formula: ReportFormula) -> Callable[[Case], float | None]:
    """Return a function for the bandwidth of the gradients by a formula; busbw is that of the first one."""

    def bandwidth(case: Case) -> float | None:
        N, busbw = case.measured.spec.world_size, case.value("gradient_busbw_bytes_per_second")
        return busbw and busbw * formula.seconds(N, 1.0, 1.0) / REPORT_FORMULAS[0].seconds(N, 1.0, 1.0)

    return bandwidth


def _predicted(formula: ReportFormula) -> Callable[[Case], str]:
    """Return a function for the time of an all_reduce by a formula, and this time over the measured one."""

    def text(case: Case) -> str:
        if not (link := case.link_bytes_per_second):
            return ""
        seconds = formula.seconds(case.measured.spec.world_size, nbytes_of(case), link)
        return f"{units.seconds(seconds)} ({units.factor(seconds / case.seconds)})"

    return text


def _messages(kind: str) -> Callable[[Case], str]:
    """Return a function for the bytes and the number of a kind of messages."""

    def text(case: Case) -> str:
        if not (nbytes := case.value(f"{kind}_bytes")):
            return ""
        return f"{units.nbytes(nbytes)} in {int(case.value(f'{kind}_messages') or 0)}"

    return text


def _accuracy_after(epoch: int) -> Callable[[Case], float | None]:
    """Return a function for the training accuracy of an epoch, with the first seed."""

    def accuracy(case: Case) -> float | None:
        found = case.measured.samples[0].counters.get(f"train_accuracy_{epoch}")
        return None if is_synthetic(case) or not found else max(found)

    return accuracy


COMPUTED: Mapping[str, tuple[Callable[[Case], Value], Callable[[float], str]]] = {
    "time": (lambda case: case.seconds, units.seconds),
    "ddp_step": (_ddp_step, units.seconds),
    "seeds": (lambda case: str(len(case.seeds)), str),
    "training_time": (_training_time, units.seconds),
    "whole_step": (lambda case: case.step_seconds, units.seconds),
    "other_seconds": (lambda case: case.other_seconds, units.seconds),
    "extra_device_time": (_extra_device_time, units.change),
    "saved_fraction": (_saved_fraction, units.percent),
    "device_minutes": (lambda case: _cost(case, "device"), lambda seconds: f"{seconds / 60:.4f}"),
    "saved": (lambda case: _cost(case, "saved"), units.seconds),
    "extra_device": (lambda case: _cost(case, "extra_device"), units.seconds),
    "price": (lambda case: _price(case, "device"), units.money),
    "extra_price": (lambda case: _price(case, "extra_device"), units.money),
    "price_of_saved_hour": (_price_of_saved_hour, units.money),
    "over_ddp": (_over_ddp, str),
    "sending": (_sending, units.seconds),
    "fraction_of_step": (_fraction_of_step, units.percent),
    **{f"epoch {epoch}": (_accuracy_after(epoch), units.percent) for epoch in (1, 2)},
    **{f"sent by {found.formula}": (_sent_at(found), units.bandwidth) for found in REPORT_FORMULAS},
    **{f"time by {found.formula}": (_predicted(found), str) for found in REPORT_FORMULAS},
    **{kind: (_messages(kind), str) for kind in MESSAGE_KINDS},
}

# --- cases of several rows: each row has properties, which are its place, and figures by heading

Rows = Iterator[tuple[Texts, Texts]]


def devices_of(case: Case) -> str:
    return "GPUs" if "GPUs" in case.properties else "ranks"


def batches_tried(case: Case) -> Rows:
    """Yield the figures of each batch size that the search measured, and the smallest one that failed."""
    found = [name.removeprefix("step_seconds_at_") for name in case.metrics if "step_seconds_at_" in name]
    failed = [int(size) for size in re.findall(r"a batch of (\d+) does not fit", " ".join(case.notes))]
    images = case.header["options"]["epoch_images"]
    names = {"throughput": "images_per_second", "peak memory": "peak_memory_bytes"}
    for size in sorted(map(int, found)):
        step = case.value(f"step_seconds_at_{size}") or 0.0
        times = {"step": units.seconds(step)}
        if size <= images:
            times["epoch"] = units.seconds(images / size * step)
        others = {heading: text_of(case, f"{name}_at_{size}") for heading, name in names.items()}
        yield {"batch": f"{size:,}"}, times | others
    if failed:
        yield {"batch": f"{min(failed):,}"}, {"step": "does not fit"}


def workers_tried(case: Case) -> Rows:
    """Yield the fraction of an epoch that loading takes with each number of workers."""
    for name in case.metrics:
        if found := re.fullmatch(r"loading_fraction_with_(\d+)_workers", name):
            yield {"workers": found[1], "input": ""}, {"loading": text_of(case, name)}


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
        stated.setdefault(found[1], {})[f"report {found[2]}"] = _as_stated(case, found[0])
    for name, reports in stated.items():
        place = {"figure": find(name).heading, "training": case.recipe}
        place |= dict.fromkeys(("global batch", devices_of(case)), "")
        yield place, {"ddpperf": text_of(case, name), **reports}


def _as_stated(case: Case, name: str) -> str:
    """Return a loss or an accuracy of a report with the digits that the report has."""
    value = case.value(name) or 0.0
    return f"{value:.3f}" if "loss" in name else f"{value:.2%}"


def part_speedups_of(case: Case) -> Rows:
    """Yield the seconds of each part of a step alone and on N devices, with its speedup, and of all parts."""
    law = weak_speedup if case.experiment.kind == "weak" else strong_speedup
    devices = devices_of(case)
    place = {devices: "", "together": f"{case.properties[devices]} {devices}"}
    alone, together = 0.0, 0.0
    for part in PARTS:
        one, many = case.value(f"{part}_seconds_on_one_device"), case.value(f"{part}_seconds")
        if one or many:
            figures = {"alone": one, "together": many}
            texts = {name: units.seconds(value) for name, value in figures.items() if value is not None}
            found = {**texts, "speedup": text_of(case, f"{part}_speedup")}
            yield place | {"part": part.replace("_", " ")}, found
        alone, together = alone + (one or 0.0), together + (many or 0.0)
    if not alone or not together:  # the test failed before its parts were known
        return
    speedup = units.factor(law(alone, together, training_of(case).world_size))
    texts = {"alone": units.seconds(alone), "together": units.seconds(together), "speedup": speedup}
    yield place | {"part": "all parts"}, texts


# --- laws

SPEEDUP_BY: Mapping[str, Law] = {"Amdahl's law": amdahl_speedup, "Gustafson's law": gustafson_speedup}


def fitted(case: Case) -> Estimate:
    """Return the serial fraction of a law; the bounds are infinite if they are not known."""
    low, high = case.interval("serial_fraction") or (-math.inf, math.inf)
    return Estimate(value=case.value("serial_fraction") or 0.0, low=low, high=high)


def predicted_by(case: Case, N: float) -> Estimate | None:
    """Return the speedup that a law predicts for N devices; None if the law predicts nothing."""
    fraction = fitted(case)
    if not_predictable(fraction.value):
        return None
    return predicted_speedup(SPEEDUP_BY[case.experiment.title], fraction, N)


def _estimate(found: Estimate, form: Callable[[float], str]) -> str:
    """Return a value with its 95% interval as text."""
    known = math.isfinite(found.low) and math.isfinite(found.high)
    interval = f"{form(found.low)} to {form(found.high)}" if known else "interval not known"
    return f"{form(found.value)} ({interval})"


def measured_speedups(case: Case) -> dict[int, float]:
    """Return the measured speedups of a law's test by the number of devices."""
    name = "speedup_of_"
    measured = {key.removeprefix(name): found["value"] for key, found in case.metrics.items() if name in key}
    return {int(N): speedup for N, speedup in sorted(measured.items()) if N.isdecimal()}


def law_rows(case: Case) -> Rows:
    """Yield the measured and the predicted speedup, and the time of an epoch, for each number of devices.

    On one device, an epoch takes as long as the measured one on N devices times its speedup.
    """
    if "serial_fraction" not in case.metrics:
        return
    law, spec = case.experiment.title, training_of(case)
    fraction = f"a serial fraction of {_estimate(fitted(case), units.percent)}"
    place = {"kind": "", "law": law, "fraction": fraction}
    measured = {1: 1.0} | measured_speedups(case)
    N = spec.world_size
    steps = spec.steps_per_epoch if case.experiment.global_batch else spec.one_device().steps_per_epoch / N
    alone = steps * case.seconds * measured.get(N, math.nan)
    for N in sorted({*measured, *PREDICTED_DEVICES}):
        figures: Texts = {}
        if N in measured:
            figures |= {"epoch": units.seconds(alone / measured[N]), "speedup": units.factor(measured[N])}
        if N > 1 and (predicted := predicted_by(case, N)) is not None:
            figures["predicted speedup"] = _estimate(predicted, units.factor)
            figures["predicted epoch"] = units.seconds(alone / predicted.value)
            if N in measured:
                figures["error of the speedup"] = units.change(predicted.value / measured[N] - 1)
        yield place | {devices_of(case): str(N)}, figures


def projected(case: Case) -> Rows:
    """Yield the projected excess over one device and the projected efficiency on more devices."""
    found = (re.fullmatch(r"projected_\w+_on_(\d+)", name) for name in case.metrics)
    for N in dict.fromkeys(match[1] for match in found if match):
        measured = {"excess": "excess_seconds", "error": "projection_error"}
        names = {"projected excess": f"projected_excess_on_{N}", "efficiency": f"projected_efficiency_on_{N}"}
        names = (measured if int(N) == training_of(case).world_size else {}) | names
        yield {devices_of(case): N}, {heading: text_of(case, name) for heading, name in names.items()}

"""The unit, the heading, the print format and the better direction of each metric.

The name of a metric says its unit and its heading, such as exposed_comm_seconds. Only a metric that
decides something, or that has other words in a table, needs an entry here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ddpperf.results import units


class Better(StrEnum):
    """The direction in which a metric improves."""

    LOWER = "lower"
    HIGHER = "higher"


MEASURED = ("time", "mean_time", "peak_memory_bytes", "idle_cpus")  # of each measurement, without a test


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The definition of a metric: its name, unit, better direction and print format.

    `unit` is in SI ("s", "B/s"), or "1" for a ratio or a count. `better` is None if neither direction
    is better. `exact` marks a metric that depends on the code alone, so that any difference is a
    change. `gate` says whether a worse value fails a run. `threshold` says whether
    perf/thresholds.toml may bound the metric, from below if higher is better, else from above.
    """

    name: str
    unit: str
    heading: str
    format: Callable[[float], str]
    better: Better | None = None
    exact: bool = False
    gate: bool = False
    threshold: bool = False

    def __post_init__(self) -> None:
        if self.better is None and (self.exact or self.gate or self.threshold):
            advice = "set it to lower or higher"
            raise ValueError(f"metric {self.name} can decide nothing without better; {advice}")
        if self.gate and (self.better is Better.HIGHER or not (self.exact or self.name in MEASURED)):
            what = f"metric {self.name} has gate=True, which needs exact=True and better=lower"
            raise ValueError(f"{what}; leave gate out, and bound the metric by perf/thresholds.toml")

    def text(self, value: float) -> str:
        """Return the metric's heading and the formatted value, such as "speedup 1.95x"."""
        return f"{self.heading} {self.format(value)}"


_KINDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (  # the first pattern that fits a name counts
    (r"accuracy_\w+|projection_error", "1", units.change),
    (r"\w*(accuracy|efficiency|fraction|spread|utilization)\w*", "1", units.percent),
    (r"parts_over_step|gradients_over_parameters|repeated_places", "1", units.percent),
    (r"held_out_error|method_disagreement|mfu", "1", units.percent),
    (r"\w+_loss(_[A-E])?|loss_after_5_steps|marked_over_step|rank_cpus|idle_cpus", "1", units.decimal),
    (r"\w+_over_\w+|\w*speedup\w*|launch_bound", "1", units.factor),
    (r"\w+_(images|messages|size|steps|workers)|protocols|late_rank", "1", units.whole),
    (r"images_per_second\w*", "1/s", units.rate),
    (r"steps_per_second", "1/s", units.decimal),
    (r"images_per_joule", "1/J", units.images_per_joule),
    (r"reduce_byte_seconds", "s/B", lambda value: f"{value * 1e9:.2g} s/GB"),
    (r"\w+_bytes_per_second", "B/s", units.bandwidth),
    (r"(mean_)?time|\w+_seconds\w*|projected_excess_on_\d+", "s", units.seconds),
    (r"\w+_bytes\w*", "B", units.nbytes),
    (r"joules_per_\w+", "J", units.joules),
    (r"\w+_watts", "W", units.watts),
    (r"\w+_celsius", "degC", units.celsius),
    (r"\w+_hertz", "Hz", units.hertz),
)
# How a heading follows from a name, in this order:
_WORDS: tuple[tuple[str, Any], ...] = (
    (r"_seconds(?=_(of|per)_)", " time"),
    (r"_(bytes_per_second|byte_seconds)$", " bandwidth"),
    (r"_(bytes|seconds|watts|celsius|hertz)(?=_at_|_on_|$)", ""),
    (r"images_per_second", "throughput"),
    (r"joules", "energy"),
    (r"_at_(?=\d)", " of batch "),
    (r"_(?:of|on)_(\d+)$", r" on \1 devices"),
    (r"_", " "),
    (r"^start (.*)", r"\1 at the start"),
    (r"\bcomm\b", "communication"),
    (r"\b(cpu|ddp|gpu|mfu|sm)\b", lambda found: found[0].upper()),
)
EXPOSED = re.compile(
    r"(\w+_)?exposed_\w+_seconds"
)  # differences of two times, so noise can make them negative
_ENDS = {"_low": "{} at least", "_high": "{} at most", "_mean": "{}", "_peak": "peak {}"}


def find(name: str) -> Metric:
    """Return the definition of a metric by its name; raise KeyError for an unknown name.

    The ends of a 95% interval, such as test_accuracy_low, and the mean and the peak over time have
    the unit of the metric itself, and decide nothing.
    """
    if name in _METRICS:
        return _METRICS[name]
    for end, words in _ENDS.items():
        if name.endswith(end):
            whole = find(name.removesuffix(end))
            return Metric(
                name=name, unit=whole.unit, heading=words.format(whole.heading), format=whole.format
            )
    return _by_name(name)


def _by_name(name: str, heading: str = "", **decides: Any) -> Metric:
    """Return the definition of a metric. Its unit and, if none is given, its heading follow from its name."""
    fitting = (kind for kind in _KINDS if re.fullmatch(kind[0], name))
    if (kind := next(fitting, None)) is None:
        raise KeyError(name)
    _, unit, text = kind
    if EXPOSED.fullmatch(name):
        text = _none_below_0(text)
    words = name
    for before, after in _WORDS:
        words = re.sub(before, after, words)
    return Metric(name=name, unit=unit, heading=heading or words, format=text, **decides)


def _none_below_0(text: Callable[[float], str]) -> Callable[[float], str]:
    """Return a format that says "none" for a negative value, which is noise."""
    return lambda value: "none" if value < 0 else text(value)


def find_or_plain(name: str, unit: str = "") -> Metric:
    """Return the definition of a metric, or a plain one if only another test suite registers it."""
    if (metric := _known(name, unit)) is not None:
        return metric
    return Metric(name=name, unit=unit, heading=name, format=lambda value: f"{value:.4g} {unit}".rstrip())


def _known(name: str, unit: str) -> Metric | None:
    """Return the definition of a stored metric, or None if only another test suite registers it.

    unit: the stored unit. Another suite's name may look like one of ours with another unit.
    """
    with contextlib.suppress(KeyError):
        if (metric := find(name)).unit == unit or not unit:
            return metric
    return None


def column(name: str, values: Sequence[float], unit: str) -> tuple[str, str, Callable[[float], str]]:
    """Return a metric's heading, the unit that suits the values, and a function that prints a value.

    The returned unit is "" if each printed value names its unit. unit: the stored unit, which counts
    for a metric that another test suite registered.
    """
    if (metric := _known(name, unit)) is None:
        return name, unit.removeprefix("1"), "{:.4g}".format
    if metric.unit == "1/s":
        is_images = metric.format is units.rate
        return ("", "images/s", units.whole) if is_images else (f"{metric.heading}/s", "", metric.format)
    if scale := units.common_scale(metric.unit, values):
        unit, text = scale
        return metric.heading, unit, _none_below_0(text) if EXPOSED.fullmatch(name) else text
    return metric.heading, "", metric.format


def register(metric: Metric) -> None:
    """Add the metric of a custom test suite; raise ValueError if another metric has its name."""
    known = _METRICS.get(metric.name)
    if known is not None and replace(known, format=metric.format) != metric:
        raise ValueError(f"a metric {metric.name} is registered already; choose another name")
    _METRICS[metric.name] = metric


def registered() -> tuple[Metric, ...]:
    """Return the definitions that are registered, among them those of all metrics that can fail a run."""
    return tuple(_METRICS.values())


MESSAGE_KINDS = ("gradients", "buffers", "parameters", "metrics", "control", "model", "other")
_LOWER: dict[str, Any] = {"better": Better.LOWER}
_HIGHER: dict[str, Any] = {"better": Better.HIGHER}
_BOUNDED: dict[str, Any] = {**_HIGHER, "threshold": True}
_EXACT: dict[str, Any] = {**_LOWER, "exact": True}
_ALL = (
    _by_name("time", gate=True, **_LOWER),
    _by_name("mean_time", gate=True, **_LOWER),
    _by_name("idle_cpus", gate=True, **_LOWER),
    _by_name("tail_seconds", "slowest tenth of rounds", **_LOWER),
    _by_name("cpu_seconds", "CPU time", threshold=True, **_LOWER),
    _by_name("peak_memory_bytes", gate=True, **_LOWER),
    _by_name("speedup", **_BOUNDED),
    _by_name("efficiency", **_BOUNDED),
    _by_name("images_per_second", **_BOUNDED),
    _by_name("ddp_over_data_parallel", "DDP over DataParallel", **_BOUNDED),
    _by_name("speedup_over_eager", **_BOUNDED),
    _by_name("busbw_bytes_per_second", "busbw", **_BOUNDED),
    _by_name("test_accuracy", **_BOUNDED),
    _by_name("gradients_over_parameters", threshold=True, **_EXACT),
    _by_name("communicated_bytes_per_epoch", "gradients per epoch", gate=True, **_EXACT),
    *(_by_name(f"{kind}_bytes", gate=True, **_EXACT) for kind in MESSAGE_KINDS[:-1]),
    _by_name("step_seconds", **_LOWER),
    _by_name("epoch_seconds", **_LOWER),
    _by_name("exposed_comm_seconds", "exposed (difference)", **_LOWER),
    *(_by_name(f"speedup_over_{other}", **_HIGHER) for other in ("ddp", "fp32", "tf32")),
    _by_name("algbw_bytes_per_second", "algbw", **_HIGHER),
    _by_name("gradient_busbw_bytes_per_second", "gradients' busbw", **_HIGHER),
    *(
        _by_name(f"{of}_{end}_seconds", f"{end} {of}", **_LOWER)
        for of in ("call", "step")
        for end in ("p50", "p99", "largest")
    ),
    # Other words than the names have
    _by_name("first_step_seconds", "start to first step"),
    _by_name("steps_per_second", "steps"),
    _by_name("asymptotic_busbw_bytes_per_second", "busbw of large buffers"),
    _by_name("between_bytes_per_second", "bandwidth between nodes"),
    _by_name("between_latency_seconds", "latency between nodes"),
    _by_name("between_message_seconds", "message between nodes"),
    _by_name("bucket_copy_seconds", "bucket copies"),
    _by_name("compile_seconds", "compilation"),
    _by_name("excess_seconds", "excess over one device"),
    _by_name("framework_seconds", "besides the kernel"),
    _by_name("gpu_busy_fraction", "GPU busy"),
    _by_name("gpu_memory_bytes", "GPU memory in use"),
    _by_name("held_out_error", "median prediction error"),
    _by_name("inside_bytes_per_second", "bandwidth inside a node"),
    _by_name("inside_message_seconds", "message inside a node"),
    _by_name("launch_bound", "step over GPU time"),
    _by_name("link_bytes_per_second", "link"),
    _by_name("link_utilization", "link used"),
    _by_name("loading_fraction", "loading"),
    _by_name("loading_seconds", "exposed loading"),
    _by_name("overlap_fraction", "hidden (trace)"),
    _by_name("power_watts", "power of a GPU"),
    _by_name("projection_error", "error of the projection"),
    _by_name("reduce_byte_seconds", "addition"),
    _by_name("repeated_places", "same place next epoch"),
    _by_name("replayed_comm_seconds", "all_reduces alone"),
    _by_name("step_minus_one_device_seconds", "t(N) - t(1)"),
    _by_name("straggler_spread", "stragglers"),
    _by_name("traced_comm_seconds", "communication (trace)"),
    _by_name("traced_exposed_comm_seconds", "exposed (trace)"),
)
_METRICS = {metric.name: metric for metric in _ALL}

"""The list of all metrics, with the unit, the better direction and the print format of each.

A new metric needs an entry here and the experiment that computes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ddpperf.results import units
from ddpperf.specs import DATA_PARALLEL_PARTS, PARTS


class Better(StrEnum):
    """The direction in which a metric improves."""

    LOWER = "lower"
    HIGHER = "higher"


class Gate(StrEnum):
    """The condition under which a worse metric fails an A/B run."""

    ALWAYS = "always"
    UNLESS_LAUNCH_BOUND = "unless launch bound"  # the time of a step that waits for the CPU varies too much
    LAUNCH_BOUND = "launch bound"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The definition of a metric: its name, unit, better direction and print format.

    `name` and `heading` may hold placeholders, such as speedup_of_{N}. {N} stands for a number, any
    other placeholder for a word. `unit` is in SI ("s", "B/s"), or "1" for a ratio or a count.
    `better` is None if neither direction is better. `exact` marks a metric that depends on the code
    alone, so that any difference is a change. `gate` is None if a change never fails a run.
    `threshold` says whether perf/thresholds.toml may bound the metric, from below if higher is
    better, else from above.
    """

    name: str
    unit: str
    heading: str
    format: Callable[[float], str]
    better: Better | None = None
    exact: bool = False
    gate: Gate | None = None
    threshold: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([a-zA-Z]|\{\w+\})([a-zA-Z0-9_]|\{\w+\})*", self.name):
            takes = "a metric's name has letters, digits and underscores"
            raise ValueError(f"{takes}, got {self.name!r}; choose another name")
        if self.better is None and (self.exact or self.gate or self.threshold):
            advice = "set it to lower or higher"
            raise ValueError(f"metric {self.name} can decide nothing without better; {advice}")

    @property
    def pattern(self) -> str:
        """A regular expression that matches all names of a metric, such as speedup_of_4."""
        numbers = self.name.replace("{N}", "(?P<N>[0-9]+)")
        return re.sub(r"\{(\w+)\}", r"(?P<\1>[A-Za-z0-9_]+)", numbers)

    def text(self, value: float) -> str:
        """Return the metric's heading and the formatted value, such as "speedup 1.95x"."""
        return f"{self.heading} {self.format(value)}"


def find(name: str) -> Metric:
    """Return the definition of a metric by its name; raise KeyError for an unknown name."""
    if name in _METRICS:
        return _METRICS[name]
    for family in _METRICS.values():
        if match := re.fullmatch(family.pattern, name):
            return replace(family, name=name, heading=family.heading.format(**match.groupdict()))
    raise KeyError(name)


def find_or_plain(name: str, unit: str = "") -> Metric:
    """Return the definition of a metric, or a plain one if only another test suite registers it."""
    try:
        return find(name)
    except KeyError:
        return Metric(name=name, unit=unit, heading=name, format=lambda value: f"{value:.4g} {unit}".rstrip())


def column(name: str, values: Sequence[float], unit: str) -> tuple[str, str, Callable[[float], str]]:
    """Return a metric's heading, the unit that suits these values, and the function that prints one.

    The returned unit is "" if each printed value names its unit. unit: the stored unit, which counts
    for a metric that another test suite registered.
    """
    try:
        metric = find(name)
    except KeyError:
        return name, unit.removeprefix("1"), "{:.4g}".format
    if metric.unit == "1/s":
        is_images = metric.format is units.rate
        return ("", "images/s", units.whole) if is_images else (f"{metric.heading}/s", "", metric.format)
    if scale := units.common_scale(metric.unit, values):
        unit, text = scale
        return metric.heading, unit, text
    return metric.heading, "", metric.format


def register(metric: Metric) -> None:
    """Add the metric of a custom test suite; raise ValueError if another metric has its name."""
    known = _METRICS.get(metric.name)
    if known is not None and replace(known, format=metric.format) != metric:
        raise ValueError(f"a metric {metric.name} is registered already; choose another name")
    _METRICS[metric.name] = metric


def registered() -> tuple[Metric, ...]:
    """Return the definitions of all metrics; speedup_of_{N} is one definition for all N."""
    return tuple(_METRICS.values())


def _in(unit: str, usual: Callable[[float], str]) -> Callable[..., Metric]:
    """Return a function that defines a metric in this unit, with this format unless it has another.

    Without a heading, the name of the metric says what it measures.
    """

    def define(
        name: str, heading: str = "", format: Callable[[float], str] = usual, **decides: Any
    ) -> Metric:
        words = heading or name.replace("_seconds", "").replace("_", " ")
        return Metric(name=name, unit=unit, heading=words, format=format, **decides)

    return define


OTHER_PARTS = ("compute", "idle", "communicator")  # of a step, or before the first one
MESSAGE_KINDS = ("gradients", "buffers", "parameters", "metrics", "control", "other")
_seconds, _ratio, _bytes = _in("s", units.seconds), _in("1", units.factor), _in("B", units.nbytes)
_bandwidth, _images = _in("B/s", units.bandwidth), _in("1/s", units.rate)
_LOWER, _HIGHER = Better.LOWER, Better.HIGHER
_EXACT: dict[str, Any] = {"better": _LOWER, "exact": True, "gate": Gate.ALWAYS}


def _interval(metric: Metric) -> Iterator[Metric]:
    """Yield a metric and the two metrics for the bounds of its 95% interval."""
    yield metric
    for end, words in (("low", "at least"), ("high", "at most")):
        name, heading = f"{metric.name}_{end}", f"{metric.heading} {words}"
        yield replace(metric, name=name, heading=heading, better=None, threshold=False)


def _over_time(metric: Metric) -> Iterator[Metric]:
    """Yield the mean and the largest value of a quantity that is sampled over time."""
    yield replace(metric, name=f"{metric.name}_mean")
    yield replace(metric, name=f"{metric.name}_peak", heading=f"peak {metric.heading}")


def _messages() -> Iterator[Metric]:
    """Yield metrics for the bytes and counts of messages that ranks send, by kind.

    They cover a step, and the time before the first step.
    """
    for kind in MESSAGE_KINDS[:-1]:
        yield _bytes(f"{kind}_bytes", kind, **_EXACT)
    yield _bytes("other_bytes", "other messages")
    for kind in ("initial_state", "control", "other"):
        yield _bytes(f"start_{kind}_bytes", f"{kind.replace('_', ' ')} at the start")
        yield _ratio(f"start_{kind}_messages", "messages at the start", units.whole)
    for kind in MESSAGE_KINDS:
        yield _ratio(f"{kind}_messages", "messages", units.whole)


_ALL = (
    # Any measured step or call
    _seconds("time", better=_LOWER, gate=Gate.UNLESS_LAUNCH_BOUND),
    _seconds("tail_seconds", "slowest tenth of rounds", better=_LOWER, gate=Gate.UNLESS_LAUNCH_BOUND),
    _seconds("cpu_seconds", "CPU time", better=_LOWER, gate=Gate.LAUNCH_BOUND, threshold=True),
    _bytes("peak_memory_bytes", "peak memory", better=_LOWER, gate=Gate.ALWAYS),
    _ratio("launch_bound", "step over GPU time"),
    _seconds("compile_seconds", "compilation"),
    _seconds("capture_seconds"),
    # A training step
    _seconds("step_seconds", better=_LOWER),
    _seconds("epoch_seconds", better=_LOWER),
    _images("images_per_second", "throughput", better=_HIGHER, threshold=True),
    _bytes("communicated_bytes_per_epoch", "gradients per epoch", **_EXACT),
    _ratio("speedup_over_eager", better=_HIGHER, threshold=True),
    _ratio("speedup_over_ddp", "speedup over DDP", better=_HIGHER),
    _ratio("speedup_over_fp32", better=_HIGHER),
    _ratio("speedup_over_tf32", better=_HIGHER),
    _ratio("loss_after_5_steps", "loss after 5 steps", units.decimal),
    # Scaling
    _ratio("ddp_over_data_parallel", "DDP over DataParallel", better=_HIGHER, threshold=True),
    _ratio("speedup", better=_HIGHER, gate=Gate.UNLESS_LAUNCH_BOUND, threshold=True),
    _ratio("efficiency", "efficiency", units.percent, better=_HIGHER, threshold=True),
    *_interval(_ratio("serial_fraction", "serial fraction", units.percent)),
    _ratio("speedup_of_{N}", "speedup on {N} devices"),
    *_interval(_ratio("predicted_speedup_of_{N}", "predicted speedup on {N} devices")),
    *_interval(_ratio("predicted_efficiency_of_{N}", "predicted efficiency on {N} devices", units.percent)),
    # Parts of a step
    _seconds("loading_seconds", "exposed loading"),
    _seconds("loading_wait_seconds", "loader wait of the CPU"),
    *(_seconds(f"{part}_seconds") for part in (*PARTS[1:], *DATA_PARALLEL_PARTS, *OTHER_PARTS)),
    *(_seconds(f"{part}_seconds_on_one_device") for part in PARTS),
    *(_ratio(f"{part}_speedup") for part in PARTS),
    _ratio("parts_over_step", "sum of parts over their step", units.percent),
    _ratio("marked_over_step", "step with marks over the one without", units.decimal),
    _ratio("gpu_busy_fraction", "GPU busy", units.percent),
    _ratio("mfu", "MFU", units.percent),
    _ratio("straggler_spread", "stragglers", units.percent),
    _ratio("node_spread", "stragglers by node", units.percent),
    _seconds("device_seconds_per_epoch", "device time per epoch"),
    _seconds("saved_seconds_per_epoch", "saved per epoch"),
    _seconds("extra_device_seconds_per_epoch", "extra device time per epoch"),
    _seconds("device_seconds_of_training", "device time of the training"),
    _seconds("saved_seconds_of_training", "saved in the training"),
    _seconds("extra_device_seconds_of_training", "extra device time of the training"),
    # Computation and communication
    _seconds("exposed_comm_seconds", "exposed (difference)", better=_LOWER),
    _seconds("traced_exposed_comm_seconds", "exposed (trace)"),
    _seconds("exposed_inside_node_seconds", "exposed inside a node (difference)"),
    _seconds("exposed_between_nodes_seconds", "exposed between nodes (difference)"),
    _seconds("traced_exposed_inside_node_seconds", "exposed inside a node (trace)"),
    _seconds("traced_exposed_between_nodes_seconds", "exposed between nodes (trace)"),
    _ratio("overlap_fraction", "hidden", units.percent),
    _ratio("method_disagreement", "difference of the methods over the step", units.percent),
    _seconds("traced_comm_seconds", "communication (trace)"),
    _seconds("comm_without_waiting_seconds", "communication without waiting"),
    _seconds("traced_step_seconds"),
    _seconds("replayed_comm_seconds", "all_reduces alone"),
    _seconds("step_minus_one_device_seconds", "t(N) - t(1)"),
    _seconds("bucket_copy_seconds", "bucket copies"),
    _seconds("idle_in_comm_seconds", "GPUs idle in these parts"),
    _seconds("ddp_exposed_comm_seconds", "DDP's exposed (difference)"),
    _seconds("ddp_traced_exposed_comm_seconds", "DDP's exposed (trace)"),
    _seconds("ddp_traced_comm_seconds", "DDP's communication (trace)"),
    _ratio("comm_over_ddp", "communication over DDP's"),
    _seconds("comm_skew_seconds", "skew"),
    _seconds("traced_comm_skew_seconds", "skew by trace"),
    _seconds("copy_seconds", "copies"),
    _bandwidth("gradient_busbw_bytes_per_second", "gradients' busbw", better=_HIGHER),
    _ratio("link_utilization", "link used", units.percent),
    *_messages(),
    _ratio("gradients_over_parameters", "", units.percent, better=_LOWER, exact=True, threshold=True),
    # All-reduce and other collectives
    _bandwidth("algbw_bytes_per_second", "algbw", better=_HIGHER),
    _bandwidth("busbw_bytes_per_second", "busbw", better=_HIGHER, threshold=True),
    _seconds("framework_seconds", "besides the kernel"),
    _ratio("speedup_of_the_best_other", "speedup of the best other algorithm"),
    _ratio("{algorithm}_over_backend"),
    *_interval(_seconds("latency_seconds")),
    *_interval(_bandwidth("link_bytes_per_second", "link")),
    *_interval(_bandwidth("asymptotic_busbw_bytes_per_second", "busbw of large buffers")),
    *_interval(_in("s/B", lambda value: f"{value * 1e9:.2g} s/GB")("reduce_byte_seconds", "addition")),
    *_interval(_seconds("inside_message_seconds", "message inside a node")),
    *_interval(_bandwidth("inside_bytes_per_second", "bandwidth inside a node")),
    *_interval(_seconds("between_message_seconds", "message between nodes")),
    *_interval(_seconds("between_latency_seconds", "latency between nodes")),
    *_interval(_bandwidth("between_bytes_per_second", "bandwidth between nodes")),
    _ratio("ring_bytes_over_measured", "2 (N-1) S / N / B over measured"),
    _ratio("doubling_seconds_over_measured", "(S / B) log2 N over measured"),
    _ratio("aggregate_bytes_over_measured", "2 (N-1) S / B over measured"),
    _ratio("predicted_over_measured_{size}", "predicted over measured of {size}"),
    _ratio("protocols", "protocols", units.whole),
    _ratio("held_out_error", "median prediction error", units.percent),
    # More devices than there are
    _seconds("excess_seconds", "excess over one device"),
    _seconds("plain_excess_seconds", "unchanged excess"),
    _ratio("projection_error", "error of the projection", units.change),
    _ratio("projected_over_measured_{size}", "projected over measured of {size}"),
    *_interval(_seconds("projected_excess_on_{N}", "projected excess on {N} devices")),
    _ratio("projected_efficiency_on_{N}", "projected efficiency on {N} devices", units.percent),
    # Batch size and loading
    _ratio("largest_batch_size", "largest batch size", units.whole),
    _seconds("step_seconds_at_{N}", "step of batch {N}"),
    _images("images_per_second_at_{N}", "throughput of batch {N}"),
    _bytes("peak_memory_bytes_at_{N}", "peak memory of batch {N}"),
    _ratio("loading_fraction", "loading", units.percent),
    _ratio("loading_fraction_with_{N}_workers", "loading with {N} workers", units.percent),
    _ratio("enough_workers", "loader workers needed", units.whole),
    # Whole trainings
    _ratio("train_loss", "train loss", units.decimal),
    _ratio("train_accuracy", "train accuracy", units.percent),
    _ratio("test_loss", "test loss", units.decimal),
    *_interval(_ratio("test_accuracy", "test accuracy", units.percent, better=_HIGHER, threshold=True)),
    _ratio("best_test_accuracy", "best test accuracy", units.percent),
    _ratio("mirrored_test_accuracy", "mirrored test accuracy", units.percent),
    _ratio("skipped_steps", "skipped steps", units.whole),
    *_interval(_ratio("accuracy_over_baseline", "accuracy over the small batch's", units.change)),
    *_interval(_ratio("accuracy_over_as_it_is", "accuracy over as it is", units.change)),
    _ratio("reported_train_accuracy_{report}", "train accuracy of report {report}", units.percent),
    _ratio("reported_test_accuracy_{report}", "test accuracy of report {report}", units.percent),
    *_interval(_ratio("accuracy_over_fp32", "accuracy over fp32's", units.change)),
    *_interval(_ratio("accuracy_over_one_device", "accuracy over one device's", units.change)),
    *_interval(_ratio("accuracy_without_set_epoch", "accuracy without set_epoch", units.change)),
    *_interval(_ratio("accuracy_unscaled_rate", "accuracy by the unscaled rate", units.change)),
    # Utilization over time, and energy
    *_over_time(_ratio("gpu_utilization", "GPU utilization", units.percent)),
    *_over_time(_bytes("gpu_memory_bytes", "GPU memory in use")),
    *_over_time(_in("W", units.watts)("power_watts", "power of a GPU")),
    *_over_time(_in("degC", units.celsius)("temperature_celsius", "GPU temperature")),
    *_over_time(_in("Hz", units.hertz)("sm_clock_hertz", "SM clock")),
    *_over_time(_ratio("cpu_utilization", "CPU utilization", units.percent)),
    *_over_time(_ratio("core_utilization", "utilization of the busiest core", units.percent)),
    *_over_time(_ratio("rank_cpus", "busy cores per rank", units.decimal)),
    *_over_time(_bytes("rank_memory_bytes", "resident memory of a rank")),
    *_over_time(_bytes("host_memory_bytes", "main memory in use")),
    *(_in("J", units.joules)(f"joules_per_{of}", f"energy per {of}") for of in ("step", "epoch")),
    _in("1/J", units.images_per_joule)("images_per_joule", "images per joule"),
    # The sampler
    _ratio("missing_images", "missing images", units.whole),
    _ratio("repeated_images", "repeated images", units.whole),
    _ratio("repeated_places", "same place next epoch", units.percent),
)
_METRICS = {metric.name: metric for metric in _ALL}

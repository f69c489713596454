"""The class of a measurement: how much it varies, and so how large a slow-down it must find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from ddpperf.results import metrics as registry
from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, CopySpec, MessagesSpec, RunSpec, SamplerSpec, Spec, TrainingSpec
from ddpperf.specs.collective import CAPTURED_ALGORITHMS, Call
from ddpperf.specs.script import ScriptSpec
from ddpperf.verdict.settings import Limits, Settings

CALLS = CALL, SMALL_CALL = "call", "small call"  # kinds of noise classes
# A step is launch bound if the ratio of its time to its GPU time is above this: the GPU waits for
# the CPU. A step that is captured in a CUDA graph needs no launches.
LAUNCH_BOUND = 1.05
SMALL_BYTES = 2**24  # a call of fewer bytes is bound by kernel launches on a GPU, by the scheduler on a CPU
# The tolerances of work on GPUs outside of CUDA graphs. The times of launch-bound steps differ by 2 to 40%
# between runs of the same code.
EAGER_TOLERANCE, LAUNCH_BOUND_TOLERANCE = 0.25, 0.50
# Of small collective calls in CUDA graphs. On two H200s, process sets differ by 0.5 to 1.5%, and by 0.1% with
# 256 MiB. (The mean of neighbouring sizes does not exclude less: calls of one process set vary together.)
SMALL_CALL_TOLERANCE = 0.03
SCRIPT_TOLERANCE = 0.05  # of the steps of a script, on GPUs
ANY_INCREASE = Limits(margin=0.0, tolerance=1e-9)  # of a metric without noise, such as bytes
MEMORY_SPREAD = 0.001  # usual standard deviation of the log of peak memory between two runs


@dataclass(frozen=True, kw_only=True)
class NoiseClass:
    """Measurements of one class vary alike. `described` names the class in a sentence.

    coarse: their noise often hides a slow-down by the tolerance, so only a visible one blocks a PASS.
    """

    kind: str
    described: str = ""
    several_ranks: bool = False  # on a CPU
    informational: bool = False
    coarse: bool = False
    least_tolerance: float = 0.0  # of a time


def is_launch_bound(measured: Measured) -> bool:
    """Return whether the GPU waited for kernel launches in the median process set.

    Returns False without device times.
    """
    by_set = measured.launch_bound()
    return bool(by_set) and median(by_set.values()) > LAUNCH_BOUND


def is_informational(spec: Spec, device: str) -> bool:
    """Return whether the time of what a spec measures varies too much on this device to fail a run.

    On a CPU these are collectives of less than 16 MiB, and steps of FSDP, which differ by 8% between
    process sets. On a GPU these are small all_reduces outside CUDA graphs. On both these are the listing
    of shards, whose microseconds vary by half, and steps whose messages are counted, which are timed
    only once.
    """
    if isinstance(spec, MessagesSpec | SamplerSpec):
        return True
    if device == "cuda":
        if not isinstance(spec, AllReduceSpec) or spec.captured:
            return False
        return spec.nbytes < SMALL_BYTES or spec.algorithm not in CAPTURED_ALGORITHMS
    if isinstance(spec, TrainingSpec):
        return spec.strategy == "fsdp"
    return isinstance(spec, Call) and spec.nbytes < SMALL_BYTES


def class_of(base: Measured, device: str) -> NoiseClass:
    """Return the noise class of the base's measurement.

    On a CPU, other programs make times vary. So steps, epochs and whole trainings vary alike, and so
    do all collectives. Few tests measure an epoch or a whole training. The noise of so few tests is
    not known well enough for a class of its own.
    """
    spec, informational = base.spec, is_informational(base.spec, device)
    kind = CALL if isinstance(spec, Call) else spec.measurement
    if device == "cpu":
        kind = "training" if isinstance(spec, TrainingSpec) else kind
        described = "of collectives on the CPU" if kind == CALL else "on the CPU"
        found = NoiseClass(kind=kind, described=described, coarse=kind == CALL)
        return replace(found, several_ranks=spec.world_size > 1, informational=informational)
    described, least = "outside of CUDA graphs", EAGER_TOLERANCE
    if isinstance(spec, ScriptSpec):
        described, least = "of scripts", SCRIPT_TOLERANCE
    elif spec.captured and not isinstance(spec, RunSpec):  # a whole training also evaluates its model
        described, least = "in CUDA graphs", 0.0
        if isinstance(spec, Call) and spec.message_bytes < SMALL_BYTES:
            kind, least = SMALL_CALL, SMALL_CALL_TOLERANCE
    elif is_launch_bound(base):
        described, least = "launch bound", LAUNCH_BOUND_TOLERANCE
    return NoiseClass(kind=kind, described=described, informational=informational, least_tolerance=least)


def limits_of(metric: str, noise_class: NoiseClass, settings: Settings) -> Limits | None:
    """Return the limits for the change of a metric; None if the metric is for information only."""
    definition, is_time = registry.find(metric), metric in ("time", "mean_time")
    if not definition.gate or (is_time and noise_class.informational):
        return None
    # On a CPU, other programs stall single calls: the means of two process sets of equal code differ by 30%.
    if metric == "mean_time" and noise_class.kind == CALL and settings.device == "cpu":
        return None
    if definition.exact:
        return ANY_INCREASE
    limits = settings.metrics.get(metric, settings.limits)
    least = noise_class.least_tolerance if is_time else 0.0
    return replace(limits, tolerance=max(limits.tolerance, least))


def usual_spread(metric: str, spec: Spec, settings: Settings) -> float:
    """Return the usual standard deviation of a log metric between two runs of the same code."""
    if metric == "peak_memory_bytes":
        return MEMORY_SPREAD
    if isinstance(spec, RunSpec) or (isinstance(spec, Call) and not spec.captured):
        return settings.call_spread
    quiet = spec.captured or isinstance(spec, CopySpec) or settings.hardware == "cpu"
    return settings.run_spread if quiet else settings.noisy_run_spread

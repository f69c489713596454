"""The parts of a training step, the GPUs' peak FLOP/s and their use, and the cost of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpperf.analysis.scaling import strong_speedup, weak_speedup

SHORTEST_FRACTION = 0.01  # a shorter part of a step has no speedup

# The peak floating point operations per second without sparsity, by the GPU's name in the driver
# and by precision, from NVIDIA's data sheets. fp32 is that of the CUDA cores.
_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
_VOLTA = {"fp16": 125e12, "fp32": 15.7e12}
PEAK_FLOPS_PER_SECOND: dict[str, Mapping[str, float]] = {
    "NVIDIA B200": {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12},
    "NVIDIA H200": _HOPPER,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12},
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "Tesla V100-SXM2-16GB": _VOLTA,
    "Tesla V100-SXM2-32GB": _VOLTA,
}


def peak_flops_per_second(gpu: str | None, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU, by its name in the driver; None for an unknown GPU."""
    return PEAK_FLOPS_PER_SECOND.get(gpu or "", {}).get(precision)


def mfu(flops: float, step_seconds: float, peak_flops_per_second: float) -> float:
    """Return the model FLOPs utilization, flops / (step_seconds * peak_flops_per_second).

    This is the fraction of the device's peak that a step's forward and backward pass need
    (Chowdhery et al., PaLM, 2022, appendix B).
    """
    return flops / (step_seconds * peak_flops_per_second)


def parts_without_waiting(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds of each step part on the rank that waits least for other ranks' gradients.

    The input is `parts[name][rank]`. Steps of synchronized ranks take equally long on all of them.
    """
    return {part: seconds[least_waiting_rank(parts)] for part, seconds in parts.items()}


def least_waiting_rank(parts: Mapping[str, Sequence[float]]) -> int:
    """Return the rank with the shortest gradient synchronization."""
    waits = parts.get("gradient_sync", (0.0,))
    return min(range(len(waits)), key=waits.__getitem__)


def part_speedups(
    on_one: Mapping[str, float], on_many: Mapping[str, float], N: int, *, weak: bool
) -> dict[str, float]:
    """Return the speedup of each step part over N devices, from its seconds on one device and on N.

    Weak scaling: N t(1) / t(N) with the same batch per rank. Strong scaling: t(1) / t(N) with the
    same global batch. A part that one of the two steps lacks has no speedup. Neither has a part
    shorter than `SHORTEST_FRACTION` of its step, because the ratio would be noise.
    """
    speedup = weak_speedup if weak else strong_speedup
    least_on_one, least_on_many = (SHORTEST_FRACTION * sum(parts.values()) for parts in (on_one, on_many))
    return {
        part: speedup(t1, on_many[part], N)
        for part, t1 in on_one.items()
        if t1 > least_on_one and on_many.get(part, 0.0) > least_on_many
    }


def straggler_spread(alone: Sequence[float]) -> float:
    """Return the fraction by which the slowest rank's step is longer than the fastest rank's.

    `alone[rank]` is the seconds of steps in which no rank waits for another.
    """
    return max(alone) / min(alone) - 1

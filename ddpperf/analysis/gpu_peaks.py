"""The peak FLOP/s of GPUs, and the fraction of the peak that a training step uses."""

from __future__ import annotations

from collections.abc import Mapping

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

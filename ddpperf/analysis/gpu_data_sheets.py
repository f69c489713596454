"""What data sheets say of GPUs: peak FLOP/s and NVLinks."""

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

# Parts of the names of GPUs, with the generation and the rate of one NVLink. Source: NVIDIA's data
# sheets, which give the sum of all links in both directions, such as 900 GB/s for 18 links of an H200.
# GA102's white paper: 14.0625 GB/s. Drivers report rates with coding and error correction, and version
# 5.0 for some GPUs with NVLink 4.
NVLINKS = {
    ("P100",): (1, 20e9),
    ("V100", "TITAN RTX", "Quadro RTX"): (2, 25e9),
    ("A100", "A800", "A30"): (3, 25e9),
    ("A40", "A4500", "A5000", "A5500", "A6000", "RTX 3090"): (3, 14.0625e9),
    ("H100", "H200", "H800", "H20"): (4, 25e9),
    ("B100", "B200", "B300"): (5, 50e9),
}


def peak_flops_per_second(gpu: str | None, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU, by its name in the driver; None for an unknown GPU."""
    return PEAK_FLOPS_PER_SECOND.get(gpu or "", {}).get(precision)


def nvlink(name: str) -> tuple[int | None, float | None]:
    """Return the generation and the rate of one NVLink of a GPU with this name, or None for both."""
    known = (nvlink for names, nvlink in NVLINKS.items() if any(part in name for part in names))
    return next(known, (None, None))

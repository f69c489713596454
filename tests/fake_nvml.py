"""A driver with prepared GPUs, in the place of NVML.

Each function of NVML that takes a GPU refuses until a test gives its answer, as NVML refuses what a
GPU does not support. It also refuses what is no handle, and arguments that are no numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.machine.gpu_description import Gpu

NOTHING = object()
ALLOWED = {  # the arguments that a function takes, besides the handle
    "nvmlDeviceGetMemoryInfo": {pynvml.nvmlMemory_v2},
    "nvmlDeviceGetTemperature": {pynvml.NVML_TEMPERATURE_GPU},
    "nvmlDeviceGetTotalEnergyConsumption": set(),
    "nvmlDeviceGetPowerUsage": set(),
}


@dataclass(eq=False)
class FakeGpu:
    """One GPU. answers: of NVML's functions, by name; a function of further arguments, or a value."""

    gpu: Gpu
    answers: dict[str, Any] = field(default_factory=dict)


def install(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[FakeGpu]) -> None:
    """Let this test's NVML have these GPUs only."""
    for name in dir(pynvml):
        function = getattr(pynvml, name)
        if name.startswith("nvmlDeviceGet") and inspect.isfunction(function):
            monkeypatch.setattr(pynvml, name, _answering(name))
    known = {fake.gpu.uuid: fake for fake in gpus}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: known.get(uuid) or _refuse())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: gpus[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda fake: fake.gpu.uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda fake: fake.gpu.name)


def _answering(name: str) -> Callable[..., Any]:
    def answer(handle: object, *arguments: object) -> Any:
        if not isinstance(handle, FakeGpu):
            return _refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not all(isinstance(argument, int | list) for argument in arguments):
            return _refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if name in ALLOWED and not set(arguments) <= ALLOWED[name]:
            return _refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = handle.answers.get(name, NOTHING)
        if found is NOTHING:
            return _refuse()
        return found(*arguments) if callable(found) else found

    return answer


def field_values(values: Mapping[int, int]) -> Callable[[list[int]], list[SimpleNamespace]]:
    """Return an answer of nvmlDeviceGetFieldValues that knows these fields; it refuses each other."""

    def answer(fields: list[int]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=pynvml.NVML_SUCCESS if field in values else pynvml.NVML_ERROR_NOT_SUPPORTED,
                value=SimpleNamespace(uiVal=values.get(field, 0), ullVal=values.get(field, 0)),
            )
            for field in fields
        ]

    return answer


def training(index: int = 0, **answers: Any) -> FakeGpu:
    """An H200 that trains: 97% busy, at 612.5 W, with an energy counter."""
    usual = {
        "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
        "MemoryInfo": SimpleNamespace(used=20_000_000_000, total=150_754_820_096),
        "ClockInfo": lambda kind: 1980,
        "Temperature": 55,
        "FieldValues": field_values({pynvml.NVML_FI_DEV_POWER_INSTANT: 612_500}),
        "PowerUsage": 600_000,
        "TotalEnergyConsumption": 1_000_000,
    }
    return healthy(index, **usual | answers)


def refuses(code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> Callable[..., Any]:
    """Return an answer with which the driver refuses a function."""
    return lambda *arguments: _refuse(code)


def _refuse(code: int = pynvml.NVML_ERROR_NOT_SUPPORTED) -> Any:
    raise pynvml.NVMLError(code)


def healthy(index: int = 0, **answers: Any) -> FakeGpu:
    """An idle H200 with nothing to complain about, except for the given answers."""
    gpu = Gpu(
        name="NVIDIA H200",
        uuid=f"GPU-{index}",
        memory_bytes=150_754_820_096,
        power_limit_watts=700.0,
        nvlinks=18,
        nvlink_bytes_per_second=450e9,
        driver="580.159.04",
        numa_node=0,
    )
    usual = {
        "nvmlDeviceGetNvLinkState": lambda link: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetApplicationsClock": lambda kind: 1980,
        "nvmlDeviceGetDefaultApplicationsClock": lambda kind: 1980,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
        "nvmlDeviceGetComputeRunningProcesses": [],
    }
    return FakeGpu(gpu, usual | {f"nvmlDeviceGet{name}": answer for name, answer in answers.items()})

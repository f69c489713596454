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
        if name.startswith("nvmlDeviceGet") and inspect.isfunction(getattr(pynvml, name)):
            monkeypatch.setattr(pynvml, name, _answering(name))
    known = {fake.gpu.uuid: fake for fake in gpus}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: known.get(uuid) or refuses())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: gpus[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda fake: fake.gpu.uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda fake: fake.gpu.name)


def _answering(name: str) -> Callable[..., Any]:
    def answer(handle: object, *arguments: object) -> Any:
        if not isinstance(handle, FakeGpu) or (name in ALLOWED and not ALLOWED[name].issuperset(arguments)):
            return refuses()
        assert all(isinstance(argument, int | list) for argument in arguments)
        found = handle.answers.get(name, refuses)
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


def refuses(*arguments: object) -> Any:
    """The answer with which the driver refuses a function."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def healthy(index: int = 0, **answers: Any) -> FakeGpu:
    """An idle H200 with nothing to complain about, except for the given answers."""
    gpu = Gpu(
        name="NVIDIA H200",
        uuid=f"GPU-{index}",
        memory_bytes=150_754_820_096,
        power_limit_watts=700.0,
        driver="580.159.04",
        numa_node=0,
        nvlink_ends={"switch": 18},
    )
    usual = {
        "NvLinkState": lambda link: 1 if link < 18 else refuses(),
        "MaxPcieLinkGeneration": 5,
        "MaxPcieLinkWidth": 16,
        "CurrPcieLinkWidth": 16,
        "EnforcedPowerLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "CurrentClocksEventReasons": 1,
        "ComputeRunningProcesses": [],
    }
    return FakeGpu(gpu, {f"nvmlDeviceGet{name}": answer for name, answer in (usual | answers).items()})


def training(index: int = 0, **answers: Any) -> FakeGpu:
    """An H200 that trains: 97% busy, at 612.5 W, with an energy counter."""
    usual = {
        "UtilizationRates": SimpleNamespace(gpu=97, memory=40),
        # the first version counts what the driver reserves, too
        "MemoryInfo": lambda *version: SimpleNamespace(used=20e9 if version else 20.6e9, total=150e9),
        "ClockInfo": lambda kind: {pynvml.NVML_CLOCK_SM: 1980}[kind],
        "Temperature": 55,
        "FieldValues": field_values({pynvml.NVML_FI_DEV_POWER_INSTANT: 612_500}),
        "PowerUsage": 600_000,
        "TotalEnergyConsumption": 1_000_000,
    }
    return healthy(index, **usual | answers)

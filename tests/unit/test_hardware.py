"""Hardware as the driver and the kernel report it, and the hardware key."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pynvml
import pytest
import torch

from ddpperf.machine import hardware
from ddpperf.machine.gpu_description import Gpu, first_unmapped, select_visible, visible_gpus
from ddpperf.machine.hardware import Machine, computes_bf16, core_count, cpu_model, differences, hardware_key
from ddpperf.specs import AllReduceSpec
from tests.fake_nvml import healthy


def gpu(uuid: str, name: str = "NVIDIA H200") -> Gpu:
    """A GPU without NVLinks and without PCIe."""
    return replace(healthy().gpu, uuid=uuid, name=name, nvlink_ends={})


GPUS = [gpu(uuid) for uuid in ("GPU-aa10", "GPU-aa20", "GPU-bb30", "GPU-cc40")]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("3,1", [3, 1]),
        ("1,-1,2", [1]),  # what follows an unknown one is hidden
        ("1,1", [1]),
        ("GPU-bb30,0", [2, 0]),
        ("3,GPU-aa,1", [3]),  # the beginning of two
        ("MIG-1234", []),
    ],
)
def test_visible_devices_are_numbered_as_in_cuda(visible: str | None, indices: list[int]) -> None:
    assert select_visible(GPUS, visible) == [GPUS[index] for index in indices]


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (["NVIDIA H200"] * 4, "h200x4"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100-sxm4-80gbx8"),
        (["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], "h200x1+a100-sxm4-80gbx1"),
    ],
)
def test_gpus_give_the_key(names: list[str], key: str) -> None:
    assert hardware_key("cuda", [gpu(f"GPU-{index}", name) for index, name in enumerate(names)]) == key


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for the kernel's file `cpuinfo`, of two cores."""
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(hardware, "core_count", lambda: 2)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    return tmp_path


def cpuinfo(**facts: str) -> str:
    lines = [f"{name.replace('_', ' ')}\t: {value}\n" for name, value in facts.items()]
    return "".join([*lines, "power management:\n", "\n"]) * 2


CLOUD = {"vendor_id": "GenuineIntel", "cpu_family": "6", "model": "85", "stepping": "7"}
ARM = {"CPU_implementer": "0x41", "CPU_architecture": "8", "CPU_part": "0xd0c"}


@pytest.mark.parametrize(
    ("name", "facts", "design", "key"),
    [
        ("Intel(R) Xeon(R) Platinum 8581C CPU @ 2.30GHz", CLOUD, "", "cpu2-xeon-8581c"),
        ("AMD EPYC 9654 96-Core Processor", CLOUD, "", "cpu2-epyc-9654"),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", CLOUD, "", "cpu2-i7-8700k"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", CLOUD, " 6 85 7", "cpu2-xeon-6-85-7"),  # no number of a model
        ("aarch64", ARM, " 0x41 0xd0c", "cpu2-aarch64-0x41-0xd0c"),
    ],
)
def test_cpu_gives_the_key(system: Path, name: str, facts: dict[str, str], design: str, key: str) -> None:
    named = facts if facts is ARM else facts | {"model_name": name}
    (system / "cpuinfo").write_text(cpuinfo(**named))
    assert cpu_model() == f"{name}{design}"
    assert hardware_key("cpu", GPUS) == key


@pytest.mark.parametrize(
    ("flags", "computes"),
    [
        ({"flags": "fpu sse avx2 avx512f avx512dq avx512bw avx512vl"}, True),
        ({"flags": "fpu sse avx2 avx512f avx512dq"}, False),
        ({"Features": "fp asimd bf16"}, True),
        ({}, True),
    ],
)
def test_cpu_flags_decide_about_bf16(system: Path, flags: dict[str, str], computes: bool) -> None:
    (system / "cpuinfo").write_text(cpuinfo(**CLOUD, **flags))
    assert computes_bf16() is computes


def test_torch_agrees_about_bf16() -> None:
    assert computes_bf16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.5, 3), (0.5, 1), (64.0, 8)])
def test_cores_are_limited_by_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    assert core_count() == cores


def test_machine_names_gpus_of_one_name() -> None:
    assert Machine(gpus=tuple(GPUS)).gpu == "NVIDIA H200"
    assert Machine(gpus=(GPUS[0], gpu("GPU-2", "NVIDIA H100 PCIe"))).gpu is Machine().gpu is None


def test_unmapped_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(one: int, other: int, capability: int) -> int:
        assert (ctypes.c_int(capability).value,) == pynvml.NVML_P2P_CAPS_INDEX_READ, "as the driver takes it"
        apart = (one, other) in ((0, 3), (1, 2))
        return int(pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED if apart else pynvml.NVML_P2P_STATUS_OK)

    def reason(world_size: int) -> str:
        spec = AllReduceSpec(world_size=world_size, nbytes=1024, algorithm="two_shot")
        return Machine(device="cuda", gpus=tuple(GPUS)).mapping_reason(spec)

    assert reason(4) == "", "no driver"
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", [each.uuid for each in GPUS].index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    assert reason(2) == "", "GPU 2 and GPU 3 are not used"
    assert "GPU 1 and GPU 2 cannot read each other's" in reason(3)
    assert "GPU 0 and GPU 3 cannot read each other's" in reason(4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_driver_and_cuda_agree_about_mapping() -> None:
    able = all(
        torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(torch.cuda.device_count()), 2)
    )
    assert (first_unmapped(visible_gpus()) is None) == able


def test_environment_names_what_changes_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware.environment("cpu", [], tmp_path)
    assert before["executable"] == sys.executable
    (tmp_path / "usercustomize.py").write_text("import time\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    after = hardware.environment("cpu", [], tmp_path)
    found = differences(before, after)
    assert "OMP_NUM_THREADS was not set, is 7" in found
    assert [line for line in found if line.startswith(f"{tmp_path}/usercustomize.py was not set, is ")]
    assert "hidden" not in str(after)


def test_differences_leave_out_what_changes_no_time() -> None:
    then = {"commit": "one", "hostname": "a", "torch": "2.11.0", "variables": {"OMP_A": "1", "OMP_B": "2"}}
    now = {"commit": "two", "hostname": "b", "torch": "2.12.0", "variables": {"OMP_A": "1", "OMP_C": "3"}}
    assert differences(then, now | {"new": 1}) == [
        "torch was 2.11.0, is 2.12.0",
        "OMP_B was 2, is not set",
        "OMP_C was not set, is 3",
    ]
    assert differences(then, then) == []

"""The rates of links: what drivers report, and which links join the GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.machine.gpu_description import Gpu, visible_gpus
from ddpperf.machine.hardware import Machine
from ddpperf.machine.links import PCIE_LANE_RATES, gpu_link, rates_in_words, rates_to_json
from tests.fake_nvml import FakeGpu, healthy, install, refuses

ADDRESSES = [f"00000000:{number}0:00.0" for number in range(1, 9)]


def driven(name: str, count: int, address: str = ADDRESSES[0], **answers: Any) -> FakeGpu:
    """A GPU with active NVLinks to a switch, unless `answers` has other ends of each link."""
    usual = {"NvLinkRemoteDeviceType": pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH} | answers
    per_link = {
        function: lambda link, answer=answer: answer if 0 <= link < count else refuses()
        for function, answer in (usual | {"NvLinkState": 1}).items()
    }
    fake = healthy(0, PciInfo=SimpleNamespace(busId=address), **per_link)
    fake.gpu = replace(fake.gpu, name=name, uuid=f"GPU-{address}")
    return fake


def described(monkeypatch: pytest.MonkeyPatch, *fakes: FakeGpu) -> list[Gpu]:
    install(monkeypatch, fakes)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return visible_gpus()


@pytest.mark.parametrize(
    ("name", "count", "rate"),
    [
        ("NVIDIA H200", 18, "450 GB/s (nominal, NVLink 4, 18 x 25 GB/s)"),
        ("NVIDIA A100-SXM4-80GB", 12, "300 GB/s (nominal, NVLink 3, 12 x 25 GB/s)"),
        ("NVIDIA A40", 4, "56.25 GB/s (nominal, NVLink 3, 4 x 14.06 GB/s)"),
        ("NVIDIA GB200", 18, "900 GB/s (nominal, NVLink 5, 18 x 50 GB/s)"),
        ("NVIDIA Unheard Of", 18, "None"),
        ("NVIDIA L40S", 0, "63.01 GB/s (nominal, PCIe 5.0 x16)"),
    ],
)
def test_rate_is_that_of_all_nvlinks(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, rate: str
) -> None:
    (gpu,) = described(monkeypatch, driven(name, count))
    assert gpu.nvlink_ends == ({"switch": count} if count else {})
    assert str(gpu_link([gpu, replace(gpu, uuid="another")])) == rate


def test_pcie_rates_are_without_coding() -> None:
    coding = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}
    for generation, transfers in zip(coding, (2.5e9, 5e9, 8e9, 16e9, 32e9, 64e9), strict=True):
        exact = transfers / 8 * coding[generation]
        assert PCIE_LANE_RATES[generation] == pytest.approx(exact, rel=1e-3)


def joined(*ends: Mapping[str, int]) -> list[Gpu]:
    """GPUs with these other ends of their NVLinks, of 25 GB/s each."""
    return [
        replace(
            healthy(0).gpu,
            name="NVIDIA A100 80GB PCIe",
            uuid=address,
            pci_address=address,
            nvlink_ends=others,
            pcie_generation=4,
            pcie_width=16,
        )
        for address, others in zip(ADDRESSES, ends, strict=False)
    ]


PAIRS = [{ADDRESSES[number ^ 1]: 12} for number in range(4)]  # NVLink bridges between 0 and 1, 2 and 3


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (joined({"switch": 12}, {"switch": 12}), "300 GB/s (nominal, NVLink 3, 12 x 25 GB/s)"),
        (joined({"switch": 12}, {"switch": 11}), "275 GB/s (nominal, NVLink 3, 11 x 25 GB/s)"),
        (joined(*PAIRS[:2]), "300 GB/s (nominal, NVLink 3, 12 x 25 GB/s)"),
        (joined(*PAIRS), "31.5 GB/s (nominal, PCIe 4.0 x16)"),
        (joined({}, {}), "31.5 GB/s (nominal, PCIe 4.0 x16)"),
        (joined({ADDRESSES[1]: 2, "cpu": 3}, {ADDRESSES[0]: 2, "cpu": 3}),
         "50 GB/s (nominal, NVLink 3, 2 x 25 GB/s)"),
        (joined({ADDRESSES[1]: 2}, {ADDRESSES[0]: 2, ADDRESSES[2]: 1}, {ADDRESSES[1]: 1}),
         "25 GB/s (nominal, NVLink 3, 1 x 25 GB/s)"),
        (joined({"switch": 12}), "None"),
    ],
)  # fmt: skip
def test_link_is_what_joins_the_gpus(gpus: list[Gpu], text: str) -> None:
    assert str(gpu_link(gpus)) == text


def test_slowest_or_unknown_gpu_decides() -> None:
    first, second = joined({}, {})
    assert str(gpu_link([first, replace(second, pcie_width=8)])) == "15.75 GB/s (nominal, PCIe 4.0 x8)"
    assert gpu_link([first, replace(second, pcie_width=None)]) is None
    gpus = [replace(gpu, name="NVIDIA Unheard Of") for gpu in joined({"switch": 4}, {"switch": 4})]
    assert gpu_link(gpus) is None, "the rate of NVLink is not that of PCIe"


def test_bridged_pairs_have_a_link_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML tells the other end of each link; four GPUs in bridged pairs meet over PCIe."""
    fakes = [
        driven(
            "NVIDIA A100 80GB PCIe",
            12,
            address,
            NvLinkRemoteDeviceType=pynvml.NVML_NVLINK_DEVICE_TYPE_GPU,
            NvLinkRemotePciInfo=SimpleNamespace(busId=ADDRESSES[number ^ 1]),
        )
        for number, address in enumerate(ADDRESSES[:4])
    ]
    found = Machine(device="cuda", gpus=tuple(described(monkeypatch, *fakes)))
    rates = {world_size: found.link(world_size) for world_size in (1, 2, 4)}
    assert rates[1] is None
    assert rates_in_words(json.loads(json.dumps(rates_to_json(rates)))) == (
        "link of 2 devices 300 GB/s (nominal, NVLink 3, 12 x 25 GB/s); "
        "link of 4 devices 63.01 GB/s (nominal, PCIe 5.0 x16)"
    )

"""What real GPUs report: their links, their users, their pace, and their utilization and energy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from ddpperf.doctor.findings import Level
from ddpperf.doctor.gpus import other_users
from ddpperf.machine.gpu_description import gpu_handles, visible_gpus
from ddpperf.machine.links import PCIE_LANE_RATES, gpu_link
from ddpperf.plugin.device_guard import Devices
from ddpperf.specs import RunSpec
from ddpperf.workers.gpu_pace import GpuPace
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.gpu.shared import ALONE, GPU, two_gpus
from tests.project import HANG_SECONDS, REPOSITORY

NBYTES = 2**28
LEAST_USED = 0.4  # of the link's rate, by one copy; NVLink's packets alone take a fifth


def test_driver_describes_links() -> None:
    for gpu in visible_gpus():
        print(gpu)
        assert gpu.pci_address
        assert gpu.pcie_generation in PCIE_LANE_RATES
        assert gpu.pcie_width in (1, 2, 4, 8, 16)


@two_gpus
def test_copy_between_gpus_is_near_the_rate() -> None:
    link = gpu_link(visible_gpus()[:2])
    assert link is not None
    source, target = (torch.zeros(NBYTES, dtype=torch.uint8, device=f"cuda:{index}") for index in (0, 1))
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - began)
    used = NBYTES / min(seconds) / link.bytes_per_second
    print(f"{link}: {used:.0%}")
    assert LEAST_USED < used < 1


# --- the doctor

HOLDING = "import torch; held = torch.ones(1, device='cuda'); print('held', flush=True); input()"


@pytest.mark.slow
def test_process_that_holds_a_gpu_is_found() -> None:
    """Tests before may hold the GPU, too."""

    def users() -> set[str]:
        named = re.search(r"used by process (.*)", other_users(next(iter(gpu_handles(visible_gpus())))))
        return set(re.findall(r"\d+", re.sub(r"\(.*?\)", "", named[1]))) if named else set()

    before = users()
    command = [sys.executable, "-c", HOLDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = users()
        holder.kill()
    assert len(found - before) == 1


def test_doctor_finds_gpus_links_and_ranks() -> None:
    """With more time than by default: on a machine with a slow CPU, two ranks need 10 s to start."""
    command = [sys.executable, "-m", "ddpperf.doctor", "--json", "--seconds", "60"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_SECONDS)
    print(ended.stdout)
    found = {finding["subject"]: finding for finding in json.loads(ended.stdout)["findings"]}
    assert str(torch.cuda.device_count()) in found["GPUs"]["text"]
    for subject in ("GPUs", "GPU links", "torch", "two ranks"):
        assert found[subject]["level"] == Level.GOOD, found[subject]
    assert "NCCL" in found["torch"]["text"]


# --- the two paces at which a GPU replays CUDA graphs

# In a process of its own, because a process returns to the fast pace only once.
_PROCESS = """
import json, torch, torchvision
from ddpperf.workers.gpu_pace import GpuPace

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
pace = GpuPace(device)
found = {"start": pace.slowdown()}
images = torch.randn(32, 3, 32, 32, device=device)
model = torchvision.models.resnet18().to(device)
with torch.autocast("cuda", torch.bfloat16):
    model(images).sum().backward()
found["convolution"] = pace.slowdown()
pace.restore()
found["restored"] = pace.slowdown()
model(images).sum().backward()  # torch still works in its own context
found["later"] = pace.slowdown()
print(json.dumps(found))
"""


def test_second_context_restores_the_fast_pace() -> None:
    output = subprocess.run(
        [sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    print(found)
    assert all(found[when] < 1.05 for when in ("start", "restored", "later")), found
    if found["convolution"] < 1.08:
        pytest.skip(f"this GPU has one pace: {found}")


def test_a_slow_launch_does_not_look_like_the_slow_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = GpuPace(GPU)
    replay = pace._graph.replay

    def launch_slowly() -> None:
        end = time.perf_counter() + 1e-4
        while time.perf_counter() < end:
            pass
        replay()

    def run_slowly() -> None:
        replay()
        replay()

    monkeypatch.setattr(pace, "_graph", SimpleNamespace(replay=launch_slowly))
    assert pace.slowdown() < 1.02
    monkeypatch.setattr(pace, "_graph", SimpleNamespace(replay=run_slowly))
    assert pace.slowdown() > 1.5


# --- utilization and energy


def test_utilization_and_energy_of_a_training() -> None:
    """The energy counter agrees with the integral of the sampled power."""
    fields = {"per_rank_batch_size": 512, "epoch_images": 50_000, "test_images": 10_000}
    spec = RunSpec(**vars(ALONE) | fields | {"epochs": 10, "rate": 0.1})  # about 7 s on an H200
    options = SetOptions(size=1, device="cuda", rounds=1, deadline_seconds=120)
    with Pool(options, recorder=Devices(visible_gpus(), 1).recorder) as pool:
        measured = pool.measure(spec)
    usage = measured.samples[0].usage
    assert usage is not None
    seconds = sum(measured.all_step_seconds())
    print(f"{seconds:.1f} s, {usage.joules} J, means {usage.mean}")
    watts, busy, used = (
        usage.mean[name][0] for name in ("power_watts", "gpu_utilization", "gpu_memory_bytes")
    )
    assert watts is not None
    assert usage.joules[0] == pytest.approx(watts * seconds, rel=0.05)
    assert busy is not None
    assert 0.5 < busy <= 1
    assert used is not None
    assert 2**29 < used < torch.cuda.mem_get_info()[1]

"""The doctor on real GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from ddpperf.doctor import gpus
from ddpperf.doctor.findings import Level
from ddpperf.machine.gpu_description import visible_gpus
from tests.project import HANG_SECONDS, REPOSITORY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HOLDING = "import torch; held = torch.ones(1, device='cuda'); print('held', flush=True); input()"


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds the first GPU, and ends when its input closes."""
    command = [sys.executable, "-c", HOLDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process
        process.kill()


def users_of_first_gpu() -> set[str]:
    """Return the ids of the processes that the doctor names; tests before may hold the GPU here."""
    users = gpus.load(visible_gpus())
    named = re.search(r"GPUs? 0\b[^;]*?used by process ([^;]*)", users.text)
    assert (users.level is Level.WARNING) == ("busy" in users.text or "used by" in users.text)
    return set(re.findall(r"\d+", re.sub(r"\(.*?\)", "", named[1]))) if named else set()


def test_process_that_holds_a_gpu_is_found(holder: subprocess.Popen[str]) -> None:
    before = users_of_first_gpu()
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert len(users_of_first_gpu() - before) == 1


def found_by_doctor(*options: str) -> dict[str, dict[str, str]]:
    """Run the doctor, and return its findings by their subject."""
    command = [sys.executable, "-m", "ddpperf.doctor", "--json", *options]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_SECONDS)
    print(ended.stdout)
    return {finding["subject"]: finding for finding in json.loads(ended.stdout)["findings"]}


def test_doctor_finds_gpus_links_and_ranks() -> None:
    """With more time than by default: on a machine with a slow CPU, two ranks need 10 s to start."""
    found = found_by_doctor("--seconds", "60")
    assert str(torch.cuda.device_count()) in found["GPUs"]["text"]
    for subject in ("GPUs", "GPU links", "torch", "two ranks"):
        assert found[subject]["level"] == Level.GOOD, found[subject]
    assert "NCCL" in found["torch"]["text"]

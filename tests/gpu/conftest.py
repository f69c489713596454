"""What all tests on GPUs need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests import faults


@pytest.fixture(scope="session", autouse=True)
def as_in_a_rank() -> Iterator[None]:
    """Skip without a GPU, and stop CUPTI after each profile, as ranks do.

    A CUPTI that still runs slows every launch, and the next profile may be empty.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "1")
        yield


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    """A live pool of a rank on each of the first two GPUs, with three rounds, for all tests.

    To start ranks takes about 10 s. A set that a test breaks is replaced for the next one.
    """
    yield from _pool(rounds=3)


@pytest.fixture(scope="session")
def exact_gpus() -> Iterator[Pool]:
    """As `gpus`, with the ten rounds that a comparison of times within 2% needs."""
    yield from _pool(rounds=10)


def _pool(rounds: int) -> Iterator[Pool]:
    size = min(2, torch.cuda.device_count())
    options = SetOptions(size=size, device="cuda", rounds=rounds, deadline_seconds=120)
    with Pool(options, sides=(Side(environment=faults.ALLOWED),)) as pool:
        yield pool

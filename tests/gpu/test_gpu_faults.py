"""Faults of ranks on GPUs: deaths are reported at once, hangs name the collective, the next set measures."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ddpperf.specs import AllReduceSpec, Fault
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SPEC = AllReduceSpec(world_size=2, nbytes=2**20)
DEADLINE_SECONDS = 15.0  # the first step of a process may take 5 s


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool whose ranks know the short deadline, which their watchdog has, too."""
    options = SetOptions(size=2, device="cuda", rounds=1, deadline_seconds=DEADLINE_SECONDS)
    with Pool(options) as pool:
        yield pool


def failure_of(pool: Pool, spec: AllReduceSpec, stopped_rank: int | None = None) -> str:
    """Measure a spec that fails; the next set must measure."""
    pool.measure(SPEC)
    (live,) = pool.live_sets()
    if stopped_rank is not None:
        os.kill(live.pids[stopped_rank], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SetFailure) as caught:
        pool.measure(spec)
    assert time.monotonic() - began < DEADLINE_SECONDS + 4
    assert not live.alive
    assert pool.measure(SPEC).samples
    return str(caught.value)


def test_killed_rank_is_named_before_its_peer(pool: Pool) -> None:
    failure = failure_of(pool, replace(SPEC, fault=Fault(kind="kill", rank=1)))
    assert re.match(r"rank 1 of set A\d+ was killed by SIGKILL \(at sample\)\n", failure)


def test_hang_names_the_late_rank_and_the_collective(pool: Pool) -> None:
    failure = failure_of(pool, replace(SPEC, fault=Fault(kind="hang", rank=1)))
    print(failure)
    assert "did not answer within 15 s (at sample)" in failure
    assert re.search(r"\nrank 0: (sleeping|running), waits in \w+ number \d+, at ", failure)
    assert re.search(r"\nrank 1: sleeping, waits in no collective, at .* in inject\n", failure)
    assert re.search(r"\nrank 1 is late for \w+ number \d+\n", failure)


@pytest.mark.slow
def test_stopped_rank_is_named_late(pool: Pool) -> None:
    failure = failure_of(pool, SPEC, stopped_rank=1)
    print(failure)
    assert "\nrank 1: stopped, and printed no stacks\n" in failure
    assert "\nrank 1 is late for " in failure

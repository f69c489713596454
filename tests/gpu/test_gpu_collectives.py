"""Collectives on GPUs pass the check of their results, and faults of ranks on GPUs are named."""

from __future__ import annotations

import re
import time

import pytest
import torch

from ddpperf.collectives.calls import AllReduce
from ddpperf.specs import AllReduceSpec, CallExecution, CollectiveSpec, TrainingSpec
from ddpperf.specs.collective import ONE_KERNEL, OWN_ALGORITHMS, SYMMETRIC, Algorithm, CollectiveKind
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests import faults
from tests.faults import failing
from tests.gpu.shared import GPU, two_gpus

NBYTES = 2**18 - 16
MAPPED: tuple[Algorithm, ...] = ("copy_engine", "low_latency")
DEADLINE_SECONDS = 15.0  # the first step of a process may take 5 s


@pytest.mark.parametrize(
    ("algorithm", "execution", "in_place", "nbytes"),
    [
        *((algorithm, "graph", True, NBYTES) for algorithm in ("backend", *SYMMETRIC)),
        ("backend", "graph", False, NBYTES),
        ("two_shot", "graph", False, NBYTES),
        ("two_shot", "eager", True, NBYTES),
        *((algorithm, "graph", True, 4) for algorithm in MAPPED),  # fewer elements than ranks
        *((algorithm, "graph", True, 2**22 + 4) for algorithm in MAPPED),  # parts of different sizes
        ("backend", "graph", True, 2**28),  # filling the buffer takes milliseconds
        *((algorithm, "eager", True, 2**23 + 4) for algorithm in OWN_ALGORITHMS),
    ],
)
@two_gpus
def test_all_reduce_passes_its_check(
    gpus: Pool, algorithm: Algorithm, execution: CallExecution, in_place: bool, nbytes: int
) -> None:
    """tests/ranks has more ranks and lengths, on the CPU."""
    spec = AllReduceSpec(
        world_size=2, nbytes=nbytes, algorithm=algorithm, execution=execution, in_place=in_place
    )
    measured = gpus.measure(spec)
    (sample,) = measured.samples
    if algorithm in ONE_KERNEL and nbytes == NBYTES:
        kernel_seconds = min(sample.counters["kernel_seconds"])
        assert 0 < kernel_seconds < 1e-3
        if algorithm == "backend" and in_place:
            # On the device's default stream a replayed one would wait 6 us for the next.
            assert measured.median_step_seconds()[sample.set] - kernel_seconds < 3e-6


@two_gpus
@pytest.mark.parametrize(
    ("kind", "execution", "nbytes"),
    [
        *((kind, "graph", NBYTES) for kind in ("reduce_scatter", "all_gather", "broadcast", "all_to_all")),
        ("reduce_scatter", "eager", NBYTES),
        ("all_gather", "graph", 2**28),
    ],
)
def test_collective_passes_its_check(
    gpus: Pool, kind: CollectiveKind, execution: CallExecution, nbytes: int
) -> None:
    spec = CollectiveSpec(world_size=2, nbytes=nbytes, kind=kind, execution=execution)
    assert gpus.measure(spec).iterations >= 1


def test_an_all_reduce_needs_the_memory_of_two_buffers() -> None:
    """And of a part that is checked. In a repeated A/B measurement, twelve processes use a GPU."""
    spec = AllReduceSpec(world_size=2, nbytes=2**30)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call = AllReduce(spec, rank=0, device=GPU)
    call.start_round()
    call.buffer.mul_(2).add_(2.0**-120)  # the sum: rank 1 starts with 2**-120 more
    call.end_round(1)
    assert torch.cuda.max_memory_allocated() - before < 2.3 * spec.nbytes


@two_gpus
@pytest.mark.parametrize(
    "algorithm",
    ["two_shot", *(pytest.param(name, marks=pytest.mark.slow) for name in MAPPED)],
)
def test_symmetric_memory_survives_changes_of_group(gpus: Pool, algorithm: Algorithm) -> None:
    """The same ranks after they left their group, and new ranks after a rank was killed."""

    def measured() -> str:
        spec = AllReduceSpec(world_size=2, nbytes=NBYTES, algorithm=algorithm, execution="graph")
        (sample,) = gpus.measure(spec).samples
        return sample.set

    first = measured()
    gpus.measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single"))
    assert measured() == first
    killed = r"^rank 1 of set A\d+ was killed by SIGKILL \(at sample\)\n"
    with pytest.raises(SetFailure, match=killed):
        gpus.measure(failing("kill"))
    assert measured() != first


@two_gpus
@pytest.mark.slow
def test_hang_names_the_late_rank_and_the_collective() -> None:
    options = SetOptions(size=2, device="cuda", rounds=1, deadline_seconds=DEADLINE_SECONDS)
    spec = AllReduceSpec(world_size=2, nbytes=2**20)
    with Pool(options, sides=(Side(environment=faults.ALLOWED),)) as pool:
        pool.measure(spec)
        (live,) = pool.live_sets()
        began = time.monotonic()
        with pytest.raises(SetFailure, match=r"did not answer within 15 s \(at sample\)") as caught:
            pool.measure(failing("hang"))
        assert time.monotonic() - began < DEADLINE_SECONDS + 4
        assert not live.alive
    print(failure := str(caught.value))
    assert re.search(r"\nrank 0: (sleeping|running), waits in \w+ number \d+, at ", failure)
    assert re.search(r"\nrank 1: sleeping, waits in no collective, at .* in sleep_for_ever\n", failure)
    assert re.search(r"\nrank 1 is late for \w+ number \d+\n", failure)

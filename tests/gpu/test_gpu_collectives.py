"""Collectives on GPUs pass the check of their results, eager and captured, in and out of place."""

from __future__ import annotations

import pytest
import torch

from ddpperf.collectives.calls import AllReduce
from ddpperf.results.samples import SLOW_PACE
from ddpperf.specs import (
    ONE_KERNEL,
    OWN_ALGORITHMS,
    SYMMETRIC,
    Algorithm,
    AllReduceSpec,
    CallExecution,
    CollectiveKind,
    CollectiveSpec,
    Fault,
    TrainingSpec,
)
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

NBYTES = 2**18 - 16


@pytest.mark.parametrize(
    ("algorithm", "execution", "in_place"),
    [
        *((each, "graph", True) for each in ("backend", *SYMMETRIC)),
        *((each, "graph", False) for each in ("backend", "two_shot", "low_latency")),
        ("two_shot", "eager", True),
    ],
)
def test_all_reduce_passes_its_check(
    gpus: Pool, algorithm: Algorithm, execution: CallExecution, in_place: bool
) -> None:
    spec = AllReduceSpec(
        world_size=2, nbytes=NBYTES, algorithm=algorithm, execution=execution, in_place=in_place
    )
    measured = gpus.measure(spec)
    (sample,) = measured.samples
    if algorithm in ONE_KERNEL:
        assert 0 < min(sample.counters["kernel_seconds"]) < 1e-3
    if (
        algorithm == "backend" and in_place
    ):  # on the device's default stream a replayed one would wait 6 us for the next
        assert measured.median_step_seconds()[sample.set] - min(sample.counters["kernel_seconds"]) < 3e-6


@pytest.mark.slow
def test_process_sets_do_not_disturb_what_others_time_at_their_end() -> None:
    """The time of an all_reduce's kernel, and the GPU's time for a step."""
    options = SetOptions(size=2, device="cuda", rounds=3, deadline_seconds=120)
    kernel = AllReduceSpec(world_size=2, nbytes=2**24, execution="graph")
    step = TrainingSpec(
        world_size=2,
        per_rank_batch_size=32,
        strategy="ddp",
        model="resnet18_cifar",
        input="device",
        execution="graph",
    )
    with Pool(options, sides=(Side(name="A"), Side(name="B")), replicates=3) as pool:
        for spec, counter in ((kernel, "kernel_seconds"), (step, "device_seconds")):
            measured = pool.measure(spec)
            seconds = measured.median_step_seconds()
            assert len(seconds) == 6
            for sample in measured.samples:
                assert max(sample.counters["graph_slowdown"]) < SLOW_PACE
                assert max(sample.counters[counter]) == pytest.approx(seconds[sample.set], rel=0.2)


@pytest.mark.parametrize(
    ("algorithm", "nbytes"),
    [
        ("copy_engine", 4),
        ("copy_engine", 2**22 + 4),
        pytest.param("low_latency", 2**28, marks=pytest.mark.slow),
    ],
)
def test_algorithms_in_mapped_memory_sum_any_length(gpus: Pool, algorithm: Algorithm, nbytes: int) -> None:
    """Also with fewer elements than ranks, and with parts of different sizes.

    test_gpu_low_latency has other lengths.
    """
    spec = AllReduceSpec(world_size=2, nbytes=nbytes, algorithm=algorithm, execution="graph")
    assert gpus.measure(spec).iterations >= 1


def test_large_buffer_is_ready_before_its_capture(gpus: Pool) -> None:
    """Filling it takes milliseconds, and it reuses the memory of its operands."""
    for _ in range(3):
        assert gpus.measure(AllReduceSpec(world_size=2, nbytes=2**28, execution="graph")).iterations >= 1


def test_an_all_reduce_needs_the_memory_of_two_buffers() -> None:
    """And of a part that is checked. In a repeated A/B measurement, twelve processes use a GPU."""
    spec = AllReduceSpec(world_size=2, nbytes=2**30)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call = AllReduce(spec, rank=0, device=torch.device("cuda", 0))
    call.start_round()
    call.buffer.mul_(2).add_(2.0**-120)  # the sum: rank 1 starts with 2**-120 more
    call.end_round(1)
    assert torch.cuda.max_memory_allocated() - before < 2.3 * spec.nbytes


@pytest.mark.parametrize("algorithm", OWN_ALGORITHMS)
def test_algorithms_work_on_nccl_messages(gpus: Pool, algorithm: Algorithm) -> None:
    """In pieces. tests/ranks tests them with more ranks, on the CPU."""
    spec = AllReduceSpec(world_size=2, nbytes=2**23 + 4, algorithm=algorithm)
    assert gpus.measure(spec).iterations >= 1


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


@pytest.mark.parametrize(
    "algorithm",
    ["two_shot", *(pytest.param(each, marks=pytest.mark.slow) for each in ("low_latency", "copy_engine"))],
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
    with pytest.raises(SetFailure):
        gpus.measure(AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind="kill", rank=1)))
    assert measured() != first


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_mapped_memory_changes_its_number_of_gpus() -> None:
    """Ranks that were left out would wait for ever."""
    count = torch.cuda.device_count()
    with Pool(SetOptions(size=count, device="cuda", rounds=3, deadline_seconds=120)) as pool:
        for world_size in (*range(count, 1, -1), count):
            for algorithm in ("two_shot", "low_latency", "copy_engine"):
                spec = AllReduceSpec(
                    world_size=world_size, nbytes=2**20 + 4, algorithm=algorithm, execution="graph"
                )
                assert pool.measure(spec).iterations >= 1

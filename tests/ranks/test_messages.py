"""What real ranks send by each strategy: exactly the bytes of the parameters, and what else."""

from __future__ import annotations

import dataclasses

from ddpperf.specs import MessagesSpec, TrainingSpec
from ddpperf.workers.pool import Pool

DDP = MessagesSpec(world_size=2, per_rank_batch_size=4, strategy="ddp")
PARAMETERS = 4 * 11_689_512  # bytes of resnet18
SMALL = dataclasses.replace(DDP, model="resnet10_cifar")
SMALL_PARAMETERS = 4 * 78_002
BATCH_NORM_FLOATS, BATCH_NORMS = 2 * 4800, 20  # means and variances of resnet18; a counter of each


def sent(pool: Pool, spec: TrainingSpec) -> dict[str, float]:
    """Return rank 0's counters, which must equal rank 1's."""
    (sample,) = pool.measure(spec).samples
    counters = {name: ranks for name, ranks in sample.counters.items() if name != "communicator_seconds"}
    assert all(ranks[0] == ranks[1] for ranks in counters.values())
    return {name: ranks[0] for name, ranks in counters.items()}


def test_ddp_sends_gradients_and_buffers(two_ranks: Pool) -> None:
    buffers = 4 * BATCH_NORM_FLOATS + 8 * BATCH_NORMS
    counters = sent(two_ranks, DDP)
    assert counters["gradients: bytes"] == counters["parameter_bytes"] == PARAMETERS
    assert (counters["gradients: messages"], counters["buffers: messages"]) == (3, 2), (
        "by bucket; and by type"
    )
    buckets = [counters[f"bucket {number}: bytes"] for number in range(3)]
    assert sum(buckets) == PARAMETERS
    assert buckets[0] == 4 * 1000 * (512 + 1), "the last layer's, which is larger than the first bucket's MiB"
    assert counters["buffers: bytes"] == buffers
    assert (counters["metrics: messages"], counters["metrics: bytes"]) == (1, 4)
    start = counters["start initial state: bytes"]
    assert PARAMETERS + buffers <= start < PARAMETERS + buffers + 10_000, "and which shapes they have"
    assert not [name for name in counters if "other" in name]


def test_bf16_without_buffers_sends_half_the_bytes(two_ranks: Pool) -> None:
    counters = sent(two_ranks, dataclasses.replace(SMALL, buffer_sync=False, comm_hook="bf16"))
    assert counters["gradients: bytes"] == SMALL_PARAMETERS / 2
    assert "buffers: bytes" not in counters


def test_zero1_also_sends_parameters(two_ranks: Pool) -> None:
    counters = sent(two_ranks, dataclasses.replace(SMALL, strategy="zero1"))
    assert counters["gradients: bytes"] == SMALL_PARAMETERS
    assert counters["parameters: bytes"] == SMALL_PARAMETERS


def test_fsdp_gathers_parameters_and_scatters_gradients(two_ranks: Pool) -> None:
    counters = sent(two_ranks, dataclasses.replace(SMALL, strategy="fsdp"))
    assert counters["gradients: bytes"] == SMALL_PARAMETERS
    assert SMALL_PARAMETERS < counters["parameters: bytes"] <= 2 * SMALL_PARAMETERS, (
        "forward and backward, what is used last only once"
    )
    assert not [name for name in counters if "other" in name]

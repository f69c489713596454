"""How much of a step is communication: from known times, and of real ranks."""

from __future__ import annotations

import dataclasses

import pytest

from ddpperf.analysis.comm_split import disagreement, longest_wait, traced
from ddpperf.results.samples import Measured
from ddpperf.specs import BucketReplaySpec, TraceSpec, TrainingSpec, measured_as
from ddpperf.training.models import MODELS
from ddpperf.workers.pool import Pool

DDP = TrainingSpec(world_size=2, per_rank_batch_size=4, strategy="ddp")
DELAY_SECONDS = 0.3  # beside which it matters little that one rank of a quiet pair waits for the other, too
SMALL = dataclasses.replace(DDP, model="resnet10_cifar")


# --- known times


def test_a_trace_without_communication_says_nothing() -> None:
    counters = {"exposed_comm_seconds": [0.1, 0.4], "idle_seconds": [0.1, 0.2]}
    assert traced(counters | {"comm_seconds": [0.5, 0.0]}) == traced({}) == {}


def test_a_disagreement_is_explained() -> None:
    assert disagreement(0.04, 0.08, "bucket copies", 1.3, 1.4)[1] == ""
    fraction, reason = disagreement(0.2, 0.08, "bucket copies", 1.3, 1.43)
    assert fraction == pytest.approx(0.2 / 1.3)
    assert reason == (
        "exposed by difference minus by trace is +15.4% of the step (+6.2% is bucket copies, "
        "+9.2% not explained); the profiler makes the step +10.0% longer"
    )
    for profiled in (1.1, 1.5):  # shorter steps are other steps, too
        assert disagreement(0.2, 0.08, "bucket copies", 1.3, profiled)[1].endswith("longer, too much")


# --- real ranks


@pytest.fixture
def pool(two_ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(two_ranks, "options", dataclasses.replace(two_ranks.options, rounds=5))
    return two_ranks


def ranks(measured: Measured) -> list[float]:
    (sample,) = measured.samples
    return measured.rank_step_seconds(sample)


@pytest.mark.figures
@pytest.mark.parametrize("late_rank", [0, 1])
def test_both_methods_find_the_late_rank(pool: Pool, late_rank: int) -> None:
    """With one bucket, which waits for no earlier one, and a step that is short beside the delay."""
    one = dataclasses.replace(DDP, bucket_cap_mb=64, model="resnet10_cifar")
    late = dataclasses.replace(one, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=late_rank)
    alone, exposed, skew = ranks(pool.measure_once(one.no_sync())), {}, {}
    for spec in (one, late):
        (sample,) = pool.measure(measured_as(TraceSpec, spec)).samples
        by_trace = sample.counters["exposed_comm_seconds"]
        exposed[spec] = longest_wait(ranks(pool.measure_once(spec)), alone), max(by_trace)
        skew[spec] = ranks(pool.measure_once(spec.local()))
    for before, after in zip(exposed[one], exposed[late], strict=True):
        assert after - before == pytest.approx(DELAY_SECONDS, rel=0.1)
    assert by_trace[late_rank] < by_trace[1 - late_rank], "the rank that waits most is the other one"
    assert skew[late][late_rank] - skew[late][1 - late_rank] == pytest.approx(DELAY_SECONDS, rel=0.2)


def test_a_replay_sends_the_bytes_of_the_parameters(pool: Pool) -> None:
    nbytes = 4 * sum(parameter.numel() for parameter in MODELS["resnet10_cifar"]().parameters())
    for spec, factor in ((SMALL, 1.0), (dataclasses.replace(SMALL, comm_hook="bf16"), 0.5)):
        replay = pool.measure(measured_as(BucketReplaySpec, spec))
        assert set(replay.counter("gradient_bytes").values()) == {factor * nbytes}


def test_waiting_for_a_late_rank_is_no_sending(pool: Pool) -> None:
    late = dataclasses.replace(SMALL, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=1)
    (sample,) = pool.measure(measured_as(TraceSpec, late)).samples
    assert max(sample.counters["comm_seconds"]) > 0.9 * DELAY_SECONDS
    sending, same = sample.counters["comm_without_waiting_seconds"]
    assert sending == same < DELAY_SECONDS / 2


def test_local_and_no_sync_steps_send_nothing(pool: Pool) -> None:
    for spec in (SMALL.local(), SMALL.no_sync()):
        (sample,) = pool.measure(measured_as(TraceSpec, spec)).samples
        assert max(sample.counters["comm_seconds"]) == 0
    late = dataclasses.replace(SMALL, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=1)
    assert max(ranks(pool.measure_once(late))) > DELAY_SECONDS
    assert max(ranks(pool.measure_once(late.no_sync()))) < DELAY_SECONDS, "no message that could be late"

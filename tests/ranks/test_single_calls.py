"""Times of single collective calls: real ones on two ranks, and tails of known times."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddpperf.analysis.statistics import two_modes
from ddpperf.collectives.single_calls import SingleCalls, tails
from ddpperf.specs import SingleCallsSpec
from ddpperf.specs.custom import CustomKind
from ddpperf.workers.pool import Pool

CALLS = 1000


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_calls_of_two_ranks_have_tails(two_ranks: Pool, kind: CustomKind) -> None:
    measured = two_ranks.measure(SingleCallsSpec(world_size=2, nbytes=2**16, kind=kind))
    (sample,) = measured.samples
    ends = [sample.counters[f"call_{end}_seconds"] for end in ("p50", "p99", "largest")]
    assert all(len(set(of_ranks)) == 1 for of_ranks in ends), "both ranks know the times of both"
    p50, p99, largest = (of_ranks[0] for of_ranks in ends)
    assert 0 < p50 <= p99 <= largest
    assert largest <= max(map(sum, zip(*sample.seconds, strict=True))), (
        "one call is no longer than all rounds"
    )
    assert max(sample.counters["event_seconds"]) < p50 / 2


def uniform(low: float = 9e-5, high: float = 11e-5) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).uniform(low, high, (4, CALLS)))


def test_tails_are_quantiles_of_the_slowest_rank() -> None:
    seconds = uniform()
    found = tails(seconds)
    longest = np.sort(seconds.amax(0).numpy())
    assert found["call_p50_seconds"] == pytest.approx(np.quantile(longest, 0.5))
    assert found["call_p99_seconds"] == pytest.approx(np.quantile(longest, 0.99))
    assert found["call_largest_seconds"] == longest[-1]
    assert "slow_mode_seconds" not in found
    assert found["late_fraction"] < 0.6


def test_rank_that_comes_late_is_named() -> None:
    seconds = uniform()
    seconds[:, ::20] += 5e-5  # the others wait for rank 2
    seconds[2, ::20] -= 5e-5
    found = tails(seconds)
    assert (found["late_rank"], found["late_fraction"]) == (2, 1.0)
    assert found["late_seconds"] == pytest.approx(5e-5, rel=0.3)


@pytest.mark.parametrize("slow", [0.03, 0.2, 0.5])
def test_two_modes_are_found(slow: float) -> None:
    rng = np.random.default_rng(2)
    values = rng.lognormal(np.log(4e-5), 0.02, CALLS) * np.where(np.arange(CALLS) < slow * CALLS, 1.5, 1.0)
    found = two_modes(values.tolist())
    assert found is not None
    assert found == pytest.approx((4e-5, 6e-5, slow), rel=0.3)


@pytest.mark.parametrize("shape", ["normal", "uniform", "exponential", "few", "equal", "close"])
def test_one_mode_is_not_called_two(shape: str) -> None:
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.normal(4e-5, 2e-6, CALLS),
        "uniform": rng.uniform(3e-5, 5e-5, CALLS),
        "exponential": 4e-5 + rng.exponential(1e-5, CALLS),
        "few": np.repeat([4e-5, 8e-5], 20),
        "equal": np.full(CALLS, 4e-5),
        "close": np.repeat([4e-5, 4.2e-5], CALLS),
    }
    assert two_modes(values[shape].tolist()) is None


def late_rank(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Measure single calls; before every tenth call of rank 1, sleep for 50 ms: other programs delay less."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world_size)
    work = SingleCalls(
        SingleCallsSpec(world_size=world_size, nbytes=2**20), rank=rank, device=torch.device("cpu")
    )
    for _ in range(3):
        work.start_round()
        dist.barrier()
        work.begin_timed()
        for number in range(40):
            if rank == 1 and number % 10 == 5:
                time.sleep(0.05)
            work.step()
        work.end_round(40)
    found = work.finish()
    dist.destroy_process_group()
    return found


def test_rank_that_sleeps_between_calls_is_the_late_rank(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as ranks:
        found = list(ranks.map(late_rank, (0, 1), (2, 2), (str(tmp_path),) * 2))
    assert {of_rank["late_rank"] for of_rank in found} == {1}
    assert found[0]["late_fraction"] > 0.9
    assert found[0]["late_seconds"] == pytest.approx(0.05, rel=0.5)

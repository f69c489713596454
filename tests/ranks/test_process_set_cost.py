"""The cost of a process set: a command, a process group, a death and a replacement."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpperf.specs import AllReduceSpec, Fault, to_json
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.project import Marked

SMALL = AllReduceSpec(world_size=2, nbytes=1024)
HANG = AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind="hang", rank=1))

Figure = Callable[[str, Callable[[], float], float, str], None]


@pytest.fixture(scope="module")
def pool(marked: Marked) -> Iterator[Pool]:
    with Pool(SetOptions(size=2, device="cpu", rounds=3, deadline_seconds=60)) as pool:
        yield pool
    marked.assert_nothing_left()


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@pytest.mark.figures
def test_ping_takes_at_most_a_millisecond(pool: Pool, figure: Figure) -> None:
    (live,) = pool.live_sets()

    def ping() -> float:
        return statistics.median(seconds_of(lambda: live.request("ping")) for _ in range(200)) * 1e3

    figure("ping of a warm set of 2 ranks, median of 200", ping, 1, "ms")


@pytest.mark.figures
def test_gloo_group_opens_samples_and_closes_in_50_ms(pool: Pool, figure: Figure) -> None:
    (live,) = pool.live_sets()
    pool.measure(SMALL)  # the first one imports and connects
    live.leave()

    def group() -> None:
        live.join(2)
        live.answers()
        live.request("open", spec=to_json(SMALL))
        live.request("sample", iterations=1)
        live.request("close")
        live.leave()

    def fresh() -> float:
        return statistics.median(seconds_of(group) for _ in range(9)) * 1e3

    figure("join, open, sample, close and leave of a gloo group, median of 9", fresh, 50, "ms")


@pytest.mark.figures
def test_dead_set_is_reported_and_replaced_in_seconds(pool: Pool, figure: Figure) -> None:
    def death() -> float:
        (live,) = pool.live_sets()
        killed_at: list[float] = []

        def kill() -> None:
            time.sleep(0.7)
            killed_at.append(time.perf_counter())
            os.kill(live.pids[1], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(SetFailure, match="was killed by SIGKILL"):
            pool.measure(HANG)
        reported = time.perf_counter()
        thread.join()
        return reported - killed_at[0]

    def replacement() -> float:
        (live,) = pool.live_sets()
        live.kill()
        return seconds_of(pool.live_sets)

    figure("a death is reported, median of 3", lambda: statistics.median(death() for _ in range(3)), 0.5, "s")
    figure(
        "a new set of 2 ranks is ready, median of 3",
        lambda: statistics.median(replacement() for _ in range(3)),
        4,
        "s",
    )

"""What a rank does at a command, in this process: the order of a round, and that its checks are not left out."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf import specs
from ddpperf.specs import TrainingSpec
from ddpperf.workers import rank
from ddpperf.workers.rank import Rank

SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


class Recorder:
    """A measurement that writes down what is asked of it."""

    max_iterations = 7

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[str] = []

    def start_round(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def end_round(self, steps: int) -> None:
        self.calls.append(f"end {steps}")

    def finish(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"loss": 0.5}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setitem(rank.MEASUREMENTS, SINGLE.measurement, Recorder)
    mine = Rank(0)
    assert mine.open(specs.to_json(SINGLE)) == {"max_iterations": 7}
    return mine


def recorder_of(mine: Rank) -> Recorder:
    assert isinstance(mine.measurement, Recorder)
    return mine.measurement


def test_opening_warms_up(opened: Rank) -> None:
    assert recorder_of(opened).calls == ["start", *["step"] * rank.WARMUP_ITERATIONS["cpu"]]


def test_a_round_is_one_untimed_step_the_timed_ones_and_a_check(opened: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(opened)
    recorder.calls.clear()

    def timed(step: Any, iterations: int, _: Any) -> float:
        recorder.calls.append(f"timed {iterations}")
        return 1.5

    monkeypatch.setattr(rank, "seconds_of", timed)
    assert opened.sample(3) == {"seconds": 1.5}
    assert recorder.calls == ["start", "step", "timed 3", "end 4"]


def test_closing_checks_once_more_and_gives_the_counters(opened: Rank) -> None:
    recorder = recorder_of(opened)
    assert opened.close() == {"counters": {"loss": 0.5}}
    assert recorder.calls[-1] == "finish"
    assert opened.measurement is None, "its memory is given back"

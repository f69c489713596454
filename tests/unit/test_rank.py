"""The commands of a rank, in this process: the order of a round, and its checks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from ddpperf import specs
from ddpperf.specs import CallExecution, EpochSpec, Execution, TrainingSpec
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.step import TrainingStep
from ddpperf.workers import rank_commands as rank
from ddpperf.workers.rank_commands import Rank

SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=2, strategy="single", epoch_images=6)


class Recorder:
    """A measurement that records its calls, together with those of all other recorders."""

    max_iterations = 7
    counters: ClassVar = {"loss": 0.5}
    calls: ClassVar[list[str]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls.append("built")

    def warm_up(self, steps: int) -> None:
        self.calls.append(f"warm up {steps}")

    def start_round(self) -> None:
        self.calls.append("start")

    def begin_timed(self) -> None:
        self.calls.append("begin timed")

    def step(self) -> None:
        self.calls.append("step")

    def end_round(self, steps: int) -> None:
        self.calls.append(f"end {steps}")

    def finish(self) -> dict[str, float]:
        self.calls.append("finish")
        return dict(self.counters)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ranks open a recorder instead of a training step, and return the calls of recorders."""
    made: list[str] = []
    monkeypatch.setattr(Recorder, "calls", made)
    monkeypatch.setattr(rank, "_training", lambda spec, rank, device: (Recorder(), None))
    return made


@pytest.fixture
def opened(calls: list[str]) -> Rank:
    mine = Rank(0)
    assert mine.open(specs.to_json(SINGLE)) == {"max_iterations": 7}
    return mine


OPENING = ["built", "start", f"warm up {rank.WARMUP_ITERATIONS['cpu']}"]


def test_opening_warms_up(opened: Rank, calls: list[str]) -> None:
    assert calls == OPENING


def test_all_graphs_of_a_rank_are_on_one_stream(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the building of a measurement on: work on another stream would have to be waited for."""
    streams = map("graph stream {}".format, itertools.count(1))
    monkeypatch.setattr(rank, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", calls.append)
    mine = Rank(0)
    mine.device = torch.device("cuda", 0)
    executions: tuple[Execution, ...] = ("graph", "eager", "graph")
    for execution in executions:
        mine.open(specs.to_json(dataclasses.replace(SINGLE, execution=execution)))
    begun = ["built", "start", f"warm up {rank.WARMUP_ITERATIONS['cuda']}"]
    first, default = ["graph stream 1", *begun], ["the default stream", *begun]
    assert calls == [*first, *default, *first]


def test_round_has_an_untimed_step_and_a_check(
    opened: Rank, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(step: Any, iterations: int, _: Any) -> float:
        calls.append(f"timed {iterations}")
        return 1.5

    monkeypatch.setattr(rank, "seconds_of", timed)
    assert opened.sample(3) == {"seconds": 1.5}
    assert calls == [*OPENING, "start", "step", "begin timed", "timed 3", "end 4"]


@pytest.mark.parametrize(("execution", "busy"), [("graph", ["busy"]), ("eager", [])])
def test_gpu_is_busy_while_graphs_of_collective_calls_are_launched(
    execution: CallExecution, busy: list[str], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rank.KINDS, specs.AllReduceSpec, Recorder)
    monkeypatch.setattr(rank, "keep_busy", lambda seconds: calls.append("busy"))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    mine = Rank(0)
    mine.open(specs.to_json(specs.AllReduceSpec(world_size=2, nbytes=1024, execution=execution)))
    mine.sample(2)
    steps = ["step", "begin timed", "step", "step", "end 3"]
    assert calls == [*OPENING, "start", "barrier", *busy, *steps]


@pytest.mark.parametrize(
    ("spec", "before_rounds"),
    [
        pytest.param(dataclasses.replace(SINGLE, execution="graph"), [], id="steps"),
        pytest.param(dataclasses.replace(EPOCH, execution="graph"), ["restore"], id="epochs"),
        pytest.param(EPOCH, None, id="eager"),
    ],
)
def test_the_pace_is_that_of_the_rounds(
    spec: TrainingSpec,
    before_rounds: list[str] | None,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is restored before the rounds, and measured after them, before anything else runs."""

    class Pace:
        def restore(self) -> None:
            calls.append("restore")

        def slowdown(self) -> float:
            calls.append("slowdown")
            return 1.25

    for built in ("TrainingStep", "MeasuredStep"):  # only a GPU can capture a real step
        monkeypatch.setattr(rank, built, lambda *_, **__: None)
    monkeypatch.setattr(rank, "TrainingEpoch", Recorder)
    mine = Rank(0)
    mine.pace = Pace()  # type: ignore[assignment]
    mine.open(specs.to_json(spec))
    opening, calls[:] = calls.copy(), []
    mine.sample(1)
    sampling, calls[:] = calls.copy(), []
    if before_rounds is None:
        assert "restore" not in opening + sampling
    else:
        assert opening[-1] == "restore"
        assert sampling[: sampling.index("start")] == before_rounds
    slowdown = {} if before_rounds is None else {"graph_slowdown": 1.25}
    assert mine.finish()["counters"] == Recorder.counters | slowdown
    assert calls == ["slowdown"] * bool(slowdown) + ["finish"]


def test_compiling_within_a_round_is_an_error(opened: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graphs: int) -> None:
        raise RuntimeError(f"more than {graphs} graphs")

    monkeypatch.setattr(rank, "require_none_new", refuse)
    with pytest.raises(RuntimeError, match=f"more than {opened.compiled_graphs} graphs"):
        opened.sample(3)


def test_epoch_has_no_untimed_epoch_before_it(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Epoch(Recorder):
        def __init__(self, *_: Any, report: Callable[[float], None], **__: Any) -> None:
            self.report = report

        def step(self) -> None:
            super().step()
            self.report(0.5)

    monkeypatch.setattr(rank, "TrainingEpoch", Epoch)
    reported: list[float] = []
    mine = Rank(0, report=reported.append)
    mine.open(specs.to_json(EPOCH))
    assert mine.sample(1)["seconds"] > 0
    assert calls == [*OPENING, "start", "begin timed", "step", "end 1"]
    assert reported == [0.5]


def test_delay_is_in_every_step_of_an_epoch() -> None:
    """With one long delay at its end, the rank would count as hung."""
    mine = Rank(0)
    mine.open(specs.to_json(dataclasses.replace(EPOCH, input="device", delay_seconds=0.1)))
    assert mine.opened is not None
    assert isinstance(mine.opened.measurement, TrainingEpoch)
    training = mine.opened.measurement.training
    began: list[float] = []
    train = training.run

    def noted() -> None:
        began.append(time.monotonic())
        train()

    training.run = noted
    assert mine.sample(1)["seconds"] >= 0.3
    assert len(began) == 3
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(began))


@pytest.mark.usefixtures("calls")
def test_delayed_measurement_is_slower_by_its_delay() -> None:
    mine = Rank(0)
    mine.open(specs.to_json(dataclasses.replace(SINGLE, delay_seconds=0.01)))
    assert mine.sample(3)["seconds"] >= 0.03
    mine.open(specs.to_json(SINGLE))
    assert mine.sample(3)["seconds"] < 0.01, "the next one is not delayed"


def test_closing_frees_the_memory_at_once(opened: Rank) -> None:
    """A model under DDP has reference cycles, and the next measurement needs its memory."""
    assert opened.opened is not None
    recorder = opened.opened.measurement
    state, gone = vars(recorder), weakref.ref(recorder)
    state["itself"] = recorder
    del recorder
    assert opened.close(kernels=True) == {"kernels": ""}, "it is no training"
    assert gone() is None
    assert state == {}, "at once, not when a collector finds it"


@pytest.mark.parametrize("spec", [SINGLE, EPOCH])
def test_kernels_are_those_of_one_step(spec: TrainingSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the rounds ended, the start of an epoch is no part of the step."""
    steps: list[bool] = []
    train = TrainingStep.train

    def noted(training: TrainingStep) -> None:
        steps.append(torch._C._autograd._profiler_enabled())
        train(training)

    monkeypatch.setattr(TrainingStep, "train", noted)
    digests = set()
    for more in range(3):
        mine = Rank(0)
        mine.open(specs.to_json(dataclasses.replace(spec, input="device", epoch_images=6)))
        mine.sample(1)
        assert mine.opened is not None
        assert mine.opened.training is not None
        for _ in range(more):
            mine.opened.training.step()
        steps.clear()
        digests.add(mine.close(kernels=True)["kernels"])
        assert steps == [True]
    assert len(digests) == 1
    assert re.fullmatch("[0-9a-f]{12}", *digests)


def slower(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return a function that sleeps before it calls another one."""

    def slow(*positional: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return function(*positional, **named)

    return slow


@pytest.mark.usefixtures("calls")
def test_forming_a_group_is_a_counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It counts until the group's first barrier, which completes the communicator."""
    for name, seconds in (("init_process_group", 0.1), ("barrier", 0.2)):
        monkeypatch.setattr(dist, name, slower(getattr(dist, name), seconds))
    mine = Rank(0, folder=tmp_path)
    assert mine.setup("cpu", None)["port"] is None, "no port is open on one node"
    gc.unfreeze()
    began = time.perf_counter()
    mine.join(None, "one", 1, 10)
    took = time.perf_counter() - began
    mine.open(specs.to_json(dataclasses.replace(SINGLE, strategy="ddp")))
    counters = mine.finish()["counters"]
    assert counters.keys() == {"loss", "communicator_seconds"}
    assert 0.3 < counters["communicator_seconds"] <= took
    mine.open(specs.to_json(SINGLE))
    assert mine.finish()["counters"] == {"loss": 0.5}, "one alone has none"
    mine.exit()


def test_store_is_open_on_its_interface_alone() -> None:
    made = Rank(0)
    port = made._start_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))

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
from ddpperf.specs import AllReduceSpec, CopySpec, EpochSpec, Execution, Spec, TrainingSpec
from ddpperf.specs.collective import GRAPH_CALLS
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.step import TrainingStep
from ddpperf.workers import rank_commands as rank
from ddpperf.workers.rank_commands import Rank

SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=2, strategy="single", epoch_images=6)
GRAPH = dataclasses.replace(SINGLE, execution="graph")
CALL = AllReduceSpec(world_size=2, nbytes=1024)


class Recorder:
    """A measurement that records its calls, together with those of all other recorders."""

    max_iterations = 7
    calls: ClassVar[list[str]] = []

    def __init__(self, *_: Any, after_step: Callable[[float], None] = print, **__: Any) -> None:
        self.after_step = after_step
        self.calls.append("built")

    def warm_up(self, steps: int) -> None:
        self.calls.append(f"warm up {steps}")

    def start_round(self) -> None:
        self.calls.append("start")

    def begin_timed(self) -> None:
        self.calls.append("begin timed")

    def step(self) -> None:
        self.calls.append("step")
        self.after_step(0.5)

    def end_round(self, steps: int) -> None:
        self.calls.append(f"end {steps}")

    def finish(self) -> dict[str, float]:
        self.calls.append("finish")
        return {"loss": 0.5}


class Pace:
    """Takes the place of a GpuPace."""

    def restore(self) -> None:
        Recorder.calls.append("restore")

    def slowdown(self) -> float:
        Recorder.calls.append("slowdown")
        return 1.25


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ranks open a recorder instead of a step, a call or an epoch, and return its calls."""
    made: list[str] = []
    monkeypatch.setattr(Recorder, "calls", made)
    monkeypatch.setattr(rank, "_training", lambda spec, rank, device: (Recorder(), None))
    monkeypatch.setattr(rank, "TrainingEpoch", Recorder)
    monkeypatch.setitem(rank.KINDS, AllReduceSpec, Recorder)
    monkeypatch.setattr(rank, "keep_busy", lambda seconds: made.append("busy"))
    monkeypatch.setattr(rank, "synchronize", lambda device: made.append("synchronize"))
    monkeypatch.setattr(dist, "barrier", lambda: made.append("barrier"))
    return made


def opened(spec: Spec, calls: list[str]) -> Rank:
    """Return a rank that has opened a measurement, and forget the calls so far."""
    mine = Rank(0, report=lambda fraction: calls.append(f"report {fraction}"))
    assert mine.open(specs.to_json(spec)) == {"max_iterations": 7}
    calls.clear()
    return mine


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


def test_copy_in_host_memory_is_timed_by_the_cpu_of_a_gpus_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("default_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(rank, "synchronize", lambda device: None)
    mine = Rank(0)
    mine.device = torch.device("cuda", 0)
    mine.open(specs.to_json(CopySpec(world_size=1, nbytes=2**20, memory="host", delay_seconds=2e-3)))
    assert 4 * 2e-3 <= mine.sample(4)["seconds"] < 1


BEGUN, ENDED = "start, synchronize, ", "step, begin timed, step, step, end 3"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(SINGLE, f"{BEGUN}{ENDED}", id="an untimed step comes first"),
        pytest.param(CALL, f"{BEGUN}barrier, {ENDED}", id="and a barrier"),
        pytest.param(
            dataclasses.replace(CALL, execution="graph"),
            f"{BEGUN}barrier, busy, {ENDED}",
            id="a GPU is busy while graphs of calls are launched",
        ),
        pytest.param(EPOCH, f"{BEGUN}begin timed, step, report 0.5, step, report 0.5, end 2", id="epochs"),
    ],
)
def test_round_has_this_order(spec: Spec, expected: str, calls: list[str]) -> None:
    opened(spec, calls).sample(2)
    assert ", ".join(calls) == expected


@pytest.mark.parametrize(
    ("spec", "opening", "sampling"),
    [(GRAPH, 1, 0), (dataclasses.replace(EPOCH, execution="graph"), 1, 1), (EPOCH, 0, 0)],
    ids=["steps", "epochs", "eager"],
)
def test_the_pace_is_that_of_the_rounds(
    spec: TrainingSpec, opening: int, sampling: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restored before the rounds, and measured after them, before anything else runs."""
    for built in ("TrainingStep", "MeasuredStep"):  # only a GPU can capture a real step
        monkeypatch.setattr(rank, built, lambda *_, **__: None)
    mine = Rank(0)
    mine.pace = Pace()  # type: ignore[assignment]
    mine.open(specs.to_json(spec))
    assert calls[calls.index("warm up 2") + 1 :] == ["synchronize"] + ["restore"] * opening
    calls.clear()
    mine.sample(1)
    assert calls[:2] == ["restore", "start"] if sampling else "restore" not in calls
    calls.clear()
    assert mine.finish()["counters"] == {"loss": 0.5} | ({"graph_slowdown": 1.25} if opening else {})
    assert calls == ["slowdown"] * opening + ["finish"]


def test_compiling_within_a_round_is_an_error(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graphs: int) -> None:
        raise RuntimeError(f"more than {graphs} graphs")

    mine = opened(SINGLE, calls)
    monkeypatch.setattr(rank, "require_none_new", refuse)
    with pytest.raises(RuntimeError, match=f"more than {mine.compiled_graphs} graphs"):
        mine.sample(3)


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


def test_delayed_measurement_is_slower_by_its_delay(calls: list[str]) -> None:
    assert opened(dataclasses.replace(SINGLE, delay_seconds=0.01), calls).sample(3)["seconds"] >= 0.03
    assert opened(SINGLE, calls).sample(3)["seconds"] < 0.01


def test_seconds_are_those_of_one_call(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = opened(dataclasses.replace(CALL, execution="graph"), calls)
    monkeypatch.setattr(rank, "seconds_of", lambda step, iterations, device: 40.0 * iterations)
    assert mine.sample(2) == {"seconds": 2 * 40.0 / GRAPH_CALLS}


def test_closing_frees_the_memory_at_once(calls: list[str]) -> None:
    """A model under DDP has reference cycles, and the next measurement needs its memory."""
    mine = opened(SINGLE, calls)
    assert mine.opened is not None
    recorder = mine.opened.measurement
    state, gone = vars(recorder), weakref.ref(recorder)
    state["itself"] = recorder
    del recorder
    assert mine.close(kernels=True) == {"kernels": ""}, "it is no training"
    assert gone() is None
    assert state == {}, "at once, not when a collector finds it"


@pytest.mark.slow
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


def test_forming_a_group_is_a_counter(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It counts until the device has done the group's first barrier, which completes the communicator."""
    monkeypatch.setattr(dist, "FileStore", lambda *_: time.sleep(0.1))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: None)
    monkeypatch.setattr(dist, "barrier", lambda: time.sleep(0.1))
    monkeypatch.setattr(rank, "synchronize", lambda device: time.sleep(0.1))
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


def test_group_ends_when_all_ranks_have_done_their_work(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    Rank(0).exit()
    assert calls == ["barrier", "synchronize", "destroy"]


def test_store_is_open_on_its_interface_alone() -> None:
    first = Rank(0)
    port = first.setup("cpu", None, "127.0.0.1")["port"]
    gc.unfreeze()
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))

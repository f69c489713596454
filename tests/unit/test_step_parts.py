"""The parts of a step: each has its time, they add up to the step, and FLOPs are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpperf.instruments import step_parts as parts
from ddpperf.instruments.step_parts import PartedSteps, PartMarks
from ddpperf.specs import PARTS, Execution, PartsSpec
from ddpperf.training import model_and_data
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep

SINGLE = PartsSpec(world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=8)
CPU = torch.device("cpu")
SPENT = {"data": 1.0, "forward": 20.0, "backward": 300.0, "optimizer": 4000.0}  # by the clock below
DELAY_SECONDS = 0.2


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def spend(self, part: str) -> None:
        self.now += SPENT[part]


class SpendsBackward(torch.autograd.Function):
    """An identity whose backward pass takes time."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, clock: Clock) -> Tensor:
        context.clock = clock
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.clock.spend("backward")
        return gradient, None


class Slow(nn.Module):
    """A linear layer whose forward and backward passes advance the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.linear = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.clock.spend("forward")
        logits: Tensor = SpendsBackward.apply(self.linear(images.flatten(1)), self.clock)
        return logits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(model_and_data, "build", lambda _: Slow(clock))
    return clock


def parted(spec: PartsSpec) -> PartedSteps:
    marks = PartMarks(CPU)
    step = TrainingStep(spec, rank=0, device=CPU, enter=marks.enter_part)
    return PartedSteps(MeasuredStep(step), marks)


def trained(
    spec: PartsSpec, prepare: Callable[[PartedSteps], object] = lambda _: None, rounds: int = 1
) -> dict[str, float]:
    """Run some rounds of an untimed step and three timed ones, and return the counters."""
    training = parted(spec)
    training.warm_up(2)
    prepare(training)
    for _ in range(rounds):
        training.start_round()
        training.step()
        training.begin_timed()
        for _ in range(3):
            training.step()
        training.end_round(1 + 3)
    return training.finish()


def spend_beside(training: PartedSteps, clock: Clock) -> None:
    """Make loading a batch and updating the parameters take time."""
    load, update = training.training.training.input.load, training.training.training.optimizer.step

    def slow_load(arrived: Callable[[], None]) -> None:
        clock.spend("data")
        load(arrived)

    def slow_update(*arguments: Any) -> Any:
        clock.spend("optimizer")
        return update(*arguments)

    training.training.training.input.load = slow_load  # type: ignore[method-assign, assignment]
    training.training.training.optimizer.step = slow_update  # type: ignore[method-assign, assignment]


def seconds(counters: dict[str, float]) -> dict[str, float]:
    return {part: counters[f"{part}_seconds"] for part in PARTS if f"{part}_seconds" in counters}


@pytest.mark.parametrize("passes", [1, 2])
def test_each_part_has_its_time(clock: Clock, passes: int) -> None:
    spec = dataclasses.replace(SINGLE, accumulation_steps=passes)
    found = seconds(trained(spec, lambda training: spend_beside(training, clock), rounds=2))
    assert found == SPENT | {part: passes * SPENT[part] for part in ("forward", "backward")}


def test_a_rounds_first_step_is_left_out(clock: Clock) -> None:
    training = parted(SINGLE)
    training.warm_up(2)
    for _ in range(2):
        training.start_round()
        clock.spend("optimizer")  # whatever lies between
        first = training.training.training.input.load
        training.training.training.input.load = lambda _: clock.spend("optimizer")  # type: ignore
        training.step()
        training.training.training.input.load = first  # type: ignore[method-assign]
        training.begin_timed()
        training.step()
        training.end_round(2)
    assert seconds(training.finish()) == SPENT | {"data": 0.0, "optimizer": 0.0}


@pytest.mark.parametrize(
    ("rounds", "forward"),
    [
        ([(1, 5.0), (4, 9.0), (2, 1.0), (2, 2.0), (2, 3.0)], 2.0),  # the trial of 4 steps was disturbed
        ([(1, 5.0), (4, 9.0), (4, 1.0), (4, 2.0)], 1.5),
        ([(1, 9.0), (1, 1.0), (1, 2.0)], 1.5),
        ([(1, 5.0), (4, 9.0), (8, 1.0), (8, 2.0), (8, 6.0)], 2.0),
        ([(4, 1.0), (4, 2.0), (4, 6.0)], 2.0),  # another process set had the trial rounds
        ([(1, 5.0), (4, 1.0)], 1.0),
    ],
)
def test_trial_rounds_are_left_out(rounds: list[tuple[int, float]], forward: float) -> None:
    training = parted(SINGLE)
    nothing = dict.fromkeys(PARTS, 0.0)
    training.rounds = [(steps, nothing | {"forward": seconds}) for steps, seconds in rounds]
    assert training.finish()["forward_seconds"] == forward


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=pytest.mark.figures)])
def test_a_late_message_counts_as_gradient_sync(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count as the backward pass, in which it was started."""
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10)
    monkeypatch.setattr(model_and_data, "build", lambda _: nn.Sequential(*layers))
    spec = dataclasses.replace(SINGLE, strategy="ddp", comm_delay_seconds=DELAY_SECONDS, execution=execution)
    found = seconds(trained(spec))
    assert found["gradient_sync"] > 0.99 * DELAY_SECONDS
    assert sum(found.values()) - found["gradient_sync"] < DELAY_SECONDS


@pytest.mark.usefixtures("group")
def test_an_accumulated_batch_synchronizes_once(clock: Clock) -> None:
    training = parted(dataclasses.replace(SINGLE, strategy="ddp", accumulation_steps=2))
    training.warm_up(2)
    training.step()
    passes = ["forward", "backward", "forward", "backward", "gradient_sync", "optimizer"]
    assert [part for part, _ in training.marks.marks] == ["data", "optimizer", *passes]


@pytest.mark.parametrize("in_parts", [1, 2])
def test_flops_count_forward_and_backward(in_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, hidden, classes, batch = 3 * 32 * 32, 20, 10, SINGLE.per_rank_batch_size
    layers = nn.Flatten(), nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
    monkeypatch.setattr(model_and_data, "build", lambda _: nn.Sequential(*layers))
    forward = 2 * batch * (inputs * hidden + hidden * classes)
    of_weights, of_activations = forward, 2 * batch * hidden * classes  # none of the images
    counted = trained(dataclasses.replace(SINGLE, accumulation_steps=in_parts))["flops"]
    assert counted == forward + of_weights + of_activations

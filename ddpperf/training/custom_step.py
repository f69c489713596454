"""Measure the training step of a user's own function."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpperf.errors import CannotTrain
from ddpperf.measuring.compile_and_capture import capture
from ddpperf.measuring.message_ledger import Ledger
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import CustomStepSpec
from ddpperf.specs.custom import import_function
from ddpperf.training.measured_step import CAPTURE_WARMUP


class CustomStep(Measurement):
    """Measurement of training steps that a user's own function makes.

    Before the function is called, each rank seeds torch with the same number.
    loss: the loss of the last step.
    collectives: how many collectives the last warm-up step called; None on one rank.
    """

    def __init__(self, spec: CustomStepSpec, *, rank: int, device: torch.device) -> None:
        if spec.captured and device.type != "cuda":
            raise CannotTrain("execution graph needs a GPU, and this runs on the CPU; use execution eager")
        self.spec = spec
        make = import_function(spec.function, "step")
        torch.manual_seed(spec.seed)
        train = make(
            rank=rank, world_size=spec.world_size, batch_size=spec.per_rank_batch_size, device=device
        )
        if not callable(train):
            got = f"got a value of type {type(train).__name__}; return a function that trains one step"
            raise CannotTrain(f"step {spec.function} must return a function, {got}")
        self._train: Callable[[], Tensor] = train
        self._run: Callable[[], object] = self._train_once  # or the replay of a captured step
        self.loss: Tensor = torch.zeros(1)
        self.collectives: int | None = None

    def step(self) -> None:
        self._run()

    def _train_once(self) -> None:
        loss = self._train()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            shape = f" of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else ""
            got = f"got a value of type {type(loss).__name__}{shape}; return the loss"
            raise CannotTrain(f"step {self.spec.function} must return a real tensor with one element, {got}")
        self.loss = loss

    def warm_up(self, steps: int) -> None:
        """Run the warm-up steps, and capture a step if the spec's execution mode is graph.

        On several ranks, one more step is run before the capture, and its collectives are counted.
        """
        for _ in range(max(steps, CAPTURE_WARMUP) if self.spec.captured else steps):
            self.step()
        if self.spec.grouped:
            with (ledger := Ledger()):
                self.step()
            self.collectives = len(ledger.messages)
        if self.spec.captured:
            self._run = capture(self._train_once, self.spec.execution).replay

    def end_round(self, steps: int) -> None:
        """Raise FloatingPointError if the loss is NaN or infinite after a round.

        A step with NaN values has another speed.
        """
        if not math.isfinite(loss := self.loss.item()):
            raise FloatingPointError(f"the loss is {loss} after a round of {steps} steps")

    def finish(self) -> dict[str, float]:
        """Return the counter `collectives`, the number of collectives in a step, on several ranks."""
        return {} if self.collectives is None else {"collectives": float(self.collectives)}

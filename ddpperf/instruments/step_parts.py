"""The parts of a training step, timed by marks between them: events on a GPU, the clock on the CPU; without a profiler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpperf.specs import PARTS, PartsSpec
from ddpperf.training.step import TrainingStep

Mark = tuple[str, Any]  # which part begins, and when: seconds of the CPU's clock, or an event of a GPU


class PartedTraining(TrainingStep):
    """The same training, of whose steps each part is timed. Captured it needs twice the memory for activations.

    A step's first part begins where the step before it ended, so that the parts are all of it. Of a captured step the events
    are a part of the graph, and mean the last time that it ran: two graphs take turns, of which one is read while the other
    runs. gradient_sync: from the last gradient's computation on, until all of them are the mean over the ranks.
    """

    def __init__(self, spec: PartsSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.enter = self.mark
        self.marks: list[Mark] = []  # of the step that runs
        self.running: deque[tuple[list[Mark], Any]] = (
            deque()
        )  # steps whose marks are still to be read, and their ends
        self.ended: Any = None  # of the step before
        self.capturing = False
        self.stream_of_step: torch.cuda.Stream | None = None
        self.parted: list[dict[str, float]] = []  # of each step of a round
        self.rounds: list[tuple[int, dict[str, float]]] = []  # the steps that it averages, and its parts
        self.hooks: list[RemovableHandle] = []
        self.last_computed: nn.Parameter | None = None
        self.flops = 0

    def mark(self, part: str) -> None:
        if self.device.type == "cuda":
            self.stream_of_step = torch.cuda.current_stream(self.device)
        self.marks.append((part, self.moment()))

    def mark_last_gradient(self, gradient: Tensor) -> None:
        """Called in a thread of the backward pass, whose current stream may be another than the step's."""
        if (
            self.model.require_backward_grad_sync
        ):  # not for the first parts of a batch, which no rank waits for
            self.marks.append(("gradient_sync", self.moment(self.stream_of_step)))

    def moment(self, stream: torch.cuda.Stream | None = None) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self.capturing)
        event.record(stream)
        return event

    # --- a step

    def advance(self) -> None:
        began = self.ended if self.ended is not None else self.moment()
        self.marks = []
        super().advance()
        self.ended = self.moment()
        self.running.append(([("data", began), *self.marks], self.ended))
        if self.spec.captured and len(self.running) > 1:  # a graph's events, before it runs again
            self.read()

    def read(self) -> None:
        """Add up the parts of the step that has run for the longest time, when it has ended."""
        marks, ended = self.running.popleft()
        cuda = self.device.type == "cuda"
        if cuda:
            ended.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in pairwise([*marks, ("", ended)]):
            seconds[part] += begin.elapsed_time(end) / 1e3 if cuda else end - begin
        self.parted.append(seconds)

    # --- starting

    def warm_up(self, steps: int) -> None:
        """Count a step's FLOPs, and see in steps of this form whose gradient is computed last."""
        self.count_flops()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.hooks = [
            each.register_hook(partial(self.computed, each)) for each in trained if self.spec.grouped
        ]
        super().warm_up(steps)
        if not self.spec.captured:
            self.watch_last_gradient()

    def computed(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.last_computed = parameter

    def watch_last_gradient(self) -> None:
        """From now on: a hook on each parameter would cost a step that launches bind more than the parts may be off."""
        for hook in self.hooks:
            hook.remove()
        if self.last_computed is not None:
            self.last_computed.register_hook(self.mark_last_gradient)

    def count_flops(self) -> None:
        """Of a forward and backward pass beside DDP, whose first step teaches it in which order gradients come."""
        from torch.utils.flop_counter import (
            FlopCounterMode,
        )  # only here: every rank would wait for the import

        self.input.begin(self.epoch)
        self.input.load()
        parts = self.spec.accumulation_steps
        inputs, targets = (whole.chunk(parts)[0] for whole in self.input.take())
        trained, self.model = self.model, self.inner
        with FlopCounterMode(display=False) as counter:
            self.loss_on(inputs, targets).backward()
        self.model = trained
        self.flops = parts * counter.get_total_flops()
        self.optimizer.zero_grad()

    def captured_train(self) -> Callable[[], None]:
        self.watch_last_gradient()
        turns = []
        self.capturing = True
        for _ in range(2):
            self.marks = []
            turns.append((super().captured_train(), self.marks))
        self.capturing = False
        turn = cycle(turns)

        def replay() -> None:
            run, self.marks = next(turn)
            run()

        return replay

    # --- rounds

    def start_round(self) -> None:
        super().start_round()
        self.ended = None
        self.running.clear()
        self.parted = []

    def end_round(self, steps: int) -> None:
        """Keep what a step's parts took on average, without the round's first step, which is not timed either."""
        super().end_round(steps)
        while self.running:
            self.read()
        timed = self.parted[-(steps - self.spec.repeats) :]
        self.rounds.append((len(timed), {part: mean(step[part] for step in timed) for part in PARTS}))

    def finish(self) -> dict[str, float]:
        """Seconds of a step by part, medians over rounds, on a rank with others also gradient_sync_seconds; flops: of a step's
        forward and backward pass, as torch counts those of matrix products and convolutions. Shorter rounds than the longest
        were tries, to see how many steps a round should have, and so was the first of one step."""
        most = max(steps for steps, _ in self.rounds)
        counted = [parts for steps, parts in self.rounds if steps == most]
        counted = counted[1:] if most == 1 and len(counted) > 1 else counted
        sends = PARTS if self.spec.grouped else [part for part in PARTS if part != "gradient_sync"]
        counters = {f"{part}_seconds": median(each[part] for each in counted) for part in sends}
        return counters | {"flops": float(self.flops)}

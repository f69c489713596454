"""Time the parts of a training step, such as forward and backward, without a profiler.

The begin of a part is marked by an event on a GPU, and by the clock on a CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import cycle, pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from ddpperf.specs import PARTS
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement

Mark = tuple[str, Any]  # a part, and its begin in seconds or as a GPU's event


class PartMarks:
    """The times at which the parts of the current training step began.

    stream: the CUDA stream on which the last part began.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Mark] = []
        self.capturing = False
        self.stream: torch.cuda.Stream | None = None

    def enter_part(self, part: str, stream: torch.cuda.Stream | None = None) -> None:
        if self.device.type == "cuda":
            self.stream = stream or torch.cuda.current_stream(self.device)
        self.marks.append((part, self.moment(stream)))

    def moment(self, stream: torch.cuda.Stream | None = None) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self.capturing)
        event.record(stream)
        return event


class PartedSteps(TrainingMeasurement):
    """Measurement in which each step trains one batch and times forward, backward and so on.

    A step's first part begins where the previous step ended, so that the parts add up to the step.
    With a DataLoader the first part is loading. It lasts until the batch is in the CPU's memory. On
    a GPU both ends are events on the device's clock. Therefore loading is the time in which the GPU
    has nothing to do because the batch is not there. The CPU may wait longer for the batch, while
    the GPU still computes the previous step.
    A step that is replayed from a CUDA graph needs twice the activation memory. The events in a
    graph hold the times of the graph's last replay. Therefore two graphs take turns, and the events
    of one graph are read while the other graph runs. The part gradient_sync lasts from the
    computation of the last gradient until all gradients are averaged.
    marks: the marks that the training makes at the begin of each part.
    """

    def __init__(self, training: MeasuredStep, marks: PartMarks) -> None:
        super().__init__(training)
        self.marks = marks
        self.running: deque[list[Mark]] = deque()  # the marks of steps that are not read yet
        self.first_part = "loading" if self.spec.input == "dataloader" else "data"
        self.ended: Any = None  # the end of the previous step
        self.parted: list[dict[str, float]] = []  # seconds of each step of a round, by part
        self.timed_from = 0  # number of steps before the timed steps of a round
        self.rounds: list[tuple[int, dict[str, float]]] = []  # timed steps, and their mean by part
        self.flops = 0

    # --- a step

    def step(self) -> None:
        began = self.ended if self.ended is not None else self.marks.moment()
        self.marks.marks = []
        self.training.step()
        self.ended = self.marks.moment()
        self.running.append([(self.first_part, began), *self.marks.marks, ("", self.ended)])
        if self.spec.captured and len(self.running) > 1:
            self._read()  # before the graph with these events runs again

    def _read(self) -> None:
        """Wait until the oldest unread training step has ended, and store its parts' seconds."""
        marks = self.running.popleft()
        is_gpu = self.marks.device.type == "cuda"
        if is_gpu:
            marks[-1][1].synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in pairwise(marks):
            seconds[part] += begin.elapsed_time(end) / 1e3 if is_gpu else end - begin
        self.parted.append(seconds)

    # --- warm-up

    def warm_up(self, steps: int) -> None:
        """Run warm-up steps, count a step's FLOPs, and find which gradient is computed last."""
        self._count_flops()
        computed: list[nn.Parameter] = []  # in the order of their gradients
        parameters = self.training.training.model.parameters() if self.spec.grouped else ()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = [each.register_hook(lambda _, each=each: computed.append(each)) for each in trained]
        self.training.warm_up_eagerly(steps)
        # Hooks on all parameters would slow a step that is bound by launches. One hook is enough.
        for hook in hooks:
            hook.remove()
        if computed:
            computed[-1].register_hook(self._last_gradient_computed)
        if self.spec.captured:
            self.training.capture(self._capture_twice)

    def _last_gradient_computed(self, gradient: Tensor) -> None:
        # The first parts of an accumulated batch are not synchronized.
        if self.training.training.model.require_backward_grad_sync:
            # The thread of the backward pass may have another current stream than the step.
            self.marks.enter_part("gradient_sync", self.marks.stream)

    def _count_flops(self) -> None:
        """Count the FLOPs of one forward and backward pass of the model without DDP.

        In its first pass DDP arranges its buckets, which must happen in the warm-up.
        """
        # Imported here, because the import is slow.
        from torch.utils.flop_counter import FlopCounterMode

        training = self.training.training
        parts = training.spec.accumulation_steps
        training.input.begin(0)
        training.input.load()
        inputs, targets = (whole.chunk(parts)[0] for whole in training.input.take())
        with FlopCounterMode(display=False) as counter:
            with training.autocast():
                loss = training.loss_function(training.module(inputs), targets)
            loss.backward()
        self.flops = parts * counter.get_total_flops()
        training.optimizer.zero_grad()

    def _capture_twice(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        turns: list[tuple[Callable[[], None], list[Mark]]] = []
        self.marks.capturing = True
        for _ in range(2):
            self.marks.marks = []
            turns.append((capture(), self.marks.marks))
        self.marks.capturing = False
        turn = cycle(turns)

        def replay() -> None:
            run, marks = next(turn)
            self.marks.marks += marks  # after the arrival of the batch, which is not captured
            run()

        return replay

    # --- rounds

    def start_round(self) -> None:
        super().start_round()
        self.ended = None
        self.running.clear()
        self.parted = []

    def begin_timed(self) -> None:
        self.timed_from = self.training.steps

    def end_round(self, steps: int) -> None:
        """Store the mean seconds of each step part over the timed steps of a round."""
        super().end_round(steps)
        while self.running:
            self._read()
        timed = self.parted[self.timed_from - self.training.steps :]
        self.rounds.append((len(timed), {part: mean(step[part] for step in timed) for part in PARTS}))

    def finish(self) -> dict[str, float]:
        """Return the median seconds of each step part over all rounds, and the FLOPs of one step.

        gradient_sync_seconds exists only if there are other ranks. loading_seconds exists only with
        a DataLoader. flops are those of a forward and backward pass, as torch counts them for matrix
        products and convolutions.
        Rounds with another number of steps than the last round are left out, because they only
        calibrated the number of steps. Such trial rounds have 1, 4, 16 and so on steps. The last of
        them may have as many steps as the timed rounds. So the first of several rounds is left out if
        it may be a trial round. Epochs have no trial rounds. They have few rounds, so that the medians
        of the parts would not add up to the median epoch. Of epochs, the parts are therefore those of
        the median epoch.
        """
        numbers = [steps for steps, _ in self.rounds]
        last = numbers[-1]
        counted = [parts for steps, parts in self.rounds if steps == last]
        if not self.spec.repeats:
            counted = _middle(counted)
        elif len(counted) > 1 and (last == 1 or last / 4 in numbers):
            counted = counted[1:]
        missing = [] if self.spec.grouped else ["gradient_sync"]
        missing += [] if self.spec.input == "dataloader" else ["loading"]
        seconds = {part: median(parts[part] for parts in counted) for part in PARTS if part not in missing}
        return {f"{part}_seconds": found for part, found in seconds.items()} | {"flops": float(self.flops)}


def _middle(rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the round in which the sum of the parts is the median, or the two rounds in the middle."""
    ordered = sorted(rounds, key=lambda parts: sum(parts[part] for part in PARTS))
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]

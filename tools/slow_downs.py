"""Puts slow-downs into measured steps, for `tools.calibrate`. Ranks of a patched checkout import it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ddpperf.measuring.clock import delayed
from ddpperf.specs import Spec, to_json
from ddpperf.workers.rank_commands import Opened

VARIABLE = "SLOW_DOWNS"  # names the file with the slow-downs
EVERY = 40
KINDS = ("constant", "percent", "one rank", "1 in 40", "CPU only", "memory")  # docs/trust.md describes them
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowDown:
    """A slow-down of one kind by `fraction` of the base's value: `value` seconds, or bytes of memory.

    factor: the fraction divided by the measurement's tolerance.
    """

    kind: str
    factor: float
    fraction: float
    value: float


def key_of(spec: Spec) -> str:
    return json.dumps(to_json(spec), sort_keys=True)


def slowed(open_measurement: Callable[..., Opened]) -> Callable[..., Opened]:
    """Return `open_measurement` with the slow-downs of the file, which holds them by `key_of(spec)`."""

    def open_slowed(
        spec: Spec, *, rank: int, device: torch.device, report: Callable[[float], None]
    ) -> Opened:
        opened = open_measurement(spec, rank=rank, device=device, report=report)
        planned = json.loads(Path(os.environ[VARIABLE]).read_text("utf-8"))
        # The positive control delays the same spec; its delay comes on top of the slow-down.
        if not (found := planned.get(key_of(dataclasses.replace(spec, delay_seconds=0.0)))):
            return opened
        step = _slower(SlowDown(**found), opened, rank, device)
        return dataclasses.replace(opened, step=step)

    return open_slowed


def _slower(slow_down: SlowDown, opened: Opened, rank: int, device: torch.device) -> Step:
    spec, step, kind = opened.spec, opened.step, slow_down.kind
    seconds = spec.calls * slow_down.fraction * slow_down.value
    match kind:
        case "memory":
            held = torch.ones(int(slow_down.fraction * slow_down.value), dtype=torch.uint8, device=device)
            return lambda: (step(), held)[0]
        case "one rank":
            return delayed(step, seconds, device) if rank == spec.world_size - 1 else step
        case "CPU only":
            return delayed(step, seconds, torch.device("cpu"))
        case "percent":
            on_cpu = device.type == "cpu"
            return _longer(step, slow_down.fraction) if on_cpu else delayed(step, seconds, device)
        case "1 in 40":
            late = delayed(step, EVERY * seconds, device)
            numbers = itertools.count(random.randrange(EVERY))
            return step if rank else lambda: (step if next(numbers) % EVERY else late)()
    return delayed(step, seconds, device)


def _longer(step: Step, fraction: float) -> Step:
    """Return a step on a CPU that takes longer by a fraction of its own time."""

    def slower() -> None:
        began = time.perf_counter()
        step()
        end = began + (1 + fraction) * (time.perf_counter() - began)
        while time.perf_counter() < end:
            pass

    return slower

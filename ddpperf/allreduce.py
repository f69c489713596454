"""The backend's all_reduce on a buffer whose sum is known, so that every timed round is also checked."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ddpperf.specs import FLOAT32_BYTES, AllReduceSpec

_SCALE_EXPONENT = -120  # where a buffer starts: the sums then have room to grow by 2**240 within float32
_ROOM_EXPONENT = 230


class BackendAllReduce:
    """A float32 buffer of `spec.nbytes` bytes on each rank; `step` replaces it by the sum over all ranks.

    Element i of rank r starts as (i % 13 + 1 + r) * 2**-120, so k steps leave world_size**(k-1) times the sum of the
    starts. A round may have so many steps that this stays a finite float32: no zeros, no infinities are ever timed.
    """

    def __init__(self, spec: AllReduceSpec, *, rank: int, device: torch.device) -> None:
        self.world_size = world_size = spec.world_size
        self.max_iterations = int(_ROOM_EXPONENT / math.log2(world_size)) - 1
        count = spec.nbytes // FLOAT32_BYTES
        scale = 2.0**_SCALE_EXPONENT
        pattern = (torch.arange(count, device=device) % 13 + 1).float() * scale
        self.start = pattern + rank * scale
        self.first_sum = pattern * world_size + world_size * (world_size - 1) / 2 * scale
        self.buffer = torch.empty_like(self.start)

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def start_round(self) -> None:
        self.buffer.copy_(self.start)

    def step(self) -> None:
        dist.all_reduce(self.buffer)

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless the buffer holds what `steps` sums over all ranks must give."""
        back = float(self.world_size) ** (-(steps - 1) / 2)  # in two halves: the whole power may not fit in float32
        error = ((self.buffer * back).mul_(back) / self.first_sum).sub_(1).abs_()
        tolerance = steps * self.world_size * 2.0**-23  # at most a rounding for each rank in each step, of 2**-24
        if not bool(error.max() <= tolerance):  # a NaN is never at most anything
            index = int(error.argmax())
            raise ArithmeticError(
                f"all_reduce is wrong: after {steps} steps element {index} is {self.buffer[index].item()!r} "
                f"where {self.first_sum[index].item() / back / back!r} was expected"
            )

    def finish(self) -> dict[str, float]:
        return {}

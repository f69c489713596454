"""Time a copy within the memory of a GPU, or within the main memory of a CPU."""

from __future__ import annotations

import mmap

import torch

from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import CopySpec


class Copy(Measurement):
    """Measurement in which each step copies `spec.nbytes` bytes within one device's memory.

    The driver copies on a GPU, and the C library copies on a CPU.
    """

    max_iterations = 10000

    def __init__(self, spec: CopySpec, *, rank: int, device: torch.device) -> None:
        del rank
        begin = -(-spec.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE // 2
        memory = torch.zeros(begin + spec.nbytes, dtype=torch.uint8, device=device)
        self.host: tuple[memoryview, memoryview] | None = None
        if device.type == "cpu":
            # A buffer's offset within its page changes the time of a copy by a tenth. Without mmap
            # the offset would depend on file paths and environment variables.
            mapped = mmap.mmap(-1, begin + spec.nbytes)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
            whole = memoryview(mapped)
            self.host = whole[begin:], whole[: spec.nbytes]
        self.source, self.target = memory[: spec.nbytes], memory[begin:]
        self.source.copy_(torch.arange(256, dtype=torch.uint8).repeat(-(-spec.nbytes // 256))[: spec.nbytes])

    def start_round(self) -> None:
        self.target.zero_()

    def step(self) -> None:
        if self.host is None:
            self.target.copy_(self.source)
        else:
            target, source = self.host
            target[:] = source

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless the target buffer is equal to the source buffer."""
        if not torch.equal(self.target, self.source):
            nbytes = len(self.target)
            raise ArithmeticError(f"a copy of {nbytes} bytes differs from its source after {steps} steps")

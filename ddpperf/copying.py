"""A copy in the device's own memory: by the driver on a GPU, by the C library on the CPU, by nothing of torch's own."""

from __future__ import annotations

import torch

from ddpperf.specs import CopySpec


class Copy:
    """`step` copies a buffer of `spec.nbytes` bytes, 0 to 255 again and again, onto another."""

    max_iterations = 10000

    def __init__(self, spec: CopySpec, *, rank: int, device: torch.device) -> None:
        del rank
        pattern = (bytes(range(256)) * -(-spec.nbytes // 256))[: spec.nbytes]
        self.source = torch.frombuffer(bytearray(pattern), dtype=torch.uint8).to(device)
        self.target = torch.zeros_like(self.source)
        self.bytes = memoryview(pattern)
        self.host_target = memoryview(self.target.numpy()) if device.type == "cpu" else None  # type: ignore[arg-type]

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def start_round(self) -> None:
        self.target.zero_()

    def step(self) -> None:
        if self.host_target is None:
            self.target.copy_(self.source)
        else:
            self.host_target[:] = self.bytes

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless all bytes are there."""
        if not torch.equal(self.target, self.source):
            raise ArithmeticError(f"a copy of {len(self.target)} bytes is not what was copied, after {steps} steps")

    def finish(self) -> dict[str, float]:
        return {}

"""Measurement spec for a memory copy, which does not depend on torch, NCCL or a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddpperf.specs.base import Positive, Work
from ddpperf.specs.collective import format_bytes


@dataclass(frozen=True, kw_only=True)
class CopySpec(Work):
    """Measurement spec for one copy of `nbytes` bytes within the memory of each rank's device."""

    measurement: ClassVar[str] = "copy"
    # On 2 busy cores the copy times of 4 process sets differ by 0.4% to 1.9%. If the process sets
    # take turns after whole rounds instead, their copy times differ by 1.4% to 3.4%.
    compared_parts: ClassVar[int] = 16

    nbytes: Positive

    @property
    def grouped(self) -> bool:
        return False

    @property
    def id(self) -> str:
        return f"world_size={self.world_size}-{format_bytes(self.nbytes)}-copy"

"""What can be measured of collectives: one call on a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ddpperf.specs.base import Work, require_at_least, require_one_of

Algorithm = Literal["backend"]
CallForm = Literal["eager"]
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec(Work):
    """One in-place sum of a float32 buffer of `nbytes` bytes over all ranks, by the backend's own all_reduce.

    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "all_reduce"

    nbytes: int
    algorithm: Algorithm = "backend"
    form: CallForm = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("world_size", self.world_size, 2)
        require_at_least("nbytes", self.nbytes, FLOAT32_BYTES)
        require_one_of("algorithm", self.algorithm, get_args(Algorithm))
        require_one_of("form", self.form, get_args(CallForm))
        if self.nbytes % FLOAT32_BYTES:
            raise ValueError(f"nbytes must be a multiple of a float32's {FLOAT32_BYTES} bytes, got {self.nbytes}")

    @property
    def id(self) -> str:
        return f"world_size={self.world_size}-{format_bytes(self.nbytes)}-{self.algorithm}-{self.form}"


def format_bytes(nbytes: int) -> str:
    """A size as test ids spell it: 1 KiB is `1KiB`; sizes that are no whole KiB stay in bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"

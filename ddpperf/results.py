"""What was measured: raw seconds as the ranks read them. Standard library only; statistics are derived on read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ddpperf import specs
from ddpperf.specs import Spec


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One process set's rounds.

    seconds[round][rank]: what rank's own clock read for all `iterations` steps of that round.
    counters[name][rank]: what a rank counted besides, such as `peak_memory_bytes`.
    """

    set: str
    side: str
    torch: str
    seconds: tuple[tuple[float, ...], ...]
    counters: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        widths = {len(ranks) for ranks in self.seconds}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(f"set {self.set} must have at least one round, each with every rank, got {self.seconds}")
        for seconds in (value for ranks in self.seconds for value in ranks):
            if not math.isfinite(seconds) or seconds <= 0:
                raise ValueError(f"set {self.set} measured {seconds} s, which is no duration; nothing is kept of it")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One spec's samples over one or more process sets, each round of `iterations` steps."""

    spec: Spec
    iterations: int
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if type(self.iterations) is not int or self.iterations < 1:
            raise ValueError(f"iterations must be a whole number of at least 1, got {self.iterations!r}")
        if not self.samples:
            raise ValueError("a measurement must have at least one set's sample")

    def step_seconds(self, sample: Sample, *, ranks: int | None = None) -> list[float]:
        """Seconds of a step in each round of `sample`: the slowest of the first `ranks` ranks (default: all)."""
        return [max(seconds[:ranks]) / self.iterations for seconds in sample.seconds]

    def all_step_seconds(self) -> list[float]:
        """Seconds of a step in each round of every set, set after set."""
        return [seconds for sample in self.samples for seconds in self.step_seconds(sample)]

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": specs.to_json(self.spec),
            "iterations": self.iterations,
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Measured:
        """What `to_json` wrote; raises ValueError for anything else."""
        try:
            return cls(
                spec=specs.from_json(fields["spec"]),
                iterations=fields["iterations"],
                samples=tuple(_sample(sample) for sample in fields["samples"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a stored measurement has another form than this: {error!r}") from error


def _sample(fields: dict[str, Any]) -> Sample:
    return Sample(
        set=fields["set"],
        side=fields["side"],
        torch=fields["torch"],
        seconds=tuple(tuple(float(value) for value in ranks) for ranks in fields["seconds"]),
        counters={name: tuple(values) for name, values in fields["counters"].items()},
    )

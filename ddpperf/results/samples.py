"""What was measured: raw seconds as the ranks read them. Standard library only; statistics are derived on read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpperf import specs
from ddpperf.specs import EpochSpec, Spec

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-12, 1e9
MOST_ITERATIONS = 10**9
BASE, CANDIDATE = "A", "B"  # the sides of a run


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One process set's rounds.

    seconds[round][rank]: what rank's own clock read for all `iterations` steps of that round.
    counters[name][rank]: what a rank counted besides, such as `peak_memory_bytes`. kernels: a digest of those that a step of
    it ran, on all ranks; empty where that was not asked for, or could not be told.
    """

    set: str
    side: str
    torch: str
    seconds: tuple[tuple[float, ...], ...]
    counters: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    kernels: str = ""

    def __post_init__(self) -> None:
        widths = {len(ranks) for ranks in self.seconds}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(
                f"set {self.set} must have at least one round, each with every rank, got {self.seconds}"
            )
        for seconds in (value for ranks in self.seconds for value in ranks):
            if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:  # nor is a NaN
                raise ValueError(
                    f"set {self.set} measured {seconds} s, which is no duration; nothing is kept of it"
                )
        for name, values in self.counters.items():
            if not (
                values and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
            ):
                raise ValueError(
                    f"set {self.set} counted {str(values)[:40]} as {name}; a finite number a rank is needed"
                )
        if not isinstance(self.kernels, str):
            raise ValueError(
                f"set {self.set} has {str(self.kernels)[:40]} as its kernels; their digest, a word, is needed"
            )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One spec's samples over one or more process sets, each round of `iterations` steps.

    candidate_spec: what the sets of the candidate's side measured, where that is another spec than the base's: of the same kind
    and world size, so that by set all figures have one meaning.
    """

    spec: Spec
    iterations: int
    samples: tuple[Sample, ...]
    candidate_spec: Spec | None = None

    def __post_init__(self) -> None:
        other = self.candidate_spec
        if other is not None and (type(other), other.world_size) != (type(self.spec), self.spec.world_size):
            raise ValueError(
                f"both sides need specs of one kind and world size, got {self.spec.id} and {other.id}"
            )
        if type(self.iterations) is not int or not 1 <= self.iterations <= MOST_ITERATIONS:
            raise ValueError(
                f"iterations must be a whole number from 1 to {MOST_ITERATIONS}, got {str(self.iterations)[:40]}"
            )
        if not self.samples:
            raise ValueError("a measurement must have at least one set's sample")

    def spec_of(self, side: str) -> Spec:
        """What the sets of this side measured."""
        return self.candidate_spec if side == CANDIDATE and self.candidate_spec is not None else self.spec

    def of(self, side: str) -> Measured:
        """One side of it by itself; raises ValueError if that was not measured."""
        samples = tuple(sample for sample in self.samples if sample.side == side)
        return Measured(spec=self.spec_of(side), iterations=self.iterations, samples=samples)

    def of_set(self, name: str) -> Sample:
        """One process set's; raises KeyError if it did not measure this."""
        return {sample.set: sample for sample in self.samples}[name]

    def step_seconds(self, sample: Sample) -> list[float]:
        """Seconds of a step in each round of `sample`: the slowest rank's, of the ranks that the spec's work is spread over.

        A set whose ranks worked in turn gives its first rank's: the others' rounds were not the same rounds.
        """
        return [max(seconds[: self.spec.world_size]) / self.iterations for seconds in sample.seconds]

    def all_step_seconds(self) -> list[float]:
        """Seconds of a step in each round of every set, set after set."""
        return [seconds for sample in self.samples for seconds in self.step_seconds(sample)]

    def median_step_seconds(self) -> dict[str, float]:
        """By set, the median over its rounds."""
        return {sample.set: median(self.step_seconds(sample)) for sample in self.samples}

    def rank_step_seconds(self, sample: Sample) -> list[float]:
        """Seconds of a step on each rank that the spec's work is spread over: its own median over the rounds of `sample`."""
        ranks = list(zip(*sample.seconds, strict=True))[: self.spec.world_size]
        return [median(rounds) / self.iterations for rounds in ranks]

    def slowest_device_seconds(self, devices: int) -> dict[str, float]:
        """By set, of ranks that worked in turn: the greatest of the first `devices` ranks' own medians.

        Not the median of each round's greatest: of rounds that were not simultaneous that grows with the number of devices.
        """
        return {
            sample.set: max(median(rounds) for rounds in list(zip(*sample.seconds, strict=True))[:devices])
            / self.iterations
            for sample in self.samples
        }

    def counter(self, name: str) -> dict[str, float]:
        """By set, the greatest that a rank counted, of the ranks that the spec's work is spread over; empty if none did."""
        ranks = slice(self.spec.world_size)
        return {
            sample.set: max(sample.counters[name][ranks])
            for sample in self.samples
            if name in sample.counters
        }

    def launch_bound(self) -> dict[str, float]:
        """By set, the seconds of a step over those that its devices need when none waits for the CPU; empty if not counted."""
        bound = {}
        for sample in self.samples:
            spec = self.spec_of(sample.side)
            steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
            device_seconds = max(
                sample.counters.get("device_seconds", ())[: self.spec.world_size], default=0.0
            )
            if device_seconds > 0:
                seconds = median(self.step_seconds(sample))
                bound[sample.set] = seconds / (steps * (device_seconds + spec.delay_seconds))
        return bound

    def different_kernels(self) -> dict[str, list[str]]:
        """By digest, the sets of a side that did not all run the same kernels; empty if those of each side did.

        Two sides may differ by design. A set whose kernels are not known is left out.
        """
        different: dict[str, list[str]] = {}
        for side in (BASE, CANDIDATE):
            known = [sample for sample in self.samples if sample.side == side and sample.kernels]
            for sample in known if len({each.kernels for each in known}) > 1 else []:
                different.setdefault(sample.kernels, []).append(sample.set)
        return different

    def counted_seconds(self) -> float:
        """What all rounds of all sets took: ranks that worked together at the same time, the others one after the other."""
        return sum(
            self.spec.calls * max(seconds[place] for place in turn if place < len(seconds))
            for sample in self.samples
            for seconds in sample.seconds
            for turn in self.spec.turns(len(seconds))
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": specs.to_json(self.spec),
            **(
                {"candidate_spec": specs.to_json(self.candidate_spec)}
                if self.candidate_spec is not None
                else {}
            ),
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
                candidate_spec=specs.from_json(fields["candidate_spec"])
                if "candidate_spec" in fields
                else None,
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
        kernels=fields.get("kernels", ""),  # not in older files
    )

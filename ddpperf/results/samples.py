"""Raw measured times of all ranks, in seconds, with the usage of their devices, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from ddpperf import specs
from ddpperf.errors import quoted
from ddpperf.specs import EpochSpec, Spec

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-12, 1e9
MOST_ITERATIONS = 10**9
# A GPU with a larger counter graph_slowdown replays CUDA graphs at its slower pace. The counter is the
# time of a small graph over its time at the fast pace; at the slow pace of an H200 it is 1.2.
SLOW_PACE = 1.08
BASE, CANDIDATE = "A", "B"  # the stored names of base and candidate

Row = tuple[float | None, ...]  # the values of one device, or of one rank; None where one is missing


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The energy of a process set's devices in a measurement, and their utilization over time.

    joules: the energy of each GPU in one step, epoch or training; empty if it is unknown. seconds:
    the time of each point since the first round began. series: the values of each quantity, such as
    power_watts, as `series[quantity][device][point]`. A quantity of the ranks has a row for each
    rank, and a quantity of the whole machine has one row. mean, peak: of each quantity and device
    over all samples, before points were averaged.
    """

    joules: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    series: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    mean: Mapping[str, Row] = field(default_factory=dict)
    peak: Mapping[str, Row] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Usage:
        """Read what `asdict` made of a usage; raise an error for anything else."""
        return cls(
            joules=tuple(fields["joules"]),
            seconds=tuple(fields["seconds"]),
            series={name: tuple(map(tuple, rows)) for name, rows in fields["series"].items()},
            mean={name: tuple(values) for name, values in fields["mean"].items()},
            peak={name: tuple(values) for name, values in fields["peak"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measured rounds of one process set, which is a group of rank processes started together.

    `seconds[round][rank]` is the time of all steps of a round. `counters[name][rank]` holds other
    numbers of a rank, such as `peak_memory_bytes`. `kernels` is a digest of the GPU kernels of a
    step on all ranks, empty if unknown. `usage` is the energy and the utilization of the devices,
    None if unknown.
    """

    set: str
    side: str
    torch: str
    seconds: tuple[tuple[float, ...], ...]
    counters: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kernels: str = ""
    usage: Usage | None = None

    def __post_init__(self) -> None:
        where = f"set {self.set[:40]}"
        widths = {len(ranks) for ranks in self.seconds}
        if len(widths) != 1 or 0 in widths:
            required = "at least one round, each with every rank"
            raise ValueError(f"{where} must have {required}, got {quoted(self.seconds)}")
        for seconds in (value for ranks in self.seconds for value in ranks):
            if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:  # a NaN is refused, too
                raise ValueError(
                    f"{where} measured {quoted(seconds)} s, which is no duration; nothing is kept of it"
                )
        for name, values in self.counters.items():
            finite = (isinstance(value, int | float) and math.isfinite(value) for value in values)
            if not values or not all(finite):
                found = f"{quoted(values)} as {name[:40]}"
                raise ValueError(f"{where} counted {found}; each rank needs a finite number")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All samples that were measured with one measurement spec, from one or more process sets.

    Each round has `iterations` steps. `candidate_spec` is the spec that the candidate's process
    sets measured, if it differs from the base's. Both specs have the same type and world size, so
    that all metrics have the same meaning.
    """

    spec: Spec
    iterations: int
    samples: tuple[Sample, ...]
    candidate_spec: Spec | None = None

    def __post_init__(self) -> None:
        base, other = self.spec, self.candidate_spec
        if other is not None and (type(other), other.world_size) != (type(base), base.world_size):
            raise ValueError(
                f"base and candidate need specs of one type and world size, got {base.id} and {other.id}"
            )
        if type(self.iterations) is not int or not 1 <= self.iterations <= MOST_ITERATIONS:
            required = f"a whole number from 1 to {MOST_ITERATIONS}"
            raise ValueError(f"iterations must be {required}, got {quoted(self.iterations)}")
        if not self.samples:
            raise ValueError("a measurement must have at least one set's sample")

    def spec_of(self, side: str) -> Spec:
        return self.candidate_spec if side == CANDIDATE and self.candidate_spec is not None else self.spec

    def of(self, side: str) -> Measured:
        """Return the samples of the base alone or of the candidate alone.

        Raises ValueError if there are none.
        """
        samples = tuple(sample for sample in self.samples if sample.side == side)
        return Measured(spec=self.spec_of(side), iterations=self.iterations, samples=samples)

    def of_set(self, name: str) -> Sample:
        """Return the sample of the process set with this name; raise KeyError for an unknown name."""
        return {sample.set: sample for sample in self.samples}[name]

    def step_seconds(self, sample: Sample) -> list[float]:
        """Return the seconds of a step in each round, on the slowest of `world_size` ranks.

        If the ranks worked in turn, only the first rank's rounds count, because the others were not
        simultaneous.
        """
        return [max(seconds[: self.spec.world_size]) / self.iterations for seconds in sample.seconds]

    def all_step_seconds(self) -> list[float]:
        """Return the seconds of a step in each round of all process sets, in one list."""
        return [seconds for sample in self.samples for seconds in self.step_seconds(sample)]

    def median_step_seconds(self) -> dict[str, float]:
        """Return the median step time over rounds of each process set, in seconds."""
        return {sample.set: median(self.step_seconds(sample)) for sample in self.samples}

    def mean_step_seconds(self) -> dict[str, float]:
        """Return the total time of all rounds divided by their steps, in seconds, by process set.

        Unlike the median over rounds, the mean shows rare stalls.
        """
        return {sample.set: fmean(self.step_seconds(sample)) for sample in self.samples}

    def rank_step_seconds(self, sample: Sample, ranks: int | None = None) -> list[float]:
        """Return the median step time over rounds of each of the first `ranks` ranks, in seconds.

        `ranks` defaults to the world size.
        """
        by_rank = list(zip(*sample.seconds, strict=True))[: ranks or self.spec.world_size]
        return [median(rounds) / self.iterations for rounds in by_rank]

    def slowest_device_seconds(self, devices: int) -> dict[str, float]:
        """Return the step time of the slowest of the first `devices` ranks, for each process set.

        The ranks worked in turn. The result is the maximum of the ranks' medians. The median of
        each round's maximum would grow with the number of devices, because these rounds were not
        simultaneous.
        """
        return {sample.set: max(self.rank_step_seconds(sample, devices)) for sample in self.samples}

    def counter(self, name: str) -> dict[str, float]:
        """Return the maximum of a counter, such as peak memory, over ranks for each process set.

        Only the first `world_size` ranks count. Process sets without this counter are left out.
        """
        ranks = slice(self.spec.world_size)
        counted = (sample for sample in self.samples if name in sample.counters)
        return {sample.set: max(sample.counters[name][ranks]) for sample in counted}

    def launch_bound(self) -> dict[str, float]:
        """Return the ratio of a step's time to its GPU time, for each process set.

        The GPU time leaves out waiting for the CPU, so a ratio well above 1 means that kernel
        launches limit the step. Process sets without GPU times are left out.
        """
        bound = {}
        for name, device_seconds in self.counter("device_seconds").items():
            sample = self.of_set(name)
            spec = self.spec_of(sample.side)
            steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
            if device_seconds > 0:
                work = steps * (device_seconds + spec.delay_seconds)
                bound[name] = median(self.step_seconds(sample)) / work
        return bound

    def counted_seconds(self) -> float:
        """Return the total duration of all measured rounds, in seconds.

        The times of ranks that worked in turn are added up.
        """
        return sum(
            self.spec.calls * max(seconds[place] for place in turn if place < len(seconds))
            for sample in self.samples
            for seconds in sample.seconds
            for turn in self.spec.turns(len(seconds))
        )

    def to_json(self) -> dict[str, Any]:
        other = self.candidate_spec
        return {
            "spec": specs.to_json(self.spec),
            **({} if other is None else {"candidate_spec": specs.to_json(other)}),
            "iterations": self.iterations,
            "samples": [asdict(sample) for sample in self.samples],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Measured:
        """Read a measurement that `to_json` wrote; raise an error for anything else."""
        candidate = fields.get("candidate_spec")
        return cls(
            spec=specs.from_json(fields["spec"]),
            iterations=fields["iterations"],
            samples=tuple(_sample(sample) for sample in fields["samples"]),
            candidate_spec=specs.from_json(candidate) if candidate is not None else None,
        )


def _sample(fields: dict[str, Any]) -> Sample:
    return Sample(
        set=str(fields["set"]),
        side=str(fields["side"]),
        torch=str(fields["torch"]),
        seconds=tuple(tuple(float(value) for value in ranks) for ranks in fields["seconds"]),
        counters={name: tuple(values) for name, values in fields["counters"].items()},
        kernels=str(fields.get("kernels", "")),
        usage=Usage.from_json(usage) if (usage := fields.get("usage")) is not None else None,
    )

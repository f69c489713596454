"""The pool of process sets that measures specs, and replaces a set that failed."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ddpperf import specs
from ddpperf.results import Measured, Sample
from ddpperf.specs import Spec
from ddpperf.workers.channel import Message
from ddpperf.workers.process_set import ProcessSet
from ddpperf.workers.rank_process import Side

ROUND_SECONDS = 0.05  # a round lasts about this long, or one step


class Pool:
    """`replicates` live sets of `size` ranks for each side; started at the first measurement, ended by `close`.

    The sets are alive side by side and their rounds interleave; only one samples at a time. A set that fails is dead at
    once and is replaced, under a new name, before the next measurement. log_folder: where each rank's output stays; by
    default in a private folder that goes with the pool.
    """

    def __init__(
        self,
        *,
        size: int,
        device: str,
        rounds: int,
        deadline_seconds: float,
        sides: Sequence[Side] = (Side(),),
        replicates: int = 1,
        log_folder: Path | None = None,
    ) -> None:
        self.size = size
        self.device = device
        self.rounds = rounds
        self.deadline_seconds = deadline_seconds
        self._slots: list[Side] = [side for _ in range(replicates) for side in sides]
        self._sets: list[ProcessSet | None] = [None] * len(self._slots)
        self._sets_made = 0
        self._folder: Path | None = None
        self._log_folder = log_folder
        self._remembered: dict[tuple[Spec, tuple[str, ...]], Measured] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def live_sets(self) -> list[ProcessSet]:
        """All sets, ready; those that are missing or failed are started first, side by side."""
        started = []
        try:
            for slot, side in enumerate(self._slots):
                current = self._sets[slot]
                if current is not None and current.alive and current.dead_ranks():
                    current.kill()
                if current is None or not current.alive:
                    self._sets[slot] = new = self._new_set(side)
                    new.spawn()
                    started.append(new)
            for new in started:
                new.wait_ready()
        except BaseException:
            for new in started:
                new.kill()
            raise
        return [live for live in self._sets if live is not None]

    def _new_set(self, side: Side) -> ProcessSet:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ddpperf-"))
        self._sets_made += 1
        return ProcessSet(
            f"{side.name}{self._sets_made}",
            side=side,
            size=self.size,
            device=self.device,
            folder=self._folder,
            log_folder=self._log_folder or self._folder,
            deadline_seconds=self.deadline_seconds,
        )

    def measure(self, spec: Spec) -> Measured:
        """The spec's rounds on every set; raises SetFailure, ValueError if a set is too small or measured no duration."""
        if spec.world_size > self.size:
            raise ValueError(
                f"world_size={spec.world_size} needs as many ranks, the sets have {self.size}; "
                f"add it to --world-sizes, or measure fewer"
            )
        sets = self.live_sets()
        limit = min(_open(process_set, spec) for process_set in sets)
        iterations = max(_calibrate(process_set, spec, limit) for process_set in sets)
        seconds: dict[str, list[tuple[float, ...]]] = {process_set.name: [] for process_set in sets}
        for index in range(self.rounds):
            for process_set in sets if index % 2 == 0 else reversed(sets):  # A B B A: drift meets both sides alike
                seconds[process_set.name].append(_sample(process_set, spec, iterations))
        samples = tuple(_close(process_set, spec, seconds[process_set.name]) for process_set in sets)
        for process_set in sets:
            process_set.require_alive()
        return Measured(spec=spec, iterations=iterations, samples=samples)

    def measure_once(self, spec: Spec) -> Measured:
        """As `measure`, but the same sets measure the same spec only once: for a leg that several tests share."""
        key = spec, tuple(live.name for live in self.live_sets())
        if key not in self._remembered:
            self._remembered[key] = self.measure(spec)
        return self._remembered[key]

    def environment(self) -> dict[str, object]:
        """What the first set computes with; empty if none has started."""
        return next((dict(each.environment) for each in self._sets if each is not None and each.environment), {})

    def close(self) -> None:
        """End all sets and remove the private folder; harmless when repeated."""
        try:
            for each in self._sets:
                if each is not None:
                    each.close()
        finally:
            for each in self._sets:
                if each is not None:
                    each.kill()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None


def choose_iterations(step_seconds: float, limit: int) -> int:
    """Steps in a round, so that it lasts about ROUND_SECONDS: a power of two, so that equal work gets equal rounds."""
    wanted = min(max(1.0, ROUND_SECONDS / max(step_seconds, 1e-9)), limit)
    return 1 << math.floor(math.log2(wanted))


def _ranks(process_set: ProcessSet, spec: Spec) -> range:
    """The ranks that take part: all of the set if each works alone, so that the slowest device is known."""
    return range(process_set.size if spec.in_turn else spec.world_size)


def _open(process_set: ProcessSet, spec: Spec) -> int:
    """Build the measurement on the ranks that take part; returns how many steps a round may have."""
    if spec.in_turn:
        process_set.leave()
    else:
        process_set.join(spec.world_size)
    answers: list[Message] = []
    for ranks in _turns(process_set, spec):
        answers += process_set.request("open", ranks=ranks, spec=specs.to_json(spec)).values()
    return min(int(answer["max_iterations"]) for answer in answers)


def _calibrate(process_set: ProcessSet, spec: Spec, limit: int) -> int:
    """Steps in a round, from untold rounds of 1, 4, 16, ... steps, the last of which is long enough to be believed."""
    iterations = 1
    while True:
        seconds = max(_sample(process_set, spec, iterations))
        if seconds >= ROUND_SECONDS / 8 or iterations * 4 > limit:
            return choose_iterations(seconds / iterations, limit)
        iterations *= 4


def _sample(process_set: ProcessSet, spec: Spec, iterations: int) -> tuple[float, ...]:
    answers: dict[int, Message] = {}
    for ranks in _turns(process_set, spec):
        answers |= process_set.request("sample", ranks=ranks, iterations=iterations)
    return tuple(answers[rank]["seconds"] for rank in sorted(answers))


def _close(process_set: ProcessSet, spec: Spec, seconds: list[tuple[float, ...]]) -> Sample:
    answers = process_set.request("close", ranks=_ranks(process_set, spec))
    names = answers[0]["counters"]
    return Sample(
        set=process_set.name,
        side=process_set.side.name,
        torch=str(process_set.environment["torch"]),
        seconds=tuple(seconds),
        counters={name: tuple(answers[rank]["counters"][name] for rank in sorted(answers)) for name in names},
    )


def _turns(process_set: ProcessSet, spec: Spec) -> list[list[int]]:
    """Which ranks work at the same time: all of them, or each in its turn."""
    ranks = list(_ranks(process_set, spec))
    return [[rank] for rank in ranks] if spec.in_turn else [ranks]

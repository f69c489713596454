"""The pool of process sets that measures specs, and replaces a set that failed."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ddpperf import specs
from ddpperf.instruments.kernels import digest_of_ranks
from ddpperf.results.samples import CANDIDATE, Measured, Sample
from ddpperf.specs import Spec
from ddpperf.workers.channel import Message
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet
from ddpperf.workers.rounds import Job, Seconds, calibrated, sample_rounds

WHOLE_SECONDS = (
    3.0  # what cannot be repeated in a round, such as an epoch, is repeated about this long in all
)


class Pool:
    """`replicates` live sets of `size` ranks for each side; started at the first measurement, ended by `close`.

    The sets are alive side by side and their rounds interleave; only one samples at a time. A set that fails is dead at
    once and is replaced, under a new name, before the next measurement. sets_made: by earlier pools, whose names are not used
    again. log_folder: where each rank's output stays; by default in a private folder that goes with the pool. cores: by rank,
    those it is kept on in each set. progress: told of the spec that is measured and how much of that is done. look: called
    with the process ids of all ranks and the number of rounds done, before the first and after each; what it answers spoiled
    that round, which is then measured again.
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
        sets_made: int = 0,
        log_folder: Path | None = None,
        cores: Sequence[Sequence[int]] | None = None,
        progress: Callable[[Spec, float], None] = lambda spec, fraction: None,
        look: Callable[[list[int], int], str] = lambda processes, done: "",
    ) -> None:
        self.size = size
        self.device = device
        self.rounds = rounds
        self.deadline_seconds = deadline_seconds
        self._slots: list[Side] = [
            side for pair in range(replicates) for side in (sides if pair % 2 == 0 else sides[::-1])
        ]
        self._sets: list[ProcessSet | None] = [None] * len(self._slots)
        self.sets_made = sets_made
        self._folder: Path | None = None
        self._log_folder = log_folder
        self._cores = cores
        self._progress = progress
        self._look = look
        self.counted_seconds = 0.0  # spent in rounds that count, so far
        self._remembered: dict[tuple[Spec, Spec | None, tuple[str, ...]], Measured] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def live_sets(self, most: int | None = None) -> list[ProcessSet]:
        """All sets, or the first `most`, ready; those that are missing or failed are started first, side by side."""
        started = []
        try:
            for slot, side in enumerate(self._slots[:most]):
                current = self._sets[slot]
                if current is not None and current.alive and current.dead_ranks():
                    current.kill()
                if current is None or not current.alive:
                    self._sets[slot] = new = self._new_set(side)
                    new.spawn()
                    started.append(new)
            for new in started:
                new.connect()  # and let it take its devices, which takes longest, while the others connect
            for new in started:
                new.wait_ready()
        except BaseException:
            for new in started:
                new.kill()
            raise
        return [live for live in self._sets[:most] if live is not None]

    def _new_set(self, side: Side) -> ProcessSet:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ddpperf-"))
        self.sets_made += 1
        return ProcessSet(
            f"{side.name}{self.sets_made}",
            side=side,
            size=self.size,
            device=self.device,
            folder=self._folder,
            log_folder=self._log_folder or self._folder,
            deadline_seconds=self.deadline_seconds,
            cores=self._cores,
        )

    def measure(self, spec: Spec, candidate: Spec | None = None) -> Measured:
        """The spec's rounds on every set, or `candidate`'s on those of its side; raises SetFailure, ValueError if a set is too
        small or measured no duration."""
        if spec.world_size > self.size:
            raise ValueError(
                f"world_size={spec.world_size} needs as many ranks, the sets have {self.size}; "
                f"add it to --world-sizes, or measure fewer"
            )
        if spec.maps_memory or (candidate is not None and candidate.maps_memory):
            self._replace_those_that_cannot_map(spec.world_size)
        jobs = [
            (live, candidate or spec if live.side.name == CANDIDATE else spec) for live in self.live_sets()
        ]
        return self._measured(jobs, spec, candidate)

    def measure_alone(self, spec: Spec) -> Measured:
        """As `measure`, on the first set, after all others were ended: a device's whole memory is its own."""
        for each in self._sets[1:]:
            if each is not None:
                each.close()
        return self._measured([(live, spec) for live in self.live_sets(1)], spec)

    def _measured(self, jobs: list[Job], spec: Spec, candidate: Spec | None = None) -> Measured:
        parts = spec.compared_parts if len({live.side.name for live, _ in jobs}) > 1 else 1
        rounds = 1 if spec.counts else self.rounds * parts
        for process_set, _ in jobs:
            process_set.progress = partial(self._tell, spec, rounds, 0)
        self._progress(spec, 0.0)
        limit = min(_open(jobs))
        iterations = max(calibrated(*job, limit, parts) for job in jobs) if spec.repeats else 1
        seconds = sample_rounds(
            jobs,
            iterations,
            rounds=rounds,
            enough_seconds=math.inf if spec.repeats else WHOLE_SECONDS * len(jobs),
            look=self._look,
            tell=partial(self._tell, spec, rounds),
        )
        samples = tuple(_close(*job, seconds[job[0].name], compared=len(jobs) > 1) for job in jobs)
        for process_set, _ in jobs:
            process_set.require_alive()
        measured = Measured(spec=spec, iterations=iterations, samples=samples, candidate_spec=candidate)
        self.counted_seconds += measured.counted_seconds()
        return measured

    def _replace_those_that_cannot_map(self, world_size: int) -> None:
        """Torch before 2.15 counts by process how often memory was mapped together, so that a rank that was left out of a
        smaller group's would wait in a larger one's for ever (pytorch issue 196082)."""
        for each in self._sets:
            if each is not None and world_size > each.fewest_mapped:
                each.close()
        for each in self.live_sets():
            each.fewest_mapped = min(each.fewest_mapped, world_size)

    def _tell(self, spec: Spec, rounds: int, index: int, fraction: float) -> None:
        """How much is done; of what is long only the round is known, not how many there will be."""
        self._progress(spec, (index + fraction) / rounds if spec.repeats else min(1.0, fraction))

    def measure_once(self, spec: Spec, candidate: Spec | None = None) -> Measured:
        """As `measure`, but the same sets measure the same only once: for a leg that several tests share."""
        key = spec, candidate, tuple(live.name for live in self.live_sets())
        if key not in self._remembered:
            measured = self.measure(spec, candidate)
            key = (
                spec,
                candidate,
                tuple(live.name for live in self.live_sets()),
            )  # they may be others than before
            self._remembered[key] = measured
        return self._remembered[key]

    def environment(self) -> dict[str, object]:
        """What the first set computes with; empty if none has started."""
        return next(
            (dict(each.environment) for each in self._sets if each is not None and each.environment), {}
        )

    def close(self) -> None:
        """End all sets, side by side, and remove the private folder; harmless when repeated."""
        made = [each for each in self._sets if each is not None]
        try:
            for each in made:
                each.begin_to_close()
            for each in made:
                each.close()
        finally:
            for each in made:
                each.kill()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None


def _open(jobs: list[Job]) -> list[int]:
    """Build the measurements on the ranks that take part, and warm them up; returns how many steps a round may have, by set.

    All sets do so at the same time, for nothing is timed yet; but of what is compiled kernels are chosen by their times.
    """
    for process_set, spec in jobs:
        process_set.leave(
            unless=spec.world_size if spec.grouped else 0
        )  # all, before any is asked: one may fail
    _wait([process_set for process_set, spec in jobs if spec.grouped and process_set.join(spec.world_size)])
    answers = []
    alone = any(spec.compiled for _, spec in jobs)
    for group in [[job] for job in jobs] if alone else [jobs]:
        for process_set, spec in group:
            ranks = [rank for turn in spec.turns(process_set.size) for rank in turn]
            process_set.ask("open", ranks=ranks, spec=specs.to_json(spec))
        answers += _wait([process_set for process_set, _ in group])
    return [min(int(answer["max_iterations"]) for answer in each.values()) for each in answers]


def _wait(sets: Sequence[ProcessSet]) -> list[dict[int, Message]]:
    """The answers of all sets that were asked; of several failures raises the first side's, when none is left unread: where
    both sides fail, the other is no worse."""
    answers, failures = [], []
    for process_set in sets:
        try:
            answers.append(process_set.answers())
        except SetFailure as failure:
            failures.append(failure)
    if failures:
        raise min(failures, key=lambda failure: failure.set_name[:1])
    return answers


def _close(process_set: ProcessSet, spec: Spec, seconds: list[Seconds], *, compared: bool) -> Sample:
    """End the measurement. compared: with other sets', so that it is asked which kernels each ran."""
    ranks = [rank for turn in spec.turns(process_set.size) for rank in turn]
    ours = process_set.side.package == Side().package  # another ddpperf's ranks may not know what is asked
    asked: dict[str, Any] = {"kernels": True} if compared and ours else {}
    answers = process_set.request("close", ranks=ranks, **asked)
    names = [
        name
        for name in answers[ranks[0]]["counters"]
        if all(name in each["counters"] for each in answers.values())
    ]
    return Sample(
        set=process_set.name,
        side=process_set.side.name,
        torch=str(process_set.environment["torch"]),
        seconds=tuple(seconds),
        counters={name: tuple(answers[rank]["counters"][name] for rank in sorted(answers)) for name in names},
        kernels=digest_of_ranks([answers[rank].get("kernels", "") for rank in sorted(answers)]),
    )

"""The pool of process sets, which measures on all of them and replaces those that have failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType

from ddpperf import specs
from ddpperf.instruments.kernels import digest_of_ranks
from ddpperf.machine.utilization import Recorder
from ddpperf.results.samples import CANDIDATE, Measured, Sample
from ddpperf.specs import Spec
from ddpperf.workers.channel import Message
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import Answers, ProcessSet, Progress, SetOptions
from ddpperf.workers.rounds import (
    ROUND_SECONDS,
    Job,
    Seconds,
    calibrated,
    choose_iterations,
    sample_rounds,
)

WHOLE_SECONDS = 3.0  # a spec whose rounds are single long steps, such as epochs, is measured for this long
SHARED_WHOLE_SECONDS = 1.0  # the same for each of several process sets, which take turns
MOST_STEPS = 1000  # in a round, unless a measurement says otherwise


class Pool:
    """Process sets that are alive at the same time and run the rounds of a measurement in turn.

    There are `replicates` process sets of `size` ranks for each of `sides`, the base and the
    candidate. They are started at the first measurement. Only one process set samples at a time. A
    process set that fails is killed, and replaced under a new name before the next measurement.

    A measurement that needs more ranks gets process sets of its own. They end before the next
    measurement that does not need them. GPUs have no more ranks than `size`.

    sides: the side of each process set.
    sets_made: how many process sets earlier pools made, so that no name is used twice.
    step_seconds: for some specs, the seconds of a step, from which the number of steps in a round
    follows. For other specs, trial rounds find the number.
    progress: called with a spec and the fraction of its measurement that is done.
    check_round: called before the first round and after each round, with the process ids of all
    ranks and the number of rounds done. It returns why the last round is spoiled, or an empty
    string. A spoiled round is measured again.
    recorder: called with a spec, the process ids of the ranks that measure it, and whether a single
    process set measures. It returns what records the energy and the utilization of the devices.
    """

    def __init__(
        self,
        options: SetOptions,
        *,
        sides: Sequence[Side] = (Side(),),
        replicates: int = 1,
        sets_made: int = 0,
        step_seconds: Mapping[Spec, float] = MappingProxyType({}),
        progress: Callable[[Spec, float], None] = lambda spec, fraction: None,
        check_round: Callable[[list[int], int], str] = lambda processes, done: "",
        recorder: Callable[[Spec, list[int], bool], Recorder] = lambda spec, processes, alone: Recorder(),
    ) -> None:
        self.options = options
        self.sets_made = sets_made
        self.counted_seconds = 0.0  # spent in rounds that count, so far
        self.sides = [side for pair in range(replicates) for side in sides[:: 1 if pair % 2 == 0 else -1]]
        self._sets: dict[tuple[int, int], ProcessSet] = {}  # by their number of ranks and place in `sides`
        self._step_seconds = step_seconds
        self._progress = progress
        self._check_round = check_round
        self._recorder = recorder
        self._fewest_mapped: dict[str, int] = {}  # each process set's smallest world size that mapped memory
        self._remembered: dict[tuple[Spec, Spec | None, tuple[str, ...]], Measured] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def live_sets(self, most: int | None = None, ranks: int = 0) -> list[ProcessSet]:
        """Return the process sets, after starting those that are missing or have failed.

        most: how many of the process sets to return, all by default. They start side by side.
        ranks: the number of ranks, if it is more than usual. Larger process sets are ended.
        """
        sides, options = self.sides[:most], self._options_of(ranks)
        for size, place in list(self._sets):
            if size > options.size:
                self._sets.pop((size, place)).close()
        started = []
        try:
            for place, side in enumerate(sides):
                current = self._sets.get((options.size, place))
                if current is not None and current.dead_ranks():
                    current.kill()
                if current is None or not current.alive:
                    self.sets_made += 1
                    new = ProcessSet(f"{side.name}{self.sets_made}", side, options)
                    self._sets[options.size, place] = new
                    started.append(new)
                    new.spawn()
            for new in started:
                new.wait_ready()
        except BaseException:
            for new in started:
                new.kill()
            raise
        return [self._sets[options.size, place] for place in range(len(sides))]

    def _options_of(self, ranks: int) -> SetOptions:
        """Return the options of process sets with this number of ranks, or with the usual number.

        More ranks than usual are not pinned to cores, because each rank would get fewer cores. Raises
        ValueError for more ranks than usual on GPUs or by a launcher.
        """
        options = self.options
        if ranks <= options.size:
            return options
        if options.device != "cpu" or options.launcher is not None:
            found = f"each process set has {options.size}"
            advice = f"pass --world-sizes {ranks}, or measure fewer ranks"
            raise ValueError(f"world_size={ranks} needs {ranks} ranks, but {found}; {advice}")
        return replace(options, size=ranks, cores=None)

    def measure(self, spec: Spec, candidate: Spec | None = None, ranks: int = 0) -> Measured:
        """Take the measurement that `spec` describes on every process set.

        candidate: what the candidate's process sets measure instead. ranks: the number of ranks in
        the process sets, if other measurements of the same test need more than this one. Raises
        SetFailure, and ValueError if there are too few GPUs or if a process set measured no duration.
        """
        ranks = max(ranks, spec.world_size)
        if spec.maps_memory or (candidate is not None and candidate.maps_memory):
            self._replace_sets_that_cannot_map(spec.world_size, ranks)
        specs_of = {CANDIDATE: candidate or spec}
        jobs = [(live, specs_of.get(live.side.name, spec)) for live in self.live_sets(ranks=ranks)]
        return self._measure(jobs, spec, candidate)

    def measure_alone(self, spec: Spec) -> Measured:
        """Measure `spec` on the first process set, after all other process sets have ended."""
        for (_, place), process_set in self._sets.items():
            if place > 0:
                process_set.close()
        return self._measure([(live, spec) for live in self.live_sets(1)], spec)

    def measure_once(self, spec: Spec, candidate: Spec | None = None, ranks: int = 0) -> Measured:
        """Measure `spec`, or return the result if the same process sets have measured it before."""
        ranks = max(ranks, spec.world_size)
        names = tuple(live.name for live in self.live_sets(ranks=ranks))
        if known := self._remembered.get((spec, candidate, names)):
            return known
        measured = self.measure(spec, candidate, ranks)
        names = tuple(sample.set for sample in measured.samples)  # process sets may have been replaced
        self._remembered[spec, candidate, names] = measured
        return measured

    def expected_seconds(self, before: Measured) -> float:
        """Return the expected seconds of the timed rounds here, from a measurement by other process sets."""
        spec, sets, parts = before.spec, len(self.sides), self._parts(before.spec)
        seconds = median(before.all_step_seconds())
        steps = self._iterations(spec, seconds, MOST_STEPS, parts) if spec.repeats else 1
        turns = len(spec.turns(self.options.devices_in_turn))
        round_seconds = spec.calls * seconds * steps * turns * sets
        rounds = 1 if spec.counts else self.options.rounds * parts
        if not spec.repeats:
            rounds = min(rounds, math.ceil(SHARED_WHOLE_SECONDS * sets / round_seconds))
        return rounds * round_seconds

    def _parts(self, spec: Spec) -> int:
        """Return the number of parts of a round. Base and candidate alternate after each part."""
        compared = len({side.name for side in self.sides}) > 1
        return spec.compared_parts[self.options.device] if compared else 1

    def _iterations(self, spec: Spec, step_seconds: float, limit: int, parts: int) -> int:
        """Return how many steps of a known length one part of a round has."""
        round_seconds = ROUND_SECONDS[self.options.device] / parts
        return choose_iterations(step_seconds * spec.calls, limit, round_seconds)

    def _measure(self, jobs: list[Job], spec: Spec, candidate: Spec | None = None) -> Measured:
        try:
            return self._measure_on(jobs, spec, candidate)
        except Exception:
            raise
        except BaseException:  # such as a timeout of pytest-timeout: answers may still be on their way
            for process_set in self._sets.values():
                process_set.kill()
            raise

    def _measure_on(self, jobs: list[Job], spec: Spec, candidate: Spec | None) -> Measured:
        parts = self._parts(spec) if len(jobs) > 1 else 1
        rounds = 1 if spec.counts else self.options.rounds * parts

        def progress(index: int, fraction: float) -> None:
            self._progress(spec, (index + fraction) / rounds if spec.repeats else min(1.0, fraction))

        self._progress(spec, 0.0)
        limit = min(_open(jobs, partial(progress, 0)))
        of_sides = {job[0].side.name: job for job in jobs}.values()
        iterations = 1
        if spec in self._step_seconds and spec.repeats:
            iterations = self._iterations(spec, self._step_seconds[spec], limit, parts)
        elif spec.repeats:
            iterations = max(calibrated(*job, limit, parts) for job in of_sides)
        whole_seconds = WHOLE_SECONDS if len(jobs) == 1 else SHARED_WHOLE_SECONDS
        enough = math.inf if spec.repeats else whole_seconds * len(jobs)
        recorders = {live.name: self._recorder_of(live, of_set, len(jobs) == 1) for live, of_set in jobs}
        seconds = sample_rounds(
            jobs,
            iterations,
            rounds=rounds,
            enough_seconds=enough,
            check=self._check_round,
            progress=progress,
            recorders=recorders,
        )
        samples = tuple(
            replace(sample, usage=recorders[sample.set].usage()) for sample in _close(jobs, seconds)
        )
        for process_set, _ in jobs:
            process_set.require_alive()
        measured = Measured(spec=spec, iterations=iterations, samples=samples, candidate_spec=candidate)
        self.counted_seconds += measured.counted_seconds()
        return measured

    def _recorder_of(self, process_set: ProcessSet, spec: Spec, alone: bool) -> Recorder:
        """Return the recorder of a process set's device usage; it records nothing if ranks take turns."""
        turns = spec.turns(self.options.devices_in_turn)
        if self.options.time_only or len(turns) > 1:
            return Recorder()
        processes = [pid for rank, pid in process_set.pids.items() if rank in turns[0]]
        return self._recorder(spec, processes, alone)

    def _replace_sets_that_cannot_map(self, size: int, ranks: int) -> None:
        """End the process sets in which fewer than `size` ranks have mapped GPU memory.

        Torch before 2.15 counts mappings per process. A rank that was not in the smaller group
        would wait in a larger group forever (pytorch issue 196082).
        """
        known = self._fewest_mapped
        for process_set in self._sets.values():
            if known.get(process_set.name, size) < size:
                process_set.close()
        live = [process_set.name for process_set in self.live_sets(ranks=ranks)]
        self._fewest_mapped |= {name: min(size, known.get(name, size)) for name in live}

    def environment(self) -> dict[str, object]:
        """Return the versions of Python and torch in the ranks, or an empty dict without ranks."""
        return next((made.environment for made in self._sets.values() if made.environment), {})

    def close(self) -> None:
        """End all process sets. May be called again."""
        try:
            for process_set in self._sets.values():
                process_set.begin_to_close()
            for process_set in self._sets.values():
                process_set.close()
        finally:
            for process_set in self._sets.values():
                process_set.kill()


def _open(jobs: list[Job], progress: Progress) -> list[int]:
    """Build and warm up a measurement on each process set.

    Returns, for each process set, the maximum number of steps per round.
    """
    for process_set, spec in jobs:  # before the first request, since a request may fail
        process_set.leave(unless=spec.world_size if spec.grouped else 0)
    _wait([made for made, spec in jobs if spec.grouped and made.join(spec.world_size)], progress)
    answers: dict[str, Answers] = {}
    # At the same time, as nothing is timed yet. But the compiler chooses kernels by timing them.
    one_by_one = any(spec.compiled for _, spec in jobs)
    for group in [[job] for job in jobs] if one_by_one else [jobs]:
        answers |= _request(group, "open", lambda job: {"spec": specs.to_json(job[1])}, progress)
    return [min(int(answer["max_iterations"]) for answer in answers[live.name].values()) for live, _ in jobs]


def _close(jobs: list[Job], seconds: Mapping[str, list[Seconds]]) -> list[Sample]:
    """End the measurement on all process sets and return their samples.

    seconds: for each process set, by its name, the durations of its rounds.
    """
    able = [job for job in jobs if job[0].can_finish]
    finished: dict[str, Answers] = {}
    for job in able:  # one by one, because some counters are times
        finished |= _request([job], "finish")
    compared = len(jobs) > 1 and not jobs[0][0].options.time_only

    def arguments(job: Job) -> Message:
        return {"kernels": True} if compared and job[0].can_finish else {}

    # Older versions' ranks finish now, so they also close one by one. The base is first, so that a failure
    # of both sides is that of the base.
    groups = [*([able] if able else []), *([job] for job in jobs if not job[0].can_finish)]
    closed: dict[str, Answers] = {}
    for group in sorted(groups, key=lambda group: group[0][0].side.name):
        closed |= _request(group, "close", arguments)
    return [
        _sample_of(live, finished.get(live.name, {}), closed[live.name], seconds[live.name])
        for live, _ in jobs
    ]


def _request(
    jobs: list[Job],
    command: str,
    arguments: Callable[[Job], Message] = lambda job: {},
    progress: Progress = None,
) -> dict[str, Answers]:
    """Send a command to several process sets at the same time, and return their answers by their names.

    arguments: of the command, for a process set and its spec.
    """
    for job in jobs:
        job[0].ask(command, ranks=_ranks(*job), **arguments(job))
    sets = [process_set for process_set, _ in jobs]
    return dict(zip([made.name for made in sets], _wait(sets, progress), strict=True))


def _wait(sets: Sequence[ProcessSet], progress: Progress) -> list[Answers]:
    """Return the answers of all process sets. If several fail, raise the base's failure."""
    answers, failures = [], []
    for process_set in sets:
        try:
            answers.append(process_set.answers(progress))
        except SetFailure as failure:
            failures.append(failure)
    if failures:
        raise min(failures, key=lambda failure: failure.set_name[:1])
    return answers


def _sample_of(process_set: ProcessSet, finished: Answers, closed: Answers, seconds: list[Seconds]) -> Sample:
    """Return a process set's sample, from its ranks' answers to "finish" and to "close"."""
    ranks = sorted(closed)
    counters = [(finished.get(rank) or closed[rank])["counters"] for rank in ranks]
    names = [name for name in counters[0] if all(name in of_rank for of_rank in counters)]
    return Sample(
        set=process_set.name,
        side=process_set.side.name,
        torch=str(process_set.environment["torch"]),
        seconds=tuple(seconds),
        counters={name: tuple(of_rank[name] for of_rank in counters) for name in names},
        kernels=digest_of_ranks([closed[rank].get("kernels", "") for rank in ranks]),
    )


def _ranks(process_set: ProcessSet, spec: Spec) -> list[int]:
    return [rank for turn in spec.turns(process_set.options.devices_in_turn) for rank in turn]

"""The pool of process sets: it measures rounds on all of them in turn, and replaces those that failed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from ddpperf import specs
from ddpperf.instruments.kernels import digest_of_ranks
from ddpperf.machine.child_process import trees_of
from ddpperf.machine.utilization import IdleLoad, Recorder
from ddpperf.results.samples import CANDIDATE, Measured, Sample
from ddpperf.specs import Spec
from ddpperf.specs.collective import Call
from ddpperf.specs.script import ScriptSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import Answers, ProcessSet, Progress, SetOptions
from ddpperf.workers.script_run import ScriptRun, run_scripts

Job = tuple[ProcessSet, Spec]  # a process set, and what it measures
Seconds = tuple[float, ...]  # each rank's duration of one round
ROUND_SECONDS = {"cpu": 0.15, "cuda": 0.05}  # a round takes about this long, or one step
# The wanted steps of a round, so that a rare stall has a chance to occur. Each of the 7 rounds of an A/B
# run has at least 16 steps, about a hundred in all. Each of the 10 rounds of another run has 32 steps or
# calls if a CUDA graph holds them, because the mean of a stored run decides only from 300 steps on. Devices
# that take turns share these steps.
COMPARED_STEPS, CAPTURED_STEPS = 16, 32
# A round of an A/B run, which has six to twelve sets, has only the steps of ROUND_SECONDS if it would take
# longer. A round of another run has as many steps as fit into this time.
LONGEST_ROUND_SECONDS, LONGEST_GPU_ROUND_SECONDS = 0.4, 0.1
WHOLE_SECONDS = 3.0  # a spec whose rounds are single long steps, such as epochs, is measured for this long
COMPILE_SECONDS = 20.0  # of a step, which process sets do one after another (22 to 27 s for ResNet-18, H200)
SHARED_WHOLE_SECONDS = 1.0  # the same for each of several process sets, which take turns
MOST_STEPS = 1000  # in a round, unless a measurement says otherwise
# A step of this length on a CPU replaces the contents of the caches, so it needs no untimed step before
# it. Without untimed steps, four process sets on 2 cores alternate faster. Their times of a step of 200 ms
# differ by 2.2%, not by 4.2%, and the rounds take two thirds of the time.
LONG_STEP_SECONDS = 0.01
TIMED_AT_END = ("cpu_seconds", "device_seconds", "graph_slowdown")  # counters that other sets would disturb


class Pool:
    """Process sets that are alive at the same time and run the rounds of a measurement in turn.

    There are `replicates` process sets for each of `sides`, the base and the candidate. They are
    started at the first measurement. Only one process set samples at a time. A process set that fails
    is killed, and replaced under a new name before the next measurement. On a CPU, a measurement that
    needs more ranks gets larger process sets, which end before the next one that does not.

    sets_made: how many process sets earlier pools made, so that no name is used twice.
    step_seconds: of some specs, so that they need no trial rounds.
    progress: called with a spec and the fraction of its measurement that is done.
    check_round: called before the first round and after each round, with the process ids of all
    ranks and the number of rounds done. It returns why the last round is spoiled, or "".
    recorder: called with a spec, the process ids of its ranks, and whether a single process set
    measures. It returns what records the energy and the utilization of the devices.
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
        self._script: dict[str, dict[str, object]] = {}  # the versions in scripts, by side
        self._remembered: dict[tuple[Spec, Spec | None, tuple[str, ...]], Measured] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def live_sets(self, places: Sequence[int] | None = None, ranks: int = 0) -> list[ProcessSet]:
        """Return the process sets, after starting those that are missing or have failed.

        places: which process sets to return, all by default. They start side by side.
        ranks: the number of ranks, if it is more than usual. Larger process sets are ended. Raises
        ValueError for more ranks than usual on GPUs or by a launcher.
        """
        options = self.options
        if ranks > options.size:
            if options.device != "cpu" or options.launcher is not None:
                found = f"each process set has {options.size}"
                advice = f"pass --world-sizes {ranks}, or measure fewer ranks"
                raise ValueError(f"world_size={ranks} needs {ranks} ranks, but {found}; {advice}")
            options = replace(options, size=ranks, cores=None)  # each rank would get fewer cores
        for size, place in list(self._sets):
            if size > options.size:
                self._sets.pop((size, place)).close()
        keys = [(options.size, place) for place in places or range(len(self.sides))]
        started = []
        try:
            for key in keys:
                if (current := self._sets.get(key)) is not None:
                    if current.alive and not current.dead_ranks():
                        continue
                    current.kill()
                side = self.sides[key[1]]
                self.sets_made += 1
                self._sets[key] = new = ProcessSet(f"{side.name}{self.sets_made}", side, options)
                started.append(new)
                new.spawn()
            for new in started:
                new.wait_ready()
        except BaseException:
            for new in started:
                new.kill()
            raise
        return [self._sets[key] for key in keys]

    def measure(self, spec: Spec, candidate: Spec | None = None, ranks: int = 0) -> Measured:
        """Take the measurement that `spec` describes on every process set.

        candidate: what the candidate's process sets measure instead. ranks: the number of ranks in
        the process sets, if other measurements of the same test need more than this one. Raises
        SetFailure, and ValueError if there are too few GPUs or if a process set measured no duration.
        """
        if isinstance(spec, ScriptSpec):
            return self._measure_script(spec, candidate)
        ranks = max(ranks, spec.world_size)
        self._replace_sets_that_cannot_map(spec, candidate, ranks)
        return self._measure(_jobs(self.live_sets(ranks=ranks), spec, candidate), spec, candidate)

    def open(self, spec: Spec, candidate: Spec | None = None, *, most_sets: int = 0) -> list[Job]:
        """Build a measurement on the process sets, and return them with what each can measure now.

        most_sets: of each side, all by default.
        """
        self._replace_sets_that_cannot_map(spec, candidate, spec.world_size)
        most = most_sets * len({side.name for side in self.sides}) or None  # the sides alternate in pairs
        places = range(len(self.sides))[:most]
        jobs = _jobs(self.live_sets(places, spec.world_size), spec, candidate)
        _open(jobs, None)
        return jobs

    @staticmethod
    def close_opened(jobs: list[Job]) -> None:
        """End what `open` has begun."""
        _ask([jobs], "close")

    def measure_alone(self, spec: Spec) -> Measured:
        """Measure `spec` on the first process set, after all other process sets have ended."""
        return self._measure(self._alone([0], spec), spec)

    def measure_base_alone(self, like: Measured) -> Measured:
        """Measure the base's spec of `like` on the base's process sets, after the candidate's have ended.

        Whatever the candidate's did while they waited no longer slows the base. There are as many
        rounds of as many steps as in `like`, which these process sets measured last.
        """
        places = [place for place, side in enumerate(self.sides) if side.name != CANDIDATE]
        return self._measure(self._alone(places, like.spec), like.spec, like=like)

    def _alone(self, places: Sequence[int], spec: Spec) -> list[Job]:
        """Return some process sets with what they measure, after all others have ended."""
        for (_, place), process_set in self._sets.items():
            if place not in places:
                process_set.close()
        return [(live, spec) for live in self.live_sets(places, spec.world_size)]

    def measure_once(self, spec: Spec, candidate: Spec | None = None, ranks: int = 0) -> Measured:
        """Measure `spec`, or return the result if the same process sets have measured it before."""
        if isinstance(spec, ScriptSpec):
            return self.measure(spec, candidate)
        ranks = max(ranks, spec.world_size)
        names = tuple(live.name for live in self.live_sets(ranks=ranks))
        if known := self._remembered.get((spec, candidate, names)):
            return known
        measured = self.measure(spec, candidate, ranks)
        names = tuple(sample.set for sample in measured.samples)  # process sets may have been replaced
        self._remembered[spec, candidate, names] = measured
        return measured

    def expected_seconds(self, before: Measured) -> float:
        """Return the expected seconds of compiling and of the timed rounds on these process sets.

        before: a measurement by other process sets. Only a process set that is alone finds its step compiled
        in a cache.
        """
        spec, sets, parts = before.spec, len(self.sides), self._parts(before.spec)
        if isinstance(spec, ScriptSpec):
            return sets * max(before.counter("run_seconds").values())
        seconds = spec.calls * median(before.all_step_seconds())
        if spec.repeats:
            seconds *= self._iterations(spec, seconds, MOST_STEPS, parts)
        round_seconds = seconds * len(spec.turns(self.options.devices_in_turn)) * sets
        rounds = 1 if spec.counts else self.options.rounds * parts
        if not spec.repeats:
            rounds = min(rounds, math.ceil(SHARED_WHOLE_SECONDS * sets / round_seconds))
        return rounds * round_seconds + COMPILE_SECONDS * sets * (spec.compiled and sets > 1)

    def run_scripts(
        self, spec: ScriptSpec, candidate: Spec | None, places: Sequence[int], traces: Path | None = None
    ) -> list[ScriptRun]:
        """Run a script once for each of some places of `sides`, after all process sets have ended.

        traces: a folder in which each run makes a folder with traces, or None.
        """
        if self.options.launcher is not None:
            raise ValueError("a script starts its ranks itself; leave --launcher and --nodes out")
        if self.options.device == "cuda" and spec.world_size > self.options.size:
            found = f"this run has {self.options.size}"
            advice = "pass fewer --world-sizes, or free more GPUs"
            raise ValueError(f"the script needs {spec.world_size} GPUs, but {found}; {advice}")
        for process_set in self._sets.values():
            process_set.close()
        jobs = []
        for side in (self.sides[place] for place in places):
            self.sets_made += 1
            own = candidate if side.name == CANDIDATE and isinstance(candidate, ScriptSpec) else spec
            jobs.append((f"{side.name}{self.sets_made}", side, own))
        runs = run_scripts(jobs, self.options, partial(self._progress, spec), traces)
        self._script |= {run.side.name: run.ranks[0]["environment"] for run in runs}
        return runs

    def _measure_script(self, spec: ScriptSpec, candidate: Spec | None) -> Measured:
        runs = self.run_scripts(spec, candidate, range(len(self.sides)))
        steps = min(run.steps for run in runs)
        samples = tuple(run.sample(steps) for run in runs)
        measured = Measured(spec=spec, iterations=steps, samples=samples, candidate_spec=candidate)
        self.counted_seconds += measured.counted_seconds()
        return measured

    @property
    def _compared(self) -> bool:
        return len({side.name for side in self.sides}) > 1

    def _parts(self, spec: Spec) -> int:
        """Return the number of parts of a round. Base and candidate alternate after each part."""
        return spec.compared_parts[self.options.device] if self._compared else 1

    def _iterations(self, spec: Spec, step_seconds: float, limit: int, parts: int) -> int:
        """Return how many steps each of the `parts` parts of a round has, at most `limit`."""
        round_seconds = ROUND_SECONDS[self.options.device]
        turns = len(spec.turns(self.options.devices_in_turn))
        wanted = COMPARED_STEPS if self._compared else CAPTURED_STEPS / turns if spec.captured else 1
        if isinstance(spec, Call) and self.options.device == "cpu":
            wanted = 1  # the times of its calls vary more than stalls could add
        on_gpus = self._compared and self.options.device == "cuda"
        longest = LONGEST_GPU_ROUND_SECONDS if on_gpus else LONGEST_ROUND_SECONDS
        needed = math.ceil(wanted / spec.calls) * step_seconds
        if needed <= longest or not self._compared:
            round_seconds = max(round_seconds, min(needed, longest))
        return choose_iterations(step_seconds, limit, round_seconds / parts)

    def _measure(
        self, jobs: list[Job], spec: Spec, candidate: Spec | None = None, like: Measured | None = None
    ) -> Measured:
        try:
            measured = self._measure_on(jobs, spec, candidate, like)
        except SetFailure:
            raise
        except BaseException:  # such as pytest-timeout's: answers may still be on their way
            self._kill()
            raise
        self.counted_seconds += measured.counted_seconds()
        return measured

    def _measure_on(
        self, jobs: list[Job], spec: Spec, candidate: Spec | None, like: Measured | None
    ) -> Measured:
        alone = len(jobs) == 1
        parts = 1 if alone else self._parts(spec)
        rounds = 1 if spec.counts else self.options.rounds * parts
        if like is not None:
            rounds = len(like.samples[0].seconds)

        def progress(index: int, fraction: float) -> None:
            self._progress(spec, (index + fraction) / rounds if spec.repeats else min(1.0, fraction))

        self._progress(spec, 0.0)
        limit = min(_open(jobs, partial(progress, 0)))
        iterations, enough, warm = 1, math.inf, False
        if like is not None:
            iterations = like.iterations
        elif not spec.repeats:
            enough = WHOLE_SECONDS if alone else SHARED_WHOLE_SECONDS * len(jobs)
        else:
            if (seconds := spec.calls * self._step_seconds.get(spec, 0.0)) == 0:
                of_sides = {job[0].side.name: job for job in jobs}.values()
                enough_seconds = ROUND_SECONDS[self.options.device] / 8
                with _failing_on_both_sides(jobs):
                    seconds = min(_step_seconds(*job, limit, enough_seconds) for job in of_sides)
            iterations = self._iterations(spec, seconds, limit, parts)
            warm = self._keeps_warm(seconds)
        recorders = {live.name: self._recorder_of(live, of_set, alone) for live, of_set in jobs}
        idle = {live.name: IdleLoad() for live, _ in jobs} if alone else _idle_loads(jobs)
        with _failing_on_both_sides(jobs):
            durations = self._sample_rounds(jobs, iterations, rounds, enough, progress, recorders, idle, warm)
        ended = _close(jobs)
        for process_set, _ in jobs:
            process_set.require_alive()
        samples = tuple(
            Sample(
                set=live.name,
                side=live.side.name,
                torch=str(live.environment["torch"]),
                seconds=tuple(of_round[live.name] for of_round in durations),
                counters=_counters(ended[live.name]) | idle[live.name].counters(),
                kernels=digest_of_ranks([answer["kernels"] for answer in ended[live.name]]),
                usage=recorders[live.name].usage(),
            )
            for live, _ in jobs
        )
        return Measured(spec=spec, iterations=iterations, samples=samples, candidate_spec=candidate)

    def _sample_rounds(
        self,
        jobs: list[Job],
        iterations: int,
        rounds: int,
        enough_seconds: float,
        progress: Callable[[int, float], None],
        recorders: Mapping[str, Recorder],
        idle: Mapping[str, IdleLoad],
        warm: bool,
    ) -> list[dict[str, Seconds]]:
        """Measure up to `rounds` rounds, and return the durations of each round by process set.

        Measuring stops early when the rounds have taken `enough_seconds` in total. A spoiled round is
        measured again, by all process sets in the same order. This happens at most `rounds` times, and
        only until spoiled rounds have taken `enough_seconds`. Later spoiled rounds count. progress:
        called with the number of rounds that count so far, and the fraction of the next round that is
        done. warm: whether the first round needs no untimed step.
        """
        processes = [pid for live, _ in jobs for pid in live.pids.values()]
        kept: list[dict[str, Seconds]] = []
        sides = [live.side.name for live, _ in jobs]
        is_balanced = sides == sides[::-1]
        again = 0
        kept_seconds = again_seconds = 0.0
        self._check_round(processes, 0)
        while len(kept) < rounds and kept_seconds < enough_seconds:
            index = len(kept)
            progress(index, 0.0)
            # The order is A B, B A, ..., or A B B A in every round, so that drift affects base and
            # candidate alike. Reversing A B B A would let the first process set follow itself, and never
            # one of B.
            order = jobs if is_balanced or index % 2 == 0 else jobs[::-1]
            taken = {}
            for live, spec in order:
                steps = iterations + (spec.repeats and not warm)
                with idle[live.name].round(), recorders[live.name].round(steps):
                    taken[live.name] = _sample(live, spec, iterations, partial(progress, index), warm=warm)
            lasted = sum(map(max, taken.values()))
            if self._check_round(processes, index + 1) and again < rounds and again_seconds < enough_seconds:
                again, again_seconds = again + 1, again_seconds + lasted
                continue
            kept.append(taken)
            kept_seconds += lasted
            # On a CPU the caches of a process set that is measured alone stay warm from round to round.
            alone = self.options.device == "cpu" and len(jobs) == 1
            warm = alone or self._keeps_warm(min(map(max, taken.values())) / iterations)
        progress(len(kept), 0.0)
        return kept

    def _keeps_warm(self, step_seconds: float) -> bool:
        """Return whether a step needs no untimed step before it."""
        return self.options.device == "cpu" and step_seconds >= LONG_STEP_SECONDS

    def _recorder_of(self, process_set: ProcessSet, spec: Spec, alone: bool) -> Recorder:
        """Return the recorder of a process set's device usage.

        It records nothing if ranks take turns, or if base and candidate alternate: then the usage is not
        shown, and reading the counters takes time between the rounds.
        """
        ranks, *others = spec.turns(self.options.devices_in_turn)
        if self.options.time_only or others or self._compared:
            return Recorder()
        return self._recorder(spec, [pid for rank, pid in process_set.pids.items() if rank in ranks], alone)

    def _replace_sets_that_cannot_map(self, spec: Spec, candidate: Spec | None, ranks: int) -> None:
        """End the process sets in which fewer ranks have mapped GPU memory than now have to.

        Torch before 2.15 counts mappings per process. A rank that was not in the smaller group
        would wait in a larger group forever (pytorch issue 196082).
        """
        if not (spec.maps_memory or (candidate is not None and candidate.maps_memory)):
            return
        for process_set in self._sets.values():
            if process_set.fewest_mapped < spec.world_size:
                process_set.close()
        for process_set in self.live_sets(ranks=ranks):
            process_set.fewest_mapped = min(spec.world_size, process_set.fewest_mapped)

    def environment(self, side: str = "") -> dict[str, object]:
        """Return the versions of Python, torch and NCCL in the ranks of a side, or {} without ranks."""
        made = [one for one in self._sets.values() if one.environment and side in ("", one.side.name)]
        scripts = [versions for name, versions in self._script.items() if side in ("", name)]
        return made[0].environment if made else scripts[0] if scripts else {}

    def close(self) -> None:
        """End all process sets. May be called again."""
        try:
            for process_set in self._sets.values():
                process_set.begin_to_close()
            for process_set in self._sets.values():
                process_set.close()
        finally:
            self._kill()

    def _kill(self) -> None:
        for process_set in self._sets.values():
            process_set.kill()


def choose_iterations(step_seconds: float, limit: int, round_seconds: float) -> int:
    """Return how many steps make a round of about `round_seconds` seconds, as a power of two.

    limit: the most steps that a round may have.
    """
    wanted = min(max(1.0, round_seconds / max(step_seconds, 1e-9)), limit)
    return 1 << math.floor(math.log2(wanted))


def _step_seconds(process_set: ProcessSet, spec: Spec, limit: int, enough_seconds: float) -> float:
    """Return the seconds of a step, from ever longer trial rounds until one takes `enough_seconds`."""
    iterations = 1
    while True:
        seconds = spec.calls * max(_sample(process_set, spec, iterations))
        if seconds >= enough_seconds or iterations * 4 > limit:
            return seconds / iterations
        iterations *= 4


def _sample(
    process_set: ProcessSet, spec: Spec, iterations: int, progress: Progress = None, *, warm: bool = False
) -> Seconds:
    """Measure one round on a process set and return each rank's duration in seconds.

    warm: leave out the untimed step before the timed steps, unless ranks take turns.
    """
    answers: Answers = {}
    turns = spec.turns(process_set.options.devices_in_turn)
    untimed = not warm or len(turns) > 1
    for ranks in turns:
        answers |= process_set.request(
            "sample", ranks=ranks, progress=progress, iterations=iterations, untimed=untimed
        )
    return tuple(answers[rank]["seconds"] for rank in sorted(answers))


@contextlib.contextmanager
def _failing_on_both_sides(jobs: Sequence[Job]) -> Iterator[None]:
    """If a rank raises an error in a round, show whether a step fails on the other side, too."""
    try:
        yield
    except SetFailure as failure:
        failures = [failure]
        other = next((job for job in jobs if failure.sides and job[0].side.name not in failure.sides), None)
        if other is not None:
            try:
                _sample(*other, iterations=1)
            except SetFailure as same:
                failures.append(same)
        raise _first(failures) from failure


def _jobs(live_sets: Sequence[ProcessSet], spec: Spec, candidate: Spec | None) -> list[Job]:
    """Return each process set with what it measures."""
    return [(live, candidate if candidate and live.side.name == CANDIDATE else spec) for live in live_sets]


def _open(jobs: list[Job], progress: Progress) -> list[int]:
    """Build and warm up a measurement on each process set, and return the most steps of its rounds.

    The number of warm-up steps is `WARMUP_ITERATIONS` in rank_commands.py.
    """
    for process_set, spec in jobs:  # before the first request, since a request may fail
        process_set.leave(unless=spec.world_size if spec.grouped else 0)
    _wait([made for made, spec in jobs if spec.grouped and made.join(spec.world_size)], progress)
    # At the same time, as nothing is timed yet. But the compiler chooses kernels by timing them.
    one_by_one = any(spec.compiled for _, spec in jobs)
    groups = [[job] for job in jobs] if one_by_one else [jobs]
    answers = _ask(groups, "open", progress, spec=specs.to_json)
    return [min(int(answer["max_iterations"]) for answer in answers[live.name].values()) for live, _ in jobs]


def _idle_loads(jobs: list[Job]) -> dict[str, IdleLoad]:
    """Return what counts each process set's idle load, or counts nothing if a rank's process is unknown."""
    trees = trees_of([pid for live, _ in jobs for pid in live.pids.values()])
    known = {live: [trees[pid] for pid in live.pids.values()] for live, _ in jobs}
    return {
        live.name: IdleLoad(of_ranks if len(of_ranks) == live.options.size else ())
        for live, of_ranks in known.items()
    }


def _close(jobs: list[Job]) -> dict[str, list[dict[str, Any]]]:
    """End the measurement, and return the counters and the kernels of each rank by process set."""
    time_only = jobs[0][0].options.time_only
    # One by one, as counters can be times. But in a comparison of times, those of one base suffice.
    timed = [min(jobs, key=lambda job: job[0].side.name == CANDIDATE)] if time_only else jobs
    others = [job for job in jobs if job not in timed]
    finished = _ask([*([job] for job in timed), others], "finish")
    for live, _ in others:
        for answer in finished[live.name].values():
            answer["counters"] = {k: v for k, v in answer["counters"].items() if k not in TIMED_AT_END}
    kernels = len(jobs) > 1 and not time_only
    closed = _ask([jobs], "close", kernels=lambda spec: kernels)
    return {name: [of[rank] | finished[name][rank] for rank in sorted(of)] for name, of in closed.items()}


def _counters(ranks: list[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the counters that all ranks have, with a value for each rank."""
    counters = [rank["counters"] for rank in ranks]
    names = [name for name in counters[0] if all(name in of_rank for of_rank in counters)]
    return {name: tuple(of_rank[name] for of_rank in counters) for name in names}


def _ask(
    groups: Sequence[Sequence[Job]],
    command: str,
    progress: Progress = None,
    **arguments: Callable[[Spec], object],
) -> dict[str, Answers]:
    """Give a command to one group of process sets after another, and return their answers by name.

    arguments: computed from what a process set measures. If a rank raises an error, later groups only show
    whether it is the same on the other side.
    """
    answers: dict[str, Answers] = {}
    failures: list[SetFailure] = []
    asked: set[str] = set()
    for group in groups:
        jobs = [job for job in group if not failures or job[0].side.name not in asked]
        asked |= {live.side.name for live, _ in jobs}
        for live, spec in jobs:
            computed = {name: value(spec) for name, value in arguments.items()}
            turns = spec.turns(live.options.devices_in_turn)
            live.ask(command, ranks=[rank for ranks in turns for rank in ranks], **computed)
        try:
            answers |= _wait([live for live, _ in jobs], progress)
        except SetFailure as failure:
            failures.append(failure)
            if not failure.sides:
                break
    if failures:
        raise _first(failures)
    return answers


def _wait(sets: Sequence[ProcessSet], progress: Progress) -> dict[str, Answers]:
    """Return the answers of all process sets by name. If several fail, raise the base's failure."""
    answers, failures = {}, []
    for process_set in sets:
        try:
            answers[process_set.name] = process_set.answers(progress)
        except SetFailure as failure:
            failures.append(failure)
    if failures:
        raise _first(failures)
    return answers


def _first(failures: Sequence[SetFailure]) -> SetFailure:
    """Return the base's failure if there is one, with the sides of all failures."""
    first = min(failures, key=lambda failure: failure.set_name[:1])  # A is the base
    first.sides = frozenset().union(*(failure.sides for failure in failures))
    return first

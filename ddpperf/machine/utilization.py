"""Sample the utilization of GPUs, CPU cores and ranks over time, and record it with their energy.

Sampling happens in a thread of the controller process. A rank knows nothing of it. Energy is that of
the driver's counters, which count all that a GPU does, also for other processes and while it is idle.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from ddpperf.machine.gpu_description import ask
from ddpperf.results.samples import Row, Usage

SAMPLE_SECONDS = 0.1
MOST_CPU = 0.02  # sampling takes at most this fraction of one core; if it took more, it waits longer
CHILDREN_SECONDS = 1.0  # how often the DataLoader workers of the ranks are searched
# The counters of H100s and H200s move about every 0.1 s. An update just outside a time span of this
# length changes its energy by at most a twentieth.
LEAST_SECONDS = 2.0
FULL = 0.9  # the rounds must fill this fraction of a time span; the rest is energy of waiting
MOST_POINTS = 600  # of a stored series; a longer one is averaged
DIGITS = 4  # significant digits of a stored value
Joules = tuple[float, ...]  # by device
Values = dict[str, list[float | None]]  # by quantity, one for each device, rank or core


def gpu_now(handle: Any) -> dict[str, float | None]:
    """Ask the driver for the current utilization of one GPU. Values that it cannot report are None.

    gpu_utilization: the fraction of the driver's last sample period, which is 1/6 s to 1 s, in which
    a kernel ran. gpu_memory_bytes: of all processes, without what the driver reserves.
    """
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return {
        "gpu_utilization": None if rates is None else rates.gpu / 100,
        "gpu_memory_bytes": None if memory is None else float(memory.used),
        "power_watts": _watts(handle),
        "temperature_celsius": ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
    }


def _watts(handle: Any) -> float | None:
    """Return a GPU's present power. If the driver lacks it, new GPUs report the mean over a second."""
    for value in ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_POWER_INSTANT]) or ():
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.value.uiVal:
            return float(value.value.uiVal) / 1e3
    milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return None if milliwatts is None else milliwatts / 1e3


class Sampler:
    """Samples at 10 Hz in a thread while a round is measured, and takes at most MOST_CPU of a core.

    gpus: NVML's handles. cores: the numbers of the cores that this run may use. processes: the process
    ids of the ranks. with_children: whether a rank's child processes, such as DataLoader workers,
    count as the rank. failed: whether sampling ended early, so that its samples are incomplete.
    """

    def __init__(
        self, gpus: Sequence[Any], cores: Sequence[int], processes: Sequence[int], *, with_children: bool
    ) -> None:
        self._gpus, self._cores, self._with_children = gpus, cores, with_children
        self._families: list[list[psutil.Process]] = [[] for _ in processes]  # each begins with the rank
        for family, pid in zip(self._families, processes, strict=True):
            with contextlib.suppress(psutil.Error):
                family.append(psutil.Process(pid))
        self._searched = 0.0
        self.samples: list[tuple[float, Values]] = []  # with the time on the monotonic clock
        self.failed = False

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample in a thread until the block ends, however it ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="ddpperf-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        began = last = time.monotonic()
        try:
            self.now()
            while True:
                due = max(last + SAMPLE_SECONDS, began + time.thread_time() / MOST_CPU)
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
                last = time.monotonic()
                self.samples.append((last, self.now()))
        except Exception:  # whatever a driver or psutil raises must not cost the measurement
            self.failed = True

    def now(self) -> Values:
        """Return the present memory and utilization; that of CPUs is the mean since the last call.

        The first call begins: its utilization of CPUs means nothing.
        cpu_utilization: mean over the cores. rank_cpus: the number of cores that a rank kept busy.
        rank_memory_bytes: its resident memory.
        """
        values: Values = {}
        for handle in self._gpus:
            for quantity, value in gpu_now(handle).items():
                values.setdefault(quantity, []).append(value)
        percents = psutil.cpu_percent(percpu=True)
        busy = [percents[core] / 100 for core in self._cores if core < len(percents)]
        if self._with_children and time.monotonic() - self._searched > CHILDREN_SECONDS:
            self._searched = time.monotonic()
            for family in filter(None, self._families):
                with contextlib.suppress(psutil.Error):
                    known = {process: process for process in family}  # they know their last CPU time
                    family[1:] = [known.get(child, child) for child in family[0].children(recursive=True)]
        return values | {
            "cpu_utilization": [sum(busy) / len(busy) if busy else None],
            "rank_cpus": [_total(lambda rank: rank.cpu_percent() / 100, family) for family in self._families],
            "rank_memory_bytes": [
                _total(lambda rank: float(rank.memory_info().rss), family) for family in self._families
            ],
        }


def _total(ask_process: Callable[[psutil.Process], float], family: Sequence[psutil.Process]) -> float | None:
    """Return the sum of a value over the processes that still run, or None if none of them runs."""
    answers = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            answers.append(ask_process(process))
    return sum(answers) if answers else None


class IdleLoad:
    """Adds up the CPU time that the ranks of a process set use between the rounds of their set.

    Meanwhile another process set measures, and whatever is busy slows it. trees: for each rank, the
    process ids of the rank and its descendants. Without trees nothing is counted.
    """

    def __init__(self, trees: Sequence[Sequence[int]] = ()) -> None:
        self._trees: list[list[psutil.Process]] = [[] for _ in trees]
        for processes, pids in zip(self._trees, trees, strict=True):
            for pid in pids:
                with contextlib.suppress(psutil.Error):  # it has ended
                    processes.append(psutil.Process(pid))
        self._last: tuple[float, list[float]] | None = None  # when the last round ended
        self._seconds = 0.0
        self._cpu_seconds = [0.0] * len(trees)

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Leave the time in this block out, and count the time since the last such block."""
        if self._last is not None:
            ended, before = self._last
            self._seconds += time.monotonic() - ended
            for rank, (now, then) in enumerate(zip(self._read(), before, strict=True)):
                self._cpu_seconds[rank] += max(0.0, now - then)
        yield
        if self._trees:
            self._last = time.monotonic(), self._read()

    def _read(self) -> list[float]:
        """Return the CPU seconds of each rank's processes so far, with those of children that have ended.

        When a process ends, its seconds become part of its parent's, so the sum does not change.
        """
        # user, system, and the same of ended children
        return [_total(lambda one: float(sum(one.cpu_times()[:4])), tree) or 0.0 for tree in self._trees]

    def counters(self) -> dict[str, tuple[float, ...]]:
        """Return the counted CPU seconds and the seconds between rounds, with a value for each rank."""
        if not self._seconds:
            return {}
        return {
            "idle_cpu_seconds": tuple(self._cpu_seconds),
            "idle_seconds": (self._seconds,) * len(self._cpu_seconds),
        }


def joules_now(handles: Sequence[Any]) -> Joules:
    """Return each GPU's energy counter in joules, or nothing if one of the GPUs has no counter."""
    found = [ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
    known = tuple(millijoules / 1e3 for millijoules in found if millijoules is not None)
    return known if len(known) == len(found) else ()


@dataclass(frozen=True, kw_only=True)
class Round:
    """A measured round of a process set, with the counters' joules before and after it.

    steps: the number of steps, also of those that did not count.
    """

    began: float
    ended: float
    before: Joules
    after: Joules
    steps: int


def joules_per_step(spans: Sequence[Sequence[Round]]) -> Joules:
    """Return the energy of each device in one step, or nothing if it is too uncertain.

    spans: successive rounds between which no other process set measured. The energy of a span counts
    from the begin of its first round to the end of its last one. It is known well if the span lasts
    LEAST_SECONDS, and if the rounds fill the fraction FULL of it.
    """
    used = []
    for rounds in spans:
        before, after = rounds[0].before, rounds[-1].after
        lasted = rounds[-1].ended - rounds[0].began
        busy = sum(one.ended - one.began for one in rounds)
        if not (before and after) or lasted < LEAST_SECONDS or busy < FULL * lasted:
            return ()
        used.append([end - begin for begin, end in zip(before, after, strict=True)])
    steps = sum(one.steps for rounds in spans for one in rounds)
    return tuple(sum(joules) / steps for joules in zip(*used, strict=True)) if steps else ()


class Recorder:
    """Records the energy and the utilization of one process set in the rounds of a measurement.

    A recorder without arguments records nothing. gpus: NVML's handles of the set's GPUs, whose energy
    counts. sampler: samples the utilization over time. alone: whether no other process set measures
    between the rounds. The time between the rounds then counts, too, because the energy counters move
    too seldom for single rounds.
    """

    def __init__(
        self, gpus: Sequence[Any] = (), sampler: Sampler | None = None, *, alone: bool = True
    ) -> None:
        self._gpus, self._sampler, self._alone = gpus, sampler, alone
        self._rounds: list[Round] = []

    @contextlib.contextmanager
    def round(self, steps: int) -> Iterator[None]:
        """Record one round with this number of steps."""
        # Reading takes time, and the first counts are enough if the time between the rounds counts, too.
        before = joules_now(self._gpus) if not (self._alone and self._rounds) else ()
        began = time.monotonic()
        with self._sampler.sampling() if self._sampler is not None else nullcontext():
            yield
        ended, after = time.monotonic(), joules_now(self._gpus)
        self._rounds.append(Round(began=began, ended=ended, before=before, after=after, steps=steps))

    def usage(self) -> Usage | None:
        """Return the usage recorded in all rounds, or None if nothing was recorded."""
        sampler, rounds = self._sampler, self._rounds
        samples = sampler.samples if sampler is not None and not sampler.failed else []
        joules = joules_per_step([rounds] if self._alone else [[one] for one in rounds]) if rounds else ()
        if not joules and not samples:
            return None
        times = averaged([when - rounds[0].began for when, _ in samples])
        rows = _rows([values for _, values in samples])
        return Usage(
            joules=tuple(map(rounded, joules)),
            seconds=tuple(round(seconds, 2) for seconds in times if seconds is not None),
            series={quantity: tuple(map(averaged, of_devices)) for quantity, of_devices in rows.items()},
            mean={quantity: tuple(map(mean_of, of_devices)) for quantity, of_devices in rows.items()},
            peak={quantity: tuple(map(_peak, of_devices)) for quantity, of_devices in rows.items()},
        )


def _rows(samples: Sequence[Values]) -> dict[str, list[list[float | None]]]:
    """Return the values over time by quantity and device, without quantities that nobody reports."""
    rows = {}
    for quantity in samples[0] if samples else ():
        of_devices = [list(values) for values in zip(*(sample[quantity] for sample in samples), strict=False)]
        if any(value is not None for values in of_devices for value in values):
            rows[quantity] = of_devices
    return rows


def _peak(values: Sequence[float | None]) -> float | None:
    return max((rounded(value) for value in values if value is not None), default=None)


def averaged(values: Sequence[float | None], most: int = MOST_POINTS) -> Row:
    """Return at most `most` points: the rounded means of equally many neighbouring values.

    A mean ignores missing values. A point without any value is None.
    """
    size = -(-len(values) // most) or 1
    groups = (values[start : start + size] for start in range(0, len(values), size))
    return tuple(mean_of(group) for group in groups)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the rounded mean of the values that are known, or None if none is."""
    known = [value for value in values if value is not None]
    return rounded(sum(known) / len(known)) if known else None


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

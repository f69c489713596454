"""Sample the utilization of GPUs, CPU cores and ranks over time, and the energy that they use.

Sampling happens in a thread of the controller process. A rank knows nothing of it. CUDA is never
initialised here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from ddpperf.errors import first_line
from ddpperf.machine.energy import EnergyCounters, Joules, Window, joules_per_step
from ddpperf.machine.gpu_watch import SM_CLOCK, SUCCESS
from ddpperf.machine.hardware import query_nvml
from ddpperf.results.usage import Usage, averaged, mean_of, rounded

SAMPLE_SECONDS = 0.1
MOST_CPU = 0.02  # sampling takes at most this fraction of one core; if it took more, it waits longer
CHILDREN_SECONDS = 1.0  # how often the DataLoader workers of the ranks are searched
MEMORY_V2 = 0x02000028  # nvmlMemory_v2, whose used memory leaves out what the driver reserves
TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; the other power is averaged over a second on new GPUs

Values = dict[str, list[float | None]]  # by quantity, one for each device, rank or core


def gpu_now(handle: Any) -> dict[str, float | None]:
    """Ask the driver for the current utilization of one GPU. Values that it cannot report are None.

    gpu_utilization: the fraction of the driver's last sample period, which is 1/6 s to 1 s, in which
    a kernel ran. gpu_memory_bytes: of all processes.
    """
    rates = query_nvml("nvmlDeviceGetUtilizationRates", handle)
    memory = query_nvml("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
    megahertz = query_nvml("nvmlDeviceGetClockInfo", handle, SM_CLOCK)
    return {
        "gpu_utilization": None if rates is None else rates.gpu / 100,
        "gpu_memory_bytes": None if memory is None else float(memory.used),
        "power_watts": _watts(handle),
        "temperature_celsius": query_nvml("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU),
        "sm_clock_hertz": None if megahertz is None else megahertz * 1e6,
    }


def _watts(handle: Any) -> float | None:
    for value in query_nvml("nvmlDeviceGetFieldValues", handle, [POWER_INSTANT]) or ():
        if value.nvmlReturn == SUCCESS and value.value.uiVal:
            return float(value.value.uiVal) / 1e3
    milliwatts = query_nvml("nvmlDeviceGetPowerUsage", handle)
    return None if milliwatts is None else milliwatts / 1e3


class CpuSampler:
    """Reads how busy the CPU cores are, and what CPU time and memory the ranks take.

    cores: the numbers of the cores that this run may use. processes: the process ids of the ranks.
    with_children: whether a rank's child processes, such as DataLoader workers, count as the rank.
    """

    def __init__(self, cores: Sequence[int], processes: Sequence[int], *, with_children: bool) -> None:
        import psutil  # here, as the rooms below are also used where it is not installed

        self._psutil = psutil
        self._cores = cores
        self._with_children = with_children
        ranks = [self._ask(psutil.Process, pid) for pid in processes]
        self._families = [[rank] if rank is not None else [] for rank in ranks]  # each begins with the rank
        self._searched = 0.0
        self._seconds: list[dict[int, float]] = [{} for _ in processes]  # of each rank, by process id
        self._when = 0.0

    def _ask(self, question: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return psutil's answer about a process, or None if the process has ended."""
        with contextlib.suppress(self._psutil.Error):
            return question(*arguments, **options)
        return None

    def now(self) -> Values:
        """Return the utilization since the last call, and the memory now.

        The first call begins: its utilization means nothing.
        cpu_utilization: mean over the cores. rank_cpus: the number of cores that a rank kept busy.
        rank_memory_bytes: its resident memory. host_memory_bytes: of all processes of the machine.
        """
        percents = self._psutil.cpu_percent(percpu=True)
        busy = [percents[core] / 100 for core in self._cores if core < len(percents)]
        if self._with_children and time.monotonic() - self._searched > CHILDREN_SECONDS:
            self._searched = time.monotonic()
            for family in self._families:
                family[1:] = (family and self._ask(family[0].children, recursive=True)) or []
        before, since = self._seconds, self._when
        self._seconds, self._when = [self._cpu_seconds(family) for family in self._families], time.monotonic()
        elapsed = self._when - since
        memory = self._psutil.virtual_memory()
        return {
            "cpu_utilization": [sum(busy) / len(busy) if busy else None],
            "core_utilization": [*busy],
            "rank_cpus": [
                _cores_used(then, now, elapsed) for then, now in zip(before, self._seconds, strict=True)
            ],
            "rank_memory_bytes": [self._resident_bytes(family) for family in self._families],
            "host_memory_bytes": [float(memory.total - memory.available)],
        }

    def _cpu_seconds(self, family: Sequence[Any]) -> dict[int, float]:
        answers = {process.pid: self._ask(process.cpu_times) for process in family}
        return {pid: times.user + times.system for pid, times in answers.items() if times is not None}

    def _resident_bytes(self, family: Sequence[Any]) -> float | None:
        answers = [self._ask(process.memory_info) for process in family]
        found = [float(memory.rss) for memory in answers if memory is not None]
        return sum(found) if found else None


def _cores_used(then: Mapping[int, float], now: Mapping[int, float], elapsed: float) -> float | None:
    """Return the CPU seconds per second of processes that existed at both times, or None without one."""
    both = then.keys() & now.keys()
    return sum(now[pid] - then[pid] for pid in both) / elapsed if both else None


class Sampler:
    """Samples at 10 Hz in a thread while a round is measured, and takes at most MOST_CPU of a core.

    gpus: NVML's handles.
    problem: why sampling ended early, so that its samples are incomplete; empty if it did not.
    """

    def __init__(self, gpus: Sequence[Any], cpu: CpuSampler) -> None:
        self._gpus = gpus
        self._cpu = cpu
        self.samples: list[tuple[float, Values]] = []  # with the time on the monotonic clock
        self.problem = ""
        self._cpu_seconds = self._seconds = 0.0

    @property
    def cpu_fraction(self) -> float:
        """The CPU time that sampling took, as a fraction of one core."""
        return self._cpu_seconds / self._seconds if self._seconds else 0.0

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
            self._cpu.now()
            while True:
                due = max(last + SAMPLE_SECONDS, began + time.thread_time() / MOST_CPU)
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
                last = time.monotonic()
                self.samples.append((last, self._sample()))
        except Exception as error:  # whatever a driver or psutil raises must not cost the measurement
            self.problem = first_line(error)
        self._cpu_seconds += time.thread_time()
        self._seconds += time.monotonic() - began

    def _sample(self) -> Values:
        values: Values = {}
        for handle in self._gpus:
            for quantity, value in gpu_now(handle).items():
                values.setdefault(quantity, []).append(value)
        return values | self._cpu.now()


class Recorder:
    """Records the energy and the utilization of one process set in the rounds of a measurement.

    A recorder without arguments records nothing. counters: the energy counters, of which the first
    `devices` count. sampler: samples the utilization over time. alone: whether no other process set
    measures between the rounds. The time between the rounds then counts, too, because the counters
    move too seldom for single rounds.
    """

    def __init__(
        self,
        counters: EnergyCounters | None = None,
        devices: int = 0,
        sampler: Sampler | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._counters = counters
        self._devices = devices
        self._sampler = sampler
        self._alone = alone
        self._windows: list[Window] = []

    @contextlib.contextmanager
    def round(self, steps: int) -> Iterator[None]:
        """Record one round with this number of steps."""
        if not (self._alone and self._windows):
            self._windows.append(Window(began=time.monotonic(), before=self._joules()))
        window, began = self._windows[-1], time.monotonic()
        with self._sampler.sampling() if self._sampler is not None else nullcontext():
            yield
        window.ended = time.monotonic()
        window.after = self._joules()
        window.busy_seconds += window.ended - began
        window.steps += steps

    def _joules(self) -> Joules | None:
        found = self._counters.read() if self._counters is not None else None
        return None if found is None else found[: self._devices]

    def usage(self) -> Usage | None:
        """Return the usage recorded in all rounds, or None if nothing was recorded."""
        sampler = self._sampler
        samples = sampler.samples if sampler is not None and not sampler.problem else []
        rows = _rows([values for _, values in samples])
        counters = self._counters
        joules = joules_per_step(self._windows, counters.update_seconds) if counters is not None else ()
        if not joules and not samples:
            return None
        began = self._windows[0].began
        times = averaged([when - began for when, _ in samples])
        return Usage(
            joules=tuple(map(rounded, joules)),
            seconds=tuple(round(seconds, 2) for seconds in times if seconds is not None),
            series={
                quantity: tuple(map(averaged, of_devices))
                for quantity, of_devices in rows.items()
                if quantity != "core_utilization"  # on large machines it has hundreds of rows
            },
            mean={quantity: tuple(map(mean_of, of_devices)) for quantity, of_devices in rows.items()},
            peak={quantity: tuple(map(_peak, of_devices)) for quantity, of_devices in rows.items()},
            sampler_cpu_fraction=rounded(sampler.cpu_fraction) if sampler is not None else 0.0,
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

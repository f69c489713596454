"""Watch the GPUs for throttled clocks and for other processes while rounds are measured.

CUDA is never initialised here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpperf.machine.hardware import gpu_handles, load_nvml, query_nvml
from ddpperf.results.notes import Note, info, warning

POWER_CAP = "power cap"
EQUAL_CLOCKS = 0.02  # clocks that differ by a smaller fraction count as equal; they move in steps below 1%
# A round counts as throttled from this fraction of its time on. A smaller fraction slows the round
# by less than the usual difference between rounds.
THROTTLED_FRACTION = 0.01

# NVML's counters of nanoseconds with throttled clocks, by field: NVML_FI_DEV_PERF_POLICY_*. The
# newer NVML_FI_DEV_CLOCKS_EVENT_REASON_* also count power brakes, but their numbers changed
# between drivers: an older driver answers with something else. Left out: the totals, and 78, low
# utilization, which every idle GPU has.
COUNTERS = {74: POWER_CAP, 75: "temperature", 76: "sync boost", 77: "board limit", 79: "reliability limit"}
SUCCESS = 0  # NVML_SUCCESS
IDLE = 0x01
SM_CLOCK = 1  # NVML_CLOCK_SM
# Why the clocks are held down at this moment, by bit. Left out: idle, application clocks and
# display, which somebody chose.
REASONS = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "hardware's temperature limit",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability limit",
}


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The clocks and processes of one GPU at one moment, as the driver reports them.

    Values that the driver does not report are empty. monotonic_seconds: the moment. violations_ns:
    nanoseconds with throttled clocks since the driver started, for each reason. reasons: why the
    clocks are throttled now. processes: the ids of processes on the GPU. megahertz: the
    multiprocessors' clock unless they are idle.
    """

    monotonic_seconds: float
    violations_ns: Mapping[str, int] = field(default_factory=dict)
    reasons: frozenset[str] = frozenset()
    processes: frozenset[int] = frozenset()
    megahertz: int | None = None


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """The disturbances of one GPU in one round of a measurement, and the GPU's clock."""

    throttled: frozenset[str] = frozenset()
    foreign: frozenset[int] = frozenset()
    megahertz: int | None = None


Disturbances = Mapping[int, Disturbance]  # by GPU


@dataclass(frozen=True, kw_only=True)
class Round:
    """The disturbances of each GPU in one round of a measurement.

    number: counts from 1, and a repeated round keeps its number. spoiled: why the round is measured
    again.
    """

    number: int
    disturbances: Disturbances
    spoiled: Sequence[str] = ()


class GpuWatch:
    """Records what disturbs each GPU in each round of a measurement.

    GpuWatch never raises an exception. Without an answer from the driver there is no warning.
    Processes that are on the GPUs at the start count as foreign. uuids: the GPUs, in CUDA's order.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        load_nvml()
        self._handles = gpu_handles(uuids)
        self._last = self._states()
        self._before = {gpu: state.processes for gpu, state in self._last.items()}
        self._own: set[int] = set()
        self._rounds: list[Round] = []

    def look(self, own: Collection[int], done: int) -> str:
        """Record the disturbances of the GPUs in the last round, and return reasons to repeat the round.

        Returns an empty string if the round counts. own: the process ids of the ranks. done: the
        number of rounds so far. 0 starts a measurement. A round with the number of the last round
        replaces it.
        """
        self._own.update(own)  # a rank that has just ended may still be listed
        before, self._last = self._last, self._states()
        if not done:
            self._rounds = []
            return ""
        disturbances = {}
        for gpu, state in self._last.items():
            why = throttled(before[gpu], state)
            others = foreign(state.processes, self._own, self._before[gpu])
            disturbances[gpu] = Disturbance(throttled=why, foreign=others, megahertz=state.megahertz)
        spoiled = spoiling([*(earlier.disturbances for earlier in self._rounds), disturbances])
        self._rounds.append(Round(number=done, disturbances=disturbances, spoiled=spoiled))
        return "; ".join(spoiled)

    def warnings(self) -> list[Note]:
        """Return warnings about disturbed rounds, and a note about rounds that were repeated."""
        rounds, self._rounds = self._rounds, []
        counting = {recorded.number: recorded for recorded in rounds}  # of equal numbers the last
        repeated = [recorded for recorded in rounds if counting[recorded.number] is not recorded]
        notes = [*map(warning, disturbance_texts([recorded.disturbances for recorded in counting.values()]))]
        if repeated:
            count = "1 spoiled round was" if len(repeated) == 1 else f"{len(repeated)} spoiled rounds were"
            reasons = dict.fromkeys(reason for recorded in repeated for reason in recorded.spoiled)
            notes.append(info(f"{count} measured again: {'; '.join(reasons)}"))
        return notes

    def _states(self) -> dict[int, GpuState]:
        return {gpu: read_state(handle) for gpu, handle in self._handles.items()}


# --- deciding


def throttled(before: GpuState, now: GpuState) -> frozenset[str]:
    """Return the reasons why a GPU's clocks were throttled between two moments.

    NVML's counters give the reasons if the GPU has them. Otherwise the function uses the reasons at
    the second moment. Counters cover the whole time, but may move in steps longer than a round, so
    that a neighbouring round is taken for the throttled one. Momentary reasons miss what ends
    before the round does.
    """
    counted = before.violations_ns.keys() & now.violations_ns.keys()
    least_ns = THROTTLED_FRACTION * (now.monotonic_seconds - before.monotonic_seconds) * 1e9
    moved_ns = {reason: now.violations_ns[reason] - before.violations_ns[reason] for reason in counted}
    moved = {reason for reason, ns in moved_ns.items() if ns > least_ns}
    return frozenset(moved | (now.reasons - counted))


def foreign(listed: Collection[int], own: Collection[int], before: Collection[int]) -> frozenset[int]:
    """Return the ids of the processes on a GPU that do not belong to this test run.

    In a container the driver may list the process ids of the host. Then none of our ids is listed,
    and only the processes that were there before the ranks started are known to be foreign.
    """
    others = frozenset(listed) - frozenset(own)
    return others if others != frozenset(listed) else others & frozenset(before)


def spoiling(rounds: Sequence[Disturbances]) -> list[str]:
    """Return a sentence for each reason why the last round of a measurement must be repeated.

    A power cap in at least half of the rounds belongs to the work itself, since a repeated round
    has it, too.
    """
    texts = []
    for gpu, last in sorted(rounds[-1].items()):
        capped = sum(gpu in earlier and POWER_CAP in earlier[gpu].throttled for earlier in rounds)
        expected = {POWER_CAP} if 2 * capped >= len(rounds) else set()
        if why := sorted(last.throttled - expected):
            texts.append(f"GPU {gpu} was throttled ({', '.join(why)})")
        if last.foreign:
            texts.append(f"{_processes(last.foreign)} also used GPU {gpu}")
        highest = max(earlier[gpu].megahertz or 0 for earlier in rounds if gpu in earlier)
        if not (last.throttled or expected) and _is_lower(last.megahertz, highest):
            texts.append(f"GPU {gpu}'s clock was {last.megahertz} MHz, of {highest}")
    return texts


def _is_lower(megahertz: int | None, than: int) -> bool:
    return megahertz is not None and megahertz < (1 - EQUAL_CLOCKS) * than


def disturbance_texts(rounds: Sequence[Disturbances]) -> list[str]:
    """Return a sentence for each disturbance of each GPU during a measurement's rounds."""
    texts: list[str] = []
    for gpu in sorted({gpu for disturbances in rounds for gpu in disturbances}):
        found = [disturbances[gpu] for disturbances in rounds if gpu in disturbances]
        reasons = sorted({reason for disturbance in found for reason in disturbance.throttled})
        if reasons:
            count = sum(bool(disturbance.throttled) for disturbance in found)
            total = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
            texts.append(f"GPU {gpu} was throttled ({', '.join(reasons)}) during {count} of {total}")
        clocks = [disturbance.megahertz for disturbance in found if disturbance.megahertz is not None]
        if not reasons and clocks and _is_lower(min(clocks), max(clocks)):
            texts.append(f"GPU {gpu}'s clock was {min(clocks)} to {max(clocks)} MHz")
        if pids := {pid for disturbance in found for pid in disturbance.foreign}:
            texts.append(f"{_processes(pids)} also use{'s' * (len(pids) == 1)} GPU {gpu}")
    return texts


def _processes(pids: Collection[int]) -> str:
    return f"process{'es' * (len(pids) > 1)} {', '.join(map(str, sorted(pids)))}"


def read_state(handle: Any) -> GpuState:
    """Ask the driver for the current clocks and processes of one GPU."""
    bits = query_nvml("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # drivers before 535 have another name
        bits = query_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    idle = bits is None or bits & IDLE
    # the clock first: the GPU may soon be idle
    megahertz = None if idle else query_nvml("nvmlDeviceGetClockInfo", handle, SM_CLOCK)
    processes = query_nvml("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    counters = query_nvml("nvmlDeviceGetFieldValues", handle, list(COUNTERS)) or ()
    known = [counter for counter in counters if counter.nvmlReturn == SUCCESS]
    return GpuState(
        monotonic_seconds=time.monotonic(),
        violations_ns={COUNTERS[counter.fieldId]: counter.value.ullVal for counter in known},
        reasons=frozenset(reason for bit, reason in REASONS.items() if (bits or 0) & bit),
        processes=frozenset(process.pid for process in processes),
        megahertz=megahertz,
    )

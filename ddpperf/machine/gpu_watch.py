"""Watch the GPUs for throttled clocks and for other processes while rounds are measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pynvml

from ddpperf.machine.gpu_description import ask
from ddpperf.results import units
from ddpperf.results.outcomes import Note, info, warning

POWER_CAP = "power cap"
EQUAL_CLOCKS = 0.02  # clocks that differ by a smaller fraction count as equal; they move in steps below 1%
# A round counts as throttled from this fraction of its time on. A smaller fraction slows the round
# by less than the usual difference between rounds.
THROTTLED_FRACTION = 0.01

# NVML's counters of nanoseconds with throttled clocks. The newer NVML_FI_DEV_CLOCKS_EVENT_REASON_*
# also count power brakes, but their numbers changed between drivers: an older driver answers with
# something else. Left out: the totals, and low utilization, which every idle GPU has.
COUNTERS = {
    pynvml.NVML_FI_DEV_PERF_POLICY_POWER: POWER_CAP,
    pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL: "temperature",
    pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST: "sync boost",
    pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT: "board limit",
    pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY: "reliability limit",
}
IDLE = 0x01
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


def read_state(handle: Any) -> GpuState:
    """Ask the driver for the current clocks and processes of one GPU."""
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    idle = bits is None or bits & IDLE
    # the clock first: the GPU may soon be idle
    megahertz = None if idle else ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    counters = ask(pynvml.nvmlDeviceGetFieldValues, handle, list(COUNTERS)) or ()
    known = [counter for counter in counters if counter.nvmlReturn == pynvml.NVML_SUCCESS]
    return GpuState(
        monotonic_seconds=time.monotonic(),
        violations_ns={COUNTERS[counter.fieldId]: counter.value.ullVal for counter in known},
        reasons=frozenset(reason for bit, reason in REASONS.items() if (bits or 0) & bit),
        processes=frozenset(process.pid for process in processes),
        megahertz=megahertz,
    )


class Round(NamedTuple):
    """The states of all GPUs before and after a round. A repeated round keeps its number."""

    number: int
    before: Sequence[GpuState]
    after: Sequence[GpuState]


class GpuWatch:
    """Records what disturbs each GPU in each round of a measurement.

    Without an answer from the driver there is no warning. Processes that are on the GPUs at the start
    count as foreign. handles: NVML's, in CUDA's order.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles
        self._last = [read_state(handle) for handle in handles]
        self._earlier = [state.processes for state in self._last]
        self._own: set[int] = set()
        self._rounds: list[Round] = []

    def look(self, own: Collection[int], done: int) -> str:
        """Record the states of the GPUs after a round, and return reasons to repeat the round.

        Returns an empty string if the round counts. own: the process ids of the ranks. done: the
        number of rounds so far. 0 starts a measurement. A round with the number of the last round
        replaces it.
        """
        self._own.update(own)  # a rank that has just ended may still be listed
        before, self._last = self._last, [read_state(handle) for handle in self.handles]
        if not done:
            self._rounds = []
            return ""
        self._rounds.append(Round(done, before, self._last))
        # A power cap in at least half of the rounds belongs to the work itself: a repeated round has it, too.
        capped = [
            sum(POWER_CAP in throttled(one.before[gpu], one.after[gpu]) for one in self._rounds)
            for gpu in range(len(self.handles))
        ]
        usual = {gpu for gpu, count in enumerate(capped) if 2 * count >= len(self._rounds)}
        return "; ".join(self._disturbances(self._rounds[-1], usual))

    def warnings(self) -> list[Note]:
        """Return warnings about disturbed rounds, and a note about rounds that were repeated."""
        counting = {one.number: one for one in self._rounds}  # of equal numbers the last
        counts = Counter(text for one in counting.values() for text in self._disturbances(one))
        total = units.counted(len(counting), "round")
        notes = [warning(f"{text} during {count} of {total}") for text, count in counts.items()]
        if repeated := [one for one in self._rounds if counting[one.number] is not one]:
            again = "1 spoiled round was" if len(repeated) == 1 else f"{len(repeated)} spoiled rounds were"
            reasons = dict.fromkeys(text for one in repeated for text in self._disturbances(one))
            notes.append(info(f"{again} measured again: {'; '.join(reasons)}"))
        self._rounds = []
        return notes

    def _disturbances(self, one: Round, usually_capped: Collection[int] = ()) -> list[str]:
        """Return a sentence for each disturbance of each GPU in one round.

        The highest clock of all rounds counts as the undisturbed one. usually_capped: the GPUs whose
        power cap, and a lower clock with it, is no disturbance.
        """
        texts = []
        for gpu, (before, now) in enumerate(zip(one.before, one.after, strict=True)):
            is_capped = gpu in usually_capped
            why = throttled(before, now) - ({POWER_CAP} if is_capped else set())
            highest = max(known.after[gpu].megahertz or 0 for known in self._rounds)
            if why:
                texts.append(f"GPU {gpu} was throttled ({', '.join(sorted(why))})")
            elif not is_capped and now.megahertz and now.megahertz < (1 - EQUAL_CLOCKS) * highest:
                texts.append(f"GPU {gpu}'s clock was below {highest} MHz")
            if others := sorted(foreign(now.processes, self._own, self._earlier[gpu])):
                pids = f"process{'es' * (len(others) > 1)} {', '.join(map(str, others))}"
                texts.append(f"{pids} also used GPU {gpu}")
        return texts


def throttled(before: GpuState, now: GpuState) -> frozenset[str]:
    """Return the reasons why a GPU's clocks were throttled between two moments.

    NVML's counters give the reasons if the GPU has them. Otherwise the function uses the reasons at
    the second moment. Counters cover the whole time, but may move in steps longer than a round, so
    that a neighbouring round is taken for the throttled one. Momentary reasons miss what ends
    before the round does.
    """
    counted = before.violations_ns.keys() & now.violations_ns.keys()
    least_ns = THROTTLED_FRACTION * (now.monotonic_seconds - before.monotonic_seconds) * 1e9
    moved = {why for why in counted if now.violations_ns[why] - before.violations_ns[why] > least_ns}
    return frozenset(moved | (now.reasons - counted))


def foreign(listed: Collection[int], own: Collection[int], before: Collection[int]) -> frozenset[int]:
    """Return the ids of the processes on a GPU that do not belong to this test run.

    In a container the driver may list the process ids of the host. Then none of our ids is listed,
    and only the processes that were there before the ranks started are known to be foreign.
    """
    others = frozenset(listed) - frozenset(own)
    return others if others != frozenset(listed) else others & frozenset(before)

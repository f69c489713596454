"""What disturbs the GPUs while rounds run, throttled clocks and other processes, and which rounds that spoils. CUDA is never
initialised here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpperf.results.notes import Note, info, warning

POWER_CAP = "power cap"
CLOCK_SHARE = 0.02  # by which clocks differ that are not taken for equal: they move in steps of less than 1 %
LEAST_SHARE = 0.01  # of the time between two looks, for a throttled round: less slows it by less than steady rounds differ

# NVML's counters of nanoseconds for which something held the clocks down, by field: NVML_FI_DEV_PERF_POLICY_*. Not the newer
# NVML_FI_DEV_CLOCKS_EVENT_REASON_*, which count power brakes, too: their numbers changed from driver to driver, so one older
# than nvidia-ml-py answers with something else. Left out: 78, low utilization, which every idle GPU has, and the totals.
COUNTERS = {74: POWER_CAP, 75: "temperature", 76: "sync boost", 77: "board limit", 79: "reliability limit"}
IDLE = 0x01
SM_CLOCK = 1  # NVML_CLOCK_SM
# What holds the clocks down at this moment, by bit. Left out: idle, application clocks and display, which someone chose.
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
class Reading:
    """One GPU at one moment; a part that the driver does not tell is empty.

    reference_seconds: of a clock that is never set back. violations_ns: nanoseconds since the driver started, by reason.
    megahertz: of its multiprocessors, unless it is idle.
    """

    reference_seconds: float
    violations_ns: Mapping[str, int] = field(default_factory=dict)
    reasons: frozenset[str] = frozenset()
    processes: frozenset[int] = frozenset()
    megahertz: int | None = None


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What disturbed one GPU in one round: why it was throttled, and whose the other processes were; and its clock, which
    someone may have set."""

    throttled: frozenset[str] = frozenset()
    foreign: frozenset[int] = frozenset()
    megahertz: int | None = None


@dataclass(frozen=True, kw_only=True)
class Round:
    """What disturbed each GPU in a round, and what of that spoiled it. number: from 1, the same when it is measured again."""

    number: int
    disturbances: Mapping[int, Disturbance]
    spoiled: Sequence[str] = ()


class GpuWatch:
    """What disturbed the GPUs while rounds ran. Nothing here raises: what the driver does not tell is no doubt."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """`uuids` of the GPUs that ranks will use, in CUDA's order; who computes on them by now is remembered as foreign."""
        self._handles = _handles(uuids)
        self._last = self._read()
        self._before = {gpu: reading.processes for gpu, reading in self._last.items()}
        self._own: set[int] = set()
        self._rounds: list[Round] = []

    def look(self, own: Collection[int], done: int) -> str:
        """Read every GPU, before a measurement's first round and after each; answers what spoiled that round, if anything.

        own: the process ids of our ranks. done: the number of rounds with this one; one of the same number as the last was
        measured again, and takes its place.
        """
        self._own.update(own)  # a rank that has just ended may still be listed
        before, self._last = self._last, self._read()
        if not done:  # what came before the first round is of no interest
            self._rounds = []
            return ""
        now = {
            gpu: Disturbance(
                throttled=throttled(before[gpu], reading),
                foreign=foreign(reading.processes, self._own, self._before[gpu]),
                megahertz=reading.megahertz,
            )
            for gpu, reading in self._last.items()
        }
        spoiled = spoiling([*(each.disturbances for each in self._rounds), now])
        self._rounds.append(Round(number=done, disturbances=now, spoiled=spoiled))
        return "; ".join(spoiled)

    def warnings(self) -> list[Note]:
        """A sentence for each GPU and what disturbed it in the rounds that count, and one about those that were measured again;
        all of that is then forgotten."""
        rounds, self._rounds = self._rounds, []
        counting = {each.number: each for each in rounds}  # of equal numbers the last
        again = [each for each in rounds if counting[each.number] is not each]
        warnings = map(warning, sentences([each.disturbances for each in counting.values()]))
        return [*warnings, *map(info, notes(again))]

    def _read(self) -> dict[int, Reading]:
        return {gpu: read(handle) for gpu, handle in self._handles.items()}


# --- deciding


def throttled(before: Reading, now: Reading) -> frozenset[str]:
    """Why the clocks were held down between two readings: by the counters, else by what holds them down now.

    The counters see the whole time, and may move in steps longer than a round: such a round can escape, or its neighbour take
    its place. The momentary reasons see only what outlasts the round.
    """
    known = before.violations_ns.keys() & now.violations_ns.keys()
    least_ns = LEAST_SHARE * (now.reference_seconds - before.reference_seconds) * 1e9
    counted = {
        reason for reason in known if now.violations_ns[reason] - before.violations_ns[reason] > least_ns
    }
    return frozenset(counted | (now.reasons - known))


def foreign(listed: Collection[int], own: Collection[int], before: Collection[int]) -> frozenset[int]:
    """The processes on a GPU that are not ours, of those the driver lists now.

    In a container with process ids of its own the driver may list the host's: then none of ours is listed, nobody can tell
    which are ours, and only those that were listed before our ranks started are known to be foreign.
    """
    return (
        frozenset(listed) - frozenset(own)
        if frozenset(listed) & frozenset(own)
        else frozenset(listed) & frozenset(before)
    )


def spoiling(rounds: Sequence[Mapping[int, Disturbance]]) -> list[str]:
    """What spoiled the last of all `rounds` that a measurement has had so far, GPU by GPU; empty if it is a good one.

    A power cap that held a GPU down in half of them or more is the work's own: any round of it would be like that.
    """
    reasons = []
    for gpu, last in sorted(rounds[-1].items()):
        capped = sum(gpu in each and POWER_CAP in each[gpu].throttled for each in rounds)
        own = {POWER_CAP} if 2 * capped >= len(rounds) else set()
        if why := sorted(last.throttled - own):
            reasons.append(f"GPU {gpu} was throttled ({', '.join(why)})")
        if last.foreign:
            reasons.append(f"{_processes(last.foreign)} also used GPU {gpu}")
        high = max(each[gpu].megahertz or 0 for each in rounds if gpu in each)
        if not (last.throttled or own) and is_lower(last.megahertz, high):
            reasons.append(f"GPU {gpu}'s clock was {last.megahertz} MHz, of {high}")
    return reasons


def is_lower(megahertz: int | None, than: int) -> bool:
    return megahertz is not None and megahertz < (1 - CLOCK_SHARE) * than


def notes(again: Sequence[Round]) -> list[str]:
    """What is told of spoiled rounds that were measured again: no doubt, for they do not count."""
    if not again:
        return []
    how_many = "1 spoiled round was" if len(again) == 1 else f"{len(again)} spoiled rounds were"
    reasons = dict.fromkeys(reason for each in again for reason in each.spoiled)
    return [f"{how_many} measured again: {'; '.join(reasons)}"]


def sentences(rounds: Sequence[Mapping[int, Disturbance]]) -> list[str]:
    """The doubts of rounds[round][GPU], GPU by GPU."""
    warnings: list[str] = []
    for gpu in sorted({gpu for each in rounds for gpu in each}):
        disturbances = [each[gpu] for each in rounds if gpu in each]
        reasons = sorted({reason for each in disturbances for reason in each.throttled})
        if reasons:
            held = sum(bool(each.throttled) for each in disturbances)
            of = f"{len(rounds)} round{'s' * (len(rounds) > 1)}"
            warnings.append(f"GPU {gpu} was throttled ({', '.join(reasons)}) during {held} of {of}")
        clocks = [each.megahertz for each in disturbances if each.megahertz is not None]
        if not reasons and clocks and is_lower(min(clocks), max(clocks)):
            warnings.append(f"GPU {gpu}'s clock was {min(clocks)} to {max(clocks)} MHz")
        if pids := {pid for each in disturbances for pid in each.foreign}:
            warnings.append(f"{_processes(pids)} also use{'s' * (len(pids) == 1)} GPU {gpu}")
    return warnings


def _processes(pids: Collection[int]) -> str:
    return f"process{'es' * (len(pids) > 1)} {', '.join(map(str, sorted(pids)))}"


# --- reading


def _handles(uuids: Sequence[str]) -> dict[int, Any]:
    """The driver's handles by the number in `uuids`; NVML stays loaded as long as this process, since loading it takes long."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (
        Exception
    ):  # no driver library, no driver, no GPU, or no nvidia-ml-py: in every case nothing can be watched
        return {}
    handles = {gpu: _ask("nvmlDeviceGetHandleByUUID", uuid) for gpu, uuid in enumerate(uuids)}
    return {gpu: handle for gpu, handle in handles.items() if handle is not None}


def read(handle: Any) -> Reading:
    """One GPU's state now, in four questions to the driver."""
    bits = _ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # its name in drivers before 535
        bits = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    idle = bits is None or bits & IDLE
    megahertz = (
        None if idle else _ask("nvmlDeviceGetClockInfo", handle, SM_CLOCK)
    )  # at once: soon it may be idle
    return Reading(
        reference_seconds=time.monotonic(),
        violations_ns=violations(_ask("nvmlDeviceGetFieldValues", handle, list(COUNTERS)) or ()),
        reasons=named(bits or 0),
        processes=frozenset(
            process.pid for process in _ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        ),
        megahertz=megahertz,
    )


def violations(values: Iterable[Any]) -> dict[str, int]:
    """Nanoseconds by reason, of NVML's values for fields of `COUNTERS`; what the GPU does not count is absent."""
    return {
        COUNTERS[value.fieldId]: value.value.ullVal for value in values if value.nvmlReturn == 0
    }  # 0: success


def named(bits: int) -> frozenset[str]:
    """The reasons that NVML's bits stand for; what someone chose is none."""
    return frozenset(reason for bit, reason in REASONS.items() if bits & bit)


def _ask(function: str, *arguments: Any) -> Any | None:
    """What a function of NVML answers; None if it refuses, in whatever way, since no look may end a run."""
    import pynvml

    with contextlib.suppress(Exception):
        return getattr(pynvml, function)(*arguments)
    return None

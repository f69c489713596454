"""The parts of a training step: their speedup, the rank that waits least, and the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpperf.analysis.scaling import strong_speedup, weak_speedup

SHORTEST_FRACTION = 0.01  # a shorter part of a step has no speedup


def parts_without_waiting(parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the seconds of each step part on the rank that waits least for other ranks' gradients.

    The input is `parts[name][rank]`. Steps of synchronized ranks take equally long on all of them.
    """
    return {part: seconds[least_waiting_rank(parts)] for part, seconds in parts.items()}


def least_waiting_rank(parts: Mapping[str, Sequence[float]]) -> int:
    """Return the rank with the shortest gradient synchronization."""
    waits = parts.get("gradient_sync", (0.0,))
    return min(range(len(waits)), key=waits.__getitem__)


def part_speedups(
    on_one: Mapping[str, float], on_many: Mapping[str, float], N: int, *, weak: bool
) -> dict[str, float]:
    """Return the speedup of each step part over N devices, from its seconds on one device and on N.

    Weak scaling: N t(1) / t(N) with the same batch per rank. Strong scaling: t(1) / t(N) with the
    same global batch. A part that one of the two steps lacks has no speedup. Neither has a part
    shorter than `SHORTEST_FRACTION` of its step, because the ratio would be noise.
    """
    speedup = weak_speedup if weak else strong_speedup
    least_on_one, least_on_many = (SHORTEST_FRACTION * sum(parts.values()) for parts in (on_one, on_many))
    return {
        part: speedup(t1, on_many[part], N)
        for part, t1 in on_one.items()
        if t1 > least_on_one and on_many.get(part, 0.0) > least_on_many
    }


def straggler_spread(alone: Sequence[float]) -> float:
    """Return the fraction by which the slowest rank's step is longer than the fastest rank's.

    `alone[rank]` is the seconds of steps in which no rank waits for another.
    """
    return max(alone) / min(alone) - 1

"""Bandwidths of collectives as in nccl-tests: S bytes per rank, t seconds, N ranks; in bytes/s."""

from __future__ import annotations


def algbw(S: float, t: float) -> float:
    """Return S / t: how fast the caller's bytes are reduced."""
    if not (S >= 0 and t > 0):
        raise ValueError(f"a bandwidth needs bytes and a positive time, got {S} bytes in {t} s")
    return S / t


def all_reduce_busbw(S: float, t: float, N: int) -> float:
    """Return algbw * 2(N-1)/N: the bytes per second that each rank must at least send and receive.

    Each rank's part S/N must leave it N-1 times in a reduce-scatter and again in an all-gather. So
    this compares with a link's bandwidth in one direction for any N. It may exceed the link where
    the switch itself reduces (NVLS).
    """
    return 2 * collective_busbw("all_reduce", S, t, N)


def collective_busbw(kind: str, S: float, t: float, N: int) -> float:
    """Return the bus bandwidth: algbw for a broadcast, else algbw * (N-1)/N.

    A rank's own part of the buffer stays where it is; a broadcast passes every rank. S: the greater
    of a rank's two buffers.
    """
    if N < 2:
        raise ValueError(f"{kind} has a bus bandwidth from 2 ranks up, got {N}")
    return algbw(S, t) * (1.0 if kind == "broadcast" else (N - 1) / N)

"""Bandwidths of collectives, by nccl-tests' definitions. S is bytes a rank, t seconds, N ranks; results in bytes per second."""

from __future__ import annotations


def algbw(S: float, t: float) -> float:
    """S / t: how fast the caller's bytes are reduced."""
    if not (S >= 0 and t > 0):
        raise ValueError(f"a bandwidth needs bytes and a positive time, got {S} bytes in {t} s")
    return S / t


def all_reduce_busbw(S: float, t: float, N: int) -> float:
    """algbw * 2(N-1)/N: the bytes that each rank must send (and receive) at the least, per second.

    Each rank's share S/N has to leave it N-1 times in a reduce-scatter and again in an all-gather, so this compares with
    a link's bandwidth in one direction at any N. It may exceed the link where the switch itself reduces (NVLS).
    """
    if N < 2:
        raise ValueError(f"an all_reduce has a bus bandwidth from 2 ranks up, got {N}")
    return algbw(S, t) * 2 * (N - 1) / N


def collective_busbw(kind: str, S: float, t: float, N: int) -> float:
    """algbw * (N-1)/N of a reduce_scatter, an all_gather and an all_to_all, of which a rank's own share stays where it is; of a
    broadcast algbw, which passes every rank. S is the greater of a rank's two buffers."""
    if N < 2:
        raise ValueError(f"a {kind} has a bus bandwidth from 2 ranks up, got {N}")
    return algbw(S, t) * (1.0 if kind == "broadcast" else (N - 1) / N)

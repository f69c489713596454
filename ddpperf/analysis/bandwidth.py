"""Bandwidths of collectives in bytes/s, as in nccl-tests: S bytes per rank, t seconds, N ranks."""

from __future__ import annotations

# Of these calls, a node's bytes are those that busbw counts, as in a flat ring.
LIKE_A_RING = ("backend", "ring", "reduce_scatter", "all_gather", "broadcast")


def algbw(S: float, t: float) -> float:
    """Return the algorithm bandwidth of S bytes in t seconds, S / t, in bytes per second."""
    if not (S >= 0 and t > 0):
        raise ValueError(f"a bandwidth needs bytes and a positive time, got {S} bytes in {t} s")
    return S / t


def all_reduce_busbw(S: float, t: float, N: int) -> float:
    """Return the bus bandwidth of an all-reduce of S bytes on N ranks, algbw * 2(N-1)/N.

    Each rank must send and receive at least this many bytes per second: its part S/N must leave it
    N-1 times in a reduce-scatter and again in an all-gather. So the bus bandwidth compares with a
    link's bandwidth in one direction for any N. It may exceed the link's bandwidth where the switch
    itself reduces (NVLS).
    """
    return 2 * collective_busbw("all_reduce", S, t, N)


def collective_busbw(kind: str, S: float, t: float, N: int) -> float:
    """Return the bus bandwidth of a collective: algbw for a broadcast, else algbw * (N-1)/N.

    A rank's own part of the buffer stays where it is. A broadcast passes every rank. S is the
    greater of a rank's two buffers.
    """
    if N < 2:
        raise ValueError(f"{kind} has a bus bandwidth from 2 ranks up, got {N}")
    return algbw(S, t) * (1.0 if kind == "broadcast" else (N - 1) / N)


def crossing_factor(kind: str, N: int, node_size: int) -> float | None:
    """Return the bytes that leave a node divided by the bytes that busbw counts.

    kind: the algorithm of an all-reduce, or the kind of another collective. node_size: the number of
    ranks L of each of N / L nodes.
    In a flat ring a node sends what one of its ranks sends, so that the factor is 1. Hierarchical
    all-reduces send less: 2(M-1)/M buffers of M nodes. In an all-to-all each of L ranks sends
    (N-L)/N of its buffer to other nodes. Returns None for other algorithms. There the busiest node
    sends or receives other numbers of bytes, which depend on the order of the ranks.
    """
    if kind == "hierarchical":
        return (N - node_size) / (N - 1)
    if kind == "all_to_all":
        return node_size * (N - node_size) / (N - 1)
    return 1.0 if kind in LIKE_A_RING else None

"""The cost of gloo's ring all-reduce over links with a latency and a rate.

Source: facebookincubator/gloo at cc44198, gloo/allreduce.cc (`ring`, which torch's backend uses)
and gloo/transport/tcp/pair.cc (`send`, `recv`). Each rank sends to the rank before it. The buffer
is cut into equal segments, at least two for each rank and at most 1 MiB each. A rank works on two
segments at a time: it posts the receive and the send of a segment when the segment two before has
arrived. A send waits until the receiver's notice, "ready to receive", has crossed the link. So a
segment costs two latencies if the link is otherwise idle: one for the notice, one for the data. A
node's notices wait behind the data that the node sends, so a link is idle for one latency after
each segment.

Measured between network namespaces, 64 KiB to 64 MiB: within 8% at 1 ms and 1 Gbit/s on 2 to 4
nodes. If a latency is more than half of a segment's time (5 ms at 1 Gbit/s), some notices leave
before the data. For buffers of many segments, gloo then needs up to 16% less time than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ddpperf.analysis.logarithmic_fit import fit_logarithms
from ddpperf.analysis.two_links import FittedLink, Link

SEGMENT_BYTES = 2**20  # kMaxSegmentSize in gloo/allreduce.h
ELEMENT_BYTES = 4  # float32
ETHERNET, IP_TCP = 14, 20 + 20 + 12  # bytes of headers: a frame's, and a packet's with timestamps
# A thread reads from the network and sends data at once. The caller's thread wakes up later and posts
# the next notice, which then waits behind that data. Without this delay, both would happen together.
LATE = 0.1  # in latencies: a notice that is posted this long before data still waits behind the data
STEP = 1e-6  # relative step of a numerical derivative; exact, because the cost is piecewise linear
STARTS = (4, 8, 16, 32)  # messages that the shortest call may have, of the first links of a fit


NO_COST = Link(latency=0.0, byte_seconds=0.0)


def byte_seconds(bytes_per_second: float, mtu: int) -> float:
    """Return the seconds per byte of a buffer, on a link whose rate also counts the headers of frames."""
    return (mtu + ETHERNET) / (mtu - IP_TCP) / bytes_per_second


def gloo_seconds(
    nbytes: float, *, nodes: int, node_size: int = 1, network: Link, local: Link = NO_COST
) -> float:
    """Return the seconds of gloo's all-reduce of a float32 buffer on nodes of `node_size` ranks.

    Ranks are numbered node by node. `network` is the link between nodes, `local` the link between
    ranks of a node. Adding costs nothing: gloo adds one segment while another is on its way. Raises
    ValueError for fewer than two ranks.
    """
    N = nodes * node_size
    if N < 2:
        raise ValueError(f"an all-reduce needs two ranks or more, got {N}")
    ranks = np.arange(N)
    crossing = (ranks + 1) % N // node_size != ranks // node_size  # from the next rank to this one
    latency = np.where(crossing, network.latency, local.latency)
    per_rank = max(2, math.ceil(math.ceil(nbytes / SEGMENT_BYTES) / N))
    segment = math.ceil(nbytes / (per_rank * N) / ELEMENT_BYTES) * ELEMENT_BYTES
    sending = segment * np.where(crossing, network.byte_seconds, local.byte_seconds)
    late = LATE * network.latency
    behind = (ranks // node_size * node_size - 1) % N  # who receives what this rank's node sends
    now = np.zeros(N)  # each rank's clock
    for _ in ("reduce-scatter", "all-gather"):
        # Of the segment two before (0) and one before (1): handed over, sent, arrived.
        handed, free, arrived = [np.full(N, -np.inf)] * 2, [now, now], [now, now]
        for _ in range(per_rank * (N - 1)):
            posted = np.maximum(arrived[0], np.roll(handed[0], 1))
            queue = np.where(handed[1][behind] <= posted + late, free[1][behind], free[0][behind])
            notice = np.maximum(posted, np.where(crossing, queue, posted)) + latency
            given = np.maximum(notice, np.roll(posted, -1))
            ended = np.maximum(given, free[1]) + sending
            handed, free = [handed[1], given], [free[1], ended]
            arrived = [arrived[1], np.maximum(arrived[1], ended + latency)]
        now = arrived[1]
    return float(now.max())


def fit_network(times: Mapping[tuple[int, int], float], *, node_size: int = 1) -> FittedLink:
    """Fit the link between nodes of `node_size` ranks to gloo's all-reduces, by (nodes, bytes).

    The fit minimizes the squares of logarithms. The messages and bytes on the critical path depend
    on the link. So each fit counts them with the link of the fit before, until nothing changes. Such
    a fit may be the best only nearby, so several first latencies are tried, and the best fit counts.
    The link inside a node counts as free, because each step of the ring waits for its slowest link.
    """
    per_byte = min(seconds / nbytes for (_, nbytes), seconds in times.items())
    starts = [Link(latency=min(times.values()) / messages, byte_seconds=per_byte) for messages in STARTS]
    return min((_fit_from(start, times, node_size) for start in starts), key=lambda found: found[0])[1]


def _fit_from(link: Link, times: Mapping[tuple[int, int], float], node_size: int) -> tuple[float, FittedLink]:
    """Return the sum of squared residuals, and the fit that is reached from a first link."""
    for _ in range(20):
        rows = [_counts(nodes, node_size, nbytes, link) for nodes, nbytes in times]
        fit = fit_logarithms(rows, list(times.values()))
        latency, per_byte = fit.estimates(fit.residuals, len(fit.values))
        fitted = FittedLink(latency=latency, byte_seconds=per_byte)
        if fitted.link == link:
            break
        link = fitted.link
    return float(fit.residuals @ fit.residuals), fitted


def _counts(nodes: int, node_size: int, nbytes: int, link: Link) -> tuple[float, float]:
    """Return the messages and bytes on the critical path: the cost's derivatives by the link."""
    cost = gloo_seconds(nbytes, nodes=nodes, node_size=node_size, network=link)
    more = Link(latency=link.latency * (1 + STEP), byte_seconds=link.byte_seconds)
    longer = gloo_seconds(nbytes, nodes=nodes, node_size=node_size, network=more)
    latencies = (longer - cost) / (link.latency * STEP)
    messages = round(latencies)
    return messages, (cost - messages * link.latency) / link.byte_seconds

"""By how much longer than on one device a step takes on more devices than were measured.

A step's excess over t(1) is what DDP does besides sending, which hardly depends on N, and the part of sending that is not
hidden behind computing: excess(N) = bookkeeping + exposed(N). sending(N) adds up the all_reduces of the step's buckets, by the
lines of the backend on N devices. Of it the share is exposed that was exposed on the numbers of devices that were measured, or,
where sending takes long, all that does not fit behind the backward pass: max(share * sending(N), sending(N) - hideable). The
share is above 1 where sending slows computing down, too; of a network between nodes no more than all is exposed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.analysis.cost_models import NotToldApart, counts
from ddpperf.analysis.log_fit import CONFIDENCE
from ddpperf.analysis.protocols import Envelope

DRAWS = 1000
DOUBLING_ERROR = (
    0.15  # relative, of all_reduces of twice as many devices as were measured: seen between 2, 4 and 8 H200s
)


def all_reduce_seconds(measured: Mapping[int, Envelope], nbytes: float, N: int) -> float:
    """Of one buffer on N devices of a node. On a number that was not measured: the lines of the nearest, their slopes as a
    ring's bytes grow, their starts by as much for each doubling as from the least number of devices measured to the
    greatest; of one number only they stay."""
    if N in measured:
        return measured[N].seconds(nbytes)
    least, greatest = min(measured), max(measured)
    nearest = min(measured, key=lambda other: abs(math.log2(N / other)))
    growth = 0.0
    if least != greatest:
        growth = (measured[greatest].seconds(0) - measured[least].seconds(0)) / math.log2(greatest / least)
    longer = counts("ring", N).volume / counts("ring", nearest).volume
    shift = max(0.0, growth) * math.log2(N / nearest)
    lines = tuple((max(0.0, start + shift), slope * longer) for start, slope in measured[nearest].lines)
    return Envelope(lines=lines).seconds(nbytes)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between nodes, as the user gives it: seconds of a message without its bytes, bytes per second of one device's part."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and 0 < self.bandwidth < math.inf):
            raise ValueError(
                f"a network needs a latency of 0 or more and a bandwidth above 0, got {self.latency}, {self.bandwidth}"
            )

    def all_reduce_seconds(self, nbytes: float, nodes: int, devices: int) -> float:
        """Between nodes of so many devices, each of which sums its share of the buffer over all nodes in a ring."""
        ring = counts("ring", nodes)
        return ring.latency * self.latency + ring.volume * nbytes / devices / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Sending:
    """Seconds of a step's all_reduces: within nodes, which the lines give, and between them, as the user gives the network."""

    within: float
    between: float = 0.0

    @property
    def seconds(self) -> float:
        return self.within + self.between


def sending_seconds(
    measured: Mapping[int, Envelope], buckets: Sequence[float], N: int, *, node: int, network: Network | None
) -> Sending:
    """Of all buckets on N devices: within a node of `node` devices, and beyond it by the network.

    Raises ValueError for no bytes at all, for more devices than a node's without a network, or for part of a node.
    """
    if not sum(buckets) > 0:
        raise ValueError(
            f"a projection is of a step that sends gradients, got buckets of {list(buckets)} bytes"
        )
    if node >= N:
        return Sending(within=sum(all_reduce_seconds(measured, nbytes, N) for nbytes in buckets))
    if network is None:
        raise ValueError(
            f"{N} devices are more than a node's {node}; give the latency and bandwidth between nodes"
        )
    nodes, rest = divmod(N, node)
    if rest:
        raise ValueError(f"{N} devices are no whole number of nodes of {node}; use a multiple")
    return Sending(
        within=sum(all_reduce_seconds(measured, nbytes, node) for nbytes in buckets),
        between=sum(network.all_reduce_seconds(nbytes, nodes, node) for nbytes in buckets),
    )


def sending_error(measured: Mapping[int, float], N: int, *, node: int) -> float:
    """Relative, as a standard error, of what is sent within nodes: that of the nearest number of devices measured, whose lines
    miss sizes by so much, and DOUBLING_ERROR for each doubling from there to N, or to a whole node. What the user says of a
    network is taken for true."""
    here = min(N, node)
    nearest = min(measured, key=lambda other: abs(math.log2(here / other)))
    return math.hypot(measured[nearest], DOUBLING_ERROR * abs(math.log2(here / nearest)))


@dataclass(frozen=True, kw_only=True)
class Excess:
    """How much longer than on one device a step takes. error: the standard error of the longer step, one_device_error: that of
    t(1), which all excesses of a set of processes are taken from."""

    seconds: float
    error: float
    one_device_error: float


@dataclass(frozen=True, kw_only=True)
class Projection:
    """seconds with an interval of CONFIDENCE, from what was measured and how far off sending may be. plain: the guess that it
    is the same as on the greatest number of devices that was measured."""

    seconds: float
    low: float
    high: float
    plain: float


def project(
    excess: Mapping[int, Excess],
    bookkeeping: Excess,
    sending: Callable[[int], Sending],
    N: int,
    *,
    hideable: float,
    error: float,
) -> Projection:
    """The excess on N devices from that on others. hideable: seconds of the backward pass, behind which sending may hide.
    error: of what sending(N) takes within nodes, relative, as a standard error.

    Raises ValueError if none was measured, and NotToldApart where sending is fitted to take no time.
    """
    if not excess:
        raise ValueError("a projection needs the excess on some devices, got none")
    sent = {devices: sending(devices) for devices in (*excess, N)}
    if not all(each.seconds > 0 for each in sent.values()):
        raise NotToldApart(
            "the all_reduces that were measured do not tell what sending a step's gradients takes; measure more --rounds, or "
            "other --buffer-sizes"
        )

    def projected(excess: Mapping[int, float], bookkeeping: float, off: float) -> float:
        share = sum((excess[other] - bookkeeping) / sent[other].seconds for other in excess) / len(excess)
        within, between = sent[N].within * off, sent[N].between
        return bookkeeping + max(0.0, share * within + min(1.0, share) * between, within + between - hideable)

    drawn = random.Random(0)

    def draw() -> float:
        one_device = drawn.gauss(0, 1)

        def off(each: Excess) -> float:
            return each.seconds + drawn.gauss(0, each.error) - one_device * each.one_device_error

        return projected(
            {N: off(each) for N, each in excess.items()}, off(bookkeeping), drawn.lognormvariate(0, error)
        )

    draws = sorted(draw() for _ in range(DRAWS))
    tail = int(DRAWS * (1 - CONFIDENCE) / 2)
    return Projection(
        seconds=projected({other: each.seconds for other, each in excess.items()}, bookkeeping.seconds, 1.0),
        low=draws[tail],
        high=draws[-tail - 1],
        plain=excess[max(excess)].seconds,
    )

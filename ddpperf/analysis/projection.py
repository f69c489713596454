"""The projection of extra step time, t(N) - t(1), to more devices than were measured.

The extra time is excess(N) = bucket_copies + exposed(N). Filling DDP's buckets hardly depends on N.
exposed(N) is the part of sending that computation does not hide. sending(N) is the sum of the
all-reduces of the step's buckets, by the lines fitted to the backend's times on N devices. The
exposed fraction is that on the measured numbers of devices. Where sending takes long, all is
exposed that does not fit behind the backward pass: max(fraction * sending(N), sending(N) -
hideable). The fraction is above 1 where sending slows computation down, too. Of the time between
nodes, at most all is exposed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.analysis.backend_protocols import Envelope
from ddpperf.analysis.cost_models import Undetermined, counts
from ddpperf.analysis.logarithmic_fit import CONFIDENCE, Estimate

DRAWS = 1000
DOUBLING_ERROR = 0.15  # relative error of all-reduce times per doubling of the devices, on 2 to 8 H200s


def all_reduce_seconds(measured: Mapping[int, Envelope], nbytes: float, N: int) -> float:
    """Return the predicted seconds of one all-reduce on N devices of a node.

    For a number that was not measured, the lines of the nearest number are scaled. Their slopes
    grow as a ring's bytes do. Their starts grow for each doubling by as much as between the
    smallest and the largest measured number. With only one measured number the starts stay.
    """
    if N in measured:
        return measured[N].seconds(nbytes)
    least, greatest = min(measured), max(measured)
    nearest = _nearest(measured, N)
    growth = 0.0
    if least != greatest:
        growth = (measured[greatest].seconds(0) - measured[least].seconds(0)) / math.log2(greatest / least)
    slope_factor = counts("ring", N).volume / counts("ring", nearest).volume
    shift = max(0.0, growth) * math.log2(N / nearest)
    lines = tuple((max(0.0, start + shift), slope * slope_factor) for start, slope in measured[nearest].lines)
    return Envelope(lines=lines).seconds(nbytes)


def _nearest(numbers: Iterable[int], N: int) -> int:
    return min(numbers, key=lambda number: abs(math.log2(N / number)))


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes: latency in seconds, bandwidth in bytes per second per device."""

    latency: float
    bandwidth: float

    def all_reduce_seconds(self, nbytes: float, nodes: int, devices: int) -> float:
        """Return the seconds of a ring all-reduce between nodes.

        Each device of a node sums its own part of the buffer.
        """
        ring = counts("ring", nodes)
        return ring.latency * self.latency + ring.volume * nbytes / devices / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Sending:
    """The seconds that a step's all-reduces take within nodes and between nodes."""

    within: float
    between: float = 0.0

    @property
    def seconds(self) -> float:
        return self.within + self.between


def sending_seconds(
    measured: Mapping[int, Envelope], buckets: Sequence[float], N: int, *, node: int, network: Network | None
) -> Sending:
    """Return the seconds to all-reduce all gradient buckets of a step on N devices.

    A node has `node` devices. Beyond one node, N is a multiple of `node`, and there is a network.
    """
    if node >= N:
        return Sending(within=sum(all_reduce_seconds(measured, nbytes, N) for nbytes in buckets))
    assert network is not None
    return Sending(
        within=sum(all_reduce_seconds(measured, nbytes, node) for nbytes in buckets),
        between=sum(network.all_reduce_seconds(nbytes, N // node, node) for nbytes in buckets),
    )


def sending_error(measured: Mapping[int, float], N: int, *, node: int) -> float:
    """Return the relative standard error of a step's predicted all-reduce time within nodes.

    The input `measured` holds errors by number of devices. The result combines the error for the
    nearest measured number with `DOUBLING_ERROR` for each doubling from there to N, or to a whole
    node. The user's figures for a network count as exact.
    """
    within = min(N, node)
    nearest = _nearest(measured, within)
    return math.hypot(measured[nearest], DOUBLING_ERROR * abs(math.log2(within / nearest)))


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The extra step time on N devices compared with one device, with standard errors.

    `error` is the standard error of the step on N devices. `one_device_error` is that of t(1),
    which is the same t(1) for every N of a process set.
    """

    seconds: float
    error: float
    one_device_error: float


def project(
    excess: Mapping[int, Excess],
    bucket_copies: Excess,
    sending: Callable[[int], Sending],
    N: int,
    *,
    hideable: float,
    error: float,
) -> Estimate:
    """Project the extra step time compared with one device to another number of devices N, in
    seconds.

    The 95% interval covers the errors of the measured times and of the all-reduce model. `hideable`
    is the seconds of the backward pass, behind which sending may hide. `error` is the relative
    standard error of sending(N) within nodes. Raises Undetermined where sending is fitted to take
    no time.
    """
    sent = {devices: sending(devices) for devices in (*excess, N)}
    if not all(time.seconds > 0 for time in sent.values()):
        raise Undetermined(
            "the measured all-reduces do not show how long sending a step's gradients takes; measure more "
            "--rounds, or other --buffer-sizes"
        )

    def projected(excess: Mapping[int, float], copies: float, factor: float) -> float:
        fraction = sum((excess[other] - copies) / sent[other].seconds for other in excess) / len(excess)
        within, between = sent[N].within * factor, sent[N].between
        exposed = fraction * within + min(1.0, fraction) * between
        return copies + max(0.0, exposed, within + between - hideable)

    rng = random.Random(0)

    def draw() -> float:
        one_device = rng.gauss(0, 1)

        def with_error(value: Excess) -> float:
            return value.seconds + rng.gauss(0, value.error) - one_device * value.one_device_error

        drawn = {devices: with_error(value) for devices, value in excess.items()}
        return projected(drawn, with_error(bucket_copies), rng.lognormvariate(0, error))

    draws = sorted(draw() for _ in range(DRAWS))
    tail = int(DRAWS * (1 - CONFIDENCE) / 2)
    measured = {devices: value.seconds for devices, value in excess.items()}
    seconds = projected(measured, bucket_copies.seconds, 1.0)
    return Estimate(value=seconds, low=draws[tail], high=draws[-tail - 1])

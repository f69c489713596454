"""The projection of extra step time, t(N) - t(1), to more devices than were measured.

The extra time is excess(N) = bucket_copies + exposed(N). Filling DDP's buckets hardly depends on N.
exposed(N) is the part of sending that computation does not hide. sending(N) is the sum of the
all-reduces of the step's buckets. A function predicts the seconds of an all-reduce for a number of
devices and of bytes. It uses lines fitted to the backend's times, or on several nodes with gloo the
cost of gloo's ring. The exposed fraction is that on the measured numbers of devices. Where sending
takes long, all is exposed that does not fit behind the backward pass: max(fraction * sending(N),
sending(N) - hideable). The fraction is above 1 where sending slows computation down, too.

Where several nodes were measured, larger numbers of nodes are projected from these measurements
alone. Otherwise the user's figures describe the network between nodes, of whose time at most all is
exposed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.analysis.cost_models import Undetermined, counts
from ddpperf.analysis.library_cost_model import Envelope
from ddpperf.analysis.logarithmic_fit import CONFIDENCE, Estimate
from ddpperf.analysis.node_cost_model import two_link_counts

LIBRARY_ALGORITHM = "ring"  # the all-reduce of gloo and NCCL on several nodes
DRAWS = 1000
# NCCL's bus bandwidth on two GPUs of a node, as part of that on more GPUs. It makes the predictions for
# four GPUs from two right on average, for 4 MiB to 256 MiB on H100s and H200s.
NCCL_PAIR_BANDWIDTH = 0.91
DOUBLING_ERROR = 0.15  # relative error of all-reduce times per doubling of the devices, on 2 to 8 H200s


def projected_from(measured: Iterable[int], N: int, *, node: int) -> list[int]:
    """Return the measured numbers of devices from which N devices are projected, in order.

    Numbers of devices on several nodes are projected from measurements on several nodes, if there
    are any. A node has `node` devices.
    """
    numbers = sorted(measured)
    across = [number for number in numbers if number > node]
    return across if node < N and across else [number for number in numbers if number <= node]


AllReduce = Callable[[int, float], float]  # the seconds on a number of devices, for a number of bytes


def all_reduce_seconds(
    measured: Mapping[int, Envelope], N: int, nbytes: float, *, node: int, pair_bandwidth: float = 1.0
) -> float:
    """Return the predicted seconds of one all-reduce on N devices, by lines.

    Either all measured numbers of devices and N are on one node of `node` devices, or all are on
    several nodes. For a number that was not measured, the lines of the nearest number are scaled.
    Their slopes grow as a ring's bytes do. Inside a node, two devices reach `pair_bandwidth` times
    the bus bandwidth of more devices. The starts of the lines grow inside a node with each doubling,
    and on several nodes with each message of a ring, by as much as between the smallest and the
    largest measured number. With only one measured number, the starts stay inside a node, and grow in
    proportion to a ring's messages on several nodes.
    """
    if N in measured:
        return measured[N].seconds(nbytes)
    least, greatest, nearest = min(measured), max(measured), _nearest(measured, N)
    steps, volume = _steps_and_volume(N, node, pair_bandwidth)
    nearest_steps, nearest_volume = _steps_and_volume(nearest, node, pair_bandwidth)
    growth = 0.0
    if least != greatest:
        more = measured[greatest].seconds(0) - measured[least].seconds(0)
        growth = more / (_steps_and_volume(greatest, node)[0] - _steps_and_volume(least, node)[0])
    elif node < N:
        growth = measured[nearest].seconds(0) / nearest_steps
    shift, slope_factor = max(0.0, growth) * (steps - nearest_steps), volume / nearest_volume
    lines = tuple((max(0.0, start + shift), slope * slope_factor) for start, slope in measured[nearest].lines)
    return Envelope(lines=lines).seconds(nbytes)


def _steps_and_volume(N: int, node: int, pair_bandwidth: float = 1.0) -> tuple[float, float]:
    """Return by what the start and the slope of an all-reduce on N devices grow."""
    if node >= N:
        return math.log2(N), counts("ring", N).volume / (pair_bandwidth if N == 2 else 1.0)
    load = two_link_counts(LIBRARY_ALGORITHM, N, node).between
    return load.messages, load.volume


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
    """The seconds of a step's all-reduces over measured links and over an assumed network.

    `measured` is the time on links whose all-reduces were measured: inside a node, or between
    nodes, too. `assumed` is the time between nodes by the user's figures for the network.
    """

    measured: float
    assumed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.measured + self.assumed


def sending_seconds(
    all_reduce: AllReduce,
    measured: Iterable[int],
    buckets: Sequence[float],
    N: int,
    *,
    node: int,
    network: Network | None,
) -> Sending:
    """Return the seconds to all-reduce all gradient buckets of a step on N devices.

    `measured` is the numbers of devices that `all_reduce` was fitted to. A node has `node` devices.
    Beyond one node, N is a multiple of `node`. `network` counts if no measured number of devices
    has several nodes. Raises Undetermined if there is no network then.
    """
    size, assumed = _measured_size(measured, N, node=node), 0.0
    if size != N:
        if network is None:
            raise Undetermined(
                f"no all-reduce on several nodes of {node} devices was measured on fewer than {N} devices; "
                "measure one node more, or pass --node-link"
            )
        assumed = sum(network.all_reduce_seconds(nbytes, N // node, node) for nbytes in buckets)
    return Sending(measured=sum(all_reduce(size, nbytes) for nbytes in buckets), assumed=assumed)


def _measured_size(measured: Iterable[int], N: int, *, node: int) -> int:
    """Return N, or a whole node if N has several nodes and all measured devices are on one."""
    return min(N, node) if max(measured) <= node else N


def sending_error(measured: Mapping[int, float], N: int, *, node: int) -> float:
    """Return the relative standard error of a step's predicted all-reduce time on measured links.

    The input `measured` holds errors by number of devices. The result combines the error for the
    nearest measured number with `DOUBLING_ERROR` for each doubling from there to N, or to a whole
    node if no several nodes were measured. The user's figures for a network count as exact.
    """
    size = _measured_size(measured, N, node=node)
    nearest = _nearest(measured, size)
    return math.hypot(measured[nearest], DOUBLING_ERROR * abs(math.log2(size / nearest)))


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
    standard error of sending(N) on measured links. Raises Undetermined where sending is fitted to take
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
        measured, assumed = sent[N].measured * factor, sent[N].assumed
        exposed = fraction * measured + min(1.0, fraction) * assumed
        return copies + max(0.0, exposed, measured + assumed - hideable)

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

"""The projection of extra step time, t(N) - t(1), to more devices than were measured.

The extra time is excess(N) = bucket_copies + exposed(N). Filling DDP's buckets hardly depends on N.
exposed(N) is the part of sending that computation does not hide. sending(N) is the sum of the
all-reduces of the step's buckets. The exposed fraction is that on the measured numbers of devices.
Where sending takes long, all is exposed that does not fit behind the backward pass:
max(fraction * sending(N), sending(N) - hideable). The fraction is above 1 where sending slows
computation down, too.

Where several nodes were measured, larger numbers of nodes are projected from these measurements
alone. Otherwise the user's figures describe the network between nodes, of whose time at most all is
exposed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpperf.analysis.cost_models import LibraryModel, Undetermined, counts, seconds_by
from ddpperf.analysis.statistics import CONFIDENCE, Estimate

DRAWS = 1000
NORMAL = 1.4826  # the standard deviation of normal errors over the median of their absolute values
# NCCL's bus bandwidth on two GPUs of a node, as part of that on more GPUs. It makes the predictions for
# four GPUs from two right on average, for 4 MiB to 256 MiB on H100s and H200s.
NCCL_PAIR_BANDWIDTH = 0.91
DOUBLING_ERROR = 0.15  # relative error of all-reduce times per doubling of the devices, on 2 to 8 H200s


def projected_from(measured: Iterable[int], N: int, *, node: int) -> list[int]:
    """Return the measured device counts, in order, from which the step on N devices is projected.

    Numbers of devices on several nodes are projected from measurements on several nodes, if there
    are any. A node has `node` devices.
    """
    numbers = sorted(measured)
    across = [number for number in numbers if number > node]
    return across if node < N and across else [number for number in numbers if number <= node]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes: latency in seconds, bandwidth in bytes per second per device."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class AllReduces:
    """Measured all-reduces, from which those on more devices are predicted.

    `models` are fitted to the times of each measured number of devices. All these numbers are on one
    node of `node` devices, or all are on several nodes. `network` counts if none is on several nodes.
    Inside a node, two devices reach `pair_bandwidth` times the bus bandwidth of more devices.
    """

    models: Mapping[int, LibraryModel]
    node: int
    network: Network | None = None
    pair_bandwidth: float = 1.0

    def seconds(self, N: int, nbytes: float) -> float:
        """Return the predicted seconds of one all-reduce on N devices, on measured links.

        For a number that was not measured, the lines of the nearest number are scaled. Their slopes
        grow as a ring's bytes do. The starts of the lines grow inside a node with each doubling, and
        on several nodes with each message of a ring, by as much as between the smallest and the
        largest measured number. With only one measured number, the starts stay inside a node, and
        grow in proportion to a ring's messages on several nodes.
        """
        nearest = self._nearest(N)
        lines = self.models[nearest].lines
        if nearest == N:
            return seconds_by(lines, nbytes)
        inside = self.node >= N

        def steps(devices: int) -> float:  # as the all-reduce of gloo and NCCL on several nodes
            return math.log2(devices) if inside else 2 * (devices - 1)

        def volume(devices: int) -> float:
            pair = self.pair_bandwidth if inside and devices == 2 else 1.0
            return counts("ring", devices).volume / pair

        least, greatest = min(self.models), max(self.models)
        growth = 0.0
        if least != greatest:
            fewest, most = (seconds_by(self.models[number].lines, 0) for number in (least, greatest))
            growth = (most - fewest) / (steps(greatest) - steps(least))
        elif not inside:
            growth = seconds_by(lines, 0) / steps(nearest)
        shift, factor = max(0.0, growth) * (steps(N) - steps(nearest)), volume(N) / volume(nearest)
        return seconds_by([(max(0.0, start + shift), slope * factor) for start, slope in lines], nbytes)

    def sending(self, buckets: Sequence[float], N: int) -> tuple[float, float]:
        """Predict the seconds of a step's all-reduces on N devices: on measured links, and on --node-link.

        buckets: the bytes of each gradient bucket. Beyond one node, N is a multiple of `node`. If
        only one node was measured, a ring joins the nodes, in which each device of a node sums its
        own part of the buffer. Raises Undetermined if neither several nodes were measured nor the
        network is known.
        """
        size, assumed = self._measured_size(N), 0.0
        if size != N:
            if self.network is None:
                raise Undetermined(
                    f"no all-reduce on several nodes of {self.node} devices was measured on fewer than {N} "
                    "devices; measure one node more, or pass --node-link"
                )
            ring = counts("ring", N // self.node)
            byte_seconds = ring.volume / self.node / self.network.bandwidth
            assumed = sum(ring.latency * self.network.latency + byte_seconds * nbytes for nbytes in buckets)
        return sum(self.seconds(size, nbytes) for nbytes in buckets), assumed

    def error(self, N: int) -> float:
        """Return the relative standard error of the predicted seconds on measured links.

        The error of the nearest measured number is combined with `DOUBLING_ERROR` for each doubling
        from there. The figures of a network count as exact.
        """
        size = self._measured_size(N)
        nearest = self._nearest(size)
        own = NORMAL * self.models[nearest].held_out_error
        return math.hypot(own, DOUBLING_ERROR * abs(math.log2(size / nearest)))

    def _measured_size(self, N: int) -> int:
        """Return N, but at most one node's devices if only all-reduces inside a node were measured."""
        return min(N, self.node) if max(self.models) <= self.node else N

    def _nearest(self, N: int) -> int:
        return min(self.models, key=lambda number: abs(math.log2(N / number)))


class Excess(NamedTuple):
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
    all_reduces: AllReduces,
    buckets: Sequence[float],
    N: int,
    *,
    hideable: float,
) -> Estimate:
    """Predict t(N) - t(1), the extra time of a step on N devices, in seconds.

    The 95% interval covers the errors of the measured times and of the all-reduce model. `buckets`
    are the bytes of a step's gradient buckets. `hideable` is the seconds of the backward pass,
    behind which sending may hide. Raises Undetermined where sending is fitted to take no time.
    """
    sent = {devices: sum(all_reduces.sending(buckets, devices)) for devices in excess}
    measured, assumed = all_reduces.sending(buckets, N)
    if not all((*sent.values(), measured + assumed)):
        raise Undetermined(
            "the measured all-reduces do not show how long sending a step's gradients takes; measure more "
            "--rounds, or other --buffer-sizes"
        )

    def projected(excess: Mapping[int, float], copies: float, factor: float) -> float:
        fraction = sum((excess[other] - copies) / sent[other] for other in excess) / len(excess)
        exposed = fraction * measured * factor + min(1.0, fraction) * assumed
        return copies + max(0.0, exposed, measured * factor + assumed - hideable)

    rng, error = random.Random(0), all_reduces.error(N)

    def draw() -> float:
        one_device = rng.gauss(0, 1)

        def with_error(value: Excess) -> float:
            return value.seconds + rng.gauss(0, value.error) - one_device * value.one_device_error

        drawn = {devices: with_error(value) for devices, value in excess.items()}
        return projected(drawn, with_error(bucket_copies), rng.lognormvariate(0, error))

    draws = sorted(draw() for _ in range(DRAWS))
    tail = int(DRAWS * (1 - CONFIDENCE) / 2)
    exact = {devices: value.seconds for devices, value in excess.items()}
    seconds = projected(exact, bucket_copies.seconds, 1.0)
    return Estimate(value=seconds, low=draws[tail], high=draws[-tail - 1])

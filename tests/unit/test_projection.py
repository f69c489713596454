"""The projection of a step's excess to more devices."""

from __future__ import annotations

import math
import random

import pytest

from ddpperf.analysis.cost_models import counts
from ddpperf.analysis.library_cost_model import Envelope, choose_envelope
from ddpperf.analysis.logarithmic_fit import Undetermined
from ddpperf.analysis.node_cost_model import two_link_counts
from ddpperf.analysis.projection import (
    DOUBLING_ERROR,
    NCCL_PAIR_BANDWIDTH,
    AllReduces,
    Excess,
    Network,
    Sending,
    project,
    projected_from,
)
from tests.unit.test_cost_models import H200

MB = 1e6
BUCKETS = [2 * MB, 25 * MB, 17 * MB]


def lines(N: int) -> Envelope:
    """Two protocols whose latency grows by 4 us for each doubling, on links of 400 GB/s."""
    volume = counts("ring", N).volume
    latency = 6e-6 + 4e-6 * N.bit_length()
    return Envelope(lines=((latency, volume / 150e9), (latency + 10e-6, volume / 400e9)))


def test_more_devices_scale_slopes_and_starts() -> None:
    all_reduces = AllReduces(lines={2: lines(2), 4: lines(4)}, node=8)
    for nbytes in (0, 1000, MB, 100 * MB):
        assert all_reduces.seconds(4, nbytes) == lines(4).seconds(nbytes)
        assert all_reduces.seconds(8, nbytes) == pytest.approx(lines(8).seconds(nbytes))
    assert AllReduces(lines={2: lines(2)}, node=8).seconds(8, 0) == lines(2).seconds(0), (
        "with one measured number, the start stays"
    )


@pytest.mark.parametrize(("N", "most"), [(4, 0.05), (8, 0.12)])
def test_nccl_on_more_gpus_is_predicted_from_two(N: int, most: float) -> None:
    """Two GPUs reach less bus bandwidth than four or eight."""
    for nbytes in (2**22, 2**24, 2**26, 2**28):
        measured = H200[N][nbytes] / 1e6
        found = AllReduces(lines={2: nccl(2)}, node=8, pair_bandwidth=NCCL_PAIR_BANDWIDTH).seconds(N, nbytes)
        assert found == pytest.approx(measured, rel=most)


def nccl(N: int) -> Envelope:
    """Return the lines that are fitted to NCCL's all-reduces on N H200s."""
    return choose_envelope(list(H200[N]), [microseconds / 1e6 for microseconds in H200[N].values()]).envelope


def sending(N: int, off: float = 1.0) -> Sending:
    """Return the sending on one node. off: by which factor a model is wrong on 8 devices."""
    found = AllReduces(lines={2: lines(2), 4: lines(4)}, node=8).sending(BUCKETS, N)
    return Sending(measured=found.measured * (off if N == 8 else 1))


def known(N: int) -> float:
    """100 us of bookkeeping, and 70 % of sending that is not hidden."""
    return 100e-6 + 0.7 * sending(N).seconds


BOOKKEEPING = Excess(seconds=100e-6, error=1e-6, one_device_error=1e-6)


def test_known_excess_is_projected() -> None:
    measured = {N: Excess(seconds=known(N), error=1e-6, one_device_error=1e-6) for N in (2, 4)}
    found = project(measured, BOOKKEEPING, {N: sending(N) for N in (2, 4, 8)}, 8, hideable=1.0, error=0.02)
    assert found.value == pytest.approx(known(8))
    assert found.low < known(8) < found.high
    assert abs(found.value - known(8)) < abs(known(4) - known(8))


def test_nineteen_of_twenty_intervals_hold_the_excess() -> None:
    """Where all of a set's excesses are taken from one t(1), which is off by as much for each."""
    drawn, held = random.Random(3), 0
    for _ in range(300):
        t1 = drawn.gauss(0, 8e-6)
        errors = {"error": 8e-6, "one_device_error": 8e-6}
        measured = {N: Excess(seconds=known(N) + drawn.gauss(0, 8e-6) - t1, **errors) for N in (2, 4)}
        bookkeeping = Excess(seconds=100e-6 + drawn.gauss(0, 8e-6) - t1, **errors)
        off = 1 + drawn.gauss(0, 0.05)  # what the model makes of sending on 8
        sent = {N: sending(N, off) for N in (2, 4, 8)}
        found = project(measured, bookkeeping, sent, 8, hideable=1.0, error=0.05)
        held += found.low <= known(8) <= found.high
    assert 0.90 < held / 300 < 0.99


def test_sending_hides_only_behind_backward() -> None:
    """A tenth is exposed on two devices; long sending exposes all that exceeds the backward pass."""
    backward = 1e-3

    def sends(N: int) -> Sending:
        return Sending(measured=1e-3 if N == 2 else 10e-3)

    measured = {2: Excess(seconds=200e-6, error=1e-6, one_device_error=1e-6)}
    found = project(measured, BOOKKEEPING, {N: sends(N) for N in (2, 64)}, 64, hideable=backward, error=0.0)
    assert found.value == pytest.approx(100e-6 + 10e-3 - backward)
    assert found.low == pytest.approx(found.value, abs=10e-6)
    slow = project(measured, BOOKKEEPING, {N: sends(N) for N in (2, 64)}, 64, hideable=1.0, error=0.0)
    assert slow.value == pytest.approx(100e-6 + 1e-3), (
        "a backward pass that is long enough hides the same share of it"
    )


@pytest.mark.parametrize(("known", "N"), [((2,), 4), ((4,), 8), ((2, 4), 8)])
def test_doubling_error_covers_h200s(known: tuple[int, ...], N: int) -> None:
    """Root mean square over sizes from 1 MiB on, which gradients have."""
    chosen = {number: nccl(number) for number in known}
    large = [nbytes for nbytes in H200[N] if nbytes >= 2**20]
    errors = [
        AllReduces(lines=chosen, node=8).seconds(N, nbytes) / (H200[N][nbytes] / 1e6) - 1 for nbytes in large
    ]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < DOUBLING_ERROR


def test_network_counts_beyond_a_node() -> None:
    network = Network(latency=10e-6, bandwidth=50e9)
    all_reduces = AllReduces(lines={2: lines(2), 4: lines(4)}, node=4, network=network)
    alone, found = all_reduces.sending(BUCKETS, 4), all_reduces.sending(BUCKETS, 1024)
    assert alone == Sending(measured=sum(all_reduces.seconds(4, nbytes) for nbytes in BUCKETS))
    assert found.measured == alone.measured
    nodes = 256
    ring = 2 * (nodes - 1) * 3 * 10e-6 + 2 * (nodes - 1) / nodes * sum(BUCKETS) / 4 / 50e9
    assert found.assumed == pytest.approx(ring)
    assert found.seconds == pytest.approx(alone.measured + ring)
    unknown = AllReduces(lines=all_reduces.lines, node=4)
    with pytest.raises(Undetermined, match="measure one node more, or pass --node-link"):
        unknown.sending(BUCKETS, 1024)


# --- several measured nodes, on a network of 1 ms and 1 Gbit/s

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
TEN_BUCKETS = [2 * MB, *[5 * MB] * 9]  # the gradients of a ResNet-18
T1, BACKWARD = 0.4, 0.25  # seconds


def on_nodes(N: int, node: int, nbytes: float) -> float:
    """Return the seconds of a flat ring by its messages and bytes between the nodes."""
    _, load = two_link_counts("ring", N, node, nbytes)
    return load.messages * 1e-3 + load.volume * nbytes / 125e6


def measured_on_nodes(numbers: tuple[int, ...], node: int, seed: int) -> dict[int, Envelope]:
    """Return the lines of the all-reduces, each with an error of 3%."""
    drawn = random.Random(seed)
    return {
        N: choose_envelope(
            SIZES, [on_nodes(N, node, nbytes) * drawn.lognormvariate(0, 0.03) for nbytes in SIZES]
        ).envelope
        for N in numbers
    }


def test_several_nodes_are_projected_from_several() -> None:
    assert projected_from((2, 3), 4, node=1) == [2, 3]
    assert projected_from((6, 2, 4), 8, node=2) == [4, 6]
    assert projected_from((2, 4, 6), 2, node=2) == [2]
    assert projected_from((2, 4), 1024, node=8) == [2, 4], "of one node, and of an assumed network"


@pytest.mark.parametrize("fraction", [0.2, 0.9, 1.2])
@pytest.mark.parametrize(("smaller", "N", "node"), [((2, 3), 4, 1), ((2, 4, 6), 8, 2)])
def test_step_on_4_nodes_is_predicted(smaller: tuple[int, ...], N: int, node: int, fraction: float) -> None:
    """Measured with errors of 3%, where a fraction of sending is not hidden."""

    def step(devices: int) -> float:
        sent = sum(on_nodes(devices, node, nbytes) for nbytes in TEN_BUCKETS)
        return T1 + 5e-3 + max(fraction * sent, sent - BACKWARD)

    across = projected_from(smaller, N, node=node)
    for seed in range(10):
        drawn = random.Random(seed)
        all_reduces = AllReduces(lines=measured_on_nodes(tuple(across), node, seed), node=node)
        errors = {"error": 0.03 * T1, "one_device_error": 0.03 * T1}
        t1, local = (seconds * drawn.lognormvariate(0, 0.03) for seconds in (T1, T1 + 5e-3))
        excess = {
            devices: Excess(seconds=step(devices) * drawn.lognormvariate(0, 0.03) - t1, **errors)
            for devices in across
        }
        found = project(
            excess,
            Excess(seconds=local - t1, **errors),
            {M: all_reduces.sending(TEN_BUCKETS, M) for M in (*across, N)},
            N,
            hideable=BACKWARD,
            error=all_reduces.sending_error(dict.fromkeys(across, 0.03), N),
        )
        assert t1 + found.value == pytest.approx(step(N), rel=0.15)


def test_one_measured_number_of_nodes_grows_by_messages() -> None:
    measured = {2: Envelope(lines=((2e-3, 8e-9),))}
    assert AllReduces(lines=measured, node=1).seconds(4, 0) == pytest.approx(6e-3)
    assert AllReduces(lines=measured, node=4).seconds(4, 0) == pytest.approx(2e-3)
    assert AllReduces(lines=measured, node=1).seconds(4, 1e9) == pytest.approx(6e-3 + 12)


def test_measured_nodes_need_no_network_figures() -> None:
    assumed = Network(latency=1.0, bandwidth=1.0)
    all_reduces = AllReduces(lines=measured_on_nodes((2, 3), 1, seed=0), node=1, network=assumed)
    assert all_reduces.sending(BUCKETS, 4).assumed == 0
    assert all_reduces.sending_error({2: 0.03, 3: 0.04}, 4) == pytest.approx(
        math.hypot(0.04, DOUBLING_ERROR * math.log2(4 / 3))
    )


@pytest.mark.parametrize(("exposed", "of_network"), [(0.5, 0.5), (2.0, 1.0)])
def test_network_is_exposed_at_most_once(exposed: float, of_network: float) -> None:
    """Within a node more than the sending time may be lost: a CPU that sends computes more slowly."""
    within, between = 1e-3, 400e-3
    measured = {2: Excess(seconds=100e-6 + exposed * within, error=0.0, one_device_error=0.0)}
    known = Excess(seconds=100e-6, error=0.0, one_device_error=0.0)

    def sends(N: int) -> Sending:
        return Sending(measured=within, assumed=between if N == 64 else 0.0)

    found = project(measured, known, {N: sends(N) for N in (2, 64)}, 64, hideable=10.0, error=0.1)
    assert found.value == pytest.approx(100e-6 + exposed * within + of_network * between)
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.1 * exposed * within, rel=0.1), (
        "of what is within the node"
    )


def test_free_sending_cannot_be_projected() -> None:
    """As where all that was measured of sending is noise."""
    excess = {2: Excess(seconds=1e-3, error=1e-5, one_device_error=1e-5)}
    with pytest.raises(
        Undetermined, match="do not show how long sending a step's gradients takes; measure more --rounds"
    ):
        project(excess, BOOKKEEPING, dict.fromkeys((2, 8), Sending(measured=0.0)), 8, hideable=1.0, error=0)

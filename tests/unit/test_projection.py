"""The projection of a step's excess to more devices."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from ddpperf.analysis.cost_models import (
    LibraryModel,
    Lines,
    Undetermined,
    choose_lines,
    counts,
    counts_by_link,
)
from ddpperf.analysis.projection import (
    DOUBLING_ERROR,
    NCCL_PAIR_BANDWIDTH,
    NORMAL,
    AllReduces,
    Excess,
    Network,
    project,
    projected_from,
)
from ddpperf.analysis.statistics import Estimate
from tests.unit.test_cost_models import H200

MB = 1e6
BUCKETS = [2 * MB, 25 * MB, 17 * MB]
NO_ESTIMATE = Estimate(value=0.0, low=0.0, high=0.0)


def all_reduces(
    lines: Mapping[int, Lines], *, node: int = 8, error: float = 0.0, network: Network | None = None
) -> AllReduces:
    """Return all-reduces of these lines. error: the standard error of what they predict."""
    models = {
        N: LibraryModel(
            lines=found, latency=NO_ESTIMATE, byte_seconds=NO_ESTIMATE, held_out_error=error / NORMAL
        )
        for N, found in lines.items()
    }
    return AllReduces(models=models, node=node, network=network)


def lines(N: int, off: float = 1.0) -> Lines:
    """Two protocols whose latency grows by 4 us for each doubling, on links of 400 GB/s."""
    volume = counts("ring", N).volume
    latency = 6e-6 + 4e-6 * N.bit_length()
    return [(off * latency, off * volume / 150e9), (off * (latency + 10e-6), off * volume / 400e9)]


MEASURED = all_reduces({2: lines(2), 4: lines(4)})


# --- all-reduces on more devices


def test_more_devices_scale_slopes_and_starts() -> None:
    exact = all_reduces({8: lines(8)})
    for nbytes in (0, 1000, MB, 100 * MB):
        assert MEASURED.seconds(4, nbytes) == all_reduces({4: lines(4)}).seconds(4, nbytes)
        assert MEASURED.seconds(8, nbytes) == pytest.approx(exact.seconds(8, nbytes))
    alone = all_reduces({2: lines(2)})
    assert alone.seconds(8, 0) == alone.seconds(2, 0), "with one measured number, the start stays"


def test_one_measured_number_of_nodes_grows_by_messages() -> None:
    measured = {2: [(2e-3, 8e-9)]}
    assert all_reduces(measured, node=1).seconds(4, 0) == pytest.approx(6e-3)
    assert all_reduces(measured, node=4).seconds(4, 0) == pytest.approx(2e-3)
    assert all_reduces(measured, node=1).seconds(4, 1e9) == pytest.approx(6e-3 + 12)


def nccl(*numbers: int, pair: float = 1.0) -> AllReduces:
    """Return what is fitted to NCCL's all-reduces on numbers of H200s."""
    models = {
        N: choose_lines(list(H200[N]), [microseconds / 1e6 for microseconds in H200[N].values()])
        for N in numbers
    }
    return AllReduces(models=models, node=8, pair_bandwidth=pair)


@pytest.mark.parametrize(("N", "most"), [(4, 0.05), (8, 0.12)])
def test_nccl_on_more_gpus_is_predicted_from_two(N: int, most: float) -> None:
    """Two GPUs reach less bus bandwidth than four or eight."""
    for nbytes in (2**22, 2**24, 2**26, 2**28):
        found = nccl(2, pair=NCCL_PAIR_BANDWIDTH).seconds(N, nbytes)
        assert found == pytest.approx(H200[N][nbytes] / 1e6, rel=most)


@pytest.mark.parametrize(("known", "N"), [((2,), 4), ((4,), 8), ((2, 4), 8)])
def test_doubling_error_covers_h200s(known: tuple[int, ...], N: int) -> None:
    """Root mean square over sizes from 1 MiB on, which gradients have."""
    large = [nbytes for nbytes in H200[N] if nbytes >= 2**20]
    errors = [nccl(*known).seconds(N, nbytes) / (H200[N][nbytes] / 1e6) - 1 for nbytes in large]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < DOUBLING_ERROR


def test_network_counts_beyond_a_node() -> None:
    both = {2: lines(2), 4: lines(4)}
    found = all_reduces(both, node=4, network=Network(latency=10e-6, bandwidth=50e9))
    alone = sum(found.seconds(4, nbytes) for nbytes in BUCKETS)
    assert found.sending(BUCKETS, 4) == (alone, 0.0)
    ring = 2 * (256 - 1) * 3 * 10e-6 + 2 * (256 - 1) / 256 * sum(BUCKETS) / 4 / 50e9
    assert found.sending(BUCKETS, 1024)[0] == alone
    assert found.sending(BUCKETS, 1024)[1] == pytest.approx(ring)
    with pytest.raises(Undetermined, match="measure one node more, or pass --node-link"):
        all_reduces(both, node=4).sending(BUCKETS, 1024)


def test_measured_nodes_need_no_network_figures() -> None:
    assumed = Network(latency=1.0, bandwidth=1.0)
    found = all_reduces({2: lines(2), 3: lines(3)}, node=1, error=0.04, network=assumed)
    assert found.sending(BUCKETS, 4)[1] == 0
    assert found.error(4) == pytest.approx(math.hypot(0.04, DOUBLING_ERROR * math.log2(4 / 3)))


# --- the step


def known(N: int) -> float:
    """100 us of bookkeeping, and 70 % of sending that is not hidden."""
    return 100e-6 + 0.7 * sum(all_reduces({N: lines(N)}).sending(BUCKETS, N))


BOOKKEEPING = Excess(seconds=100e-6, error=1e-6, one_device_error=1e-6)


def test_nineteen_of_twenty_intervals_hold_the_excess() -> None:
    """Where all of a set's excesses are taken from one t(1), which is off by as much for each."""
    drawn, held = random.Random(3), 0
    for _ in range(300):
        t1 = drawn.gauss(0, 8e-6)
        errors = {"error": 8e-6, "one_device_error": 8e-6}
        measured = {N: Excess(seconds=known(N) + drawn.gauss(0, 8e-6) - t1, **errors) for N in (2, 4)}
        bookkeeping = Excess(seconds=100e-6 + drawn.gauss(0, 8e-6) - t1, **errors)
        off = 1 + drawn.gauss(0, 0.05)  # what the model makes of sending on 8
        sent = all_reduces({2: lines(2), 4: lines(4), 8: lines(8, off)}, error=0.05)
        found = project(measured, bookkeeping, sent, BUCKETS, 8, hideable=1.0)
        held += found.low <= known(8) <= found.high
    assert 0.90 < held / 300 < 0.99


@pytest.mark.parametrize(("backward", "exposed"), [(1e-3, 10e-3 - 1e-3), (1.0, 1e-3)])
def test_sending_hides_only_behind_backward(backward: float, exposed: float) -> None:
    """A tenth is exposed on two devices; long sending exposes all that exceeds the backward pass."""
    measured = {2: Excess(seconds=200e-6, error=1e-6, one_device_error=1e-6)}
    sent = all_reduces({2: [(1e-3, 0.0)], 64: [(10e-3, 0.0)]}, node=64)
    found = project(measured, BOOKKEEPING, sent, [1.0], 64, hideable=backward)
    assert found.value == pytest.approx(100e-6 + exposed)


@pytest.mark.parametrize(("exposed", "of_network"), [(0.5, 0.5), (2.0, 1.0)])
def test_network_is_exposed_at_most_once(exposed: float, of_network: float) -> None:
    """Within a node more than the sending time may be lost: a CPU that sends computes more slowly."""
    within, between = 1e-3, 400e-3
    measured = {2: Excess(seconds=100e-6 + exposed * within, error=0.0, one_device_error=0.0)}
    copies = Excess(seconds=100e-6, error=0.0, one_device_error=0.0)
    network = Network(latency=between / 2, bandwidth=math.inf)  # two messages between two nodes
    sent = all_reduces({2: [(within, 0.0)]}, node=2, error=0.1, network=network)
    found = project(measured, copies, sent, [1.0], 4, hideable=10.0)
    assert found.value == pytest.approx(100e-6 + exposed * within + of_network * between)
    of_the_node = 2 * 1.96 * 0.1 * exposed * within
    assert found.high - found.low == pytest.approx(of_the_node, rel=0.1)


def test_free_sending_cannot_be_projected() -> None:
    """As where all that was measured of sending is noise."""
    excess = {2: Excess(seconds=1e-3, error=1e-5, one_device_error=1e-5)}
    with pytest.raises(Undetermined, match="do not show how long sending a step's gradients takes"):
        project(excess, BOOKKEEPING, all_reduces({2: [(0.0, 0.0)]}), BUCKETS, 8, hideable=1.0)


# --- several measured nodes, on a network of 1 ms and 1 Gbit/s

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
TEN_BUCKETS = [2 * MB, *[5 * MB] * 9]  # the gradients of a ResNet-18
T1, BACKWARD = 0.4, 0.25  # seconds


def on_nodes(N: int, node: int, nbytes: float) -> float:
    """Return the seconds of a flat ring by its messages and bytes between the nodes."""
    _, load = counts_by_link("ring", N, node, nbytes)
    return load.latency * 1e-3 + load.volume * nbytes / 125e6


def test_several_nodes_are_projected_from_several() -> None:
    assert projected_from((2, 3), 4, node=1) == [2, 3]
    assert projected_from((6, 2, 4), 8, node=2) == [4, 6]
    assert projected_from((2, 4, 6), 2, node=2) == [2]
    assert projected_from((2, 4), 1024, node=8) == [2, 4], "of one node, and of an assumed network"


@pytest.mark.parametrize("fraction", [0.2, 1.2])
@pytest.mark.parametrize(("across", "N", "node"), [((2, 3), 4, 1), ((4, 6), 8, 2)])
def test_step_on_4_nodes_is_predicted(across: tuple[int, ...], N: int, node: int, fraction: float) -> None:
    """Measured with errors of 3%, where a fraction of sending is not hidden."""

    def step(devices: int) -> float:
        sent = sum(on_nodes(devices, node, nbytes) for nbytes in TEN_BUCKETS)
        return T1 + 5e-3 + max(fraction * sent, sent - BACKWARD)

    for seed in range(10):
        drawn = random.Random(seed)

        def noisy(seconds: float, drawn: random.Random = drawn) -> float:
            return seconds * drawn.lognormvariate(0, 0.03)

        models = {M: choose_lines(SIZES, [noisy(on_nodes(M, node, S)) for S in SIZES]) for M in across}
        errors = {"error": 0.03 * T1, "one_device_error": 0.03 * T1}
        t1, local = noisy(T1), noisy(T1 + 5e-3)
        excess = {devices: Excess(seconds=noisy(step(devices)) - t1, **errors) for devices in across}
        copies = Excess(seconds=local - t1, **errors)
        sent = AllReduces(models=models, node=node)
        found = project(excess, copies, sent, TEN_BUCKETS, N, hideable=BACKWARD)
        assert t1 + found.value == pytest.approx(step(N), rel=0.15)

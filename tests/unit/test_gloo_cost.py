"""The cost of gloo's ring: known cases, and a fit that finds the link again."""

from __future__ import annotations

import pytest

from ddpperf.analysis.gloo_cost import byte_seconds, fit_network, gloo_seconds
from ddpperf.analysis.two_links import Link

LINK = Link(latency=1e-3, byte_seconds=8e-9)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_short_step_costs_two_latencies(nodes: int) -> None:
    """2(N-1) steps, each with a notice and data; a rank's first segment is sent beside its second."""
    nbytes = 4 * nodes * 2**10
    assert gloo_seconds(nbytes, nodes=nodes, network=LINK) == pytest.approx(
        4 * (nodes - 1) * LINK.latency + nbytes * LINK.byte_seconds
    )


def test_a_long_segment_costs_one_latency() -> None:
    """64 segments of 1 MiB in both phases; the first of a phase costs two."""
    nbytes = 2**26
    assert gloo_seconds(nbytes, nodes=2, network=LINK) == pytest.approx(
        nbytes * LINK.byte_seconds + (2**26 / 2**20 + 2) * LINK.latency, rel=0.01
    )


def test_one_slow_hop_slows_every_step() -> None:
    """Each step crosses all hops at once, so nodes of several ranks save no latency of the ring."""
    spread = gloo_seconds(2**16, nodes=4, network=LINK)
    packed = gloo_seconds(2**16, nodes=2, node_size=2, network=LINK)
    assert packed == pytest.approx(spread)
    assert gloo_seconds(2**16, nodes=1, node_size=4, network=LINK) == 0


def test_headers_take_time() -> None:
    assert byte_seconds(125e6, 1500) == pytest.approx(1514 / 1448 / 125e6)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two ranks or more, got 1"):
        gloo_seconds(4, nodes=1, network=LINK)


def test_a_fit_finds_the_link() -> None:
    times = {
        (nodes, 2**power): gloo_seconds(2**power, nodes=nodes, network=LINK)
        for nodes in (2, 3)
        for power in range(16, 27, 2)
    }
    fitted = fit_network(times).link
    assert fitted.latency == pytest.approx(LINK.latency, rel=1e-3)
    assert fitted.byte_seconds == pytest.approx(LINK.byte_seconds, rel=1e-3)


def test_the_best_of_several_fits_counts() -> None:
    """Measured on 2 nodes of 2 ranks; from a high latency, the fit ends at 1.2 ms."""
    measured = {2**16: 13.97e-3, 2**20: 25.85e-3, 2**22: 61.78e-3, 2**24: 228.43e-3}
    fitted = fit_network({(2, nbytes): seconds for nbytes, seconds in measured.items()}, node_size=2).link
    assert fitted.latency == pytest.approx(LINK.latency, rel=0.15)
    assert fitted.byte_seconds == pytest.approx(LINK.byte_seconds, rel=0.05)

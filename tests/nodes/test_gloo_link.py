"""Gloo's all-reduce between nodes: as fast as delay and rate allow, and a fit finds both again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpperf.analysis.gloo_cost import byte_seconds, fit_network, gloo_seconds
from ddpperf.analysis.two_links import Link
from tests.namespaces import MTU, needs_namespaces
from tests.nodes.gloo_times import Times, gloo_times

pytestmark = needs_namespaces
FAST = {"delay_seconds": 1e-3, "bytes_per_second": 1e9 / 8}
SLOW = {"delay_seconds": 5e-3, "bytes_per_second": 200e6 / 8}
SIZES = [2**power for power in (16, 18, 20, 22, 24, 26)]
Figure = Callable[[str, Callable[[], float], float, str], None]


def link_of(delay_seconds: float, bytes_per_second: float) -> Link:
    return Link(latency=delay_seconds, byte_seconds=byte_seconds(bytes_per_second, MTU))


def worst(times: Times, link: Link) -> float:
    """Return the largest |measured / allowed - 1|, and print all."""
    ratios = {}
    for (count, nbytes), seconds in times.items():
        allowed = gloo_seconds(nbytes, nodes=count, network=link)
        ratios[count, nbytes] = seconds / allowed
        print(
            f"{count} nodes, {nbytes // 2**10:>6} KiB: measured {seconds * 1e3:8.3f} ms, "
            f"allowed {allowed * 1e3:8.3f} ms, ratio {seconds / allowed:.3f}"
        )
    return max(abs(ratio - 1) for ratio in ratios.values())


def fit_error(times: Times, link: Link) -> float:
    """Return the larger relative error of the fitted latency and seconds per byte."""
    fitted = fit_network(times).link
    latency, per_byte = fitted.latency / link.latency, fitted.byte_seconds / link.byte_seconds
    print(f"fitted latency {latency:.3f} and seconds per byte {per_byte:.3f} of what was set")
    return max(abs(latency - 1), abs(per_byte - 1))


@pytest.mark.slow
def test_a_fit_finds_delay_and_rate() -> None:
    times = gloo_times(2, [2**16, 2**20, 2**22], 3, **SLOW)
    assert fit_error(times, link_of(**SLOW)) < 0.2


@pytest.mark.figures
def test_all_reduce_takes_what_the_link_allows(figure: Figure) -> None:
    def measured() -> float:
        times, link = gloo_times(2, SIZES, 5, **FAST), link_of(**FAST)
        return max(worst(times, link), fit_error(times, link))

    figure("gloo on 2 nodes at 1 ms and 1 Gbit/s, from the allowed time and set link", measured, 0.10, "")


@pytest.mark.figures
def test_two_and_three_nodes_predict_four(figure: Figure) -> None:
    def measured() -> float:
        two, three, four = (gloo_times(count, SIZES[:-1], 3, **SLOW) for count in (2, 3, 4))
        return worst(four, fit_network(two | three).link)

    figure("gloo on 4 nodes, from what 2 and 3 nodes predict", measured, 0.15, "")

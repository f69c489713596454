"""Amdahl's and Gustafson's laws: the share is found again, its interval holds it, and nonsense is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.scaling import (
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    gustafson_speedup,
    over_sets,
)
from ddpperf.machine.hardware import Machine
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import Spec, TrainingSpec
from perf import test_scaling
from tests.canned import CannedSuite
from tests.experiments import with_experiments
from tests.generated import BOUNDED
from tests.project import SUMS_MODEL, Finished, Project

SIZES = (1, 2, 4, 8)
LAWS = [(amdahl_speedup, fit_amdahl), (gustafson_speedup, fit_gustafson)]


def test_known_points() -> None:
    assert amdahl_speedup(0.1, 4) == pytest.approx(1 / (0.1 + 0.9 / 4))
    assert amdahl_speedup(0.5, 10**9) == pytest.approx(2)
    assert gustafson_speedup(0.1, 4) == pytest.approx(3.7)
    for law, _ in LAWS:
        assert (law(0, 8), law(1, 8)) == (8, 1)


@BOUNDED
@given(st.floats(-0.1, 0.9), st.sampled_from(LAWS))
def test_speedups_without_noise_give_their_fraction_back(share: float, law: tuple) -> None:  # type: ignore[type-arg]
    speedup, fit = law
    found = fit(SIZES, [speedup(share, N) for N in SIZES])
    assert found.value == pytest.approx(share, abs=1e-9)
    assert found.low - 1e-9 <= share <= found.high + 1e-9


@pytest.mark.parametrize(("law", "fit"), LAWS)
def test_19_of_20_intervals_hold_the_fraction(law, fit) -> None:  # type: ignore[no-untyped-def]
    """Noise of 1 % on each speedup: 95 % of 1,000, within four standard errors."""
    drawn, sizes, held = random.Random(1), SIZES[1:] * 3, 0
    for _ in range(1000):
        found = fit(sizes, [law(0.1, N) * math.exp(drawn.gauss(0, 0.01)) for N in sizes])
        held += found.low <= 0.1 <= found.high
    assert 0.923 < held / 1000 < 0.977


@pytest.mark.parametrize(("law", "fit"), LAWS)
def test_19_of_20_intervals_over_sets_hold_the_fraction(law, fit) -> None:  # type: ignore[no-untyped-def]
    drawn, held = random.Random(2), 0
    for _ in range(1000):
        shares = []
        for _ in range(3):
            t1 = drawn.gauss(0, 0.01)
            shares.append(
                fit(SIZES, [law(0.1, N) * math.exp(t1 + drawn.gauss(0, 0.003)) for N in SIZES]).value
            )
        found = over_sets(shares)
        held += found.low <= 0.1 <= found.high
    assert 0.923 < held / 1000 < 0.977


def test_interval_of_two_speedups_has_one_degree_of_freedom() -> None:
    """1 - S/N is 0.1 and 0.2, the weights are 1/2 and 3/4: a regression through the origin."""
    found = fit_gustafson([2, 4], [1.8, 3.2])
    fraction = (0.1 * 0.5 + 0.2 * 0.75) / (0.5**2 + 0.75**2)
    residuals = (0.1 - fraction * 0.5) ** 2 + (0.2 - fraction * 0.75) ** 2
    half = 12.7062 * math.sqrt(residuals / (0.5**2 + 0.75**2))  # Student's t of one degree of freedom
    assert found.value == pytest.approx(fraction)
    assert (found.low, found.high) == pytest.approx((fraction - half, fraction + half), rel=1e-4)


def test_one_speedup_has_no_interval() -> None:
    found = fit_gustafson([1, 2], [1.0, 1.8])
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == (-math.inf, math.inf)


# --- the experiments


def test_laws_are_fitted_to_the_measured_speedups(canned_suite: CannedSuite) -> None:
    with_experiments(canned_suite)
    sizes = ("--world-sizes", "1,2,4", "--batch-sizes", "8", "--global-batch-sizes", "16", "--rounds", "1")
    run = canned_suite.run("perf/test_scaling.py", *sizes, "-k", "gustafson or amdahl")
    assert_laws(canned_suite, run)


@pytest.mark.slow
def test_laws_are_fitted_on_real_ranks(project: Project) -> None:
    with_experiments(project)
    (project.root / "mine.py").write_text(SUMS_MODEL.format(sums=10))
    sizes = ("--world-sizes", "1,2,4", "--batch-sizes", "8", "--global-batch-sizes", "16", "--rounds", "1")
    run = project.run("perf/test_scaling.py", "--model", "mine:sums", *sizes, "-k", "gustafson or amdahl")
    assert_laws(project, run)


def assert_laws(project: Project, run: Finished) -> None:
    """Each stored law is the fit of the stored speedups."""
    run.assert_one_sentence(0, "PASS: 2 tests measured")
    for stored in project.measured().values():
        values = {name: metric["value"] for name, metric in stored["metrics"].items()}
        weak = stored["spec"]["per_rank_batch_size"] == 8
        law, fit = LAWS[weak]
        found = fit([2, 4], [values["speedup_of_2"], values["speedup_of_4"]])
        assert values["serial_fraction"] == pytest.approx(found.value)
        assert values["serial_fraction_low"] == pytest.approx(found.low)
        assert values["serial_fraction_high"] == pytest.approx(found.high)
        for N in (2, 4):
            assert values[f"predicted_speedup_of_{N}"] == pytest.approx(law(found.value, N))
        reference = stored["references"]["world_size=2"]["spec"]
        assert (reference["world_size"], reference["per_rank_batch_size"]) == (2, 8)


class FakeMeasure:
    """A `measure` fixture of eight devices, each step of which takes a second."""

    def __init__(self) -> None:
        self.machine = Machine(world_sizes=SIZES)
        self.world_sizes: list[int] = []
        self.metrics: dict[str, Mapping[str, float]] = {}

    def __call__(self, spec: Spec) -> Measured:
        self.world_sizes.append(spec.world_size)
        sample = Sample(set="A1", side="A", torch="2", seconds=((1.0,) * max(SIZES),), counters={})
        return Measured(spec=spec, iterations=1, samples=(sample,))

    def reference(self, name: str, spec: Spec) -> Measured:
        del name
        return self(spec)

    def metric(self, name: str, by_set: Mapping[str, float]) -> None:
        self.metrics[name] = by_set


@pytest.mark.parametrize("test", [test_scaling.test_gustafson, test_scaling.test_amdahl])
def test_largest_world_size_is_measured_first(test: Callable[..., None]) -> None:
    """After a smaller group mapped its memory, a larger one would need fresh process sets."""
    measure = FakeMeasure()
    test(measure, TrainingSpec(world_size=8, per_rank_batch_size=8, strategy="ddp"))
    assert measure.world_sizes == [8, 4, 2, 1]
    assert [name for name in measure.metrics if name.startswith("speedup")] == [
        "speedup_of_2",
        "speedup_of_4",
        "speedup_of_8",
    ]

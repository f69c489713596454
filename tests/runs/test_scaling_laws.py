"""Amdahl's and Gustafson's laws: the share is found again, its interval holds it, and nonsense is refused."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.scaling_laws import (
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
from tests.generated import BOUNDED
from tests.project import REPOSITORY, SUMS_MODEL, Project

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
def test_speedups_without_noise_give_their_share_back(share: float, law: tuple) -> None:  # type: ignore[type-arg]
    speedup, fit = law
    found = fit(SIZES, [speedup(share, N) for N in SIZES])
    assert found.share == pytest.approx(share, abs=1e-9)
    assert found.low - 1e-9 <= share <= found.high + 1e-9


@pytest.mark.parametrize(("law", "fit"), LAWS)
def test_nineteen_of_twenty_intervals_hold_the_share(law, fit) -> None:  # type: ignore[no-untyped-def]
    """Noise of 1 % on each speedup: 95 % of 1,000, within four standard errors."""
    drawn, sizes, held = random.Random(1), SIZES[1:] * 3, 0
    for _ in range(1000):
        found = fit(sizes, [law(0.1, N) * math.exp(drawn.gauss(0, 0.01)) for N in sizes])
        held += found.low <= 0.1 <= found.high
    assert 0.923 < held / 1000 < 0.977


@pytest.mark.parametrize(("law", "fit"), LAWS)
def test_nineteen_of_twenty_intervals_over_sets_hold_the_share_whose_speedups_share_one_t1(law, fit) -> None:  # type: ignore[no-untyped-def]
    drawn, held = random.Random(2), 0
    for _ in range(1000):
        shares = []
        for _ in range(3):
            t1 = drawn.gauss(0, 0.01)
            shares.append(
                fit(SIZES, [law(0.1, N) * math.exp(t1 + drawn.gauss(0, 0.003)) for N in SIZES]).share
            )
        found = over_sets(shares)
        held += found.low <= 0.1 <= found.high
    assert 0.923 < held / 1000 < 0.977


def test_one_speedup_leaves_nothing_to_judge_it_by() -> None:
    found = fit_gustafson([1, 2], [1.0, 1.8])
    assert found.share == pytest.approx(0.2)
    assert (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("sizes", "speedups"), [([1], [1.0]), ([2, 4], [1.8, 0.0]), ([], []), ([2], [-1.0])])
def test_what_says_nothing_is_refused(sizes: list[int], speedups: list[float]) -> None:
    for _, fit in LAWS:
        with pytest.raises(ValueError, match="a serial share needs positive speedups beyond one device, got"):
            fit(sizes, speedups)


# --- the experiments


def test_the_laws_are_fitted_to_what_was_measured_and_stand_beside_it(project: Project) -> None:
    project.experiment.unlink()
    (project.root / "mine.py").write_text(SUMS_MODEL.format(sums=10))
    for path in (REPOSITORY / "perf").glob("*.py"):
        shutil.copy(path, project.root / "perf")
    sizes = ("--world-sizes", "1,2,4", "--batch-sizes", "8", "--global-batch-sizes", "16", "--rounds", "1")
    run = project.run("perf/test_scaling.py", "--model", "mine:sums", *sizes, "-k", "gustafson or amdahl")
    run.assert_one_sentence(0, "PASS: 2 tests measured")
    for stored in project.measured().values():
        values = {name: each["value"] for name, each in stored["metrics"].items()}
        weak = stored["spec"]["per_rank_batch_size"] == 8
        law, fit = LAWS[weak]
        found = fit([2, 4], [values["speedup_of_2"], values["speedup_of_4"]])
        assert (values["serial_fraction"], values["serial_fraction_low"]) == pytest.approx(
            (found.share, found.low)
        )
        assert values["serial_fraction_high"] == pytest.approx(found.high)
        for N in (2, 4):
            assert values[f"predicted_speedup_of_{N}"] == pytest.approx(law(found.share, N))
        reference = stored["references"]["world_size=2"]["spec"]
        assert (reference["world_size"], reference["per_rank_batch_size"]) == (2, 8)


class Asked:
    """A `measure` of eight devices, each step of which takes a second, that keeps what it is asked for."""

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

    def metric(self, name: str, unit: str, by_set: Mapping[str, float]) -> None:
        del unit
        self.metrics[name] = by_set


@pytest.mark.parametrize("test", [test_scaling.test_gustafson, test_scaling.test_amdahl])
def test_a_law_asks_for_the_most_devices_first_and_tells_the_fewest_first(test: Callable[..., None]) -> None:
    """After a smaller group had its memory mapped, a larger one would get fresh sets, of which a test's legs must not be."""
    measure = Asked()
    test(measure, TrainingSpec(world_size=8, per_rank_batch_size=8, strategy="ddp"))
    assert measure.world_sizes == [8, 4, 2, 1]
    assert [name for name in measure.metrics if name.startswith("speedup")] == [
        "speedup_of_2",
        "speedup_of_4",
        "speedup_of_8",
    ]

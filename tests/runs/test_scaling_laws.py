"""Amdahl's and Gustafson's laws: the fraction is found again, its interval holds it, nonsense is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.scaling import (
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    fit_sets,
    gustafson_speedup,
    predicted_speedup,
)
from ddpperf.machine.hardware import Machine, core_count
from ddpperf.results.samples import Sample
from ddpperf.specs import Spec, TrainingSpec
from perf import test_scaling
from tests.canned import CannedSuite
from tests.experiments import with_experiments
from tests.fake_measure import FakeMeasure
from tests.generated import BOUNDED

SIZES = (1, 2, 4, 8)
LAWS = [(amdahl_speedup, fit_amdahl), (gustafson_speedup, fit_gustafson)]


def test_known_points() -> None:
    assert amdahl_speedup(0.1, 4) == pytest.approx(1 / (0.1 + 0.9 / 4))
    assert amdahl_speedup(0.5, 10**9) == pytest.approx(2)
    assert gustafson_speedup(0.1, 4) == pytest.approx(3.7)
    for law, fit in LAWS:
        assert (law(0, 8), law(1, 8)) == (8, 1)
        alone = predicted_speedup(law, fit([2], [1.8]), 32)
        assert (alone.low, alone.high) == (-math.inf, math.inf), "one speedup says nothing about errors"


@BOUNDED
@given(st.floats(-0.1, 0.9), st.sampled_from(LAWS))
def test_speedups_without_noise_give_their_fraction_back(share: float, law: tuple) -> None:  # type: ignore[type-arg]
    speedup, fit = law
    found = fit(SIZES, [speedup(share, N) for N in SIZES])
    assert found.value == pytest.approx(share, abs=1e-9)
    assert found.low - 1e-9 <= share <= found.high + 1e-9


def test_interval_of_two_speedups_has_one_degree_of_freedom() -> None:
    """1 - S/N is 0.1 and 0.2, the weights are 1/2 and 3/4: a regression through the origin."""
    found = fit_gustafson([2, 4], [1.8, 3.2])
    fraction = (0.1 * 0.5 + 0.2 * 0.75) / (0.5**2 + 0.75**2)
    residuals = (0.1 - fraction * 0.5) ** 2 + (0.2 - fraction * 0.75) ** 2
    half = 12.7062 * math.sqrt(residuals / (0.5**2 + 0.75**2))  # Student's t of one degree of freedom
    assert found.value == pytest.approx(fraction)
    assert (found.low, found.high) == pytest.approx((fraction - half, fraction + half), rel=1e-4)


# --- the experiments

LAW_CASES = {"test_gustafson[4rank-b8]": 8, "test_amdahl[4rank-b4]": 4}


def test_full_suite_of_a_cpu_fits_three_sizes(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laws are measured on process sets of four ranks, all other tests on sets of two."""
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "--device", "cpu"]
    monkeypatch.setattr(canned_suite, "options", lambda: options)
    with_experiments(canned_suite)
    sizes = ("--batch-sizes", "8", "--global-batch-sizes", "16", "--rounds", "1")
    run = canned_suite.run("perf", "--full", "-k", "gustafson or amdahl or strong_scaling", *sizes)
    run.assert_one_sentence(0, "PASS: 4 tests measured")
    stored = canned_suite.measured()
    assert LAW_CASES.keys() < stored.keys()
    for test, found in stored.items():
        process_set, devices = ("A2", 4) if test in LAW_CASES else ("A1", 2)
        measured = [found, *found["references"].values()]
        assert {sample["set"] for each in measured for sample in each["samples"]} == {process_set}
        if "one_device" in found["references"]:
            assert len(found["references"]["one_device"]["samples"][0]["seconds"][0]) == devices
    for test, batch_size in LAW_CASES.items():
        found = stored[test]
        assert (found["spec"]["world_size"], found["spec"]["per_rank_batch_size"]) == (4, batch_size)
        assert list(found["references"]) == ["world_size=2", "one_device"]
        reference = found["references"]["world_size=2"]["spec"]
        assert (reference["world_size"], reference["per_rank_batch_size"]) == (2, 8)
        texts = [note["text"] for note in found["notes"]]
        shared = f"4 ranks share {core_count()} cores, so the law is about these cores"
        assert any(text.startswith(shared) for text in texts) == (core_count() < 4)


EIGHT = TrainingSpec(world_size=8, per_rank_batch_size=8, strategy="ddp")
TESTS = [
    (test_scaling.test_gustafson, gustafson_speedup, lambda N: N),
    (test_scaling.test_amdahl, amdahl_speedup, lambda N: 1),
]
by_law = pytest.mark.parametrize(("test", "law", "work"), TESTS, ids=["gustafson", "amdahl"])
PREDICTED = [f"predicted_{kind}_of_{N}" for N in (2, 4, 8, 16, 32) for kind in ("speedup", "efficiency")]


def measured_by(
    test: Callable[..., None],
    seconds: Callable[[str, int], float],
    sets: tuple[str, ...] = ("A1",),
    device: str = "cuda",
) -> Any:
    """Run a test on eight devices. seconds: of a step on a process set and N devices."""

    def samples(spec: Spec) -> Iterator[Sample]:
        for name in sets:
            rounds = ((seconds(name, spec.world_size),) * max(SIZES),)
            yield Sample(set=name, side=name[0], torch="2", seconds=rounds)

    measure: Any = FakeMeasure(samples, Machine(world_sizes=SIZES, device=device))
    test(measure, EIGHT)
    return measure


@by_law
def test_exact_speedups_predict_32_devices(test, law, work) -> None:  # type: ignore[no-untyped-def]
    """The largest world size is measured first, because smaller groups map their memory."""
    measure = measured_by(test, lambda name, N: work(N) / law(0.1, N))
    assert [spec.world_size for spec in measure.specs] == [8, 4, 2, 1]
    assert measure.metrics["serial_fraction"]["A1"] == pytest.approx(0.1, abs=1e-9)
    for N in (2, 4, 8):
        assert measure.metrics[f"speedup_of_{N}"]["A1"] == pytest.approx(law(0.1, N))
    assert set(PREDICTED) <= measure.metrics.keys()
    for end in ("", "_low", "_high"):
        assert measure.metrics[f"predicted_speedup_of_32{end}"]["A1"] == pytest.approx(law(0.1, 32), abs=1e-9)
        predicted = measure.metrics[f"predicted_efficiency_of_32{end}"]["A1"]
        assert predicted == pytest.approx(law(0.1, 32) / 32, abs=1e-9)
    assert (measure.notes, measure.warnings) == ([], [])


@by_law
def test_base_and_candidate_have_their_own_intervals(test, law, work) -> None:  # type: ignore[no-untyped-def]
    """The serial fraction of the candidate is four times that of the base."""
    shares = {"A1": 0.05, "B1": 0.2, "A2": 0.052, "B2": 0.202}
    measure = measured_by(test, lambda name, N: work(N) / law(shares[name], N), tuple(shares))
    half = 12.7062 * 0.001  # Student's t of one degree of freedom, times the standard error
    low, high = (measure.metrics[f"serial_fraction_{end}"] for end in ("low", "high"))
    middle = {"A1": 0.051, "B1": 0.201, "A2": 0.051, "B2": 0.201}
    assert low == pytest.approx({name: share - half for name, share in middle.items()}, rel=1e-4)
    assert high == pytest.approx({name: share + half for name, share in middle.items()}, rel=1e-4)
    slowest = {name: law(share + half, 32) for name, share in middle.items()}
    assert measure.metrics["predicted_speedup_of_32"] == pytest.approx(
        {name: law(share, 32) for name, share in shares.items()}
    )
    assert measure.metrics["predicted_speedup_of_32_low"] == pytest.approx(slowest, rel=1e-4)


@by_law
@pytest.mark.parametrize(
    ("shares", "note"),
    [
        ({"A1": -0.02}, "a serial fraction of -2.0% means that speedups exceed the number of devices: "),
        ({"A1": 1.05}, "a serial fraction of 105.0% means that several devices are slower than one: "),
        ({"A1": 0.1, "B1": -0.02}, "a serial fraction of -2.0% means"),
    ],
)
def test_impossible_fraction_predicts_nothing(test, law, work, shares, note) -> None:  # type: ignore[no-untyped-def]
    measure = measured_by(test, lambda name, N: work(N) / law(shares[name], N), tuple(shares))
    assert measure.metrics["serial_fraction"] == pytest.approx(shares)
    assert not measure.metrics.keys() & set(PREDICTED)
    (found,) = measure.notes
    assert found.startswith(note)
    assert found.endswith("so nothing is predicted" + (", candidate" if len(shares) > 1 else ""))


@pytest.mark.parametrize(("device", "cores"), [("cpu", 7), ("cpu", 8), ("cuda", 1)])
def test_laws_of_shared_cores_are_a_warning(device: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_scaling, "core_count", lambda: cores)
    measure = measured_by(test_scaling.test_amdahl, lambda name, N: 1 / amdahl_speedup(0.1, N), device=device)
    assert len(measure.warnings) == (cores == 7)


@by_law
def test_19_of_20_predictions_hold_the_speedup(test, law, work) -> None:  # type: ignore[no-untyped-def]
    """Noise of 1 % on each time of a process set: 95 % of 500, within four standard errors."""
    drawn, held = random.Random(3), 0
    for _ in range(500):
        noisy = cache(lambda name, N: work(N) / law(0.1, N) * math.exp(drawn.gauss(0, 0.01 * (N > 1))))
        measure = measured_by(test, noisy)
        low, high = (measure.metrics[f"predicted_speedup_of_32_{end}"]["A1"] for end in ("low", "high"))
        held += low <= law(0.1, 32) <= high
    assert 0.911 < held / 500 < 0.989


@pytest.mark.parametrize(
    ("is_weak", "on_two", "on_four", "error"),
    [
        (True, [1.9365, 1.9373, 1.9358, 1.9409, 1.9334], [3.8677, 3.8642, 3.8706, 3.8691, 3.8649], -0.015),
        (False, [1.7036, 1.7019, 1.7, 1.7015, 1.6966], [2.7811, 2.7798, 2.7784, 2.7789, 2.7766], -0.058),
    ],
    ids=["batch 512 per GPU", "global batch 512"],
)
def test_two_gpus_predict_too_little_for_four(
    is_weak: bool, on_two: list[float], on_four: list[float], error: float
) -> None:
    """Five core runs on 4 H100s are five process sets; their interval misses the speedup on 4 GPUs."""
    law, fit = LAWS[is_weak]
    fraction = fit_sets(fit, [2], [[speedup] for speedup in on_two])
    predicted, measured = predicted_speedup(law, fraction, 4), mean(on_four)
    assert predicted.value / measured - 1 == pytest.approx(error, abs=0.001)
    assert predicted.high < measured
    both = fit_sets(fit, [2, 4], list(zip(on_two, on_four, strict=True)))
    assert predicted_speedup(law, both, 4).low < measured < predicted_speedup(law, both, 4).high

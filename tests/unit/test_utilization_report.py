"""Utilization and energy in reports: metrics, the table, the picture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from ddpperf.report.plots import pictures_of
from ddpperf.report.stored_cases import cases_of
from ddpperf.results.metrics import find
from ddpperf.results.samples import Measured, Sample, Usage
from ddpperf.specs import EpochSpec, RunSpec, TrainingSpec
from perf.common.step_metrics import usage_metrics
from tests.fake_measure import FakeMeasure
from tests.project import REPOSITORY

CPU = REPOSITORY / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
SECONDS = tuple(round(0.1 * number, 2) for number in range(1, 31))
FALLING: tuple[float | None, ...] = (None, *(1 - 0.01 * number for number in range(29)))
USAGE = Usage(  # of two GPUs
    joules=(1200.0, 600.0),
    seconds=SECONDS,
    series={
        "gpu_utilization": (FALLING, (0.5,) * 30),
        "gpu_memory_bytes": ((20e9,) * 30, (10e9,) * 30),
        "power_watts": ((612.5,) * 30, (300.0,) * 30),
        "temperature_celsius": ((55,) * 30, (50,) * 30),
        "cpu_utilization": ((0.25,) * 30,),
        "rank_memory_bytes": ((2e9,) * 30, (2e9,) * 30),
    },
    mean={
        "gpu_utilization": (0.86, 0.5),
        "power_watts": (612.5, 300.0),
        "temperature_celsius": (55, None),
        "cpu_utilization": (0.25,),
    },
    peak={
        "gpu_utilization": (1.0, 0.5),
        "power_watts": (650.0, 310.0),
        "temperature_celsius": (56, None),
        "cpu_utilization": (0.3,),
    },
)


def metrics_of(spec: TrainingSpec, *usages: Usage | None, **counters: float) -> FakeMeasure:
    by_rank: dict[str, tuple[float, ...]] = {name: (value,) for name, value in counters.items()}
    samples = tuple(
        Sample(set=f"A{number}", side="A", torch="2.11", seconds=((2.0,),), counters=by_rank, usage=usage)
        for number, usage in enumerate(usages, 1)
    )
    measure = FakeMeasure()
    measured = Measured(spec=spec, iterations=1, samples=samples)
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    usage_metrics(measure, measured)  # type: ignore[arg-type]
    return measure


COMMON: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": 4, "strategy": "ddp", "epoch_images": 80}
RUN = RunSpec(**COMMON, input="device", test_images=8, epochs=3, rate=0.1)


# --- metrics


def test_means_and_peaks_are_over_gpus() -> None:
    found = metrics_of(RUN, USAGE, None).metrics
    assert found["gpu_utilization_mean"] == {"A1": pytest.approx(0.68)}
    assert found["gpu_utilization_peak"] == {"A1": 1.0}
    assert found["power_watts_mean"] == {"A1": pytest.approx(456.25)}
    assert found["temperature_celsius_mean"] == {"A1": 55}  # the other GPU has no sensor
    for name in found:
        assert find(name).better is None


@pytest.mark.parametrize(
    ("spec", "steps", "epochs"),
    [
        (TrainingSpec(**COMMON), 1, 0.1),
        (EpochSpec(**COMMON), 10, 1),
        (RUN, 30, 3),
    ],
    ids=["step", "epoch", "training"],
)
def test_energy_is_that_of_all_gpus(spec: TrainingSpec, steps: int, epochs: float) -> None:
    found = metrics_of(spec, USAGE).metrics
    assert found["joules_per_step"] == {"A1": pytest.approx(1800 / steps)}
    assert found["joules_per_epoch"] == {"A1": pytest.approx(1800 / epochs)}
    assert found["images_per_joule"] == {"A1": pytest.approx(8 * steps / 1800)}


# --- reports of a stored run


@pytest.mark.parametrize(("of_gpus", "panels", "lines"), [(True, 4, 3), (False, 2, 1)], ids=["gpu", "cpu"])
def test_picture_has_a_panel_for_each_unit(of_gpus: bool, panels: int, lines: int) -> None:
    """lines: of the first panel, of GPUs and of CPU cores."""
    series = {
        name: rows for name, rows in USAGE.series.items() if of_gpus or name.startswith(("cpu", "rank"))
    }
    document: dict[str, Any] = json.loads(CPU.read_text())
    for test in document["benchmarks"]:
        for sample in test["extra_info"]["ddpperf"]["samples"]:
            sample["usage"] = json.loads(json.dumps(asdict(replace(USAGE, series=series))))
    pictures = [picture for picture in pictures_of(document) if picture.name.startswith("utilization-")]
    trainings = [case for case in cases_of(document) if isinstance(case.measured.spec, RunSpec)]
    assert len(pictures) == len(trainings) > 0
    for picture, case in zip(pictures, trainings, strict=True):
        assert case.test.partition("::")[2] in picture.description
        axes = picture.figure.axes
        assert (len(axes), len(axes[0].lines)) == (panels, lines)

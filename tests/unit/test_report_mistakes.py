"""The tables of docs/reports.md, recomputed from the raw samples of the stored runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from ddpperf.results.stored_runs import read_document
from tests.project import REPOSITORY
from tools import plain_timing, report_mistakes
from tools.plain_timing import PARTS, WAYS, measure

FOUR = "docs/runs/h200x4-suite.json.gz"
CALLS = "docs/runs/h200x4-own_ddp.json.gz"


def stored(run: str, name: str) -> dict[str, Any]:
    """Return what a run stored of the test with this name."""
    tests = read_document(REPOSITORY / run)["benchmarks"]
    (found,) = (test["extra_info"]["ddpperf"] for test in tests if test["name"] == name)
    return dict(found)


def step(found: dict[str, Any]) -> float:
    """Return the median over rounds of the slowest rank's seconds of a step."""
    rounds = [max(ranks[: found["spec"]["world_size"]]) for ranks in found["samples"][0]["seconds"]]
    return float(median(rounds)) / int(found["iterations"])


def alone(found: dict[str, Any], N: int) -> float:
    """Return t(1): the largest of the medians of the devices."""
    reference = found["references"]["one_device"]
    rounds = reference["samples"][0]["seconds"]
    slowest = max(median(ranks[device] for ranks in rounds) for device in range(N))
    return float(slowest) / int(reference["iterations"])


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]


def numbers(cells: list[str]) -> Iterator[float]:
    for cell in cells:
        yield float(cell.partition(" ")[0].rstrip("x%").replace(",", ""))


@pytest.mark.parametrize(("N", "place"), [(2, 2), (4, 3)])
def test_speedups_are_those_of_the_samples(N: int, place: int) -> None:
    weak = stored(FOUR, f"test_weak_scaling[{N}gpu-b128]")
    strong = stored(FOUR, f"test_strong_scaling[{N}gpu-b{128 // N}]")
    epochs = (50_000 // 128 * alone(weak, N)) / (50_000 // N // 128 * step(weak))
    ratio = alone(weak, N) / step(weak)
    due = [N * ratio, ratio, epochs, N * epochs, alone(strong, N) / step(strong), epochs]
    shown = list(numbers([row[place] for row in rows(report_mistakes.speedups_table(FOUR))]))
    assert shown == pytest.approx(due, abs=0.006)


def test_errors_of_speedups_are_ratios_of_the_table() -> None:
    last = [row[3:] for row in rows(report_mistakes.speedups_table(FOUR))]
    values = list(numbers([value for value, _ in last]))
    assert float(last[3][1].split()[1]) == pytest.approx(values[3] / values[0], abs=0.02)
    assert float(last[5][1].split()[1]) == pytest.approx(values[5] / values[4], abs=0.02)


def test_amdahl_predicts_too_little_from_weak_scaling() -> None:
    strong, weak, wrong = rows(report_mistakes.laws_table(CALLS))
    for row, name, is_amdahl in (
        (strong, "test_amdahl[4gpu-b32]", True),
        (weak, "test_gustafson[4gpu-b128]", False),
        (wrong, "test_gustafson[4gpu-b128]", True),
    ):
        metrics = stored(CALLS, name)["metrics"]
        speedups = {N: metrics[f"speedup_of_{N}"]["value"] for N in (2, 4)}
        x = {N: (S if is_amdahl else 1) * (1 - 1 / N) for N, S in speedups.items()}
        fraction = sum(x[N] * (1 - speedups[N] / N) for N in x) / sum(value**2 for value in x.values())
        assert next(numbers([row[3]])) == pytest.approx(100 * fraction, abs=0.06)
    assert next(numbers([wrong[4]])) < next(numbers([weak[4]])) / 2


def test_lead_of_ddp_depends_on_the_images_per_gpu() -> None:
    for row in rows(report_mistakes.data_parallel_table(CALLS)):
        N = int(row[0])
        ddp = stored(CALLS, f"test_weak_scaling[{N}gpu-b128-eager]")
        split, whole = (
            stored(CALLS, f"{test}-eager-data_parallel]")
            for test in (f"test_strong_scaling[{N}gpu-b{128 // N}", f"test_weak_scaling[{N}gpu-b128")
        )
        same_argument, same_images = numbers(row[6:])
        assert same_images == pytest.approx(step(whole) / step(ddp), rel=2e-3)
        assert same_argument == pytest.approx(N * step(split) / step(ddp), rel=1e-2)


def test_plain_loop_is_timed_in_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_mistakes, "BATCH", 2)
    found = measure("cpu", "resnet10_cifar", batch_sizes=(2,), steps=1, images=2, workers=0)
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    clocks = rows(report_mistakes.clocks_table(str(tmp_path / "cpu.json")))
    assert [row[0] for row in clocks] == list(WAYS)
    for way, row in zip(WAYS, clocks, strict=True):
        assert all(found["steps"][0][way][part] > 0 for part in PARTS)
        assert row[-1] == f"{found['steps'][0][way]['step'] / found['steps'][0][WAYS[-1]]['step'] - 1:+.0%}"


@pytest.mark.parametrize(
    ("way", "waits"), [("never", 0), ("loss.item()", 0), ("each part", 3 * 2), ("at both ends", 0)]
)
def test_loop_waits_for_the_device_as_named(way: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Linear(2, 2)
    counted: list[str] = []
    monkeypatch.setattr(plain_timing, "wait", counted.append)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    parts = plain_timing.loop(network, optimizer, torch.ones(1, 2), torch.zeros(1, dtype=torch.long), 2, way)
    assert len(counted) == waits
    assert list(parts) == list(PARTS)

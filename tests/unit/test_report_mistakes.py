"""The tables of docs/reports.md, recomputed from the raw samples of the stored runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from ddpperf.results import units
from tests.project import REPOSITORY
from tools import plain_timing, report_mistakes
from tools.plain_timing import PARTS, WAYS, measure

FOUR = "perf/baselines/h200x4/0005_forms.json"
TWO = "perf/baselines/h200x2/0001_where.json"
LARGE_BATCH = "perf/baselines/h200x2/0002_large_batch.json"
CALLS = "docs/own_ddp/h200x4.json"


def stored(run: str, name: str) -> dict[str, Any]:
    """Return what a run stored of the test with this name."""
    tests = json.loads((REPOSITORY / run).read_text())["benchmarks"]
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


def test_epochs_leave_out_the_incomplete_batches() -> None:
    for row in rows(report_mistakes.epoch_ends_table(FOUR)):
        N, batch, steps, trained, left_out, on_one, error = numbers(row)
        assert steps == 50_000 // N // batch
        assert (trained, left_out) == (N * batch * steps, 50_000 - N * batch * steps)
        assert on_one == 50_000 // batch * batch
        assert error == pytest.approx(100 * (on_one / trained - 1), abs=0.006)


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


def test_bandwidths_divide_the_same_bytes() -> None:
    for row, name in zip(
        rows(report_mistakes.bandwidths_table(TWO)),
        ("2gpu-b128", "2gpu-b128-eager", "2gpu-b512", "2gpu-b512-eager"),
        strict=True,
    ):
        found = stored(TWO, f"test_comm_split[{name}]")
        S = found["samples"][0]["counters"]["gradient_bytes"][0]  # on two ranks, 2 (N-1) S / N is S
        steps = 25_000 // found["spec"]["per_rank_batch_size"]
        _, by_difference, of_epoch, of_step = numbers(row[2:])
        assert of_epoch == pytest.approx(S / step(found) / 1e9, rel=2e-3)
        assert of_step == pytest.approx(S / (steps * step(found)) / 1e6, rel=2e-3)
        apart = found["metrics"]["step_minus_one_device_seconds"]["value"]
        assert by_difference == pytest.approx(S / apart / 1e9, rel=2e-3)


def test_formulas_divide_volumes_by_the_measured_time() -> None:
    for row in rows(report_mistakes.formulas_table(CALLS)):
        N = int(row[0])
        algbw = 2**30 / step(stored(CALLS, f"test_all_reduce[{N}gpu-1GiB]")) / 1e9
        due = [algbw, 2 * (N - 1) / N * algbw, {2: 1, 4: 2}[N] * algbw, 2 * (N - 1) * algbw]
        assert list(numbers(row[3:])) == pytest.approx(due, rel=1e-3)


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


def test_single_seeds_lie_around_the_mean() -> None:
    table = rows(report_mistakes.accuracies_table(LARGE_BATCH))
    assert len(table) == 14
    for row in table:
        trained, tested, apart = numbers(row[2:5])
        low, high = numbers(row[5].split(" to "))
        assert low <= tested <= high
        assert apart == pytest.approx(trained - tested, abs=0.15)


def test_plain_loop_is_timed_in_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure("cpu", "resnet10_cifar", batch_sizes=(2,), steps=1, images=128, workers=0)
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    monkeypatch.setattr(report_mistakes, "ROOT", tmp_path)
    clocks = rows(report_mistakes.clocks_table("."))
    assert [row[2] for row in clocks] == list(WAYS)
    for way, row in zip(WAYS, clocks, strict=True):
        assert all(found["steps"][0][way][part] > 0 for part in PARTS)
        assert row[-1] == f"{found['steps'][0][way]['step'] / found['steps'][0][WAYS[-1]]['step'] - 1:+.0%}"
    ((_, first, usual, mean, _),) = rows(report_mistakes.first_epochs_table("."))
    seconds = found["epochs"]["seconds"]
    assert len(seconds) == 5
    assert [first, usual, mean] == [
        units.seconds(value) for value in (seconds[0], median(seconds[1:]), sum(seconds) / 5)
    ]


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

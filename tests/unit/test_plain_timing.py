"""A plain training loop, timed in the ways that reports time it; test_docs compares the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import plain_timing, report_mistakes
from tools.plain_timing import PARTS, WAYS, measure


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]


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

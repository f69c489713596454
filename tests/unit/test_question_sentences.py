"""The sentences below a report's tables, checked with the cells above them or with stored samples."""

from __future__ import annotations

import re

import pytest

from tests.stored_samples import cells, measured, sections

CPU, CPU_REPORT = "perf/baselines/cpu2-epyc-25-17-1/0014_core.json", "docs/runs/cpu2-report.json.gz"
TWO = "perf/baselines/h100-80gb-hbm3x2/0005_core.json"
LARGEST, LAWS = "docs/runs/h200x1-questions.json.gz", "docs/runs/h100x4-laws.json.gz"


def text(name: str, title: str) -> str:
    return " ".join(sections(name)[title].split())


def amount(cell: str) -> float:
    """Return the first number of a cell, in seconds, bytes or parts of one."""
    digits, unit = re.findall(r"([-+]?[\d,.]+) ?([mu]?s|[GM]B|%)?", cell)[0]
    scales = {"ms": 1e-3, "us": 1e-6, "GB": 1e9, "MB": 1e6, "%": 0.01}
    return float(digits.replace(",", "")) * scales.get(unit, 1)


def test_largest_batch() -> None:
    """Only the first size has samples in the run, so others are compared with the printed step."""
    title = "Q1: largest batch size"
    rows: dict[str, dict[str, float]] = {}
    for cell in cells(LARGEST, title):
        if cell.shown != "does not fit":
            rows.setdefault(cell.labels["batch"], {})[cell.heading] = amount(cell.shown)
    assert [*rows] == ["32", "128", "512", "2,048", "8,192", "32,768", "57,344"]
    for batch, row in rows.items():
        assert row["throughput"] == pytest.approx(amount(batch) / row["step"], rel=6e-4)
        if "epoch" in row:
            assert row["epoch"] == pytest.approx(50_000 / row["throughput"], rel=6e-4)
        assert ("epoch" in row) is (amount(batch) <= 50_000)
    (first,) = measured(LARGEST, "largest_batch")
    assert rows["32"]["peak memory"] == pytest.approx(first.most("peak_memory_bytes"), rel=5e-4)


@pytest.mark.parametrize("name", [CPU, TWO])
def test_messages(name: str) -> None:
    (ddp,) = (m for m in measured(name, "messages") if m.properties()["strategy"] == "ddp")
    kinds = ("gradients", "buffers", "parameters", "metrics", "control", "model", "other")
    sent = {kind: ddp.most(f"{kind}: bytes") or 0 for kind in kinds}
    others = 1 - sent["gradients"] / sum(sent.values())
    assert f"{others:.2%} of the bytes are not gradients." in text(
        name, "Q6 and Q7: messages besides gradients"
    )


def test_buffers() -> None:
    steps = {
        cell.labels["strategy"]: cell.shown for cell in cells(TWO, "Q7: strategies") if cell.heading == "step"
    }
    without, ddp = steps["ddp+no_buffer_sync"], steps["ddp"]
    said = text(TWO, "Q7: strategies")
    assert f"ddp+no_buffer_sync, a step that sends nothing else takes {without}." in said
    change = float(re.findall(r"If it also sends .* it takes (.*?) \((.*?)%\)", said)[0][1]) / 100
    assert f"BatchNorm, it takes {ddp} (" in said
    assert change == pytest.approx(amount(ddp) / amount(without) - 1, abs=6e-4)


@pytest.mark.parametrize("name", [CPU_REPORT, LAWS])
def test_laws_that_predict_nothing(name: str) -> None:
    """A fraction that is not from 0 to 1 is explained, and no speedup is predicted from it."""
    title, fractions = "Laws of scaling", re.compile(r"a serial fraction of ([-\d.]+%)")
    predicting = {cell.caption for cell in cells(name, title) if cell.heading == "predicted speedup"}
    explained = set(re.findall(r"a serial fraction of ([-\d.]+%) means", text(name, title)))
    for caption in {cell.caption for cell in cells(name, title)}:
        (fraction,) = (found[1] for word in caption if (found := fractions.match(word)))
        assert (caption in predicting) is (0 <= amount(fraction) <= 1) is (fraction not in explained)

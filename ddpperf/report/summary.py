"""A run as one table, then the verdict with its reasons: printed at the end of a run, or later from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ddpperf.analysis.compare import Comparison
from ddpperf.analysis.statistics import FEWEST_ROUNDS, relative_iqr
from ddpperf.results import Measured

_METRIC_FORMATS = {
    "speedup": lambda value: f"speedup {value:.2f}x",
    "efficiency": lambda value: f"efficiency {value:.1%}",
    "images_per_second": lambda value: f"{value:,.0f} images/s",
    "loss_after_5_steps": lambda value: f"loss {value:.3f} after 5 steps",
    "algbw_bytes_per_second": lambda value: f"algbw {value / 1e9:.3g} GB/s",
    "busbw_bytes_per_second": lambda value: f"busbw {value / 1e9:.3g} GB/s",
}


DOUBTFUL_IQR = 0.25


def summary_lines(document: Mapping[str, Any], comparison: Comparison | None = None) -> list[str]:
    """The table and the verdict of a stored run, as lines without markup."""
    header = document["ddpperf"]
    stored = {benchmark["fullname"]: benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]}
    changes = comparison.changes if comparison is not None else {}
    rows = [("test", "step", "IQR", "ratio", "limit", "outcome", "metrics")]
    for test, outcome in header["outcomes"].items():
        compared = (f"{changes[test].ratio:.3f}", f"{changes[test].limit:g}") if test in changes else ("-", "-")
        metrics = stored[test]["metrics"] if test in stored else {}
        rows.append((_short(test), *_step(stored.get(test)), *compared, outcome["outcome"], _metrics(metrics)))
    lines = [_title(header, stored), "", *_aligned(rows), ""]
    if comparison is not None:
        lines.append(f"ratio: step time over that in {comparison.baseline}; above its limit it is slower")
    lines += _doubts(stored)
    status = header["verdict"]["status"]
    first, *others = header["verdict"]["reasons"]
    return [*lines, f"{status}: {first}", *(f"{' ' * len(status)}  {reason}" for reason in others)]


def _title(header: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    environment = header["environment"]
    sets = max((len(each["samples"]) for each in stored.values()), default=0)
    parts = [
        f"ddpperf on {header['hardware_key']}",
        f"torch {environment['torch']}" if "torch" in environment else "",
        " ".join(str(part) for part in (environment.get("backend"), environment.get("nccl")) if part),
        "NVLS off" if environment.get("nvls") == "0" else "",
        f"commit {environment['commit']}" if environment["commit"] != "nogit" else "",
        _count(header["options"]["rounds"], "round"),
        _count(sets, "process set"),
    ]
    return ", ".join(part for part in parts if part)


def _doubts(stored: Mapping[str, Any]) -> list[str]:
    """What makes figures doubtful, a line for each reason."""
    doubts = {f"{_short(test)}: {note}" for test, each in stored.items() for note in each["notes"]}
    spreads = [Measured.from_json(each).all_step_seconds() for each in stored.values()]
    wide = sum(len(seconds) >= FEWEST_ROUNDS and relative_iqr(seconds) > DOUBTFUL_IQR for seconds in spreads)
    if wide:
        doubts.add(f"doubtful: the rounds of {_count(wide, 'test')} spread by more than {DOUBTFUL_IQR:.0%} (IQR)")
    return sorted(doubts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _short(test: str) -> str:
    return test.split("::", 1)[-1]


def _step(stored: dict[str, Any] | None) -> tuple[str, str]:
    if stored is None:
        return "-", "-"
    seconds = Measured.from_json(stored).all_step_seconds()
    return format_seconds(median(seconds)), f"{relative_iqr(seconds):.1%}" if len(seconds) >= FEWEST_ROUNDS else "-"


def _metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        _METRIC_FORMATS[name](metric["value"]) if name in _METRIC_FORMATS else f"{name} {metric['value']:.4g} {metric['unit']}"
        for name, metric in metrics.items()
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell: words to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    figures = (1, 2, 3, 4)
    return [
        "  ".join(
            cell.rjust(width) if column in figures else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_seconds(seconds: float) -> str:
    """Four significant digits in the unit that suits: 1.234 s, 132.1 ms, 45.60 us."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, scale = next((each for each in units if seconds >= each[1]), units[-1])
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:#.4g} {unit}".replace(". ", " ")

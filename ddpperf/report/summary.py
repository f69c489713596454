"""A run as one table, then the verdict with its reasons: printed at the end of a run, or later from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.analysis.compare import Comparison
from ddpperf.analysis.statistics import median, relative_iqr
from ddpperf.results import Measured

_METRIC_FORMATS = {
    "speedup": lambda value: f"speedup {value:.2f}x",
    "efficiency": lambda value: f"efficiency {value:.1%}",
    "images_per_second": lambda value: f"{value:,.0f} images/s",
    "algbw_bytes_per_second": lambda value: f"algbw {value / 1e9:.3g} GB/s",
    "busbw_bytes_per_second": lambda value: f"busbw {value / 1e9:.3g} GB/s",
}


def summary_lines(document: Mapping[str, Any], comparison: Comparison | None = None) -> list[str]:
    """The table and the verdict of a stored run, as lines without markup."""
    header = document["ddpperf"]
    stored = {benchmark["fullname"]: benchmark["extra_info"]["ddpperf"] for benchmark in document["benchmarks"]}
    changes = comparison.changes if comparison is not None else {}
    rows = [("test", "step", "IQR", "ratio", "outcome", "metrics")]
    for test, outcome in header["outcomes"].items():
        ratio = f"{changes[test].ratio:.3f}" if test in changes else "-"
        metrics = stored[test]["metrics"] if test in stored else {}
        rows.append((_short(test), *_step(stored.get(test)), ratio, outcome["outcome"], _metrics(metrics)))
    lines = [_title(header), "", *_aligned(rows), ""]
    if comparison is not None:
        lines.append(
            f"ratio: step time over that in {comparison.baseline}; above 1 is slower, the limit is {comparison.limit:g}"
        )
    lines += sorted({f"{_short(test)}: {note}" for test, each in stored.items() for note in each["notes"]})
    status = header["verdict"]["status"]
    first, *others = header["verdict"]["reasons"]
    return [*lines, f"{status}: {first}", *(f"{' ' * len(status)}  {reason}" for reason in others)]


def _title(header: Mapping[str, Any]) -> str:
    environment = header["environment"]
    using = [f"torch {environment['torch']}", environment["backend"]] if "torch" in environment else []
    return ", ".join([f"ddpperf on {header['hardware_key']}", *using, f"{header['options']['rounds']} rounds, 1 process set"])


def _short(test: str) -> str:
    return test.split("::", 1)[-1]


def _step(stored: dict[str, Any] | None) -> tuple[str, str]:
    if stored is None:
        return "-", "-"
    seconds = Measured.from_json(stored).all_step_seconds()
    return format_seconds(median(seconds)), f"{relative_iqr(seconds):.1%}"


def _metrics(metrics: Mapping[str, Any]) -> str:
    return ", ".join(_METRIC_FORMATS[name](metric["value"]) for name, metric in metrics.items() if name in _METRIC_FORMATS)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell: words to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    figures = (1, 2, 3)
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

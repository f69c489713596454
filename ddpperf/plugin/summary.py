"""What the user reads at the end: one table, the verdict with its reasons, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.analysis.statistics import median, relative_iqr
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.session import Session

_METRIC_FORMATS = {
    "speedup": lambda value: f"speedup {value:.2f}x",
    "efficiency": lambda value: f"efficiency {value:.1%}",
    "images_per_second": lambda value: f"{value:,.0f} images/s",
    "algbw_bytes_per_second": lambda value: f"algbw {value / 1e9:.3g} GB/s",
    "busbw_bytes_per_second": lambda value: f"busbw {value / 1e9:.3g} GB/s",
}


def summary_lines(session: Session) -> list[str]:
    """The table and the verdict, as lines without markup."""
    comparison, verdict = session.decide()
    changes = comparison.changes if comparison is not None else {}
    rows = [("test", "step", "IQR", "ratio", "outcome", "metrics")]
    for test in session.collected:
        outcome = session.outcomes[test].outcome if test in session.outcomes else "not run"
        measure = session.measures.get(test)
        ratio = f"{changes[test].ratio:.3f}" if test in changes else "-"
        rows.append((_short(test), *_step(measure), ratio, outcome, _metrics(measure)))
    lines = [_title(session), "", *_aligned(rows), ""]
    if comparison is not None:
        lines.append(
            f"ratio: step time over that in {comparison.baseline}; above 1 is slower, the limit is {comparison.limit:g}"
        )
    lines += _notes(session)
    first, *others = verdict.reasons
    lines.append(f"{verdict.status}: {first}")
    lines += [f"{' ' * len(verdict.status)}  {reason}" for reason in others]
    return lines


def _title(session: Session) -> str:
    environment = session.environment
    using = [f"torch {environment['torch']}", str(environment["backend"])] if "torch" in environment else []
    return ", ".join([f"ddpperf on {session.storage.hardware_key}", *using, f"{session.options.rounds} rounds, 1 process set"])


def _short(test: str) -> str:
    return test.split("::", 1)[-1]


def _step(measure: Measure | None) -> tuple[str, str]:
    if measure is None or measure.measured is None:
        return "-", "-"
    seconds = measure.measured.all_step_seconds()
    return format_seconds(median(seconds)), f"{relative_iqr(seconds):.1%}"


def _metrics(measure: Measure | None) -> str:
    metrics = measure.metrics if measure is not None else {}
    return ", ".join(_METRIC_FORMATS[name](metric["value"]) for name, metric in metrics.items() if name in _METRIC_FORMATS)


def _notes(session: Session) -> list[str]:
    notes = {
        note
        for measure in session.measures.values()
        if measure.measured is not None
        for note in session.notes(measure.measured.spec)
    }
    return sorted(notes)


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
    digits = max(0, 3 - len(str(int(value))) + 1)
    return f"{value:.{digits}f} {unit}"

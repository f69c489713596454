"""How figures are written: a unit that suits, names that the field uses, columns as wide as they need to be."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

METRIC_FORMATS = {
    "speedup": lambda value: f"speedup {value:.2f}x",
    "efficiency": lambda value: f"efficiency {value:.1%}",
    "speedup_over_eager": lambda value: f"{value:.2f}x eager",
    "speedup_over_ddp": lambda value: f"{value:.2f}x plain DDP",
    "images_per_second": lambda value: f"{value:,.0f} images/s",
    "cpu_seconds": lambda value: f"CPU {format_seconds(value)}",
    "launch_bound": lambda value: f"launch bound {value:.2f}x",
    "communicator_seconds": lambda value: f"communicator {value:.2f} s",
    "compile_seconds": lambda value: f"compilation {value:.1f} s",
    "capture_seconds": lambda value: f"capture {value:.2f} s",
    "step_seconds": lambda value: f"step {format_seconds(value)}",
    "epoch_seconds": lambda value: f"epoch {format_seconds(value)}",
    "loss_after_5_steps": lambda value: f"loss {value:.3f} after 5 steps",
    "communicated_bytes_per_epoch": lambda value: f"gradients {value / 1e9:.3g} GB/epoch",
    "peak_memory_bytes": lambda value: f"peak {value / 1e9:.3g} GB",
    "algbw_bytes_per_second": lambda value: f"algbw {value / 1e9:.3g} GB/s",
    "busbw_bytes_per_second": lambda value: f"busbw {value / 1e9:.3g} GB/s",
    "loading_share": lambda value: f"loading {value:.1%}",
    "enough_workers": lambda value: f"loading stops limiting at {count(round(value), 'worker')}",
    "missing_images": lambda value: f"{count(round(value), 'image')} missing",
    "repeated_images": lambda value: f"{value:.0f} repeated",
    "repeated_places": lambda value: f"{value:.1%} in the same place next epoch",
}


def count(number: int, what: str) -> str:
    """1 set, 2 sets."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def short(test: str) -> str:
    """A test's id without its file."""
    return test.split("::", 1)[-1]


def format_metric(name: str, value: float, unit: str = "") -> str:
    """A metric's value with its name, or what it is usually called."""
    if name in METRIC_FORMATS:
        return METRIC_FORMATS[name](value)
    if match := re.fullmatch(r"loading_share_with_(\d+)_workers", name):
        return f"loading {value:.1%} with {count(int(match[1]), 'worker')}"
    return f"{name} {value:.4g} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], figures: Collection[int]) -> list[str]:
    """Columns as wide as their widest cell: words to the left, the columns of `figures` to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
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

"""Formatting of numbers as text, each in the unit that suits its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

SCALES = {
    "s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)),
    "B": (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0)),
    "J": (("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)),
    "B/s": (("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3), ("B/s", 1.0)),
}


def _scale(unit: str, value: float) -> tuple[str, float]:
    """Return the name and the size of the unit that suits a value in SI units."""
    return next((found for found in SCALES[unit] if abs(value) >= found[1]), SCALES[unit][-1])


def seconds(value: float) -> str:
    """Format seconds with four significant digits: 1.234 s, 132.1 ms, 45.60 us."""
    unit, scale = _scale("s", value)
    scaled = value / scale
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 1000 else f"{scaled:#.4g} {unit}".replace(". ", " ")


def _scaled(unit: str, value: float) -> str:
    name, scale = _scale(unit, value)
    return f"{value / scale:.4g} {name}"


nbytes = partial(_scaled, "B")  # by powers of ten, as nccl-tests counts: 46.76 MB, 38.56 KB, 4 B
bandwidth = partial(_scaled, "B/s")  # 354.1 GB/s
joules = partial(_scaled, "J")  # 1.234 kJ, 45.6 J, 7.89 mJ


def money(value: float) -> str:
    """Format an amount of money without its currency, with three digits or more: 1,234.50, 0.00731."""
    if abs(value) >= 1 or value == 0:
        return f"{value:,.2f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def hertz(value: float) -> str:
    """Format a clock: 1,980 MHz."""
    return f"{value / 1e6:,.0f} MHz"


percent = "{:.1%}".format  # 95.0%
change = "{:+.1%}".format  # +1.2%
factor = "{:.2f}x".format  # 1.95x
whole = "{:,.0f}".format  # 12,346
decimal = "{:.3f}".format  # 2.303
watts = "{:.0f} W".format  # 612 W
celsius = "{:.0f} C".format  # 58 C
images_per_joule = "{:.3g} images/J".format  # 45.6 images/J
rate = "{:,.0f} images/s".format  # 12,346 images/s


def points(fraction: float) -> str:
    """Format a difference of two fractions in percentage points: +1.2."""
    return f"{100 * fraction:+.1f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: 1 test, 2 tests."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def common_scale(unit: str, values: Iterable[float]) -> tuple[str, Callable[[float], str]] | None:
    """Return one unit for a whole column of values, and a function that formats a value in this unit.

    The unit suits the median value. Returns None for a unit that has no scales, such as "1".
    """
    if unit not in SCALES:
        return None
    name, scale = _scale(unit, median(map(abs, values)))

    def text(value: float) -> str:
        scaled = value / scale
        if abs(scaled) >= 1000 or name == "B":
            return f"{scaled:,.0f}"
        return f"{scaled:#.4g}".rstrip(".") if scaled else "0"

    return name, text

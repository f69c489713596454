"""The reasons of a slow-down as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.io.terminal_text import harmless
from ddpperf.results import units

MOST_ROWS = 3  # of a measurement
UNEXPLAINED = 0.25  # of a change: the heading then says so


def headings(why: Mapping[str, Any]) -> str:
    """Return how much longer a step takes, and how well its rows explain that."""
    step = why["step"]
    change = step["candidate"] - step["base"]
    text = f"a step takes {_signed(change)} of {units.seconds(step['base'])} on rank {why['rank']}"
    text += f" ({units.counted(why['sets'], 'process set')} a side)"
    left = why["unexplained"]
    if abs(left) > max(UNEXPLAINED * abs(change), step["half"]):
        text += f"; the rows do not explain {_signed(left)}"
    return text


def rows_of(why: Mapping[str, Any], most: int = MOST_ROWS) -> list[str]:
    """Return the first rows of a reason; what was sent is the second one if it changed."""
    rows = [row_text(row) for row in why["rows"]]
    if why["messages"]:
        rows.insert(1, f"sends other messages in a step: {_messages(why['messages'])}")
    if why["function"]:
        place = next((n for n, row in enumerate(why["rows"]) if row["path"][0].startswith("CPU time")), 0)
        rows[place] += f", most in {why['function']}"
    return rows[:most]


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row with its change and, if they changed, its calls or kernels."""
    calls = [f"{count:g}" for count in row["calls"]]
    counts = f", {calls[0]} -> {calls[1]} calls" if calls[0] != calls[1] else ""
    if row["calls"][0] == 0 < row["calls"][1]:
        counts = f", new: {calls[1]} calls"
    change = row["candidate"] - row["base"]
    sure = "" if row["clear"] else ", not clear"
    return f"{name(row['path'])}: {_signed(change)} (± {units.seconds(row['half'])}{sure}){counts}"


def name(path: Sequence[str]) -> str:
    """Return a row's path in words, such as "aten::mul in forward"."""
    kind, *rest = path
    if kind == "kernels":
        return rest[-1] if len(rest) > 1 and rest[0] in rest[-1] else ": ".join(rest)
    if kind == "operators":
        return f"{rest[1]} in {rest[0]}" if rest[0] else rest[1]
    if kind == "idle":
        where = f" in {rest[1]}" if len(rest) > 1 and rest[1] else ""
        return f"the GPU is idle: {rest[0]}{where}"
    if kind.startswith("CPU time"):
        return f"{kind} in {rest[0]}" if rest and rest[0] else kind
    return ": ".join([kind, *filter(None, rest)])


def why_lines(header: Mapping[str, Any]) -> list[str]:
    """Return sentences on why measurements got slower: rows of the first one, one row of each other."""
    lines: list[str] = []
    for number, why in enumerate(header.get("judged", {}).get("why", ())):
        test = why["tests"][0].rpartition("::")[2]
        if why.get("problem"):
            lines.append(harmless(f"{test}: not shown, because {why['problem']}"))
            continue
        rows = rows_of(why, 1 if number else MOST_ROWS)
        lines.append(harmless(f"{test}: {headings(why)}" if not number else f"{test}: {rows[0]}"))
        if not number:
            lines += [f"  {harmless(row)}" for row in rows]
    return lines


def _messages(messages: Mapping[str, Sequence[Sequence[int]]]) -> str:
    return "; ".join(
        f"{kind} {before[0]} -> {now[0]} messages, {units.nbytes(before[1])} -> {units.nbytes(now[1])}"
        for kind, (before, now) in messages.items()
    )


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{units.seconds(abs(seconds))}"

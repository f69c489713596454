"""The reasons of a slow-down as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.io.terminal_text import harmless
from ddpperf.results import units

MOST_ROWS, LEAST_ROWS = 3, 2  # of a measurement, of which at least so many are shown even if unclear
MOST_GONE = 2  # named of what only the base's steps have
EVENTS = {"kernels": "kernels", "copies": "copies", "memory pages": "page faults"}  # else calls
UNEXPLAINED = 0.25  # of a change: the heading then says so


def headings(why: Mapping[str, Any]) -> str:
    """Return how much longer a step takes, and how well its rows explain that."""
    step = why["step"]
    change = step["candidate"] - step["base"]
    where = f"on rank {why['rank']} of {units.counted(why['sets'], 'process set')} a side"
    base = units.seconds(step["base"])
    if change <= 0:
        return (
            f"steps of {base} were not slower now ({_signed(change)}, {where}), so noise may hide the reason"
        )
    half = f"± {units.seconds(step['half'])}{'' if change > step['half'] else ', not clear'}"
    text = f"a step of {base} takes {units.seconds(change)} longer ({half}), {where}"
    left = why["unexplained"]
    if abs(left) > max(UNEXPLAINED * abs(change), step["half"]):
        text += f"; the rows do not explain {_signed(left)}"
    return text


def rows_of(why: Mapping[str, Any], most: int = MOST_ROWS) -> list[str]:
    """Return the first rows of a reason; what was sent is the second one if it changed."""
    shown = [row for row in why["rows"] if row["clear"]]
    shown += [row for row in why["rows"] if not row["clear"]][: max(0, LEAST_ROWS - len(shown))]
    rows = [row_text(row) for row in shown]
    for place, row in enumerate(shown):
        if any("CPU time" in part for part in row["path"]):
            rows[place] += f", most in {why['function']}" if why["function"] else ""
            rows[place] += f"; its function is not known, because {lost}" if (lost := why.get("lost")) else ""
            break
    if why["messages"]:
        rows.insert(1, f"other messages in a step: {_messages(why['messages'])}")
    return rows[:most]


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row with its change and, if they changed, its calls or kernels."""
    calls = [_count(count) for count in row["calls"]]
    events = EVENTS.get(row["path"][0], "calls")
    counts = f", {calls[0]} -> {calls[1]} {events}" if calls[0] != calls[1] else ""
    if row["calls"][0] == 0 < row["calls"][1]:
        counts = f", new: {calls[1]} {events}"
    change = row["candidate"] - row["base"]
    sure = "" if row["clear"] else ", not clear"
    return f"{name(row['path'])}: {_signed(change)} (± {units.seconds(row['half'])}{sure}){counts}"


def name(path: Sequence[str]) -> str:
    """Return a row's path in words, such as "aten::mul in forward"."""
    kind, *rest = path
    if kind == "kernels":
        return ", mostly ".join([rest[0], *(one.removeprefix(rest[0]).strip() for one in rest[1:])])
    if kind == "operators":
        return f"{rest[1]} in {rest[0]}" if rest[0] else rest[1]
    if kind == "idle":
        where = f" in {rest[1]}" if len(rest) > 1 and rest[1] else ""
        return f"the GPU is idle: {rest[0]}{where}"
    if kind.startswith("CPU time"):
        return f"{kind} in {rest[0]}" if rest and rest[0] else kind
    return ": ".join([kind, *rest[-1:]])


def why_lines(header: Mapping[str, Any]) -> list[str]:
    """Return sentences on why measurements got slower: rows of the first one, one row of each other."""
    lines: list[str] = []
    found = sorted(header.get("judged", {}).get("why", ()), key=lambda why: bool(why.get("problem")))
    for number, why in enumerate(found):
        test = why["tests"][0].rpartition("::")[2]
        if why.get("problem"):
            lines.append(harmless(f"{test}: not shown, because {why['problem']}"))
            continue
        rows = rows_of(why, 1 if number else MOST_ROWS)
        lines.append(harmless(f"{test}: {headings(why)}" if not number else f"{test}: {rows[0]}"))
        if not number:
            lines += [f"  {harmless(row)}" for row in [*rows, _rest(why, len(rows) - bool(why["messages"]))]]
    return lines


def _rest(why: Mapping[str, Any], shown: int) -> str:
    """Return the change of the rows that are not shown, what no row explains, and what the base alone has."""
    others = sum(row["candidate"] - row["base"] for row in why["rows"][shown:])
    gone = [name(row["path"]) for row in why["rows"] if row["calls"][0] >= 1 and not row["calls"][1]]
    text = f"other rows: {_signed(others)}; not explained: {_signed(why['unexplained'])}"
    return text + f"; no longer there: {' and '.join(gone[:MOST_GONE])}" * bool(gone)


def tree(why: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all rows of a reason for a page: each kind with its sum, then its rows, the largest first.

    bar: the change as a fraction of the largest one.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(why["rows"], key=lambda row: -abs(row["candidate"] - row["base"])):
        kinds.setdefault(row["path"][0], []).append(row)
    sums = [_sum(kind, rows) for kind, rows in kinds.items()]
    largest = max((abs(one["candidate"] - one["base"]) for one in sums), default=0.0)
    shown = []
    for one, rows in zip(sums, kinds.values(), strict=True):
        for row in [one, *rows]:
            change = row["candidate"] - row["base"]
            shown.append(
                {
                    "name": name(row["path"]) if row is not one else row["path"][0],
                    "is_sum": row is one,
                    "values": [units.seconds(row[side]) for side in ("base", "candidate")],
                    "change": _signed(change),
                    "half": "" if row is one else f"± {units.seconds(row['half'])}",
                    "calls": " -> ".join(dict.fromkeys(map(_count, row["calls"]))),
                    "is_clear": "clear" if row.get("clear") else "",
                    "bar": min(1.0, abs(change) / largest) if largest else 0.0,
                }
            )
    return shown


def _sum(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sides = {side: sum(row[side] for row in rows) for side in ("base", "candidate")}
    return {"path": [kind], **sides, "calls": [sum(row["calls"][side] for row in rows) for side in (0, 1)]}


def _count(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def _messages(messages: Mapping[str, Sequence[Sequence[int]]]) -> str:
    return "; ".join(
        f"{kind} {before[0]} -> {now[0]} messages, {units.nbytes(before[1])} -> {units.nbytes(now[1])}"
        for kind, (before, now) in messages.items()
    )


def _signed(seconds: float) -> str:
    """Format a change; less than a nanosecond, which no clock shows, is 0."""
    if abs(seconds) < 1e-9:
        return "0"
    return f"{'-' if seconds < 0 else '+'}{units.seconds(abs(seconds))}"

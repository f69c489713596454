"""Explain a hang: what each rank does, which collective it waits in, and which ranks are late.

A rank prints its stacks and its collectives after the deadline of a command, and `seen_in` reads
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from ddpperf.io.terminal_text import printable

COLLECTIVES = "ddpperf collectives: "  # begins a rank's line of JSON, the last line of its report
STATE = "state: "
FREE_SPACE = "free space there, or name another folder by --worker-logs"
MOST_LINES = 8  # about ranks
MOST_LETTERS = 50  # of a collective's name
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/((site|dist)-packages|lib/python[\d.]+)/(?!(site|dist)-packages|ddpperf/)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of one rank while its process set hangs, as far as it is known.

    name: its number, with its node if a launcher has started it, such as "3 on node b". state: of its
    process, such as "stopped". collective, number: the collective that it waits in, and that
    collective's number in the process group; "" and None if it waits in none. place: the innermost
    line of code outside of libraries. has_answered: whether it printed stacks.
    """

    name: str
    state: str
    collective: str = ""
    number: int | None = None
    place: str = ""
    has_answered: bool = True

    @property
    def doing(self) -> str:
        """The rank's activity in words. Ranks that do the same share a line of the message."""
        if not self.has_answered:
            return f"{self.state}, and printed no stacks"
        waits = f"waits in {_named(self)}" if self.collective else "waits in no collective"
        return f"{self.state}, {waits}" + f", at {self.place}" * bool(self.place)


def _named(seen: Seen) -> str:
    return seen.collective if seen.number is None else f"{seen.collective} number {seen.number}"


def seen_in(name: str, report: str) -> Seen:
    """Read a rank's report: the state of its process, its stacks and its collectives."""
    state = found[1] if (found := re.match(f"{STATE}(.*)", report)) else "unknown"
    frames = _main_thread(report)
    if not frames:
        return Seen(name=name, state=state, has_answered=False)
    own = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
    pending = _pending(report)
    if pending is None:  # the rank's torch has no record, or the rank could not run the thread that reads it
        calls = [function for path, _, function in frames if path.endswith("distributed_c10d.py")]
        pending = {"name": calls[0], "number": None} if calls else {}
    number = pending.get("number")
    return Seen(
        name=name,
        state=state,
        collective=str(pending.get("name", ""))[:MOST_LETTERS],
        number=number if isinstance(number, int) else None,
        place=f"{'/'.join(PurePath(own[0]).parts[-2:])}:{own[1]} in {own[2]}",
    )


def _main_thread(report: str) -> list[tuple[str, str, str]]:
    """Return the frames of the main thread, which faulthandler prints last, innermost frame first."""
    stacks = report.rpartition("\nTimeout (")[2]  # what the rank printed before may look like stacks
    threads = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.MULTILINE)[1:]
    return [(path, line, name) for path, line, name in _FRAME.findall(threads[-1])] if threads else []


def _pending(report: str) -> Mapping[str, Any] | None:
    """Return the collective that a rank waits in, {} if none, or None if the rank did not report it."""
    line = next((line for line in report.splitlines()[::-1] if line.startswith(COLLECTIVES)), "")
    try:
        return dict(json.loads(line.removeprefix(COLLECTIVES))["pending"])
    except (ValueError, KeyError, TypeError):
        return None


def explained(ranks: Sequence[Seen]) -> list[str]:
    """Return at most ten lines on what the ranks do and which are late; similar ranks share a line."""
    doing: dict[str, list[Seen]] = {}
    for seen in ranks:
        doing.setdefault(seen.doing, []).append(seen)
    lines = [f"{_ranks(same)}: {what}" for what, same in doing.items()]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more groups of ranks"]
    return [*lines, _late(ranks)]


def _late(ranks: Sequence[Seen]) -> str:
    waiting = [seen for seen in ranks if seen.collective]
    if not waiting:
        return "no rank waits in a collective"
    furthest = max(waiting, key=lambda seen: seen.number or 0)
    late = [seen for seen in ranks if not seen.collective or (seen.number or 0) < (furthest.number or 0)]
    if late:
        others = [seen for seen in waiting if seen not in late]
        are, them = ("is", "it") if len(late) == 1 else ("are", "them")
        wait = "waits" if len(others) == 1 else "wait"
        return f"{_ranks(late)} {are} late: {_ranks(others)} {wait} for {them} in {_named(furthest)}"
    kinds = {seen.collective for seen in waiting}
    if len(kinds) > 1:
        return f"the ranks wait in different collectives: {', '.join(sorted(kinds))}"
    return f"no rank is late: all ranks wait in {_named(furthest)}; check the network and the devices"


def _ranks(ranks: Sequence[Seen]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(seen.name for seen in ranks)}"


def write_report(folder: Path, set_name: str, reports: Mapping[str, str]) -> str:
    """Write the reports of all ranks to a new file, and return a line that names it or says why not.

    reports: by the names of the ranks.
    """
    path = folder / f"hang-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{set_name}.txt"
    text = "\n\n".join(f"report of rank {name}:\n{report}" for name, report in reports.items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(printable(text))
    except OSError as error:
        return f"the stacks of all ranks cannot be written to {path} ({error.strerror}); {FREE_SPACE}"
    return f"the stacks of all ranks are in {path}"

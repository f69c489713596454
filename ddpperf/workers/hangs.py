"""Explain a hang: what each rank does, which collective it waits in, and which ranks are late.

A rank prints its stacks and the collective that it waits in after the deadline of a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath

from ddpperf.io.terminal_text import printable

COLLECTIVE = "ddpperf collective: "  # begins a rank's line of JSON, the last line of its report
STATE = "state: "
FREE_SPACE = "free space there, or name another folder by --worker-logs"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/((site|dist)-packages|lib/python[\d.]+)/(?!(site|dist)-packages|ddpperf/)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank does while its process set hangs.

    name: its number, with its node if a launcher has started it, such as "3 on node b". doing: in
    words. collective: the collective that it waits in and its number in the process group, such as
    "all_reduce number 7", or "". number: that number, or -1.
    """

    name: str
    doing: str
    collective: str = ""
    number: int = -1


def seen_in(name: str, report: str) -> Seen:
    """Read a rank's report: the state of its process, its stacks and its collectives."""
    state = report.partition("\n")[0].removeprefix(STATE)
    stacks = report.rpartition("\nTimeout (")[2]  # what the rank printed before may look like stacks
    *_, main_thread = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.MULTILINE)
    frames = _FRAME.findall(main_thread)  # the innermost one first
    if not frames:
        return Seen(name=name, doing=f"{state}, and printed no stacks")
    path, line, function = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
    place = f"{'/'.join(PurePath(path).parts[-2:])}:{line} in {function}"
    *_, recorded = ["", *(line for line in report.splitlines() if line.startswith(COLLECTIVE))]
    try:
        pending = json.loads(recorded.removeprefix(COLLECTIVE))
        number = int(pending["number"])
        collective = f"{pending['name']} number {number}"
    except (ValueError, KeyError, TypeError):  # it waits in none, or could not run the thread that prints it
        return Seen(name=name, doing=f"{state}, waits in no collective, at {place}")
    doing = f"{state}, waits in {collective}, at {place}"
    return Seen(name=name, doing=doing, collective=collective, number=number)


def explained(ranks: Sequence[Seen]) -> list[str]:
    """Return lines on what the ranks do, and one on which are late; ranks that do the same share a line."""
    doing: dict[str, list[Seen]] = {}
    for seen in ranks:
        doing.setdefault(seen.doing, []).append(seen)
    return [*(f"{_ranks(same)}: {what}" for what, same in doing.items()), _late(ranks)]


def _late(ranks: Sequence[Seen]) -> str:
    furthest = max(ranks, key=lambda seen: seen.number)
    if not furthest.collective:
        return "no rank waits in a collective"
    if late := [seen for seen in ranks if seen.number < furthest.number]:
        return f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} late for {furthest.collective}"
    if len(kinds := sorted({seen.collective for seen in ranks})) > 1:
        return f"the ranks wait in different collectives: {', '.join(kinds)}"
    return f"no rank is late: all ranks wait in {furthest.collective}; check the network and the devices"


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
        path.write_text(printable(text), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"the stacks of all ranks cannot be written to {path} ({error.strerror}); {FREE_SPACE}"
    return f"the stacks of all ranks are in {path}"

"""Failures of ranks: the likeliest cause, what a dead rank printed, and what the ranks of a hang do.

A rank prints its stacks and the collective that it waits in after the deadline of a command.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath

from ddpperf.io.terminal_text import harmless, printable, shortened

COLLECTIVE = "ddpperf collective: "  # begins a rank's line of JSON, the last line of its report
FREE_SPACE = "free space there, or name another folder by --worker-logs"
LOG_TAIL_LINES = 20  # of a dead rank, in its message
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/((site|dist)-packages|lib/python[\d.]+)/(?!(site|dist)-packages|ddpperf/)")


class Cause(enum.IntEnum):
    """Why a rank did not answer a command.

    The smallest value is the likeliest cause of other failures. A rank that dies breaks the
    collective calls of the other ranks. A rank that raises an exception leaves the other ranks
    waiting.
    """

    DIED = 1
    RAISED = 2
    RAISED_DISTRIBUTED = 3  # an error of torch.distributed, gloo or NCCL
    HUNG = 4


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The cause and the details of one rank's failure.

    rank: None for a whole script. what: the end of a sentence that begins with the rank. detail: the
    rank's traceback, log or stacks. where: " on node b" for a launched rank. limit: whether the rank may
    simply have needed too much memory or too large indices.
    """

    rank: int | None
    cause: Cause
    what: str
    detail: str = ""
    where: str = ""
    limit: bool = False


class SetFailure(Exception):
    """Raised if ranks of a process set fail; the message names the first cause and its rank.

    failures: as they were noticed: a launcher that kills the other ranks does so after the first death.
    sides: the names of the sides whose ranks raised errors at the same command. is_slow_start: whether the
    ranks only took too long to start.
    """

    def __init__(self, set_name: str, doing: str, failures: Sequence[RankFailure]) -> None:
        self.set_name = set_name
        self.failures = tuple(sorted(failures, key=lambda failure: failure.cause))
        first = self.failures[0]
        self.is_slow_start = doing == "at setup" and first.cause is Cause.HUNG
        raised = first.cause in (Cause.RAISED, Cause.RAISED_DISTRIBUTED)
        self.sides = frozenset(set_name[:1] if raised else "")
        count = len(self.failures) if first.cause is Cause.HUNG else 1  # all may wait for one of them
        ranks = ", ".join(f"{failure.rank}{failure.where}" for failure in self.failures[:count])
        who = "the script" if first.rank is None else f"rank{'s' * (count > 1)} {ranks}"
        lines = [f"{who} of set {set_name} {first.what} ({doing})"]
        lines += [failure.detail for failure in self.failures[:count]]
        others = self.failures[count:]
        lines += [f"after it, rank {failure.rank}{failure.where} {failure.what}" for failure in others]
        texts = (shortened(line.rstrip()) for line in lines if line.strip())
        super().__init__(harmless("\n".join(texts)))

    @property
    def reason(self) -> str:
        """What the first failed rank raised, on one line."""
        return self.failures[0].what.removeprefix("raised ").removeprefix("CannotTrain: ")


def explain_death(rank: int, printed: str, words: Sequence[str]) -> str:
    """Return the last lines that a dead rank has printed, and what its launcher said of its end."""
    lines = printed.splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([*([f"the end of rank {rank}'s output:"] if lines else []), *lines, *words])


# --- hangs


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state and the output of one rank in a hanging process set.

    rank: its number, with its node if a launcher has started it, such as "3 on node b". state: of its
    process, such as "sleeping". printed: what it has printed since its last command.
    """

    rank: str
    state: str
    printed: str


def explain_hang(reports: Sequence[Report], folder: Path, set_name: str) -> str:
    """Return lines on what the ranks do, which are late, and the file with all their stacks."""
    doing: dict[str, list[str]] = {}  # ranks that do the same share a line
    waiting: dict[str, tuple[int, str]] = {}
    for report in reports:
        waiting[report.rank] = number, name = _pending(report.printed)
        place = _place(report.printed)
        where = f"waits in {name} number {number}" if name else "waits in no collective"
        what = f"{where}, at {place}" if place else "and printed no stacks"
        doing.setdefault(f"{report.state}, {what}", []).append(report.rank)
    lines = [f"{_ranks(same)}: {what}" for what, same in doing.items()]
    lines += [_late(waiting), _write(reports, folder, set_name)]
    lines.append("if a rank is only slow, for example because it compiles, pass a larger --deadline")
    return "\n".join(lines)


def _place(printed: str) -> str:
    """Return where a rank's main thread is, outside of libraries if possible; "" without stacks."""
    stacks = printed.rpartition("\nTimeout (")[2]  # what the rank printed before may look like stacks
    *_, main_thread = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.MULTILINE)
    frames = _FRAME.findall(main_thread)  # the innermost one first
    if not frames:
        return ""
    path, line, function = next((frame for frame in frames if not _LIBRARY.search(frame[0])), frames[0])
    return f"{'/'.join(PurePath(path).parts[-2:])}:{line} in {function}"


def _pending(printed: str) -> tuple[int, str]:
    """Return the number and the name of the collective that a rank waits in, or -1 and ""."""
    *_, recorded = ["", *(line for line in printed.splitlines() if line.startswith(COLLECTIVE))]
    try:
        pending = json.loads(recorded.removeprefix(COLLECTIVE))
        return int(pending["number"]), str(pending["name"])
    except (ValueError, KeyError, TypeError):  # it waits in none, or could not run the thread that prints it
        return -1, ""


def _late(waiting: Mapping[str, tuple[int, str]]) -> str:
    furthest, name = max(waiting.values())
    if not name:
        return "no rank waits in a collective"
    if late := [rank for rank, (number, _) in waiting.items() if number < furthest]:
        return f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} late for {name} number {furthest}"
    if len(kinds := sorted({f"{name} number {number}" for number, name in waiting.values()})) > 1:
        return f"the ranks wait in different collectives: {', '.join(kinds)}"
    return f"no rank is late: all ranks wait in {kinds[0]}; check the network and the devices"


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _write(reports: Sequence[Report], folder: Path, set_name: str) -> str:
    """Write the reports of all ranks to a new file, and return a line that names it or says why not."""
    path = folder / f"hang-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{set_name}.txt"
    text = "\n\n".join(f"rank {report.rank}: {report.state}\n{report.printed}" for report in reports)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(printable(text), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"the stacks of all ranks cannot be written to {path} ({error.strerror}); {FREE_SPACE}"
    return f"the stacks of all ranks are in {path}"

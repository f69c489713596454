"""Keep the outcome of each fault as a line of JSON, and show all outcomes as one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

NEVER = 1e9  # seconds of a fault that was not reported
SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a fault.

    number: which of the fault's repetitions. moment: what went on when the fault happened.
    seconds: until the fault was reported; None if there is nothing to report.
    limit_seconds: the most that `seconds` may be. report: what was reported.
    is_named: whether the report names the cause. is_next_right: whether the next measurement was
    right. left: processes, files, shared memory and sockets that are left. wrong: anything else
    that was not as it must be. The outcome of a fault that cannot be tried here has the moment
    SKIPPED and the reason as its report.
    """

    fault: str
    number: int = 0
    moment: str = ""
    seconds: float | None = None
    limit_seconds: float = 0.0
    report: str = ""
    is_named: bool = True
    is_next_right: bool = True
    left: tuple[str, ...] = ()
    wrong: str = ""

    @property
    def is_late(self) -> bool:
        return self.seconds is not None and self.seconds > self.limit_seconds

    def problems(self) -> list[str]:
        """Return a phrase for each thing that was not as it must be."""
        found = [f"left behind: {', '.join(self.left)}"] if self.left else []
        if self.seconds == NEVER:
            found.append("was not reported")
        elif self.is_late:
            found.append(f"was reported after {self.seconds:.2f} s, not {self.limit_seconds:g} s")
        if not self.is_named:
            found.append(f"the report does not name the cause: {self.report!r}")
        if not self.is_next_right:
            found.append("the next measurement failed")
        return [*found, self.wrong] if self.wrong else found

    def line(self) -> str:
        """Return one line for the terminal."""
        if self.moment == SKIPPED:
            return f"{self.fault:24} skipped: {self.report}"
        seconds = "" if self.seconds is None else f"{min(self.seconds, 9999):.2f} s"
        what = "; ".join(self.problems()) or self.report.partition("\n")[0][:120]
        return f"{self.fault:24}{self.number:4}  {self.moment:20}{seconds:>8}  {what}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a line for each fault, and a line for each thing that was wrong."""
    lines = [
        f"{'':24}{'':>6}  {'reported in, s':^23}{'cause':>7}{'next':>7}{'left':>8}{'other':>8}",
        f"{'fault':24}{'times':>6}{'median':>9}{'worst':>8}{'limit':>8}"
        f"{'named':>7}{'right':>7}{'behind':>8}{'faults':>8}",
    ]
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        of_fault = [outcome for outcome in outcomes if outcome.fault == fault]
        done = [outcome for outcome in of_fault if outcome.moment != SKIPPED]
        if not done:
            lines.append(of_fault[0].line())
            continue
        seconds = [min(outcome.seconds, 9999) for outcome in done if outcome.seconds is not None]
        times = f"{'-':>9}{'-':>8}{'-':>8}"
        if seconds:
            times = f"{median(seconds):9.2f}{max(seconds):8.2f}{done[-1].limit_seconds:8.1f}"
        lines.append(
            f"{fault:24}{len(done):6}{times}"
            f"{sum(outcome.is_named for outcome in done):7}{sum(outcome.is_next_right for outcome in done):7}"
            f"{sum(bool(outcome.left) for outcome in done):8}{sum(bool(outcome.wrong) for outcome in done):8}"
        )
    failed = [outcome for outcome in outcomes if outcome.problems()]
    lines.append(f"{len(failed)} of {len(outcomes)} faults were not handled as they must be")
    return "\n".join([*lines, *(failure.line() for failure in failed)])


class Kept:
    """The outcomes of one seed, and the file that they are appended to as lines of JSON."""

    def __init__(self, file: Path, seed: int, *, resume: bool) -> None:
        self._file, self._seed = file, seed
        self.outcomes: list[Outcome] = []
        file.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            file.write_text("")
        text = file.read_text() if file.exists() else ""
        complete = text[: text.rfind("\n") + 1]  # a killed run leaves half a line
        file.write_text(complete)
        for line in complete.splitlines():
            values = json.loads(line)
            if values.pop("seed") == seed:
                self.outcomes.append(Outcome(**{**values, "left": tuple(values["left"])}))

    def has(self, fault: str, number: int) -> bool:
        return any((outcome.fault, outcome.number) == (fault, number) for outcome in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        with self._file.open("a") as file:
            file.write(json.dumps({"seed": self._seed, **asdict(outcome)}) + "\n")

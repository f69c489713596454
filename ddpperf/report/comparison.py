"""What a comparison found: the measurements that changed, and what they have in common, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.report.stored_cases import Case, cases_of, in_words, judged_rows, looks_worse, usual_properties
from ddpperf.report.terminal_tables import GAP, aligned, wrapped
from ddpperf.results import units
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.outcomes import Status

MOST_ROWS = 20  # of a table
LEAST_ROOM = 30  # characters, of a name beside its figures
ALIKE = 0.005  # the least relative change that is named
MOST_NAMED = 3  # measurements that one line names
LABEL = 10  # characters, of a line's first word
FEW = 0.05  # of the measurements without what the slower ones share: so many may be slower, too
UNNAMED = ("kind", "memory format", "seed", "seeds", "warm-up")  # properties
Row = Mapping[str, Any]  # a row of a stored comparison


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A compared measurement: the case of a test that has it, and its rows, the worst metric first."""

    case: Case
    rows: Sequence[Row]

    @property
    def row(self) -> Row:
        return self.rows[0]

    @property
    def judged(self) -> bool:
        return any(row["finding"] != "for information" for row in self.rows)

    @property
    def seconds(self) -> float:
        """How much longer the candidate takes."""
        return float(self.row["candidate"] - self.row["base"])

    @property
    def improved(self) -> bool:
        """Whether the time is shorter than any noise explains, or an exact metric is smaller."""
        row = self.row
        if row["low"] is None or row["metric"].endswith("_bytes"):
            return bool(row["candidate"] < row["base"]) and row["metric"] != "time"
        return row["metric"] == "time" and row["ratio"] < 1 - 2 * ALIKE and (row["high"] or 1) < 1

    def is_(self, finding: str, metric: str = "") -> bool:
        return self.row["finding"] == finding and metric in ("", self.row["metric"])

    def name(self) -> str:
        """Return what was measured, without what is usual in this run, and the metric if it is no time."""
        usual = usual_properties(self.case.header)
        properties = self.case.properties | self.case.constant_batch
        kind, metric = properties["kind"], self.row["metric"]
        words = [f"{kind} scaling" if kind else self.case.experiment.title]
        words += [
            in_words(name, value).removesuffix(" per rank")
            for name, value in properties.items()
            if value and name not in UNNAMED and usual.get(name) != value
        ]
        return ", ".join(words) + ("" if metric == "time" else f": {find_or_plain(metric).heading}")

    def cells(self) -> tuple[str, ...]:
        """Return the base's value, the candidate's, both changes, and the interval of the relative one."""
        row, form = self.row, find_or_plain(self.row["metric"]).format
        values = (form(row["base"]), form(row["candidate"]), signed(form, row["candidate"] - row["base"]))
        relative = f"{row['ratio'] - 1:+.1%}" if row["base"] else ""
        if not row["base"] or row["low"] is None:
            return (*values, relative, "")
        high = "or more" if row["high"] is None else f"to {row['high'] - 1:+.1%}"
        return (*values, relative, f"{row['low'] - 1:+.1%} {high}")


def signed(form: Callable[[float], str], change: float) -> str:
    return f"{'-' if change < 0 else '+'}{form(abs(change))}"


def measurements_of(document: Mapping[str, Any]) -> list[Measurement]:
    """Return each judged measurement of a comparison; several tests may have the same one."""
    cases = {case.test: case for case in cases_of(document)}
    by_tests: dict[tuple[str, ...], list[Row]] = {}
    for row in judged_rows(document["ddpperf"]):
        if row["control"] is None and row["tests"]:
            by_tests.setdefault(tuple(row["tests"]), []).append(row)
    found = []
    for tests, rows in by_tests.items():
        rows.sort(key=lambda row: (row["finding"] != "worse", not looks_worse(row), row["metric"] != "time"))
        if (case := next((cases[test] for test in tests if test in cases), None)) is not None:
            found.append(Measurement(case=case, rows=rows))
    return [one for one in found if one.judged]


def certain_first(found: Iterable[Measurement]) -> list[Measurement]:
    """Return measurements: those that were measured again first, then times, by the size of the change."""

    def order(one: Measurement) -> tuple[bool, bool, float]:
        change = abs(math.log(one.row["ratio"])) if one.row["ratio"] else 0.0
        return "repeat" not in one.row["stages"], one.row["metric"] != "time", -change

    return sorted(found, key=order)


def comparison_lines(document: Mapping[str, Any], width: int) -> list[str]:
    """Return what changed in a compared run; unchanged measurements are a count."""
    found = measurements_of(document)
    worse = certain_first(one for one in found if one.is_("worse"))
    undecided = certain_first(one for one in found if one.is_("undecided") and one.row.get("open", True))
    lines: list[str] = []
    if worse:
        lines += ["", *_table("WORSE", worse, len(found), width)]
    elif undecided:
        lines += ["", *_table("UNDECIDED", undecided, len(found), width)]
    passed = document["ddpperf"]["verdict"]["status"] == Status.PASS  # its reason says what was excluded
    facet, common = _common(worse, found)
    facts = {
        "ALSO": _moved_alike(worse, found, facet),
        "COMMON": common,
        "FASTER": _named([one for one in found if one.improved]),
        "UNDECIDED": _named(undecided) if worse else "",
        "EXCLUDED": "" if passed else _excluded(found),
    }
    for label, text in facts.items():
        lines += wrapped(text, width, first=label.ljust(LABEL), indent=LABEL) if text else []
    return lines


def _table(label: str, found: Sequence[Measurement], of: int, width: int) -> list[str]:
    """Return a table of measurements. A long name has lines of its own above its figures."""
    shown = found[:MOST_ROWS]
    head, *texts = aligned(
        [("base", "candidate", "change", "", "interval"), *(one.cells() for one in shown)], range(5)
    )
    room = width - max(map(len, (head, *texts))) - len(GAP)
    names = [f"{label.ljust(LABEL)}{len(found)} of {units.counted(of, 'measurement')}"]
    names += [f"  {one.name()}" for one in shown]
    lines: list[str] = []
    for name, figures in zip(names, (head, *texts), strict=True):
        first = " " * (len(name) - len(name.lstrip()))
        if room < LEAST_ROOM:  # of a narrow terminal
            lines += [*wrapped(name.strip(), width, first=first, indent=4), f"    {figures.strip()}"]
        else:
            *above, last = wrapped(name.strip(), room, first=first, indent=4)
            lines += [*above, f"{last.ljust(room)}{GAP}{figures}".rstrip()]
    return [*lines, f"  and {len(found) - len(shown)} more: -v shows them"] if found[MOST_ROWS:] else lines


def headline(document: Mapping[str, Any]) -> str:
    """Return how many measurements are worse, and by how much the certain ones; "" if none is."""
    found = measurements_of(document)
    worse = certain_first(one for one in found if one.is_("worse"))
    if not worse:
        return ""
    times = [one for one in worse if one.is_("worse", "time") and one.row["base"]]
    times = [one for one in times if "repeat" in one.row["stages"]] or times
    text = f"{len(worse)} of {units.counted(len(found), 'measurement')} {'are' if worse[1:] else 'is'} worse"
    times.sort(key=lambda one: one.row["ratio"])
    ends = [f"{one.cells()[3]} ({one.cells()[2]})" for one in (times[:1] + times[-1:])]
    return f"{text}, by {' to '.join(dict.fromkeys(ends))}" if ends else text


def sides(header: Mapping[str, Any]) -> str:
    """Return what a comparison compares in a few words, with "A/A" if nothing differs."""
    if (judged := header.get("judged")) is None:
        return ""
    both = judged.get("sides") or {}
    base, candidate = ({**_fields(both.get(side) or {})} for side in ("base", "candidate"))
    root, commit = base.pop("root", ""), header["environment"]["commit"]
    same = commit if root in ("", candidate.pop("root", "")) else root  # the folder of a commit has its name
    then = [header.get("compared_with", ""), "" if header.get("compared_with") and not root else same]
    then += [f"{name}={base[name]}" for name in base if base[name] != candidate.get(name)]
    now = [commit, *(f"{name}={value}" for name, value in candidate.items() if value != base.get(name))]
    equal = " (A/A)" if now == [commit] and then[1:] == [commit] else ""
    return f"{' '.join(filter(None, then))} -> {' '.join(now)}{equal}"


def _fields(side: Mapping[str, Any]) -> dict[str, str]:
    """Return what describes a side of a comparison: its code, its torch, and what options set."""
    root = Path(side.get("root") or "")
    found = {"root": root.name if ".ddpperf" in root.parts else str(side.get("root") or "")}
    found |= {"torch": str(side["torch"])} if side.get("torch") else {}
    return found | {**side.get("environment", {}), **side.get("spec", {})}


def _moved_alike(worse: Sequence[Measurement], found: Sequence[Measurement], facet: str) -> str:
    """Name measurements with the same facet that got slower by about as much, but too little to fail."""
    seconds = [one.seconds for one in worse if one.is_("worse", "time")]
    moved = [
        one
        for one in found
        if seconds and one.is_("not worse", "time") and one.row["ratio"] - 1 > ALIKE
        if one.seconds > min(seconds) / 2 and (facet in _facets(one) if facet else (one.row["low"] or 0) > 1)
    ]
    return f"slower, too, but too little to fail: {_named(certain_first(moved))}" if moved else ""


def _named(found: Sequence[Measurement]) -> str:
    """Return the names of some measurements, each with its change."""
    named = [f"{one.name()} ({one.cells()[2]}, {one.cells()[3]})" for one in found[:MOST_NAMED]]
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{'; '.join(named)}{more}"


def _facets(one: Measurement) -> set[str]:
    """Return the words that describe a measurement; each option of a strategy is one."""
    properties = {name: value for name, value in one.case.properties.items() if value}
    words = {*properties.pop("strategy", "").split("+"), *properties.pop("execution", "").split("+")}
    words |= {in_words(name, value) for name, value in properties.items() if name not in ("kind", "recipe")}
    return words - {""} | {"several devices" if one.case.measured.spec.world_size > 1 else "one device"}


def _common(worse: Sequence[Measurement], found: Sequence[Measurement]) -> tuple[str, str]:
    """Return the word that most slower measurements share and few others, and a sentence on it, or ""."""
    slower = [one for one in worse if one.is_("worse", "time")]
    certain = [one for one in slower if "repeat" in one.row["stages"]] or slower
    timed = [one for one in found if any(one.is_(finding, "time") for finding in ("worse", "not worse"))]
    best: tuple[float, str, str] = (0.5, "", "")  # at least half of those with it are slower
    for facet in sorted(set.intersection(*map(_facets, certain)) if certain[1:] else ()):
        having = [one for one in timed if facet in _facets(one)]
        others = [one for one in timed if one not in having]
        counts = [sum(one in slower for one in some) for some in (having, others)]
        if others and counts[1] <= max(1, FEW * len(others)) and counts[0] / len(having) >= best[0]:
            without = f"{counts[1] or 'none'} of {len(others)} without it"
            sentence = f"{facet}: {counts[0]} of {len(having)} with it are slower, {without}"
            best = counts[0] / len(having), facet, sentence
    return best[1:]


def _excluded(found: Sequence[Measurement]) -> str:
    """Return which slow-downs of the other measurements are excluded, rounded up."""
    times = [row for one in found for row in one.rows if row["metric"] == "time"]
    clear = [row["high"] - 1 for row in times if row["finding"] == "not worse" and row["high"] is not None]
    if not clear:
        return ""
    ends = sorted(math.ceil(round(1000 * max(0.0, end), 6)) / 1000 for end in clear)
    half, most = median(ends), ends[math.ceil(0.9 * len(ends)) - 1]
    unchanged = units.counted(len(ends), "unchanged time")
    return f"of {unchanged}, half exclude a slow-down above {half:.1%}, 9 of 10 above {most:.1%}"

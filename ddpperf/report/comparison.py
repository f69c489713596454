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

MOST_ROWS = 12  # of undecided measurements
MOST_NAMED = 3  # measurements that one line names
LABEL = 10  # characters, of a line's first word
FEW = 0.05  # the largest fraction of slower measurements without what the others have in common
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
        lines += ["", *_table("WORSE", worse, len(worse), len(found), width)]
    elif undecided:
        lines += ["", *_table("UNDECIDED", undecided[:MOST_ROWS], len(undecided), len(found), width)]
    passed = document["ddpperf"]["verdict"]["status"] == Status.PASS  # its reason says what was excluded
    facts = {
        "": _moved_alike(found) if worse else "",
        "COMMON": _common(worse, found),
        "UNDECIDED": _named(undecided) if worse and undecided else "",
        "EXCLUDED": "" if passed else _excluded(found),
    }
    for label, text in facts.items():
        lines += wrapped(text, width, first=label.ljust(LABEL), indent=LABEL) if text else []
    return lines


def _table(label: str, shown: Sequence[Measurement], count: int, of: int, width: int) -> list[str]:
    """Return a table of measurements. A long name has lines of its own above its figures."""
    head, *texts = aligned(
        [("base", "candidate", "change", "", "interval"), *(one.cells() for one in shown)], range(5)
    )
    room = max(width - max(map(len, (head, *texts))) - len(GAP), LABEL)
    names = [f"{label.ljust(LABEL)}{count} of {units.counted(of, 'measurement')}"]
    names += [f"  {one.name()}" for one in shown]
    lines: list[str] = []
    for name, figures in zip(names, (head, *texts), strict=True):
        *above, last = wrapped(name.strip(), room, first=" " * (len(name) - len(name.lstrip())), indent=4)
        lines += [*above, f"{last.ljust(room)}{GAP}{figures}".rstrip()]
    return [*lines, f"  and {count - len(shown)} more: -v shows them"] if count > len(shown) else lines


def headline(document: Mapping[str, Any]) -> str:
    """Return how many measurements are worse, and by how much; "" if none is."""
    worse = [one for one in measurements_of(document) if one.is_("worse")]
    text = f"{units.counted(len(worse), 'measurement')} {'are' if len(worse) > 1 else 'is'} worse"
    times = [one for one in worse if one.is_("worse", "time")]
    if not times:
        return text if worse else ""
    ratios, seconds = sorted(one.row["ratio"] - 1 for one in times), sorted(one.seconds for one in times)
    ends = [f"{ratios[end]:+.1%} ({signed(units.seconds, seconds[end])})" for end in (0, -1)]
    return f"{text}, by {' to '.join(dict.fromkeys(ends))}"


def sides(header: Mapping[str, Any]) -> str:
    """Return the base and the candidate of a comparison in a few words, with "A/A" if they are equal."""
    if (judged := header.get("judged")) is None:
        return ""
    both = judged.get("sides") or {}
    base, candidate = both.get("base") or {}, both.get("candidate") or {}
    root = Path(base.get("root") or "")
    commit = root.name if root.parent.parent.name == "base" else ""  # of .ddpperf/base
    then = [header.get("compared_with", ""), commit or str(base.get("root") or "")]
    fields = [*candidate.get("environment", {}).items(), *candidate.get("spec", {}).items()]
    now = [header["environment"]["commit"], *(f"{name}={value}" for name, value in fields)]
    equal = " (A/A)" if now == [commit] else ""
    return f"{' '.join(filter(None, then)) or 'the same code'} -> {' '.join(now)}{equal}"


def _moved_alike(found: Sequence[Measurement]) -> str:
    """Name the measurements that got slower, too, but by less than their tolerance."""
    today = [one for one in found if one.is_("not worse", "time") and one.row["stages"] != ["stored run"]]
    moved = certain_first(one for one in today if (one.row["low"] or 0) > 1)
    return f"slower, too, within the tolerance: {_named(moved)}" if moved else ""


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


def _common(worse: Sequence[Measurement], found: Sequence[Measurement]) -> str:
    """Return what the slower measurements have in common, if few others without it are slower."""
    slower = [one for one in worse if one.is_("worse", "time")]
    certain = [one for one in slower if "repeat" in one.row["stages"]] or slower
    if len(certain) < 2:
        return ""
    best: tuple[float, str, int, int] | None = None
    for facet in sorted(set.intersection(*map(_facets, certain))):
        having = [one for one in found if facet in _facets(one)]
        with_it = sum(facet in _facets(one) for one in slower)
        others, slower_others = len(found) - len(having), len(slower) - with_it
        share = with_it / len(having)
        if others and slower_others <= FEW * others and (best is None or share > best[0]):
            best = share, facet, slower_others, others
    if best is None:
        return ""
    _, facet, count, others = best
    are, without = "are" if count > 1 else "is", units.counted(others, "measurement")
    having_it = f"{len(slower) - count} of the {len(slower)} have {facet}"
    return f"{having_it}; of {without} without it, {count or 'none'} {are} slower"


def _excluded(found: Sequence[Measurement]) -> str:
    """Return which slow-downs of the other measurements are excluded."""
    times = [row for one in found for row in one.rows if row["metric"] == "time"]
    clear = [row for row in times if row["finding"] == "not worse" and row["high"] is not None]
    if not clear:
        return ""
    ends, steps = sorted(row["high"] - 1 for row in clear), median(row.get("steps", 0) for row in clear)
    most = ends[math.ceil(0.9 * len(ends)) - 1]
    share = f"half of the {len(ends)} others exclude a slow-down of {median(ends):.1%}"
    known = (
        f" (in the median {units.counted(round(steps), 'step')} a side)" if steps else ""
    )  # not in old runs
    return f"{share}, 9 of 10 one of {most:.1%}{known}"

"""What a comparison found: the measurements that changed, and what they have in common, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpperf.report.stored_cases import (
    Case,
    all_in_words,
    cases_of,
    judged_rows,
    looks_worse,
    usual_properties,
    usual_strategy,
    without_file,
)
from ddpperf.report.terminal_tables import GAP, aligned, wrapped
from ddpperf.results import units
from ddpperf.results.metrics import find_or_plain
from ddpperf.specs import TrainingSpec
from ddpperf.why.lines import why_lines

MOST_ROWS = 20  # of a table
LEAST_ROOM = 30  # characters, of a name beside its figures
ALIKE = 0.005  # the least relative change that is named
MOST_NAMED = 3  # measurements that one line names
LABEL = 10  # characters, of a line's first word
FEW = 0.05  # of the measurements without what the slower ones share: so many may be slower, too
UNNAMED = ("kind", "memory format", "seed", "seeds", "warm-up")  # properties
ALWAYS_NAMED = ("collective", "algorithm")
FINDINGS = ("worse", "undecided", "not worse", "for information")  # of a row, the worst first
EQUAL_SIDES = " (A/A)"
OF_MANY = 1.5  # times as wide as an interval of 98% is one that holds for about 100 measurements
Row = Mapping[str, Any]  # a row of a stored comparison


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A compared measurement: the row of a metric, and the case of a test that has it, if it is stored.

    tests: those with this measurement. usual: the strategy that the run's first line names.
    """

    row: Row
    tests: tuple[str, ...]
    case: Case | None = None
    usual: str = ""

    @property
    def seconds(self) -> float:
        """How much longer the candidate takes, or how many more bytes it has."""
        return float(self.row["candidate"] - self.row["base"])

    @property
    def improved(self) -> bool:
        """Whether the time is shorter than noise explains, or there are fewer bytes."""
        row = self.row
        if row["low"] is None or row["metric"].endswith("_bytes"):
            return bool(row["candidate"] < row["base"]) and row["metric"] != "time"
        end = row["ratio"] * ((row["high"] or math.inf) / row["ratio"]) ** OF_MANY
        return bool(row["metric"] == "time" and row["ratio"] < 1 - 2 * ALIKE and end < 1)

    def is_(self, finding: str, metric: str = "") -> bool:
        return self.row["finding"] == finding and metric in ("", self.row["metric"])

    def name(self) -> str:
        """Return what was measured, without what is usual in this run, and the metric if it is no time."""
        metric = self.row["metric"]
        ending = "" if metric == "time" else f": {find_or_plain(metric).heading}"
        if self.case is None:
            return f"{without_file(self.row['tests'][0])}{ending}"
        usual = usual_properties(self.case.header) | {"strategy": self.usual}
        usual |= dict.fromkeys(ALWAYS_NAMED, "")
        kind = self.case.experiment.kind
        words = [f"{kind} scaling" if kind else self.case.experiment.title]
        words += all_in_words(self.case.properties, usual=usual, without=UNNAMED)
        return f"{', '.join(word.removesuffix(' per rank') for word in words)}{ending}"

    def cells(self) -> tuple[str, ...]:
        """Return the base's value, the candidate's, both changes, and the interval of the relative one."""
        row, form = self.row, find_or_plain(self.row["metric"]).format
        relative = change(row["ratio"]) if row["base"] else ""
        noise = relative == "0.0%" and not find_or_plain(row["metric"]).exact  # less than can be measured
        sign = "-" if self.seconds < 0 else "+"
        absolute = "0" if noise or not self.seconds else f"{sign}{form(abs(self.seconds))}"
        values = (form(row["base"]), form(row["candidate"]), absolute)
        if not row["base"] or row["low"] is None:
            return (*values, relative, "")
        high = "or more" if row["high"] is None else f"to {change(row['high'])}"
        return (*values, relative, f"{change(row['low'])} {high}")

    def changes(self) -> str:
        """Return both changes in a few words, and the metric if it is no time."""
        _, _, absolute, relative, _ = self.cells()
        metric = self.row["metric"]
        what = absolute if metric == "time" else f"{absolute}, {find_or_plain(metric).heading}"
        return f"{relative} ({what})" if relative else what


def change(ratio: float) -> str:
    """Return a ratio as a signed change, such as +3.1%; 0.0% has no sign."""
    text = f"{ratio - 1:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def interval(row: Row) -> str:
    """Return the interval of a row's ratio as text; "" if it is not known."""
    if row["low"] is None or row["base"] == 0:
        return ""
    return f"{row['low']:.3f} or more" if row["high"] is None else f"{row['low']:.3f} to {row['high']:.3f}"


def measurements_of(header: Mapping[str, Any], cases: Iterable[Case] = ()) -> list[Measurement]:
    """Return the compared measurements, each with its worst row.

    Several tests may have the same measurement. Bytes that grew beside a longer time have a row of
    their own, but a mean beside a median says nothing new.
    """
    by_name = {case.test: case for case in cases}
    usual = usual_strategy(list(by_name.values()))
    groups: dict[str, list[Row]] = {}  # by each test of a measurement; not all of them count its bytes
    for row in judged_rows(header):
        if row["control"] is None and row["tests"]:
            group = next((groups[test] for test in row["tests"] if test in groups), [])
            group.append(row)
            groups |= dict.fromkeys(row["tests"], group)
    found = []
    for group in {id(group): group for group in groups.values()}.values():
        tests = list(dict.fromkeys(test for row in group for test in row["tests"]))
        case = next((by_name[test] for test in tests if test in by_name), None)
        first, *others = sorted(group, key=_rank)
        shown = [row for row in others if row["finding"] == "worse" and row["metric"].endswith("_bytes")]
        found += [Measurement(row=row, tests=tuple(tests), case=case, usual=usual) for row in (first, *shown)]
    return found


def _rank(row: Row) -> tuple[int, bool, bool]:
    """Return what sorts the rows of a measurement: the worst one, and then its time, comes first."""
    return FINDINGS.index(row["finding"]), not looks_worse(row), row["metric"] != "time"


def certain_first(found: Iterable[Measurement]) -> list[Measurement]:
    """Return measurements: those that were measured again first, then times, by the size of the change."""

    def order(one: Measurement) -> tuple[bool, bool, float]:
        size = abs(math.log(one.row["ratio"])) if one.row["ratio"] else 0.0
        return "repeat" not in one.row["stages"], one.row["metric"] != "time", -size

    return sorted(found, key=order)


def comparison_lines(document: Mapping[str, Any], width: int, *, verbose: bool = False) -> list[str]:
    """Return what changed in a compared run; what is not worse is a count, unless verbose."""
    header = document["ddpperf"]
    cases = cases_of(document)
    every = measurements_of(header, cases)
    judged = [one for one in every if not one.is_("for information")]
    worse = certain_first(one for one in judged if one.is_("worse"))
    undecided = certain_first(one for one in judged if one.is_("undecided"))
    shown = undecided if verbose else [one for one in undecided if one.row.get("open", True)]
    look_worse = [one for one in shown if looks_worse(one.row)]
    tables = {"WORSE": worse, "UNDECIDED": look_worse if worse and not verbose else shown}
    if verbose:
        tables["NOT WORSE"] = [one for one in judged if one.is_("not worse")]
        tables["UNJUDGED"] = [one for one in every if one.is_("for information")]
    count, lines = _count(judged), []
    for label, rows in tables.items():
        if rows:
            lines += ["", *_table(label, rows, len(every) if label == "UNJUDGED" else count, width, verbose)]
    facet, common = _common(worse, judged)
    facts = {
        "CERTAIN": _certainty(worse),
        "ALSO": _moved_alike(worse, judged, facet),
        "COMMON": common,
        "FASTER": _named([one for one in judged if one.improved]),
        "UNDECIDED": _named([one for one in undecided if one not in tables["UNDECIDED"]], undecided=True),
        "EXCLUDED": _excluded(header, judged),
        "BYTES": _bytes(header),
        "TESTS": _tests(len(cases), _count(every), count),
    }
    for label, text in facts.items():
        lines += wrapped(text, width, first=label.ljust(LABEL), indent=LABEL) if text else []
        if label == "COMMON":
            lines += _reasons(header, width)
    return lines


def _reasons(header: Mapping[str, Any], width: int) -> list[str]:
    """Return why measurements got slower, and what differs between the sides of the comparison."""
    lines: list[str] = []
    for label, texts in (("WHY", why_lines(header)), ("DIFFER", header["judged"].get("differ", ()))):
        for number, text in enumerate(texts):
            first, indent = ("" if number else label).ljust(LABEL), len(text) - len(text.lstrip())
            lines += wrapped(text.strip(), width, first=f"{first}{' ' * indent}", indent=LABEL + 2 * indent)
    return lines


def _certainty(worse: Sequence[Measurement]) -> str:
    """Return which measurements are worse for certain, if the others were not measured again."""
    again = sum("repeat" in one.row["stages"] for one in worse)
    if not 0 < again < len(worse):
        return ""
    first = f"the first {again}" if again > 1 else "the first one"
    others = f"the other {len(worse) - again}" if len(worse) - again > 1 else "the other one"
    return f"{first}, measured again; {others} only once: on average, 1 of 20 such names is wrong"


def _tests(tests: int, measurements: int, judged: int) -> str:
    others = f", of which {judged} can fail; the others vary too much, or only count"
    what = f"{units.counted(tests, 'test')} with {units.counted(measurements, 'measurement')}"
    return f"{what}{others}" if judged < measurements else what


def _count(found: Iterable[Measurement]) -> int:
    return len({one.tests for one in found})


def _table(label: str, found: Sequence[Measurement], of: int, width: int, verbose: bool) -> list[str]:
    """Return a table of measurements. A long name has lines of its own above its figures."""
    shown = found if verbose else found[:MOST_ROWS]
    cells = [("base", "candidate", "change", "", "98% interval"), *(one.cells() for one in shown)]
    texts = aligned(cells, range(5))
    room = width - max(map(len, texts)) - len(GAP)
    names = [f"{label.ljust(LABEL)}{_count(found)} of {units.counted(of, 'measurement')}"]
    names += [f"  {one.name()}" for one in shown]
    lines: list[str] = []
    for name, figures, row in zip(names, texts, cells, strict=True):
        first = " " * (len(name) - len(name.lstrip()))
        if room < LEAST_ROOM:  # of a narrow terminal
            lines += wrapped(name.strip(), width, first=first, indent=4)
            lines += wrapped(", ".join(filter(None, row)), width, first="    ", indent=4)
        else:
            *above, last = wrapped(name.strip(), room, first=first, indent=4)
            lines += [*above, f"{last.ljust(room)}{GAP}{figures}".rstrip()]
    left = len(found) - len(shown)
    return [*lines, f"  and {left} more: -v shows them"] if left else lines


def headline(header: Mapping[str, Any]) -> str:
    """Return how many measurements are worse, and the most certain one; "" if none is worse."""
    judged = [one for one in measurements_of(header) if not one.is_("for information")]
    worse = certain_first(one for one in judged if one.is_("worse"))
    if not worse:
        return ""
    first, count = worse[0], _count(worse)
    text = f"{count} of {units.counted(_count(judged), 'measurement')} {'are' if count > 1 else 'is'} worse"
    such_as = ", such as" if count > 1 else ":"
    return f"{text}{such_as} {without_file(first.row['tests'][0])} by {first.changes()}"


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
    equal = EQUAL_SIDES if now == [commit] and then[1:] == [commit] else ""
    return f"{' '.join(filter(None, then))} -> {' '.join(now)}{equal}"


def _fields(side: Mapping[str, Any]) -> dict[str, str]:
    """Return what describes a side of a comparison: its code, its torch and NCCL, and what options set."""
    root = Path(side.get("root") or "")
    found = {"root": root.name if ".ddpperf" in root.parts else str(side.get("root") or "")}
    found |= {name: str(side[name]) for name in ("torch", "nccl") if side.get(name)}
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


def _named(found: Sequence[Measurement], *, undecided: bool = False) -> str:
    """Return the names of some measurements, each with its change, or with its interval and tolerance."""
    named = []
    for one in found[:MOST_NAMED]:
        _, _, absolute, relative, ends = one.cells()
        tolerance = one.row.get("tolerance")
        limit = f"tolerance {tolerance:.0%}" if tolerance else ""
        cells = (ends, limit) if undecided and ends else (absolute, relative)
        named.append(f"{one.name()} ({', '.join(filter(None, cells))})")
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{'; '.join(named)}{more}"


def _facets(one: Measurement) -> set[str]:
    """Return the words that describe a measurement; each option of a strategy is one."""
    if one.case is None:
        return set()
    properties = {**one.case.properties}
    words = {*properties.pop("strategy", "").split("+"), *properties.pop("execution", "").split("+")}
    words |= {*all_in_words(properties, without=("kind", "recipe"))}
    words |= {"training steps"} if isinstance(one.case.measured.spec, TrainingSpec) else set()
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
            sentence = f"{facet}: {counts[0]} of {len(having)} decided ones with it are slower, {without}"
            best = counts[0] / len(having), facet, sentence
    return best[1:]


def _excluded(header: Mapping[str, Any], found: Sequence[Measurement]) -> str:
    """Return which slow-downs the unchanged times exclude, in their medians and means, rounded up."""
    highs: dict[tuple[str, ...], list[float]] = {}
    for row in judged_rows(header):
        if (
            row["metric"] in ("time", "mean_time")
            and row["finding"] == "not worse"
            and row["high"] is not None
        ):
            highs.setdefault(tuple(row["tests"]), []).append(row["high"])
    clear = {tuple(one.row["tests"]): one for one in found if one.is_("not worse", "time")}
    ends = sorted(
        (math.ceil(round(1000 * max(0.0, max(highs[tests]) - 1), 6)) / 1000, one.name())
        for tests, one in clear.items()
        if tests in highs
    )
    reasons = header["verdict"]["reasons"]
    if not ends or any(" control " in reason.partition(":")[0] for reason in reasons):
        return ""
    half = median(end for end, _ in ends)
    most, (largest, name) = ends[math.ceil(0.9 * len(ends)) - 1][0], ends[-1]
    text = (
        f"slow-downs above {half:.1%} for half of the {units.counted(len(ends), 'time')} that are not worse"
    )
    text += f", above {most:.1%} for 9 of 10" if most < largest else ""
    return f"{text}, above {largest:.1%} for all ({name})"


def _bytes(header: Mapping[str, Any]) -> str:
    """Return how many peak memories and counts of bytes did not grow; "" if none is known."""
    rows = [row for row in judged_rows(header) if row["metric"].endswith(("_bytes", "_bytes_per_epoch"))]
    grown = any(row["finding"] == "worse" for row in rows)
    same = [row for row in rows if row["finding"] == "not worse"]
    of_memory = {tuple(row["tests"]) for row in same if row["metric"] == "peak_memory_bytes"}
    sent = {tuple(row["tests"]) for row in same if row["metric"] != "peak_memory_bytes"}
    other = "other measurement" if grown else "measurement"
    named = [f"no more peak memory in {units.counted(len(of_memory), other)}"] * bool(of_memory)
    named += [f"no more bytes sent in {units.counted(len(sent), other)}"] * bool(sent)
    return ", ".join(named)

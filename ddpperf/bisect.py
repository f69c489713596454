"""Find the commit, the interpreter or the version that made a test slower.

    python -m ddpperf.bisect --good A --bad B [TEST] [options of pytest]

A and B are commits, Python interpreters, or versions such as torch==2.14.0. --between names what lies
between two interpreters or versions, the oldest first, joined by commas; for nightlies, it is each day.
Without TEST, the test that the newest stored run found worst is taken, with the options of this run.
git bisects in a work tree of its own. If the command is interrupted, the same command continues.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from math import log
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused
from ddpperf.history.bisection import SETS, Comparisons, Stage, first_bad
from ddpperf.history.versions import Candidates, CannotMeasure, candidates_of
from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.io.files import read_text, write_atomically
from ddpperf.machine.child_process import run_child
from ddpperf.report.summary import worst_test
from ddpperf.results.command_words import OF_COMPARISONS, command_words
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import NoBaseline, newest_run, read_document

FOLDER = Path(".ddpperf", "bisect")
COMPARISON_SECONDS = 3600
NO_VERDICT = 125  # the exit status


@dataclass(frozen=True, kw_only=True)
class ABRuns:
    """Compares commits or versions by A/B runs of pytest, whose results are kept until the search ends."""

    candidates: Candidates
    test: str
    options: list[str]
    folder: Path

    def measure(self, base: str, candidate: str, sets: int) -> list[Stage]:
        """Return the stages of an A/B run. sets: how many process sets the pair already has."""
        return _stages(self.run(base, candidate, f"{sets}", "--max-seconds=0", f"--replicates={SETS}"))

    def run(self, base: str, candidate: str, name: str, *options: str) -> dict[str, Any]:
        """Return the document of an A/B run, which is stored under this name if it is measured now."""
        digest = sha256(f"{base}\n{candidate}".encode()).hexdigest()[:16]
        path = self.folder / f"{digest}-{name}.json"
        if not path.exists():
            pair = zip(("--base", "--candidate"), (base, candidate), strict=True)
            sides = [f"{side}={self.candidates.side(one, n)}" for n, (side, one) in enumerate(pair)]
            command = [sys.executable, "-m", "pytest", self.test, *sides, f"--benchmark-json={path}"]
            try:
                ended = run_child([*command, *options, *self.options], {}, COMPARISON_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise CannotMeasure(f"took longer than {COMPARISON_SECONDS} s") from error
            if not path.exists():
                errors = re.findall(r"(?:ERROR|error): (?!usage)(.+)", f"{ended.stdout}\n{ended.stderr}")
                raise CannotMeasure((errors or [f"pytest ended with status {ended.returncode}"])[-1])
        document: dict[str, Any] = read_document(path)
        try:
            _stages(document)
        except CannotMeasure:
            path.unlink()
            raise
        return document


def _stages(document: dict[str, Any]) -> list[Stage]:
    """Return the log seconds of the process sets in each stage of an A/B run of one test."""
    header, tests = document["ddpperf"], [one["fullname"] for one in document["benchmarks"]]
    if len(header["outcomes"]) > 1:
        raise CannotMeasure(f"it names {len(header['outcomes'])} tests; name one, such as {tests[0]}")
    why = [outcome["reason"] for outcome in header["outcomes"].values()] + header["verdict"]["reasons"]
    stages: list[Stage] = []
    of_stages = [stage["tests"] for stage in header.get("judged", {}).get("stages", ())]
    first = {one["fullname"]: one["extra_info"]["ddpperf"] for one in document["benchmarks"]}
    for fields in (of[test] for of in (first, *of_stages) for test in of):
        one = Measured.from_json(fields)
        seconds = one.median_step_seconds() if one.spec.repeats else one.mean_step_seconds()
        sets = {
            side: [log(seconds[s.set]) for s in one.samples if s.side == side] for side in (BASE, CANDIDATE)
        }
        if min(map(len, sets.values())) > 1:
            stages.append((sets[BASE], sets[CANDIDATE]))
    if not stages:
        raise CannotMeasure(next(filter(None, why), "it measured nothing"))
    return stages


def search(given: argparse.Namespace, options: list[str], cleanup: ExitStack) -> int:
    """Search between the given ends, print what is found, and return the exit status."""
    folder, state = FOLDER.absolute(), FOLDER.absolute() / "search.json"
    known = json.loads(read_text(state)) if state.exists() else None
    test, options = what_to_measure(given.test, options, known)
    wanted = [given.good, given.bad, given.between, test, options]
    if known not in (None, wanted):
        raise Refused(
            f"{FOLDER} has a search from {known[0]} to {known[1]} that has not ended; "
            f"type its command again, or delete {FOLDER}"
        )
    between = list(filter(None, given.between.split(",")))
    environments = given.environments or folder / "environments"
    candidates = candidates_of(given.good, given.bad, between, folder, environments.absolute(), cleanup)
    write_atomically(state, json.dumps(wanted))
    runs = ABRuns(candidates=candidates, test=test, options=options, folder=folder)
    comparisons = Comparisons(runs.measure)
    good, bad = map(candidates.label, candidates.ends)
    try:
        differ = comparisons.is_above(good, bad)
    except CannotMeasure as why:
        cleanup.callback(shutil.rmtree, folder)
        raise Refused(f"{given.good} and {given.bad} cannot be compared: {why}") from why
    size = comparisons.in_words(good, bad)
    if not differ:
        cleanup.callback(shutil.rmtree, folder)
        advice = "exchange them" if differ is False else "use a quieter machine, or a test that changed more"
        print_lines([f"NO VERDICT: {given.bad} is not slower than {given.good} in {test}: {size}; {advice}"])
        return NO_VERDICT
    print_lines([test, f"{given.bad} against {given.good}: {size}"])
    left = first_bad(candidates, comparisons, lambda line: print_lines([line]))
    cleanup.callback(shutil.rmtree, folder)
    if len(left) > 1:
        print_lines(["NO VERDICT: one of these is the first bad one:", *map(candidates.described, left)])
        return NO_VERDICT
    before, culprit = map(candidates.label, (candidates.before(left[0]), left[0]))
    try:
        document = runs.run(before, culprit, "last")
        comparisons.stages.setdefault((before, culprit), []).extend(_stages(document))
        slower = comparisons.is_above(before, culprit)
        size = comparisons.in_words(before, culprit)
    except CannotMeasure as why:
        slower, size = None, str(why)
    name = candidates.described(left[0])
    if not slower:
        print_lines(
            [f"NO VERDICT: {name} seemed to be the first bad one, but against the one before: {size}"]
        )
        return NO_VERDICT
    print_lines([f"FIRST BAD: {name}", f"against the one before: {size}", *candidates.changes(left[0])])
    return 0


def what_to_measure(test: str, options: list[str], known: list[Any] | None) -> tuple[str, list[str]]:
    """Return the test to measure, and the options of pytest: by default those of a search that goes on.

    Otherwise they are those of the newest stored run, which must have found a slower test.
    """
    if test:
        if ".py" not in test:
            raise Refused(f"TEST takes a test such as perf/test_it.py::test_it[x], got {test}; name one")
        return test, options
    if known:
        return known[3], known[4]
    run = newest_run(Path.cwd())
    header = read_document(run)["ddpperf"]
    if not (worst := worst_test(header)):
        raise Refused(f"the newest run {run.name} found no slower test; name a test")
    return worst, [*shlex.split(command_words(header, tests=False, without=OF_COMPARISONS)), *options]


def main() -> int:
    parser = Parser("ddpperf.bisect", __doc__)
    parser.add_argument(
        "--good", required=True, metavar="A", help="a commit, an interpreter or NAME==VERSION"
    )
    parser.add_argument("--bad", required=True, metavar="B", help="a later one of the same kind")
    parser.add_argument("--between", default="", metavar="X,Y", help="what lies between, the oldest first")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="keep environments of versions here")
    parser.add_argument("test", nargs="?", default="", help="the test to measure")
    given, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as cleanup:
            return search(given, options, cleanup)
    except KeyboardInterrupt:
        print_lines(["NO VERDICT: the search was interrupted; the same command continues it"])
        return NO_VERDICT
    except (NoBaseline, Refused, OSError) as problem:
        return refused(problem)


if __name__ == "__main__":
    sys.exit(main())

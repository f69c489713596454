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
import os
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

from ddpperf.errors import Refused, first_line
from ddpperf.history.bisection import SETS, Comparisons, Stage, first_bad
from ddpperf.history.versions import Candidates, CannotMeasure, committed, days_between, listed
from ddpperf.io.command import Parser, print_lines, refused
from ddpperf.io.files import read_text, write_atomically
from ddpperf.machine.child_process import run_child
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.report.summary import worst_test
from ddpperf.results.command_words import OF_COMPARISONS, command_words
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import NoBaseline, newest_run, read_document
from ddpperf.why.lines import why_lines

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

    def path_of(self, base: str, candidate: str, name: str) -> Path:
        return self.folder / f"{sha256(f'{base} {candidate}'.encode()).hexdigest()[:16]}-{name}.json"

    def measure(self, base: str, candidate: str, sets: int) -> list[Stage]:
        """Return the stages of an A/B run. sets: how many process sets the pair already has."""
        return self.run(base, candidate, f"{sets}", "--max-seconds=0", f"--replicates={SETS}")

    def run(self, base: str, candidate: str, name: str, *options: str) -> list[Stage]:
        """Return the stages of an A/B run that is stored under this name, or that is made now."""
        path = self.path_of(base, candidate, name)
        if not path.exists():
            command = [sys.executable, "-m", "pytest", self.test, f"--benchmark-json={path}"]
            try:
                command += [f"--base={self.candidates.side(base, 0)}"]
                command += [f"--candidate={self.candidates.side(candidate, 1)}"]
                ended = run_child([*command, *options, *self.options], {}, COMPARISON_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CannotMeasure(first_line(error)) from error
            if not path.exists():
                lock_devices([gpu.uuid for gpu in visible_gpus()] or ["cpu"]).close()  # another run ends all
                errors = re.findall(r"(?:ERROR|error): (?!usage)(.+)", f"{ended.stdout}\n{ended.stderr}")
                raise CannotMeasure((errors or [f"pytest ended with status {ended.returncode}"])[-1])
        try:
            return stages_of(read_document(path))
        except CannotMeasure:
            path.unlink()  # measure it again if the search is continued
            raise


def stages_of(document: dict[str, Any]) -> list[Stage]:
    """Return the log seconds of the process sets in each stage of an A/B run of one test."""
    header = document["ddpperf"]
    if len(outcomes := header["outcomes"]) > 1:
        raise CannotMeasure(f"TEST names {len(outcomes)} tests; name one, such as {min(outcomes)}")
    stored = [one["extra_info"]["ddpperf"] for one in document["benchmarks"]]
    for stage in header.get("judged", {}).get("stages", ()):
        stored += stage["tests"].values()
    stages: list[Stage] = []
    for one in map(Measured.from_json, stored):
        seconds = one.median_step_seconds() if one.spec.repeats else one.mean_step_seconds()
        sides = [
            [log(seconds[sample.set]) for sample in one.samples if sample.side == side]
            for side in (BASE, CANDIDATE)
        ]
        stages += [(sides[0], sides[1])] if min(map(len, sides)) > 1 else []
    if not stages:
        reasons = [outcome["reason"] for outcome in outcomes.values()] + header["verdict"]["reasons"]
        raise CannotMeasure(next(filter(None, reasons), "it measured nothing"))
    return stages


def search(given: argparse.Namespace, options: list[str], cleanup: ExitStack) -> str:
    """Search between the given ends, print each step, and return why there is no answer, or ""."""
    folder = FOLDER.absolute()
    state, tree = folder / "search.json", folder / "tree"
    known = json.loads(read_text(state)) if any(folder.glob("*-*.json")) else None
    test, options = what_to_measure(given.test, options, known)
    wanted = [given.good, given.bad, given.between, test, options]
    if known not in (None, wanted):
        what = f"{FOLDER} has a search from {known[0]} to {known[1]} that has not ended"
        raise Refused(f"{what}; type its command again, or delete {FOLDER}")
    if "==" in given.good or os.path.isfile(given.good):
        between = given.between.split(",") if given.between else days_between(given.good, given.bad)
        environments = (given.environments or folder / "environments").absolute()
        candidates = listed([given.good, *between, given.bad], tree, environments, cleanup)
    else:
        candidates = committed(given.good, given.bad, tree, cleanup)
    write_atomically(state, json.dumps(wanted))
    runs = ABRuns(candidates=candidates, test=test, options=options, folder=folder)
    comparisons = Comparisons(runs.measure)
    ends = candidates.label(candidates.ends[0]), candidates.label(candidates.ends[1])
    try:
        differ = comparisons.is_above(ends)
    except CannotMeasure as why:
        raise Refused(f"{given.good} and {given.bad} cannot be compared: {why}") from why
    size = comparisons.in_words(ends)
    if not differ:
        advice = "exchange them" if differ is False else "use a quieter machine, or a test that changed more"
        return f"{given.bad} is not slower than {given.good} in {test}: {size}; {advice}"
    print_lines([test, f"{given.bad} against {given.good}: {size}"])
    left = first_bad(candidates, comparisons, lambda line: print_lines([line]))
    if len(left) > 1:
        return f"one of these is the first bad one: {'; '.join(map(candidates.described, left))}"
    name = candidates.described(left[0])
    pair = candidates.label(candidates.before(left[0])), candidates.label(left[0])
    try:
        comparisons.stages.setdefault(pair, []).extend(runs.run(*pair, "last"))
        slower, size = comparisons.is_above(pair), comparisons.in_words(pair)
    except CannotMeasure as why:
        slower, size = None, str(why)
    if not slower:
        return f"{name} seemed to be the first bad one, but against the one before: {size}"
    print_lines([f"FIRST BAD: {name}", f"against the one before: {size}", *candidates.changes(left[0])])
    print_lines(why_lines(read_document(runs.path_of(*pair, "last"))["ddpperf"]))
    return ""


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
    parser.add_argument("--good", required=True, metavar="A", help="a commit, interpreter or NAME==VERSION")
    parser.add_argument("--bad", required=True, metavar="B", help="a later one of the same kind")
    parser.add_argument("--between", default="", metavar="X,Y", help="what lies between, the oldest first")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="keep environments of versions here")
    parser.add_argument("test", nargs="?", default="", help="the test to measure")
    given, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as cleanup:
            problem = search(given, options, cleanup)
            cleanup.callback(shutil.rmtree, FOLDER)  # the search has ended
    except KeyboardInterrupt:
        problem = "the search was interrupted; the same command continues it"
    except (NoBaseline, Refused, OSError) as error:
        return refused(error)
    if problem:
        print_lines([f"NO VERDICT: {problem}"])
    return NO_VERDICT if problem else 0


if __name__ == "__main__":
    sys.exit(main())

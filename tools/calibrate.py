"""Measures how often this machine's verdicts are wrong, and which slow-downs they find.

    python -m tools.calibrate [--minutes 60] [--run gate] [--into FILE] [-- OPTIONS OF THE TEST RUNS]

Base and candidate have equal code, but the candidate's ranks put known slow-downs into about half of
the measurements (`tools.slow_downs`). One of three runs has no slow-downs. A trial is one measurement
in one run. Each run is added to FILE, so that calls on several days share the work. The first run with
some options has no slow-downs. It shows the times and the tolerances, of which later slow-downs are
0.25 to 5 times as large. `python -m tools.update_docs` makes docs/trust.md from the
files in docs/trials/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from ddpperf import specs
from ddpperf.machine.child_process import die_with_parent
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.hardware import hardware_key
from ddpperf.verdict.noise_classes import LAUNCH_BOUND_TOLERANCE
from tools.markdown_tables import ROOT, markdown
from tools.slow_downs import EVERY, KINDS, VARIABLE, SlowDown, key_of

FACTORS = {
    0.25: 20,
    0.5: 20,
    1.0: 60,
    2.0: 20,
    5.0: 10,
}  # of the tolerance, with how many trials of each kind
METRIC = {"1 in 40": "mean_time", "memory": "peak_memory_bytes"}  # what shows a kind; others: time
LEAST_STEPS = 3 * EVERY  # of a side, for a rare slow-down
EQUAL_RUNS = 3  # one of so many runs is without slow-downs
PATCH = """

from tools.slow_downs import slowed  # noqa: E402

open_measurement = slowed(open_measurement)
"""
Run = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--run", choices=("gate", "compare"), default="gate")
    parser.add_argument("--slowed", type=float, default=0.5, help="the fraction of slowed measurements")
    parser.add_argument("--factor", type=float, choices=[*FACTORS], help="the only size of slow-downs")
    parser.add_argument("--kind", choices=KINDS, help="the only kind of slow-downs")
    parser.add_argument("--into", type=Path, default=ROOT / ".ddpperf" / "calibration" / "trials.jsonl")
    parser.add_argument("options", nargs="*", help="options of the test runs, after --")
    chosen = parser.parse_args(arguments)
    commit = git(ROOT, "rev-parse", "--short=12", "HEAD")
    checkouts = Checkouts(ROOT / ".ddpperf" / "calibration" / commit)
    chosen.into.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in chosen.into.read_text().splitlines()] if chosen.into.exists() else []
    what = {"machine": hardware_key("cuda" if (gpus := visible_gpus()) else "cpu", gpus), "commit": commit}
    what |= {"run": chosen.run, "options": chosen.options}
    end, longest = time.monotonic() + 60 * chosen.minutes, 0.0
    while time.monotonic() + longest < end:
        began = time.monotonic()
        alike = [run for run in runs if run.items() >= what.items()]
        plan = chosen.slowed, chosen.kind, chosen.factor
        slow = planned(alike, len(runs), *plan) if len(alike) % EQUAL_RUNS else {}
        stored = checkouts.measure(chosen.run, chosen.options, slow, end)
        if stored is None:
            break
        longest = max(longest, time.monotonic() - began)
        header = stored["ddpperf"]
        run = {
            **what,
            "machine": header["hardware_key"],
            "seconds": round(header["timing"]["seconds"]),
            "verdict": header["verdict"]["status"],
            "reason": header["verdict"]["reasons"][0],
            "trials": list(trials_of(stored, slow)),
        }
        if not run["trials"]:
            sys.exit(f"nothing was compared ({run['reason']}); select tests that the {chosen.run} has")
        runs.append(run)
        with chosen.into.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{run['verdict']} in {run['seconds']} s, {len(slow)} slow-downs", flush=True)
    print(tables(runs))


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def planned(
    runs: Sequence[Run],
    seed: int,
    slowed: float,
    only_kind: str | None = None,
    only_factor: float | None = None,
) -> dict[str, SlowDown]:
    """Return slow-downs for a fraction of the measurements of earlier runs, of the kinds that lack trials."""
    draw = random.Random(seed)
    values: dict[str, dict[str, Run]] = {}  # the first base value and tolerance, by spec and metric
    done: Counter[tuple[str, float]] = Counter()
    for run in runs:
        for trial in run["trials"]:
            values.setdefault(trial["spec"], {}).setdefault(trial["metric"], trial)
            if trial.get("kind") and trial["metric"] == METRIC.get(trial["kind"], "time"):
                done[trial["kind"], trial["factor"]] += 1
    found = {}
    for spec, metrics in values.items():
        possible = [
            (done[kind, factor] / FACTORS[factor], draw.random(), kind, factor)
            for kind in kinds_of(specs.from_json(json.loads(spec)), metrics)
            for factor in ([only_factor] if only_factor else FACTORS)
            if only_kind in (None, kind)
        ]
        if possible and draw.random() < slowed:
            _, _, kind, factor = min(possible)
            done[kind, factor] += 1
            row = metrics[METRIC.get(kind, "time")]
            found[spec] = SlowDown(
                kind=kind, factor=factor, fraction=factor * row["tolerance"], value=row["base"]
            )
    return found


def kinds_of(spec: specs.Spec, metrics: Mapping[str, Run]) -> list[str]:
    """Return the kinds of slow-downs that a measurement's judged metrics can show."""
    on_gpu = "peak_memory_bytes" in metrics
    tolerance = metrics["time"]["tolerance"]
    waits = tolerance >= LAUNCH_BOUND_TOLERANCE  # for its launches
    impossible = {
        "one rank": spec.world_size == 1,
        "1 in 40": spec.calls > 1 or metrics.get("mean_time", {"steps": 0})["steps"] < LEAST_STEPS,
        "memory": not on_gpu,
        "CPU only": not (on_gpu and waits),
        "constant": on_gpu and waits,
        "percent": on_gpu and waits,
    }
    return [kind for kind in KINDS if "time" in metrics and not impossible.get(kind, False)]


class Checkouts:
    """A checkout of the present commit, and one whose ranks also put slow-downs into the steps."""

    def __init__(self, folder: Path) -> None:
        self.base, self.candidate = folder / "base", folder / "candidate"
        for place in (self.base, self.candidate):
            if not place.exists():
                subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
        patched = self.candidate / "ddpperf" / "workers" / "rank_commands.py"
        patched.write_text(patched.read_text().removesuffix(PATCH) + PATCH)

    def measure(
        self, run: str, options: Sequence[str], slow: Mapping[str, SlowDown], end: float
    ) -> Run | None:
        """Make a test run, and return what it stored; None if it was stopped at the time `end`."""
        if run == "gate":
            return self._pytest(["-m", "gate", f"--base={self.base}", *options], slow, end)
        stored = self.base / f"stored{' '.join(options).replace('/', '_')}.json"
        if not stored.exists():
            if self._pytest(options, {}, end, self.base) is None:
                return None
            max(self.base.glob(".ddpperf/runs/*/*.json")).rename(stored)
        return self._pytest([f"--benchmark-compare={stored}", *options], slow, end)

    def _pytest(
        self,
        options: Sequence[str],
        slow: Mapping[str, SlowDown],
        end: float,
        checkout: Path | None = None,
    ) -> Run | None:
        folder = checkout or self.candidate
        plan = folder.parent / "slow_downs.json"
        plan.write_text(json.dumps({spec: asdict(slow_down) for spec, slow_down in slow.items()}))
        for earlier in folder.glob(".ddpperf/runs/*/*.json"):
            earlier.unlink()  # an interrupted run stored what it had
        command = [sys.executable, "-m", "pytest", "perf/", *options]
        with (folder.parent / "output.txt").open("w") as output:
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {VARIABLE: str(plan)},
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
                child.wait()
                return None
        stored = max(folder.glob(".ddpperf/runs/*/*.json"), default=None)
        if stored is None:
            sys.exit(f"a test run stored nothing; its output is in {folder.parent / 'output.txt'}")
        run: Run = json.loads(stored.read_text())
        return run


def trials_of(stored: Run, slow: Mapping[str, SlowDown]) -> Iterator[Run]:
    """Yield each judged row of a stored run, with the slow-down that was put into its measurement."""
    spec_of = {one["fullname"]: one["extra_info"]["ddpperf"]["spec"] for one in stored["benchmarks"]}
    for row in stored["ddpperf"]["judged"]["rows"]:
        if row["tests"] and row["metric"] in ("time", "mean_time", "peak_memory_bytes") and row["tolerance"]:
            spec = key_of(specs.from_json(spec_of[row["tests"][0]]))
            put = asdict(slow[spec]) if spec in slow else {}
            kept = ("metric", "tolerance", "base", "ratio", "low", "high", "finding", "sets", "steps")
            yield {"spec": spec} | put | {name: row[name] for name in kept}


def tables(runs: Iterable[Run]) -> str:
    """Return Markdown tables of how often the verdicts of some test runs were wrong, and what they found."""
    place = itemgetter("machine", "run")
    by_place = [(*key, list(group)) for key, group in groupby(sorted(runs, key=place), place)]
    everything = [run for *_, group in by_place for run in group]
    equal = [_unslowed(machine, kind, group) for machine, kind, group in by_place]
    return f"{markdown(UNSLOWED, [*equal, _unslowed('all', '', everything)])}\n{_slowed(everything)}"


UNSLOWED = ["machine", "run", "unslowed", "called worse", "at most", "runs", "half exclude", "95% exclude"]


def _unslowed(machine: str, kind: str, runs: Sequence[Run]) -> list[str]:
    """Return a row on measurements without a slow-down: false alarms, and what they claim to exclude."""
    equal = [rows for rows in _measurements(runs) if "kind" not in rows[0]]
    whole = [run for run in runs if not any("kind" in row for row in run["trials"])]
    verdicts = Counter(run["verdict"] for run in whole)
    false = sum(map(_is_found, equal))
    bound = binomtest(false, len(equal)).proportion_ci(0.90, "exact").high if equal else 1.0
    times = ([row for row in rows if "time" in row["metric"]] for rows in equal)
    ends = sorted(max(row["high"] or math.inf for row in rows) - 1 for rows in times if rows)
    half, most = (f"{ends[math.ceil(part * len(ends)) - 1]:.1%}" if ends else "" for part in (0.5, 0.95))
    ended = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return [machine, kind, str(len(equal)), str(false), f"{bound:.2%}", ended, half, most]


def _measurements(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield the rows of each measurement of each run."""
    for run in runs:
        for _, rows in groupby(sorted(run["trials"], key=itemgetter("spec")), itemgetter("spec")):
            yield list(rows)


def _is_found(rows: Iterable[Run]) -> bool:
    return any(row["finding"] == "worse" for row in rows)


def _slowed(runs: Sequence[Run]) -> str:
    """Return the table of put-in slow-downs: how many were found, and how many were wrongly excluded."""
    slow = [rows for rows in _measurements(runs) if "kind" in rows[0]]
    body = []
    for kind in (*KINDS, "all"):
        of_kind = [rows for rows in slow if kind in (rows[0]["kind"], "all")]
        cells = []
        for factor in FACTORS:
            found = [_is_found(rows) for rows in of_kind if rows[0]["factor"] == factor]
            cells.append(f"{sum(found)} of {len(found)}" if found else "")
            if found and factor == 1:
                interval = binomtest(sum(found), len(found)).proportion_ci(0.95, "exact")
                cells[-1] += f" ({interval.low:.0%} to {interval.high:.0%})"
        body.append([kind, *cells, str(sum(map(_is_excluded, of_kind)))])
    sizes = [f"{factor:g} x tolerance" for factor in FACTORS]
    return markdown(["slow-down", *sizes, "wrongly excluded"], body)


def _is_excluded(rows: Sequence[Run]) -> bool:
    """Return whether the interval of a slowed measurement excludes the slow-down, and nothing was found."""
    shows = [row for row in rows if row["metric"] == METRIC.get(row["kind"], "time")]
    return not _is_found(rows) and any(row["high"] and row["high"] < 1 + _size(row) for row in shows)


def _size(row: Run) -> float:
    """Return a slow-down as a fraction of the base in the same run."""
    return float(row["fraction"] * (1.0 if row["kind"] == "percent" else row["value"] / row["base"]))


if __name__ == "__main__":
    main()

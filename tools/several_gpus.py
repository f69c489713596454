"""Measures all that a machine with several GPUs can show, and prints one table of it.

    NCCL_NVLS_ENABLE=0 python -m tools.several_gpus FOLDER [--seconds 540] [--only core-1] [-- OPTIONS]

The test runs of PARTS follow each other, the most important first, each in a fresh process. A part
whose stored run is in the folder is not measured again, so that several calls can share the work.
When the seconds are over, the part that runs is interrupted, and keeps what it has measured. For
each part, the folder gets the output (NAME.txt) and the stored run (NAME.json). The table comes
from all stored runs in the folder.

With --nccl-tests, the folder of nccl-tests' programs, the all-reduces of nccl-tests are measured,
too, once by themselves and once in a CUDA graph (N.txt and N-graph.txt for N GPUs).
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from ddpperf.machine.child_process import die_with_parent
from ddpperf.report.cases import Case, cases_of, of_functions
from ddpperf.report.text import function_of
from ddpperf.results import units
from ddpperf.results.stored_runs import NoBaseline, read_document
from ddpperf.specs import AllReduceSpec, TrainingSpec, format_bytes
from tools.tables import ROOT, in_place, is_plain, markdown

THIS_PYTHON = f"--against={sys.executable}"
SCALING = ["perf/test_scaling.py", "perf/test_projection.py"]
# The arguments of each test run, by its name. The delay is 3% of the shortest step on 2 H200s.
PARTS = {
    "core-1": ["perf/"],
    "core-2": ["perf/"],
    "core-3": ["perf/"],
    "core-compared": ["perf/", "--benchmark-compare={folder}/core-1.json"],
    "gate-equal": ["perf/", "-m", "gate", THIS_PYTHON],
    "gate-slower": ["perf/", "-m", "gate", THIS_PYTHON, "--slow-down=0.00006"],
    "split": ["perf/test_comm_split.py::test_comm_split"],
    "scaling": [*SCALING, "-k", "not data_parallel and not eager"],
    "buckets": [f"{SCALING[0]}::test_weak_scaling", "--executions=graph", "--spec=bucket_cap_mb=25"],
    "all_reduce": ["perf/test_all_reduce.py"],
}
SEVERAL_CALLS = "-b 1K -e 1G -f 4 -g 1 -a 3"  # of nccl-tests' all_reduce_perf
LEAST_SECONDS = 30  # a part does not begin if less is left
SECONDS_TO_SAVE = 20  # for an interrupted part
MOST_SECONDS_TO_SAVE = 50  # until an interrupted part is killed
MODEL = "resnet18_cifar"  # whose scaling the table shows
EXPOSED = "exposed_comm_seconds", "traced_exposed_comm_seconds"
PACE = "slower pace"  # in the warning of a test whose CUDA graphs were replayed at the slower pace

Runs = Mapping[str, Sequence[Case]]  # the measured tests of each stored run
Rows = Iterator[tuple[str, str, str]]  # what, where, value


# --- measure


def measure(folder: Path, wanted: Sequence[str], seconds: float, options: Sequence[str]) -> None:
    """Measure the wanted parts that the folder does not have yet, until the seconds are over."""
    end = time.monotonic() + seconds
    for name in wanted:
        left = end - time.monotonic()
        if not (folder / f"{name}.json").exists() and left > LEAST_SECONDS:
            arguments = [argument.format(folder=folder) for argument in PARTS[name]]
            command = [sys.executable, "-m", "pytest", *arguments, *options]
            print(f"{name}: {shlex.join(command)}", flush=True)
            run_part(folder, name, command, left - SECONDS_TO_SAVE)


def run_part(folder: Path, name: str, command: Sequence[str], seconds: float) -> None:
    """Run a part, interrupt it when its seconds are over, and keep its output and its stored run.

    If this process is interrupted, it interrupts the part in the same way.
    """
    # Not NAME.json: pytest makes the file at its start, and a killed part leaves it empty.
    stored, began = folder / f"{name}.json.part", time.monotonic()
    with open(folder / f"{name}.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, f"--benchmark-json={stored}"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches this process alone
            preexec_fn=die_with_parent,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(seconds, 1))
        finally:
            _end(process)
            if stored.exists() and stored.stat().st_size:
                stored.replace(folder / f"{name}.json")
            stored.unlink(missing_ok=True)
    print(f"  exit status {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a part that runs on, and kill it if it does not end."""
    if process.poll() is None:
        process.terminate()  # SIGINT is ignored by what a shell has started in the background
        try:
            process.wait(MOST_SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure_nccl_tests(folder: Path, programs: Path, gpus: int) -> None:
    """Measure the all-reduces of nccl-tests, eager and in a CUDA graph."""
    for name, graph in (("", ""), ("-graph", "-G 20")):
        command = [str(programs / "all_reduce_perf"), *f"{SEVERAL_CALLS} -t {gpus} {graph}".split()]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        (folder / f"{gpus}{name}.txt").write_text(f"# {shlex.join(command)}\n{ended.stdout}", "utf-8")


# --- the table


def table(folder: Path) -> str:
    """Return a Markdown table of what the stored runs of the parts in a folder show."""
    runs: dict[str, list[Case]] = {}
    rows: list[tuple[str, str, str]] = []
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                document = read_document(path)
                stored, cases = document["ddpperf"], cases_of(document)
                verdict = f"{stored['verdict']['status']}: {stored['verdict']['reasons'][0]}"
                rows.append((f"{name}, {stored['timing']['seconds']:.0f} s", "verdict", verdict))
                runs[name] = cases
            except (NoBaseline, AttributeError, LookupError, TypeError, ValueError):
                rows.append((name, "verdict", f"{path.name} is damaged; remove it to measure the part again"))
    for rows_of in (weak_scaling, epochs, fits, splits, fastest_all_reduces, paces):
        rows += rows_of(runs)
    return markdown(("what", "where", "value"), [*rows, *over_nccl_tests(runs, folder)])


def trained(runs: Runs, *tests: str) -> dict[str, list[tuple[TrainingSpec, Case]]]:
    """Return the cases of the tests that train the small model, by what they train."""
    found: dict[str, list[tuple[TrainingSpec, Case]]] = {}
    for cases in runs.values():
        for case in of_functions(cases, *tests):
            spec = case.measured.spec
            if isinstance(spec, TrainingSpec) and spec.model == MODEL and not case.side:
                found.setdefault(spec.id, []).append((spec, case))
    return found


def weak_scaling(runs: Runs) -> Rows:
    """Yield the weak efficiency of each captured step, the median over the runs."""
    for found in trained(runs, "test_weak_scaling").values():
        spec, case = found[0]
        efficiencies = [value for _, other in found if (value := other.value("efficiency")) is not None]
        if spec.captured and efficiencies:
            step = units.seconds(median(other.seconds for _, other in found))
            yield "weak efficiency", case.described(), f"{units.percent(median(efficiencies))}, {step} a step"


def epochs(runs: Runs) -> Rows:
    """Yield the time of each epoch, the median over the runs."""
    for found in trained(runs, "test_epoch_scaling").values():
        seconds = median(case.seconds for _, case in found)
        yield "epoch", found[0][1].described(), units.seconds(seconds)


def fits(runs: Runs) -> Rows:
    """Yield the errors of the projection, and what the two laws fit."""
    metrics = {
        "test_projection": ("projection_error", "excess_seconds", "plain_excess_seconds"),
        "test_amdahl": ("serial_fraction",),
        "test_gustafson": ("serial_fraction",),
    }
    for test, names in metrics.items():
        for cases in runs.values():
            for case in of_functions(cases, test):
                values = (f"{name} {case.value(name):.4g}" for name in names if case.value(name) is not None)
                yield test, case.described(), ", ".join(values)


def splits(runs: Runs) -> Rows:
    """Yield how far the two methods of measuring exposed communication are apart."""
    for cases in runs.values():
        for case in of_functions(cases, "test_comm_split"):
            exposed, traced = (case.value(name) for name in EXPOSED)
            if exposed is not None and traced is not None:
                apart, why = units.percent(abs(exposed - traced) / case.seconds), "; ".join(case.warnings)
                what = f"{apart} of the step" + f" ({why})" * bool(why)
                yield "difference between the methods of the split", case.described(), what


def fastest_all_reduces(runs: Runs) -> Rows:
    """Yield the captured time of NCCL's all-reduce over that of the fastest other algorithm."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for spec, seconds in all_reduces(runs).items():
        if spec.captured and spec.in_place:
            times.setdefault((spec.world_size, spec.nbytes), {})[spec.algorithm] = seconds
    for (N, nbytes), by_algorithm in times.items():
        nccl = by_algorithm.pop("backend", None)
        if nccl and by_algorithm:
            fastest = min(by_algorithm, key=by_algorithm.__getitem__)
            value = f"{units.factor(nccl / by_algorithm[fastest])} ({fastest})"
            yield "NCCL over the fastest other", f"{N} devices, {format_bytes(nbytes)}", value


def all_reduces(runs: Runs) -> dict[AllReduceSpec, float]:
    """Return the time of each all-reduce, the median over the runs."""
    times: dict[AllReduceSpec, list[float]] = {}
    for cases in runs.values():
        for case in cases:
            if isinstance(case.measured.spec, AllReduceSpec) and not case.side:
                times.setdefault(case.measured.spec, []).append(case.seconds)
    return {spec: median(seconds) for spec, seconds in times.items()}


def over_nccl_tests(runs: Runs, folder: Path) -> Rows:
    """Yield the time of NCCL's all-reduce from torch over that in nccl-tests."""
    for spec, seconds in all_reduces(runs).items():
        output = folder / f"{spec.world_size}{'-graph' * spec.captured}.txt"
        measured = in_place(output) if is_plain(spec) and output.exists() else {}
        if theirs := measured.get(spec.nbytes):
            where = f"{spec.world_size} devices, {format_bytes(spec.nbytes)}, {spec.execution}"
            yield "NCCL from torch over nccl-tests", where, f"{seconds / median(theirs):.3f}"


def paces(runs: Runs) -> Rows:
    """Yield the tests whose CUDA graphs were replayed at the slower pace."""
    for name, cases in runs.items():
        slow = [function_of(case.test) for case in cases if any(PACE in text for text in case.warnings)]
        yield (
            "tests at the slower pace",
            name,
            f"{len(slow)} of {len(cases)} {', '.join(dict.fromkeys(slow))}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the folder does not have yet, then print the table."""
    own = [*(sys.argv[1:] if arguments is None else arguments)]
    end = own.index("--") if "--" in own else len(own)
    parser = argparse.ArgumentParser(
        prog="python -m tools.several_gpus",
        usage="%(prog)s FOLDER [--seconds SECONDS] [--only ONLY] [--nccl-tests DIR] [-- OPTIONS]",
        description=f"{__doc__.splitlines()[0]} All test runs get the OPTIONS.",
    )
    parser.add_argument("folder", type=Path, help="folder of the outputs and the stored runs")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together; default 540")
    parser.add_argument("--only", default=",".join(PARTS), help="the parts, joined by commas; default all")
    parser.add_argument("--nccl-tests", type=Path, help="folder of nccl-tests' programs")
    given = parser.parse_args(own[:end])
    if unknown := set(given.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only: unknown parts {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.nccl_tests:
        measure_nccl_tests(given.folder, given.nccl_tests, torch.cuda.device_count())
    measure(given.folder.resolve(), [*filter(None, given.only.split(","))], given.seconds, own[end + 1 :])
    print(table(given.folder))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the part, too
    main()

"""Measures all that a machine with several GPUs can show, and prints one table of it.

    NCCL_NVLS_ENABLE=0 python -m tools.several_gpus FOLDER [--seconds 540] [--only core-1] [-- OPTIONS]

Each part is a test run in a fresh process; the most important part is measured first. For each part,
the folder gets the output (NAME.txt) and the stored run (NAME.json). A part whose stored run is in
the folder is not measured again, so that several calls can share the work. When the seconds are
over, the part that runs is interrupted. What it has measured is kept as NAME-interrupted.json, and
the next call measures the part again. The table shows all stored runs in the folder.
core-compared compares with core-1, which must be in the folder.

--nccl-tests names the folder that has all_reduce_perf, a program of nccl-tests. The all-reduces of
nccl-tests are then measured, too, eager and in a CUDA graph (N.txt and N-graph.txt for N GPUs),
unless the folder has them.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from ddpperf.machine.child_process import die_with_parent
from ddpperf.report.cases import Case, cases_of, of_functions
from ddpperf.report.text import function_of
from ddpperf.results import units
from ddpperf.results.samples import SLOW_PACE
from ddpperf.results.stored_runs import NoBaseline, read_document
from ddpperf.specs import TrainingSpec, format_bytes
from tools.tables import ROOT, all_reduces, in_place, is_plain, markdown

THIS_PYTHON = f"--candidate={sys.executable}"
SCALING = "perf/test_scaling.py"
WEAK = f"{SCALING}::test_weak_scaling"
BUCKETS = "{gpus}gpu and not data_parallel and not torchvision and not resnet50"
# What the pages about course reports still need
REPORTS = (
    "(split and data_parallel and {gpus}gpu and b128) or (test_weak_scaling and data_parallel) or "
    "(test_weak_scaling and resnet50 and not eager and not compile and not own_ddp) or "
    "(test_step_breakdown and {gpus}gpu and not eager and not epoch and not speedup and not resnet50)"
)
# NCCL's all_reduces in CUDA graphs and plain DDP steps, which README.md's picture shows
PICTURE = (
    "(test_weak_scaling or graph) and not eager and not compile and not own_ddp and not resnet50 and not "
    "torchvision and not shot and not copy_engine and not low_latency and not out_of_place"
)
# The arguments of each test run, by its name. The delay is 3% of the shortest step on 2 H200s.
PARTS = {
    "core-1": ["perf/"],
    "core-2": ["perf/"],
    "core-3": ["perf/"],
    "core-compared": ["perf/", "--benchmark-compare={folder}/core-1.json"],
    "gate-equal": ["perf/", "-m", "gate", THIS_PYTHON],
    "gate-slower": ["perf/", "-m", "gate", THIS_PYTHON, "--candidate=delay_seconds=0.00006"],
    "all_reduce": ["perf/test_all_reduce.py", "-k", "{gpus}gpu"],
    "own_ddp": [WEAK, "-k", "{gpus}gpu and own_ddp and not compile and not eager"],
    "epochs": [f"{SCALING}::test_epoch_scaling", "-k", "({gpus}gpu or 1gpu) and compile and not eager"],
    "split": ["perf/test_comm_split.py::test_comm_split", "-k", "{gpus}gpu and not resnet50"],
    "laws": [f"{SCALING}::test_amdahl", f"{SCALING}::test_gustafson", "perf/test_projection.py"],
    "buckets": [WEAK, "--executions=graph", "--spec=bucket_cap_mb=25", "-k", BUCKETS],
    "picture": [WEAK, "perf/test_all_reduce.py::test_all_reduce", "-k", PICTURE],
    "reports": ["perf/test_step_breakdown.py", "perf/test_comm_split.py", WEAK, "-k", REPORTS],
}
ALL_REDUCE_PERF = "-b 1K -e 1G -f 4 -g 1 -a 3"  # the options of this program of nccl-tests
LEAST_SECONDS = 30  # a part does not begin if less is left
SECONDS_TO_SAVE = 20  # for an interrupted part
MOST_SECONDS_TO_SAVE = 50  # until an interrupted part is killed
MODEL = "resnet18_cifar"  # whose scaling the table shows
INTERRUPTED = "-interrupted"  # at the end of the name of a part's stored run

Cases = Sequence[Case]
Row = tuple[str, str, str]  # what, where, value


# --- measure


def measure(folder: Path, wanted: Sequence[str], seconds: float, options: Sequence[str]) -> None:
    """Measure the wanted parts that the folder does not have yet, until the seconds are over."""
    end, gpus = time.monotonic() + seconds, torch.cuda.device_count()
    for name in wanted:
        left = end - time.monotonic()
        if not (folder / f"{name}.json").exists() and left > LEAST_SECONDS:
            arguments = [argument.format(folder=folder, gpus=gpus) for argument in PARTS[name]]
            command = [sys.executable, "-m", "pytest", *arguments, *options]
            run_part(folder, name, command, left - SECONDS_TO_SAVE)


def run_part(folder: Path, name: str, command: Sequence[str], seconds: float) -> None:
    """Run a part, interrupt it when its seconds are over, and keep its output and its stored run.

    If this process is interrupted, it interrupts the part in the same way.
    """
    # Not NAME.json: pytest makes the file at its start, and a killed part leaves it empty.
    stored = folder / f"{name}.json.part"
    command = [*command, f"--benchmark-json={stored}"]
    print(f"{name}: {shlex.join(command)}", flush=True)
    began = time.monotonic()
    with open(folder / f"{name}.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches this process alone
            preexec_fn=die_with_parent,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
        finally:
            ending = INTERRUPTED if process.poll() is None else ""
            _end(process)
            if stored.exists() and stored.stat().st_size:
                stored.replace(folder / f"{name}{ending}.json")
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
    """Measure the all-reduces of nccl-tests, eager and in a CUDA graph.

    A failure is printed. The test runs do not need the result.
    """
    for name, graph in (("", ""), ("-graph", "-G 20")):
        output = folder / f"{gpus}{name}.txt"
        if not output.exists():
            command = [str(programs / "all_reduce_perf"), *f"{ALL_REDUCE_PERF} -t {gpus} {graph}".split()]
            try:
                ended = subprocess.run(command, capture_output=True, text=True, check=True)
            except OSError as error:
                print(f"nccl-tests: {command[0]} cannot run ({error.strerror}); check --nccl-tests")
            except subprocess.CalledProcessError as error:
                said = (error.stderr + error.stdout).strip()
                print(f"nccl-tests: {shlex.join(command)} failed with {error.returncode}:\n{said}")
            else:
                output.write_text(f"# {shlex.join(command)}\n{ended.stdout}", "utf-8")


# --- the table


def table(folder: Path) -> str:
    """Return a Markdown table of what the stored runs of the parts in a folder show."""
    verdicts, paces = list[Row](), list[Row]()
    cases: list[Case] = []
    for name in PARTS:
        kept = [path for end in ("", INTERRUPTED) if (path := folder / f"{name}{end}.json").exists()]
        for path in kept[:1]:
            try:
                document = read_document(path)
                stored, found = document["ddpperf"], cases_of(document)
                verdict = f"{stored['verdict']['status']}: {stored['verdict']['reasons'][0]}"
                verdicts.append((f"{name}, {stored['timing']['seconds']:.0f} s", "verdict", verdict))
            except (NoBaseline, AttributeError, LookupError, TypeError, ValueError):
                advice = "remove it to measure the part again"
                verdicts.append((name, "verdict", f"{path.name} is damaged; {advice}"))
                continue
            paces.append(("tests at the slower pace", name, slower_pace(found)))
            cases += found
    rows = [
        row for rows_of in (weak_scaling, epochs, fits, splits, fastest_all_reduces) for row in rows_of(cases)
    ]
    return markdown(("what", "where", "value"), [*verdicts, *rows, *paces, *over_nccl_tests(cases, folder)])


def slower_pace(cases: Cases) -> str:
    """Return the number and the names of the tests whose CUDA graphs were replayed at the slower pace."""
    slow = [
        function_of(case.test)
        for case in cases
        if max(case.measured.counter("graph_slowdown").values(), default=1.0) > SLOW_PACE
    ]
    return f"{len(slow)} of {len(cases)} {', '.join(dict.fromkeys(slow))}".rstrip()


def trainings(cases: Cases, test: str) -> dict[TrainingSpec, list[Case]]:
    """Return the cases of a test that train MODEL, by their spec."""
    found: dict[TrainingSpec, list[Case]] = {}
    for case in of_functions(cases, test):
        spec = case.measured.spec
        if isinstance(spec, TrainingSpec) and spec.model == MODEL and not case.side:
            found.setdefault(spec, []).append(case)
    return found


def weak_scaling(cases: Cases) -> Iterator[Row]:
    """Yield the weak efficiency of each captured step, the median over the runs."""
    for spec, found in trainings(cases, "test_weak_scaling").items():
        efficiencies = [fraction for case in found if (fraction := case.value("efficiency")) is not None]
        if spec.captured and efficiencies:
            step = units.seconds(median(case.seconds for case in found))
            value = f"{units.percent(median(efficiencies))}, {step} a step"
            yield "weak efficiency", found[0].described(), value


def epochs(cases: Cases) -> Iterator[Row]:
    """Yield the time of each epoch, the median over the runs."""
    for found in trainings(cases, "test_epoch_scaling").values():
        yield "epoch", found[0].described(), units.seconds(median(case.seconds for case in found))


def fits(cases: Cases) -> Iterator[Row]:
    """Yield the errors of the projection, and the serial fractions that fit the two laws."""
    metrics = {
        "test_projection": ("projection_error", "excess_seconds", "plain_excess_seconds"),
        "test_amdahl": ("serial_fraction",),
        "test_gustafson": ("serial_fraction",),
    }
    for test, names in metrics.items():
        for case in of_functions(cases, test):
            values = (f"{name} {value:.4g}" for name in names if (value := case.value(name)) is not None)
            yield test, case.described(), ", ".join(values)


def splits(cases: Cases) -> Iterator[Row]:
    """Yield the difference between the two methods of measuring exposed communication."""
    for case in of_functions(cases, "test_comm_split"):
        exposed, traced = case.value("exposed_comm_seconds"), case.value("traced_exposed_comm_seconds")
        if exposed is not None and traced is not None:
            value = f"{units.percent(abs(exposed - traced) / case.seconds)} of the step"
            if case.warnings:
                value += f" ({'; '.join(case.warnings)})"
            yield "difference between the methods of the split", case.described(), value


def fastest_all_reduces(cases: Cases) -> Iterator[Row]:
    """Yield the captured time of NCCL's all-reduce over that of the fastest other algorithm."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for spec, seconds in all_reduces(cases).items():
        if spec.captured and spec.in_place:
            times.setdefault((spec.world_size, spec.nbytes), {})[spec.algorithm] = seconds
    for (N, nbytes), by_algorithm in times.items():
        nccl = by_algorithm.pop("backend", None)
        if nccl and by_algorithm:
            fastest = min(by_algorithm, key=by_algorithm.__getitem__)
            value = f"{units.factor(nccl / by_algorithm[fastest])} ({fastest})"
            yield "NCCL over the fastest other", f"{N} devices, {format_bytes(nbytes)}", value


def over_nccl_tests(cases: Cases, folder: Path) -> Iterator[Row]:
    """Yield the time of NCCL's all-reduce from torch over that in nccl-tests."""
    for spec, seconds in all_reduces(cases).items():
        output = folder / f"{spec.world_size}{'-graph' * spec.captured}.txt"
        measured = in_place(output) if is_plain(spec) and output.exists() else {}
        if theirs := measured.get(spec.nbytes):
            where = f"{spec.world_size} devices, {format_bytes(spec.nbytes)}, {spec.execution}"
            yield "NCCL from torch over nccl-tests", where, f"{seconds / median(theirs):.3f}"


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
    parser.add_argument("--nccl-tests", type=Path, help="folder that has all_reduce_perf")
    given = parser.parse_args(own[:end])
    wanted = [*filter(None, given.only.split(","))]
    if unknown := set(wanted) - {*PARTS}:
        parser.error(f"--only: unknown parts {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{given.folder} cannot be made ({error.strerror}); name another folder")
    if given.nccl_tests:
        measure_nccl_tests(given.folder, given.nccl_tests, torch.cuda.device_count())
    measure(given.folder.resolve(), wanted, given.seconds, own[end + 1 :])
    print(table(given.folder))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the part, too
    main()

"""Specs and cases of unchanged scripts, and what is said of their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpperf.init.__main__ import TEMPLATE
from ddpperf.plugin.options.refused_options import lacking_side
from ddpperf.plugin.scripts import script_metrics, scripts
from ddpperf.results.samples import Measured
from ddpperf.specs import ScriptSpec
from ddpperf.workers.interpreter import Side
from ddpperf.workers.script_marks import MEMORY_STEPS
from ddpperf.workers.script_run import ScriptRun
from tests.command_line import Read
from tests.fake_measure import FakeMeasure
from tests.project import REPOSITORY

TORCHRUN = "torchrun --nproc-per-node {ranks} train.py --lr 0.1"


def spec(command: str, world_size: int = 2) -> ScriptSpec:
    return ScriptSpec(command=command, world_size=world_size)


@pytest.mark.parametrize(
    ("command", "name", "files"),
    [
        (TORCHRUN, "train", ("./train.py",)),
        ("cd sub && LR=1 python a/b.py", "b", ("./a/b.py",)),
        ("torchrun -m pkg.train", "train", ("./pkg/train.py",)),
        ("./run.sh 'two words'", "run.sh", ("./run.sh",)),
    ],
)
def test_script_is_named_after_its_file(command: str, name: str, files: tuple[str, ...]) -> None:
    assert spec(command).script == name
    assert spec(command).functions == files


def test_ranks_are_written_into_the_command() -> None:
    assert spec(TORCHRUN, 4).line == "torchrun --nproc-per-node 4 train.py --lr 0.1"


@pytest.mark.parametrize(("command", "sentence"), [("", "got none"), ("python 'train.py", "for the shell")])
def test_command_that_names_nothing_is_refused(command: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        spec(command)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (("--script", TORCHRUN), [2]),
        (("--script", TORCHRUN, "--world-sizes", "1,2"), [1, 2]),
        (("--script", "python train.py"), [1]),
        (("--script", "mpirun -n 3 python train.py", "--world-sizes", "3"), [3]),
    ],
)
def test_cases_of_a_script(words: tuple[str, ...], sizes: list[int], read: Read) -> None:
    found = [case.values[0] for case in scripts(read(*words))]  # type: ignore[union-attr]
    assert found == [spec(words[1], size) for size in sizes]


def test_without_a_script_nothing_is_measured(read: Read) -> None:
    (case,) = scripts(read())
    assert case.values[0] is None  # type: ignore[union-attr]


def test_script_that_only_the_candidate_has_is_new(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base := tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    options = read("--base", str(base), "--rootdir", str(tmp_path))
    assert lacking_side(options, "./train.py") == "base"
    (base / "train.py").write_text("")
    assert lacking_side(options, "./train.py") == ""


def run(*ranks: list[float], memory: int = 0) -> ScriptRun:
    """A run of a script, from the seconds of each rank's steps; its peak memory grows by 100 bytes."""
    each = {"first_step_seconds": 2.0, "delayed_over_usual": [1.3, 1.3], "environment": {}}
    peaks = [memory + 100 * number for number in range(len(ranks[0]) // MEMORY_STEPS)] if memory else []
    records = [{**each, "seconds": seconds, "peak_memory_bytes": peaks} for seconds in ranks]
    return ScriptRun(name="A1", side=Side(), folder=Path(), ranks=records, run_seconds=9.0)


def test_mean_of_all_steps_counts_and_pauses_are_named() -> None:
    measure = FakeMeasure()
    one = run([0.1] * 18 + [2.2], [0.1] * 19)
    measured = Measured(spec=spec(TORCHRUN), iterations=19, samples=(one.sample(19),))
    script_metrics(measure, measured)  # type: ignore[arg-type]
    assert measure.metrics["steps_per_second"]["A1"] == pytest.approx(19 / 4.0)
    assert measure.metrics["step_p50_seconds"] == {"A1": 0.1}
    assert measure.metrics["step_largest_seconds"] == {"A1": 2.2}
    pauses, slow = measure.notes
    assert (
        pauses
        == "pauses: 1 step took more than 5 times the median, 55% of the time; the longest took 2.200 s"
    )
    assert slow == "rank 0 is 111% slower than the fastest rank"


def test_peak_memory_is_that_of_the_steps_that_both_sides_measured() -> None:
    assert run([0.1] * 40, memory=1000).sample(25).counters["peak_memory_bytes"] == (1100.0,)


def test_experiment_is_the_one_that_init_writes() -> None:
    name = "perf/test_script.py"
    assert (REPOSITORY / name).read_text() == (TEMPLATE / name).read_text()

"""Runs with two sides: real processes, whose candidate is the same, or slower, or cannot be measured."""

from __future__ import annotations

import importlib.metadata
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.machine.hardware import hardware_key
from ddpperf.results.stored_runs import Storage
from tests.project import SLEEPING_MODEL, Finished, Project

STEPS = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=8, strategy="single"))
"""
# Few sets: the machine adds next to nothing to what a step sleeps.
SETTINGS = "[decision.cpu]\nscreen_sets = 3\nconfirm_sets = 3\n"
ONE_LOOK = "[decision.cpu]\nmargin = 0.9\ntolerance = 0.95\nscreen_sets = 2\n"
WITH_BF16 = ("--world-sizes", "2", "--against-spec", "comm_hook=bf16")
FAST, SLOW, SLOWEST = (SLEEPING_MODEL.format(seconds=seconds) for seconds in (0.1, 0.16, 0.4))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Its current folder has the fast model, the folder `other` the slower one."""
    project = Project(tmp_path)
    project.experiment.write_text(STEPS)
    (tmp_path / "mine.py").write_text(FAST)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(SLOW)
    (tmp_path / "perf" / "thresholds.toml").write_text(SETTINGS)
    try:
        yield project
    finally:
        project.clean()


def run(project: Project, *arguments: str, rounds: str = "4") -> Finished:
    sizes = ("--world-sizes", "1", "--model", "mine:sleeping", "--rounds", rounds)
    return project.run("perf", *sizes, *arguments)


def found(project: Project) -> dict[tuple[str, str], dict[str, object]]:
    """The newest run's rows: of its two sides, or of what it confirmed beside the stored run's code."""
    header = project.saved_runs()[-1]["ddpperf"]
    rows = header["confirmed" if "confirmed" in header else "against"]["rows"]
    return {(row["test"].rpartition("::")[2], row["metric"]): row for row in rows}


def torch_version() -> str:
    return importlib.metadata.version("torch").partition("+")[0]


@pytest.mark.figures
def test_a_slower_candidate_fails_after_a_second_look_on_fresh_sets(project: Project) -> None:
    finished = run(project, "--against-root", "other", "--junitxml", "junit.xml")
    assert finished.status == 1, finished
    assert "test_it.py::test_step is worse: its time is 1." in finished.output
    row = found(project)["test_step", "time"]
    assert (row["finding"], row["look"]) == ("worse", 2)
    assert 1.3 < float(str(row["ratio"])) < 1.9
    assert float(str(row["ratio"])) == pytest.approx(1.6, abs=0.15), "160 ms of 100, less what is beside"
    (document,) = project.saved_runs()
    first, second = (
        document["benchmarks"][0]["extra_info"]["ddpperf"],
        document["ddpperf"]["against"]["confirmation"],
    )
    again = second["perf/test_it.py::test_step"]
    sets = [{sample["set"] for sample in look["samples"]} for look in (first, again)]
    assert [len(each) for each in sets] == [6, 6]
    times = [{sample["seconds"][0][0] for sample in look["samples"]} for look in (first, again)]
    assert not times[0] & times[1], "fresh sets alone decide"
    cases = ET.parse(project.root / "junit.xml").getroot().findall(".//testcase")
    failed = {
        case.get("name"): case.findtext("failure", "") for case in cases if case.find("failure") is not None
    }
    assert "is worse: its time is 1." in failed["test_step"]
    assert failed["verdict"].startswith("FAIL: perf/test_it.py::test_step is worse")


@pytest.mark.figures
def test_the_same_candidate_is_not_worse_and_its_run_never_a_baseline(project: Project) -> None:
    finished = run(project, "--against", sys.executable, "--benchmark-save=same")
    assert finished.status == 0, finished
    assert "is worse" not in finished.output
    for side in ("base", "candidate"):
        finished.assert_one_sentence(finished.status, f"{side}: {sys.executable}, torch {torch_version()}")
    assert "not saved as a baseline" in finished.output
    rows = found(project)
    assert rows["test_step", "time"]["finding"] == "unchanged"
    assert rows["positive control", "time"]["control"] == "positive"
    assert float(str(rows["positive control", "time"]["ratio"])) == pytest.approx(1.25, abs=0.05)
    assert float(str(rows["negative control", "time"]["ratio"])) == pytest.approx(1, abs=0.05)
    (document,) = project.saved_runs()
    samples = document["benchmarks"][0]["extra_info"]["ddpperf"]["samples"]
    assert sorted(sample["side"] for sample in samples) == ["A"] * 3 + ["B"] * 3
    assert len(document["benchmarks"][0]["stats"]["data"]) == 3 * 4, "the time that is told is one side's"


def test_a_spec_of_its_own_for_the_candidate(project: Project) -> None:
    project.experiment.write_text(
        "from ddpperf.specs import TrainingSpec\n\n"
        "def test_step(measure):\n"
        '    step = measure(TrainingSpec(model="mine:sleeping", world_size=2, per_rank_batch_size=8, strategy="ddp"))\n'
        '    measure.metric("communicated_bytes_per_epoch", step.counter("gradient_bytes"))\n'
    )
    (project.root / "perf" / "thresholds.toml").write_text(ONE_LOOK)
    finished = run(project, *WITH_BF16, "--slow-down", "0.0001", rounds="1")
    (stored,) = project.measured().values()
    assert stored["candidate_spec"]["comm_hook"] == "bf16", finished
    assert (stored["spec"]["delay_seconds"], stored["candidate_spec"]["delay_seconds"]) == (0, 0.0001)
    sent = stored["metrics"]["communicated_bytes_per_epoch"]["by_set"]
    by_side = {sample["side"]: sent[sample["set"]] for sample in stored["samples"]}
    assert by_side["B"] == by_side["A"] / 2
    assert stored["metrics"]["communicated_bytes_per_epoch"]["value"] == by_side["A"]


def test_thresholds_hold_the_candidate(project: Project) -> None:
    """It sends half of what the base does."""
    project.experiment.write_text(
        "from ddpperf.specs import TrainingSpec\n\n"
        "def test_step(measure):\n"
        '    step = measure(TrainingSpec(model="mine:sleeping", world_size=2, per_rank_batch_size=8, strategy="ddp"))\n'
        '    measure.metric("speedup", {name: sent / 2**14 for name, sent in step.counter("gradient_bytes").items()})\n'
    )
    mine = f'[[threshold]]\nhardware = "{hardware_key("cpu", [])}"\ntest = "test_step"\n'
    text = f"{ONE_LOOK}\n{mine}"
    text += (
        'where = { comm_hook = "none" }\nspeedup = 0.9\n'
        + mine
        + 'where = { comm_hook = "bf16" }\nspeedup = 0.75\n'
    )
    (project.root / "perf" / "thresholds.toml").write_text(text)
    finished = run(project, *WITH_BF16, rounds="1")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step failed: speedup 0.5 is below 0.75")
    assert "below 0.9" not in finished.output, "which is of what the base measures"


def test_what_the_candidate_cannot_measure_is_skipped_and_nothing_left_to_judge_is_no_verdict(
    project: Project,
) -> None:
    project.experiment.write_text(
        "import pytest\nfrom ddpperf.specs import AllReduceSpec\n\n"
        "def cells(options):\n"
        "    yield options.step(world_size=2, per_rank_batch_size=8, accumulation_steps=2)\n\n"
        "@pytest.mark.specs(cases=cells)\n"
        "def test_step(measure, spec):\n"
        "    measure(spec)\n"
    )
    finished = project.run("perf", "--against-spec", "static_graph=true")
    assert finished.status == 125, finished
    assert "skipped: the candidate cannot measure it: static_graph does not know no_sync" in finished.output


def test_too_many_tests_that_the_candidate_cannot_measure_are_no_verdict_also_of_the_gate(
    project: Project,
) -> None:
    project.experiment.write_text(
        "import pytest\nfrom ddpperf.specs import TrainingSpec\n\n"
        "def cells(options):\n"
        "    for parts in (1, 2):\n"
        "        yield TrainingSpec(model='mine:sleeping', world_size=2, per_rank_batch_size=8, strategy='ddp',\n"
        "                           accumulation_steps=parts)\n\n"
        "@pytest.mark.specs(cases=cells, gate=lambda options, spec: True)\n"
        "def test_step(measure, spec):\n"
        "    measure(spec)\n"
    )
    (project.root / "perf" / "thresholds.toml").write_text(ONE_LOOK)
    finished = run(
        project, "--world-sizes", "2", "-m", "gate", "--against-spec", "static_graph=true", rounds="1"
    )
    assert "1 passed, 1 skipped" in finished.output, finished
    assert finished.status == 125, finished
    assert (
        " 1 of 2 tests cannot be measured by the candidate, as perf/test_it.py::test_step[" in finished.output
    )


def test_a_variable_reaches_the_candidate_alone_and_a_rank_of_it_that_dies_fails_the_test(
    project: Project,
) -> None:
    (project.root / "mine.py").write_text(
        FAST + "\nimport os\nif 'DIE' in os.environ and 'RANK' in os.environ:\n    os._exit(7)\n"
    )
    finished = run(project, "--against-env", "DIE=1")
    assert finished.status == 1, finished
    assert "the candidate's rank 0 of set B" in finished.output
    assert "exited with status 7" in finished.output
    assert "Traceback" not in finished.output


def test_a_rank_of_the_base_that_dies_is_no_failure_of_the_candidate(project: Project) -> None:
    (project.root / "other" / "mine.py").write_text(
        FAST + "\nimport os\nif 'RANK' in os.environ:\n    os._exit(7)\n"
    )
    finished = run(project, "--baseline-root", "other")
    finished.assert_one_sentence(
        125, "NO VERDICT: perf/test_it.py::test_step was not measured: the base's rank 0 of set A"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--baseline-root", "other", "--slow-down", "0.1", "--benchmark-compare"),
            ("--slow-down is in no stored run, got --benchmark-compare and a side; leave one of them out",),
        ),
        (
            ("--replicates", "1", "--against-env", "A=1"),
            ("--replicates 1 leaves nothing to judge a difference by", "pass 2"),
        ),
        (("--against-spec", "comm_hook=avg"), ("comm_hook avg needs NCCL; this runs on the CPU",)),
        (("--against-spec", "comm_hook=int8"), ("comm_hook must be one of none, avg",)),
        (
            ("--against-spec", "colour=red"),
            ("--against-spec takes FIELD=VALUE with a field of", "form, got 'colour=red'"),
        ),
        (
            ("--against-root", "perf"),
            ("--against-root", "holds nothing that a rank loads", "name a checkout of one of them"),
        ),
        (
            ("--against", "no-python"),
            ("--against takes a Python interpreter, got 'no-python', which is not on PATH",),
        ),
        (
            ("--against-env", "A=1", "--benchmark-compare=x"),
            ("--benchmark-compare compares this environment with a stored run, got --against",),
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    project: Project, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    finished = project.run("perf", *arguments)
    finished.assert_one_sentence(4, *words)
    assert not project.saved_runs()


def test_a_base_that_is_not_the_stored_runs_code_is_refused(project: Project) -> None:
    assert run(project, rounds="1").status == 0
    (path,) = project.root.glob(".ddpperf/runs/*/*.json")
    (sample,) = project.measured()["test_step"]["samples"]
    path.write_text(path.read_text().replace(f'"torch": "{sample["torch"]}"', '"torch": "2.11.9"'))
    finished = run(project, "--baseline-root", "other", "--benchmark-compare")
    finished.assert_one_sentence(
        4, f"{path.name} was measured with torch 2.11.9, its code's side has {sample['torch']}; name"
    )
    assert len(project.saved_runs()) == 1


@pytest.mark.figures
def test_a_stored_runs_suspects_are_measured_beside_its_code(project: Project) -> None:
    """The fast model is what was stored, and what the base is; the slow one that is here now is worse than both."""
    stored = run(project, "--benchmark-save=fast")
    assert stored.status == 0, stored
    (project.root / "before").mkdir()
    (project.root / "before" / "mine.py").write_text(FAST)
    (project.root / "mine.py").write_text(SLOWEST)
    finished = run(
        project,
        "--baseline-root",
        "before",
        "--benchmark-compare-fail=median:20%",
        "--benchmark-compare=fast",
    )
    assert finished.status == 1, finished.output
    assert "test_it.py::test_step is worse: its time is " in finished.output
    assert "on fresh process sets" in finished.output
    row = found(project)["test_step", "time"]
    assert row["finding"] == "worse"
    assert float(str(row["ratio"])) == pytest.approx(4, abs=0.4)
    (project.root / "before" / "mine.py").write_text(
        SLOWEST
    )  # another day's machine would do the same to what did not change
    finished = run(
        project,
        "--baseline-root",
        "before",
        "--benchmark-compare-fail=median:20%",
        "--benchmark-compare=fast",
    )
    assert finished.status == 0, finished
    assert "test_step is slower" not in finished.output
    assert (
        "compared with 0001_fast.json: 1 suspect was measured beside its code, and none is worse"
        in finished.output
    )
    assert "confirmed" in project.saved_runs()[-1]["ddpperf"], (
        "its first look is a run of one side, and may be a baseline"
    )
    storage = Storage(root=project.root, hardware_key=hardware_key("cpu", []))
    assert len(storage.history(storage.load(storage.find("fast")))) == 2, (
        "the run in which its suspect was cleared, too"
    )


def test_a_folder_that_pytest_took_for_its_root_is_refused(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its thresholds and stored runs would be the other's."""
    other = tmp_path_factory.mktemp("other")
    (other / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (other / "mine.py").write_text("")
    finished = project.run("--against-root", str(other), "perf")
    sentence = f"pytest took {other} for the root of this project, in which {project.root / 'perf'} is not; name the tests"
    finished.assert_one_sentence(4, sentence)
    assert not (other / ".ddpperf").exists()

"""What a strategy cannot train: skipped with the reason if base and candidate refuse it, else a FAIL."""

from __future__ import annotations

import pytest

from ddpperf.specs import Spec, TrainingSpec
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Found
from tests.canned import CannedSuite

CASES = """
import pytest

def cases(options):
    for strategy in ("ddp", "fsdp"):
        for batch in (8, 16):
            yield options.step(world_size=2, per_rank_batch_size=batch, strategy=strategy)

@pytest.mark.specs(cases=cases)
def test_step(measure, spec):
    measure(spec)
"""
IMPORTS = "from dataclasses import replace\nimport pytest"
MODEL = ("--model", "mine:make")
WHY = "ValueError: fully_shard doesn't support scalar parameters"
REASON = f"mine:make cannot be trained by fsdp (fp32, eager): {WHY}"


@pytest.fixture
def project(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> CannedSuite:
    """Return a project with four tests, of which two train by FSDP, and with a model of its own."""
    found = Found(python="", torch="2.11.0", torchvision=True)
    for name in ("check_model", "check_side"):
        monkeypatch.setattr(f"ddpperf.plugin.options.refused_options.{name}", lambda *_: found)
    canned_suite.experiment.write_text(CASES)
    (canned_suite.root / "mine.py").write_text("")
    return canned_suite


def refusing(sides: str, opened: list[str] | None = None) -> object:
    """Return what ranks of these sides raise for FSDP, and note which process sets were asked."""

    def refuses(spec: Spec, name: str) -> str:
        if not isinstance(spec, TrainingSpec) or spec.strategy != "fsdp":
            return ""
        if opened is not None:
            opened.append(name)
        return WHY if name[0] in sides else ""

    return refuses


def test_refused_strategy_is_skipped_once_for_all_batch_sizes(project: CannedSuite) -> None:
    opened: list[str] = []
    project.canned.refuses = refusing("A", opened)  # type: ignore[assignment]
    finished = project.run("perf", *MODEL)
    finished.assert_one_sentence(0, "PASS: 2 tests measured, 2 skipped")
    assert REASON in " ".join(finished.output.split())
    assert opened == ["A1"], "the second test knows it from the first"


def test_refused_option_of_a_strategy_is_not_the_strategy(project: CannedSuite) -> None:
    """A model with control flow cannot have a static graph, but DDP trains it without one."""
    cases = CASES.replace('("ddp", "fsdp")', "(True, False)").replace(
        "strategy=strategy", "static_graph=strategy"
    )
    project.experiment.write_text(cases)
    project.canned.refuses = lambda spec, name: WHY * getattr(spec, "static_graph", False)
    finished = project.run("perf", *MODEL)
    finished.assert_one_sentence(0, "PASS: 2 tests measured, 2 skipped")
    assert "mine:make cannot be trained by ddp+static (fp32, eager)" in " ".join(finished.output.split())


def test_batch_that_needs_too_much_memory_hides_no_smaller_one(project: CannedSuite) -> None:
    project.experiment.write_text(CASES.replace("(8, 16)", "(32, 64, 8)").replace(', "fsdp"', ","))
    opened: list[int] = []

    def refuses(spec: Spec, name: str) -> str:
        opened.append(batch := getattr(spec, "per_rank_batch_size", 0))
        return "RuntimeError: out of memory" * (batch > 16)

    project.canned.refuses = refuses
    project.run("perf", *MODEL).assert_one_sentence(0, "PASS: 1 test measured, 2 skipped")
    assert opened == [32, 8, 0], "64 needs even more than 32; the last one is the copy of memory"


def test_a_test_whose_reference_is_refused_is_skipped(project: CannedSuite) -> None:
    reference = '    measure(spec)\n    measure.reference("fsdp", replace(spec, strategy="fsdp"))\n'
    own = CASES.replace("    measure(spec)\n", reference).replace("import pytest", IMPORTS)
    project.experiment.write_text(own)
    project.canned.refuses = refusing("A")  # type: ignore[assignment]
    finished = project.run("perf", *MODEL)
    assert "4 skipped" in finished.output
    assert project.measured() == {}


@pytest.mark.parametrize("model", [(), ("--model", "resnet10_cifar")])
def test_refused_built_in_model_fails(project: CannedSuite, model: tuple[str, ...]) -> None:
    project.canned.refuses = refusing("A")  # type: ignore[assignment]
    project.run("perf", *model).assert_one_sentence(
        1, "FAIL: perf/test_it.py::test_step[2rank-b8-fsdp] failed"
    )


def test_what_the_stored_run_trained_fails(project: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    project.commit(monkeypatch)
    assert project.run("perf", *MODEL, "--benchmark-save=all").status == 0
    project.canned.refuses = refusing("AB")  # type: ignore[assignment]
    finished = project.run("perf", *MODEL, "--benchmark-compare")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step[2rank-b8-fsdp] failed")


@pytest.mark.parametrize(
    ("refuse", "status", "words"),
    [
        ("AB", 0, "PASS: 2 tests measured, 2 skipped"),
        ("B", 125, "the candidate cannot measure 2 tests"),
        ("A", 125, "was not measured: the base's rank 0"),
    ],
)
def test_variable_that_refuses_a_strategy_is_no_fail(
    project: CannedSuite, refuse: str, status: int, words: str
) -> None:
    """Only what the user named differs between base and candidate, and no code."""
    (project.root / "perf" / "thresholds.toml").write_text(
        "[decision.cpu]\nmargin = 0.9\ntolerance = 0.95\ncompare_tolerance = 0.95\n"
    )
    project.canned.refuses = refusing(refuse)  # type: ignore[assignment]
    finished = project.run("perf", *MODEL, "--candidate", "NCCL_ALGO=Tree", "--rounds", "3")
    finished.assert_one_sentence(status, words)
    assert (f"the candidate cannot measure it: {WHY}" in " ".join(finished.output.split())) == (refuse == "B")


@pytest.mark.parametrize("candidate", ["other", "PYTHONPATH=other"])
def test_candidate_whose_code_refuses_a_strategy_fails(project: CannedSuite, candidate: str) -> None:
    (other := project.root / "other").mkdir()
    (other / "mine.py").write_text("")
    project.canned.refuses = refusing("B")  # type: ignore[assignment]
    finished = project.run("perf", *MODEL, "--candidate", candidate, "--rounds", "3")
    finished.assert_one_sentence(1, "FAIL: perf/test_it.py::test_step[2rank-b8-fsdp] failed: the candidate's")


def test_slow_start_of_the_candidates_ranks_is_no_fail(
    project: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine needs as long to start them."""

    def hangs(self: object, command: str, *_: object, **__: object) -> None:
        hung = RankFailure(rank=0, cause=Cause.HUNG, what="did not answer within 120 s")
        raise SetFailure("B1", "at setup", [hung])

    (other := project.root / "other").mkdir()
    (other / "mine.py").write_text("")
    monkeypatch.setattr("ddpperf.workers.pool.Pool.measure_once", hangs)
    finished = project.run("perf", *MODEL, "--candidate", "other", "--rounds", "3")
    finished.assert_one_sentence(
        125, "the candidate's rank 0 of set B1 did not answer within 120 s (at setup)"
    )

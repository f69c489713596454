"""Fixtures for tests: shared ranks, projects to run pytest in, canned measurements, figures."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpperf.machine.compiler import compiler_problem
from ddpperf.machine.git import KEPT_VARIABLES
from ddpperf.specs import FUNCTIONS_VARIABLE
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests import faults
from tests.canned import Canned, CannedSuite, canned_sets
from tests.command_line import Read, reader
from tests.namespaces import namespaces_reason
from tests.odd_models import ODD_MODELS
from tests.project import Marked, Project

BUSY_SECONDS = 20
FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def untried_compiler() -> None:
    """Forget what earlier tests found out about the compiler."""
    compiler_problem.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute with one thread, as ranks do: on a busy machine two are 30 times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_repositories() -> Iterator[None]:
    """Let git find the repositories of tests, also if this pytest is run by a hook of git."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("GIT_") and not name.startswith(KEPT_VARIABLES):
                patch.delenv(name)
        yield


@pytest.fixture
def own_stream() -> Iterator[None]:
    """Compute on a GPU stream other than the default one, which cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture(scope="session")
def namespaces_allowed() -> None:
    """Skip a test with the reason if network namespaces cannot be made here."""
    if reason := namespaces_reason():
        pytest.skip(reason)


@pytest.fixture
def group() -> Iterator[None]:
    """Form a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    """Mark the processes and files of a module's tests, and remove what is left of them."""
    tmp_path_factory.getbasetemp()  # made before TMPDIR changes
    mine = Marked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(mine.folder))
        patch.setattr(tempfile, "tempdir", str(mine.folder))
        yield mine
    mine.clean()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A live pool of two gloo ranks and two rounds, for all tests of this pytest process.

    For tests that need some ranks and leave them as they were. A set that a test breaks is replaced
    for the next one.
    """
    tmp_path_factory.getbasetemp()  # made before TMPDIR changes
    mine = Marked()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(mine.folder))
            patch.setattr(tempfile, "tempdir", str(mine.folder))
            hangs = tmp_path_factory.mktemp("hangs")
            options = SetOptions(size=2, device="cpu", rounds=2, deadline_seconds=60, hang_folder=hangs)
            functions = f"{faults.ALLOWED[FUNCTIONS_VARIABLE]},{','.join(ODD_MODELS.values())}"
            pool = Pool(options, sides=(Side(environment={FUNCTIONS_VARIABLE: functions}),))
            pool.live_sets()
        with pool:
            assert len(mine.processes()) >= 2, "the ranks are known by their temporary folder"
            yield pool
        mine.assert_nothing_left()
    finally:
        mine.clean()


@pytest.fixture
def read(pytestconfig: pytest.Config) -> Read:
    """Return a function that reads the options of a command line."""
    return reader(pytestconfig)


@pytest.fixture
def canned() -> Iterator[Canned]:
    """What the process sets of this test's pools answer; no ranks are started."""
    mine = Canned()
    with canned_sets(mine):
        yield mine


@pytest.fixture
def canned_suite(tmp_path: Path) -> Iterator[CannedSuite]:
    """A project whose runs happen in this process, with canned measurements (tests/canned.py)."""
    mine = CannedSuite(tmp_path)
    yield mine
    mine.clean()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    mine = Project(tmp_path)
    yield mine
    mine.clean()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, Callable[[], float], float, str], None]:
    """Return a function that measures a figure, prints it and requires a limit.

    It measures three times, and then up to three times more with pauses, as the machine may be
    busy.
    """
    lines = request.config.stash.setdefault(FIGURES, [])

    def report(what: str, measure: Callable[[], float], at_most: float, unit: str) -> None:
        tries: list[float] = []
        while len(tries) < 6 and not (tries and tries[-1] <= at_most):
            if len(tries) >= 3:
                time.sleep(BUSY_SECONDS)
            tries.append(measure())
        lines.append(
            f"{what}: {', '.join(f'{value:.3g}' for value in tries)} {unit} (at most {at_most:g} {unit})"
        )
        assert min(tries) <= at_most, lines[-1]

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.line(line)

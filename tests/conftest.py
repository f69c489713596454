"""Fixtures around real process sets and real runs of pytest."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpperf.machine.compiler import compiler_reason
from ddpperf.workers.pool import Pool
from tests.canned import Canned, CannedSuite, canned_sets
from tests.project import Marked, Project

BUSY_SECONDS = 20
FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def untried_compiler() -> None:
    """A test's compiler is not another's."""
    compiler_reason.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute as every rank does: two threads would wait for each other on a busy machine, thirty times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def own_stream() -> Iterator[None]:
    """A stream of a GPU, as a rank has one where it captures; from the default one nothing can be."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    """What the tests of a module start is known, and is killed at its end if it still runs."""
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    mine = Marked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(mine.folder))
        patch.setattr(tempfile, "tempdir", str(mine.folder))
        yield mine
    mine.clean()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A live pool of one process set of two gloo ranks, and two rounds, for all tests of this pytest process.

    For tests that need some ranks and leave them as they were. A set that a test breaks is replaced for the next one.
    """
    yield from _shared_pool(2, tmp_path_factory)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """As `two_ranks`, with one rank."""
    yield from _shared_pool(1, tmp_path_factory)


def _shared_pool(size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    tmp_path_factory.getbasetemp()  # made before the folder for temporary files is another
    mine = Marked()
    try:
        with Pool(size=size, device="cpu", rounds=2, deadline_seconds=60) as pool:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TMPDIR", str(mine.folder))
                patch.setattr(tempfile, "tempdir", str(mine.folder))
                pool.live_sets()
            yield pool
        mine.assert_nothing_left()
    finally:
        mine.clean()


@pytest.fixture
def canned() -> Iterator[Canned]:
    """What the process sets of this test's pools answer; no ranks are started."""
    mine = Canned()
    with canned_sets(mine):
        yield mine


@pytest.fixture
def canned_suite(tmp_path: Path) -> Iterator[CannedSuite]:
    """A project whose runs take place in this process, with canned measurements: see tests/canned.py."""
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
    """Report a measured figure beside the one asked for, and require it: of three tries, and of three more by and by, for the
    machine may be busy for a while."""
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

"""Real agents on loopback: ranks on two nodes, and every way in which a node can be lost."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpperf.node.facts import machine_id
from ddpperf.node.handshake import LOST_SECONDS
from ddpperf.specs import AllReduceSpec, Fault, FaultKind, TrainingSpec
from ddpperf.workers.failures import NodeLost, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from tests.images import images_in, picture
from tests.nodes.joined import Run, run_of
from tests.project import Marked, wait_until

ACROSS = AllReduceSpec(world_size=2, nbytes=1024)
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
AT_ONCE_SECONDS = 0.5


@pytest.fixture
def run(marked: Marked, tmp_path: Path) -> Iterator[Run]:
    with run_of(tmp_path) as started:
        started.start()
        started.wait()
        yield started


@pytest.fixture
def pool(run: Run) -> Iterator[Pool]:
    with run.pool() as made:
        yield made


def failure_of(pool: Pool, spec: AllReduceSpec) -> str:
    with pytest.raises(SetFailure, match="rank") as caught:
        pool.measure(spec)
    return str(caught.value)


def ranks_of(run: Run, name: str = "b") -> list[psutil.Process]:
    """Return the processes of the ranks that an agent has started."""
    children: list[psutil.Process] = psutil.Process(run.agents[name].pid).children()
    return children


def test_ranks_on_two_nodes_measure_together(run: Run, pool: Pool) -> None:
    for spec in (ACROSS, SINGLE):
        (sample,) = pool.measure(spec).samples
        assert [len(ranks) for ranks in sample.seconds] == [2, 2]
    (rank,) = ranks_of(run)
    assert rank.environ()["RANK"] == "1"
    assert rank.environ()["LOCAL_RANK"] == "0", "it is the first rank of its node"
    pool.close()
    run.close()
    assert run.agents["b"].returncode == 0


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("kill", "was killed by SIGKILL"),
        pytest.param("raise", "raised RuntimeError", marks=pytest.mark.slow),
    ],
)
def test_failing_rank_names_its_node(pool: Pool, kind: FaultKind, what: str) -> None:
    pool.measure(ACROSS)
    failing = AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind=kind, rank=1))
    failure = failure_of(pool, failing)
    assert re.match(rf"rank 1 of set A1 on node 1 \(b\) {what}", failure), failure
    assert "injected into rank 1 at sample" in failure
    pool.measure(ACROSS)


@pytest.mark.slow
def test_hang_keeps_stacks_of_both_nodes(run: Run, tmp_path: Path) -> None:
    hanging = AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind="hang", rank=1))
    with run.pool(deadline_seconds=4.0, hang_folder=tmp_path) as pool:
        failure = failure_of(pool, hanging)
    assert "did not answer within 4 s (at sample)" in failure
    assert "\nrank 1 on node 1 (b) is late: rank 0 waits for it in barrier number " in failure
    path = failure.partition("the stacks of all ranks are in ")[2].partition("\n")[0]
    here, there = Path(path).read_text().split("report of rank 1 on node 1 (b):")
    assert " in barrier" in here
    assert "in inject" in there


def test_killed_agent_fails_the_test_at_once(run: Run, pool: Pool) -> None:
    pool.measure(ACROSS)
    (live,) = pool.live_sets()
    (rank,) = ranks_of(run)
    run.agents["b"].kill()
    began = time.monotonic()
    wait_until(live.dead_ranks, AT_ONCE_SECONDS, lambda: "the rank counts as alive")
    with pytest.raises(SetFailure, match=r"rank 1 of set A1 on node 1 \(b\) was lost: its agent has ended"):
        live.require_alive()
    assert time.monotonic() - began < 2 * AT_ONCE_SECONDS
    rank.wait(2)
    pool.measure(SINGLE)
    with pytest.raises(NodeLost, match=r"^world_size=2 needs 2 ranks, 1 are left; node b was lost"):
        pool.measure(ACROSS)
    run.start()
    run.wait()
    (sample,) = pool.measure(ACROSS).samples
    assert len(sample.seconds[0]) == 2


@pytest.mark.slow
def test_stopped_agent_is_lost_after_silence(run: Run, pool: Pool) -> None:
    pool.measure(ACROSS)
    (rank,) = ranks_of(run)
    run.agents["b"].send_signal(signal.SIGSTOP)
    wait_until(lambda: not run.joining.joined(), LOST_SECONDS + 2, lambda: "the node is not lost")
    assert "silent for 5 s" in run.joining.nodes[0].lost
    wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE, 2, lambda: "the rank runs on")
    run.agents["b"].send_signal(signal.SIGCONT)
    output, _ = run.agents["b"].communicate(timeout=5)
    assert run.agents["b"].returncode == 3
    assert "contact lost" in output


def test_killed_controller_ends_agent_and_ranks(run: Run, pool: Pool) -> None:
    pool.measure(ACROSS)
    (rank,) = ranks_of(run)
    run.joining.nodes[0].lose("as if the controller were dead: all its connections close")
    output, _ = run.agents["b"].communicate(timeout=5)
    assert run.agents["b"].returncode == 3
    assert "pytest on the first node has ended" in output
    assert not rank.is_running()


def test_rank_without_interpreter_says_so(run: Run) -> None:
    side = Side(python="/no/such/python")
    with (
        run.pool(sides=[side]) as pool,
        pytest.raises(SetFailure, match="could not be started: /no/such/python: No such file"),
    ):
        pool.measure(ACROSS)
    (node,) = run.joining.nodes
    rank = node.start_rank(1, 0, set_name="A9", side=side, device="cpu", log_folder=None)
    failure = rank.connect() or rank.death()
    assert re.fullmatch(r"could not be started: .*No such file.*/no/such/python.*", failure.what)
    rank.kill()
    rank.close()
    run.wait()


def test_agent_that_decodes_images_leaves_nothing(marked: Marked, tmp_path: Path) -> None:
    """And SIGTERM ends it at once."""
    images = images_in(tmp_path / "images")
    picture(images / "train" / "ape" / "large.png", 1, size=(1500, 1500))
    welcome = {"device": "cpu", "ranks": 1, "data": f"imagefolder:{images}", "machine": machine_id()}
    with run_of(tmp_path, welcome=welcome, cwd=tmp_path) as run:
        agent = run.start()

        def decodes() -> bool:
            with contextlib.suppress(psutil.Error):  # git, which the agent runs first, has ended
                children = psutil.Process(agent.pid).children()
                return any("ddpperf.data.decode" in " ".join(child.cmdline()) for child in children)
            return False

        wait_until(decodes, 10, lambda: "no images are decoded")
        agent.terminate()
        output, _ = agent.communicate(timeout=5)
        assert agent.returncode == 128 + signal.SIGTERM, output
        wait_until(lambda: run.joining.refused, 2, lambda: "the agent counts as joined")
        assert "its agent was ended by SIGTERM" in run.joining.refused[-1]
    assert list(marked.folder.iterdir()) == []
    assert [path for path in (tmp_path / ".ddpperf").rglob("*") if path.is_file()] == []


def test_second_agent_finds_devices_locked(marked: Marked, tmp_path: Path) -> None:
    welcome = {"device": "cpu", "ranks": 1, "data": "synthetic", "machine": "another machine"}
    with run_of(tmp_path, count=3, welcome=welcome) as run:
        first = run.start("b")
        wait_until(run.joining.joined, 10, lambda: "no agent has joined")
        output, _ = run.start("c").communicate(timeout=10)
        assert run.agents["c"].returncode == 2
        assert f"cpu is being measured by process {first.pid}; wait until that run ends" in output

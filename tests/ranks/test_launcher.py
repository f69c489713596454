"""Ranks that a launcher starts: what they measure, and each fault of ranks, launchers and nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.network import find_interface
from ddpperf.specs import AllReduceSpec
from ddpperf.workers import launcher as module
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.launched_rank import place
from ddpperf.workers.launcher import Launcher
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests import faults
from tests.faults import failing
from tests.namespaces import needs_namespaces, nodes
from tests.project import REPOSITORY, Marked, Project, wait_until
from tests.slurm_cluster import slurm_cluster

EACH_RANK = "env RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={ranks}"
TORCHRUN = (
    f"{sys.executable} -m torch.distributed.run --no-python --nnodes {{nodes}} --nproc-per-node {{per_node}}"
    " --master-addr {address} --master-port {port}"
)
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -np {ranks} --bind-to none"
TWO = AllReduceSpec(world_size=2, nbytes=1024)
HANG_SECONDS = 3.0


def launcher_of(template: str, folder: Path, per_node: int = 2) -> Launcher:
    return Launcher(
        template=template,
        per_node=per_node,
        device="cpu",
        interface=find_interface("lo"),
        images="",
        key_file=folder / "key",
    )


@contextlib.contextmanager
def launched(template: str, folder: Path, per_node: int = 2) -> Iterator[Pool]:
    """A pool of two ranks that a launcher starts on this machine."""
    launcher = launcher_of(template, folder, per_node)
    options = SetOptions(
        size=2,
        device="cpu",
        rounds=2,
        deadline_seconds=HANG_SECONDS,
        hang_folder=folder,
        log_folder=folder,
        launcher=launcher,
    )
    try:
        with Pool(options, sides=(Side(environment=faults.ALLOWED),)) as pool:
            yield pool
    finally:
        launcher.close()


# --- what is the same by each launcher


@pytest.mark.parametrize(
    ("template", "words", "what"),
    [
        (EACH_RANK, "", "ended, and env was killed by SIGKILL"),
        pytest.param(
            TORCHRUN, "exitcode  : -9", "ended, and python.* exited with status 1", marks=pytest.mark.slow
        ),
        pytest.param(
            MPIRUN,
            "exited on signal 9 (Killed)",
            "ended, and mpirun exited with status 137",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["each rank", "torchrun", "mpirun"],
)
def test_killed_rank_is_named_first_with_its_launchers_words(
    template: str, words: str, what: str, marked: Marked, tmp_path: Path
) -> None:
    if shutil.which(template.split()[0]) is None:
        pytest.skip(f"needs {template.split()[0]}")
    allowed = os.sched_getaffinity(0)
    with launched(template, tmp_path) as pool:
        os.sched_setaffinity(0, {min(allowed)})  # as pytest is pinned; ranks have cores of their own
        try:
            (sample,) = pool.measure(TWO).samples
        finally:
            os.sched_setaffinity(0, allowed)
        assert [len(ranks) for ranks in sample.seconds] == [2, 2]
        (live,) = pool.live_sets()
        assert os.sched_getaffinity(live.pids[0]) == allowed
        os.kill(live.pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(SetFailure, match=rf"rank 1 on node \S+ of set A1 {what} \(at ") as caught:
            pool.measure(TWO)
        assert time.monotonic() - began < 8
        assert words in str(caught.value)
        log = (tmp_path / "A1-rank1.log").read_text()
    assert '{"spec": "all_reduce world_size=2' in log
    for path in [*marked.folder.glob("torchelastic_*"), *marked.folder.glob("ompi.*")]:
        shutil.rmtree(path)  # what torchrun and Open MPI leave themselves
    marked.assert_nothing_left(5)
    assert not (tmp_path / "key").exists()


@pytest.mark.slow
def test_srun_starts_ranks_and_says_who_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "srun --nodes=2 --ntasks={ranks} --ntasks-per-node=1 --cpu-bind=none --mpi=none"
    template += f" --cpus-per-task={os.cpu_count()}"  # without a job, a task gets one core
    with slurm_cluster(tmp_path, ["a", "b"]) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with launched(template, tmp_path, per_node=1) as pool:
            assert pool.measure(TWO).samples
            assert pool.options.launcher is not None
            assert len(pool.options.launcher.hosts) == 2
            os.kill(pool.live_sets()[0].pids[1], signal.SIGKILL)
            with pytest.raises(SetFailure, match=r"(?s)rank 1 on node \S+ of set A1 ended.*task 1: Killed"):
                pool.measure(TWO)


# --- faults


@pytest.mark.slow
def test_hanging_rank_is_explained_by_its_stacks(marked: Marked, tmp_path: Path) -> None:
    with launched(EACH_RANK, tmp_path) as pool:
        pool.live_sets()
        with pytest.raises(SetFailure, match="did not answer within 3 s") as caught:
            pool.measure(failing("hang"))
    assert " is late for barrier number " in str(caught.value)
    (report,) = tmp_path.glob("hang-*")
    assert "in sleep_for_ever" in report.read_text()
    marked.assert_nothing_left(5)


@pytest.mark.slow
def test_killed_launcher_ends_its_ranks(marked: Marked, tmp_path: Path) -> None:
    with launched(f"sh -c '{EACH_RANK} \"$@\"; exit 0' sh", tmp_path) as pool:
        (live,) = pool.live_sets()
        assert live._launch is not None
        live._launch._processes[1].kill()
        wait_until(live.dead_ranks, 1, lambda: "the launcher's end was not noticed")
        with pytest.raises(SetFailure, match=r"rank 1 .* ended, and sh was killed by SIGKILL"):
            live.require_alive()
    marked.assert_nothing_left(5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("/no/such/launcher", r"did not start: launcher cannot be started \(No such file"),
        (
            "sh -c 'echo no nodes; exit 3'",
            r"did not start: sh exited with status 3 (.|\n)*no nodes",
        ),
        ("sh -c 'sleep 60' {node}", r"did not join within 0.5 s"),
        ("env RANK={rank} WORLD_SIZE=3", r"did not start: env started rank \d of 3, not of 2"),
        ("env", r"did not start: (.|\n)*the launcher sets none of RANK"),
    ],
)
def test_launcher_that_starts_no_ranks_is_explained(
    template: str, words: str, marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.5 if "sleep" in template else 60.0)
    monkeypatch.setattr(module, "TERM_SECONDS", 0.1)
    with launched(template, tmp_path) as pool:
        for _ in range(2):
            with pytest.raises(SetFailure, match=rf"rank 0 of set A\d {words}"):
                pool.live_sets()
        with pytest.raises(SetFailure, match="failed twice and is not tried again"):
            pool.live_sets()
    marked.assert_nothing_left(5)


ANOTHER_ORDER = "env RANK={rank} WORLD_SIZE=2 sh -c 'LOCAL_RANK=$((1 - $RANK)) exec \"$@\"' sh"


@pytest.mark.parametrize(
    ("template", "facts", "words"),
    [
        (EACH_RANK, {"torch": "1.0"}, r"torch on node \S+ is \S+, where pytest runs it is 1\.0"),
        (ANOTHER_ORDER, {}, r"started rank 0 as local rank 1 on node .*one node after the other"),
    ],
)
def test_node_that_differs_is_refused_by_name(
    template: str,
    facts: dict[str, str],
    words: str,
    marked: Marked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "node_facts", lambda *_: facts)
    with launched(template, tmp_path) as pool, pytest.raises(Refused, match=words):
        pool.live_sets()
    marked.assert_nothing_left(5)


@pytest.mark.slow
def test_strangers_are_not_taken_for_ranks(
    marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connects and is silent, another one has no key; both come before the ranks."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    launcher = launcher_of("sh -c 'sleep 0.5; exec \"$@\"' sh " + EACH_RANK, tmp_path)
    process_set = ProcessSet(
        "A1", Side(), SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=9.0, launcher=launcher)
    )
    process_set.spawn()
    assert process_set._launch is not None
    address = process_set._launch._listener.getsockname()
    with socket.create_connection(address), socket.create_connection(address) as nonsense:
        nonsense.sendall(bytes(300))
        process_set.wait_ready()
    assert len(process_set.ranks) == 2
    process_set.close()
    launcher.close()
    marked.assert_nothing_left(5)


@pytest.mark.slow
def test_ranks_end_with_a_killed_pytest(project: Project) -> None:
    process = project.start("perf", "--launcher", EACH_RANK)
    wait_until(lambda: len(project.ranks()) == 2, 60, lambda: "no ranks started")
    process.kill()
    process.communicate()
    wait_until(lambda: not project.processes(), 5, lambda: f"left: {project.processes()}")


CONTROLLER = """
import json, sys, time
from pathlib import Path
from ddpperf.machine.network import find_interface
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.launcher import Launcher
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
launcher = Launcher(template=sys.argv[1], per_node=1, device="cpu", interface=find_interface("eth0"),
                    images="", key_file=Path(sys.argv[2]))
with Pool(SetOptions(size=2, device="cpu", rounds=2, deadline_seconds=60, launcher=launcher)) as pool:
    for spec in [AllReduceSpec(world_size=2, nbytes=1024)] * 2:
        (live,) = pool.live_sets()
        print(json.dumps([len(pool.measure(spec).samples), launcher.hosts]), flush=True)
        idle = sys.stdin.readline() == "idle\\n"
        began = time.monotonic()
        try:
            while idle:
                live.require_alive()
                time.sleep(0.1)
            live.request("leave")
        except SetFailure as failure:
            print(json.dumps([str(failure), time.monotonic() - began]), flush=True)
            sys.stdin.readline()
launcher.close()
"""


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "asked"])
def test_lost_network_is_named_and_the_next_set_starts(state: str, marked: Marked, tmp_path: Path) -> None:
    with nodes(2) as made:
        words = [sys.executable, "-c", CONTROLLER, made.launcher, str(tmp_path / "key")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        controller = made.start(0, words, cwd=REPOSITORY, env=marked.environment, **pipes)
        assert controller.stdin is not None
        assert controller.stdout is not None

        def tell(line: str) -> None:
            assert controller.stdin is not None
            controller.stdin.write(f"{line}\n")
            controller.stdin.flush()

        sets, hosts = json.loads(controller.stdout.readline())
        assert sets == 1
        assert [host["interface"] for host in hosts] == ["eth0", "eth0"]
        made.connect(1, False)
        tell(state)
        failure, seconds = json.loads(controller.stdout.readline())
        assert failure.startswith("rank 1 on node ")
        assert "was lost: its node or the network does not answer (" in failure
        assert 3 < seconds < 8
        made.connect(1)
        tell("")
        assert json.loads(controller.stdout.readline())[0] == 1
        controller.communicate("\n\n")
        assert controller.returncode == 0


# --- templates and places

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("template", "commands"),
    [
        ("srun", ["srun --overlap --nodes=2 --ntasks=4 --ntasks-per-node=2"]),
        ("mpirun", ["mpirun -np 4 --map-by ppr:2:node"]),
        ("ssh node{node} torchrun {nodes}", ["ssh node0 torchrun 2", "ssh node1 torchrun 2"]),
        ("x {rank} {local_rank}", ["x 0 0", "x 1 1", "x 2 0", "x 3 1"]),
    ],
)
def test_template_starts_once_a_rank_a_node_or_a_set(
    template: str, commands: list[str], tmp_path: Path
) -> None:
    launcher = launcher_of(template, tmp_path)
    found = [" ".join(words) for words in launcher.commands(4, "10.0.0.1:5")]
    assert len(found) == len(commands)
    for command, begin in zip(found, commands, strict=True):
        assert command.startswith(begin)
        assert command.endswith(f"launched_rank.py 10.0.0.1:5 {tmp_path}/key 2 cpu")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, (2, 4, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"} | OPEN_MPI, (1, 2, 1)),
    ],
)
def test_place_is_read_from_the_launchers_variables(
    variables: dict[str, str], found: tuple[int, int, int]
) -> None:
    assert place(variables, 2) == found


def test_key_is_private_or_comes_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of("srun", tmp_path)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    launcher.close()
    assert not (tmp_path / "key").exists()
    monkeypatch.setenv("DDPPERF_KEY", "ab" * 32)
    launcher_of("srun", tmp_path)
    assert not (tmp_path / "key").exists()

"""Whole runs of scripts: what is measured of their steps, how they fail, and that nothing is left running."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import psutil
import pytest
import torch

from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.specs import ScriptSpec
from ddpperf.why.sweep import BETWEEN, functions_of, steps_of
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from ddpperf.workers.script_marks import CONTROL, FEWEST_TRACED, delayed_over_usual
from ddpperf.workers.script_run import CONTROL_DELAY, CONTROL_RATIOS, ScriptRun, run_scripts
from tests.project import REPOSITORY

STEP = 0.02  # seconds of a step of the scripts
SCRIPT = """
    import os, sys, time
    import ddpperf

    def step():
        time.sleep({step})
        ddpperf.step()

    {rest}
"""
TORCH = """
    import time
    import torch
    weights = torch.nn.Linear(2, 2)
    for weight in weights.parameters():
        weight.grad = torch.ones_like(weight)
    one, other = torch.optim.SGD(weights.parameters(), lr=0.1), torch.optim.Adam(weights.parameters())
    def waits_for_data():
        time.sleep({step})
    while True:
        waits_for_data()
        one.step()
        {rest}
"""
FOREVER = "while True:\n    step()"
HERE = Side()
PYTHON = "python train.py"
TWO_RANKS = "(RANK=0 python train.py & RANK=1 python train.py; wait)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


def write(folder: Path, rest: str = FOREVER, script: str = SCRIPT) -> None:
    text = textwrap.dedent(script).format(step=STEP, rest=rest)
    (folder / "train.py").write_text(text)


def options(ranks: int = 1, deadline: float = 60.0, logs: Path | None = None) -> SetOptions:
    return SetOptions(size=ranks, device="cpu", rounds=7, deadline_seconds=deadline, log_folder=logs)


def run(command: str = PYTHON, ranks: int = 1, side: Side | None = None, **fields: int) -> ScriptRun:
    spec = ScriptSpec(command=command, world_size=ranks, **{"steps": 30, **fields})
    return alone(spec, options(ranks), side or Side())


def alone(spec: ScriptSpec, options: SetOptions, side: Side = HERE) -> ScriptRun:
    (found,) = run_scripts([("A1", side, spec)], options, lambda part: None)
    return found


def failure(command: str = PYTHON, ranks: int = 1, deadline: float = 60.0, **fields: int) -> str:
    spec = ScriptSpec(command=command, world_size=ranks, **{"steps": 30, **fields})
    with pytest.raises(SetFailure) as caught:
        alone(spec, options(ranks, deadline))
    return str(caught.value)


def processes_of(folder: Path) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(folder)]


# --- what is measured


def test_steps_are_timed_and_the_script_is_ended(folder: Path) -> None:
    write(folder)
    found = run()
    sample = found.sample(30)
    assert found.steps == 30
    assert STEP <= sample.seconds[0][0] / 30 < 1.5 * STEP
    assert STEP <= sample.counters["step_p50_seconds"][0] <= sample.counters["step_largest_seconds"][0]
    assert STEP < sample.counters["first_step_seconds"][0] < found.run_seconds
    assert processes_of(folder) in ([], [os.getpid()])


def test_slowest_rank_counts(folder: Path) -> None:
    write(folder, "while True:\n        time.sleep(0.02 * int(os.environ['RANK']))\n        step()")
    sample = run(TWO_RANKS, 2).sample(30)
    fast, slow = (seconds / 30 for seconds in sample.seconds[0])
    assert STEP <= fast < 1.5 * STEP < 2 * STEP <= slow


@pytest.mark.parametrize("other", ["", "other.step()"])
def test_step_of_one_or_two_optimizers_is_one_step(folder: Path, other: str) -> None:
    write(folder, other, TORCH)
    found = run()
    assert STEP <= median(found.ranks[0]["seconds"]) < 1.5 * STEP
    assert found.sample(30).torch == torch.__version__


def test_calls_of_ddpperf_step_replace_those_of_optimizers(folder: Path) -> None:
    write(folder, "one.step()\n    __import__('ddpperf').step()\n    time.sleep(0.02)", TORCH)
    assert 2 * STEP <= median(run().ranks[0]["seconds"]) < 3 * STEP


def test_pauses_count_in_the_mean(folder: Path) -> None:
    write(folder, "for number in range(10**9):\n    step()\n    time.sleep(0.5 * (number % 20 == 19))")
    found = run(steps=40)
    sample = found.sample(40)
    assert sample.counters["pause_steps"] == (2.0,)
    assert sample.seconds[0][0] / 40 > STEP + 2 * 0.5 / 40
    assert sample.counters["pause_fraction"][0] == pytest.approx(2 * 0.5 / (2 * 0.5 + 40 * STEP), rel=0.2)


def test_control_shows_its_delay(folder: Path) -> None:
    write(folder)
    counters = run().sample(30).counters
    shown = mean(counters[name][0] for name in CONTROL_RATIOS) - 1
    assert shown == pytest.approx(CONTROL_DELAY["cpu"], abs=0.1)
    usual = [STEP] * len(CONTROL)
    assert delayed_over_usual(usual, 0.32, 0.32 * STEP) == [1.0, 1.0]
    slow = [STEP * (1.16 if kind == "D" else 1.0) for kind in CONTROL]
    assert delayed_over_usual(slow, 0.32, 0.32 * STEP) == pytest.approx([1.16, 1.16])  # half of it


def test_delayed_steps_are_longer_by_their_delay(folder: Path) -> None:
    write(folder)
    spec = ScriptSpec(command=PYTHON, world_size=1, steps=30, delay_seconds=0.03)
    slow = alone(spec, options())
    assert STEP + 0.03 <= median(slow.ranks[0]["seconds"]) < STEP + 0.04


def test_runs_of_both_sides_have_the_same_steps(folder: Path) -> None:
    """A script of 41 steps ends before the seconds of a run have passed. One after a turn is not timed."""
    write(folder, "for _ in range(10 + 16 + 15):\n    step()")
    with Pool(options(), sides=(Side(name=BASE), Side(name=CANDIDATE))) as pool:
        measured = pool.measure(ScriptSpec(command=PYTHON, world_size=1))
    assert [sample.side for sample in measured.samples] == [BASE, CANDIDATE]
    assert measured.iterations == 15 - 1
    assert pool.environment(BASE)["python"] == platform.python_version()


def test_scripts_that_need_the_same_port_run_one_after_another(folder: Path) -> None:
    listen = "import socket\nserver = socket.create_server(('127.0.0.1', 47113))"
    write(folder, f"{listen}\n{FOREVER}")
    with Pool(options(), sides=(Side(name=BASE), Side(name=CANDIDATE))) as pool:
        measured = pool.measure(ScriptSpec(command=PYTHON, world_size=1, steps=10))
    assert [sample.side for sample in measured.samples] == [BASE, CANDIDATE]


def test_base_runs_the_script_and_modules_of_its_own_folder(folder: Path) -> None:
    write(folder, "import seconds\nwhile True:\n    time.sleep(seconds.MORE)\n    step()")
    for name, more in (("here", 0.0), ("base", 0.03)):
        (root := folder / name).mkdir()
        (root / "train.py").write_text((folder / "train.py").read_text())
        (root / "seconds.py").write_text(f"MORE = {more}\n")
    os.chdir(folder / "here")
    base = run(side=Side(name=BASE, root=folder / "base"))
    assert STEP + 0.03 <= median(base.ranks[0]["seconds"]) < 1.5 * STEP + 0.03


def test_modules_of_the_present_checkout_are_refused_in_the_base(folder: Path) -> None:
    write(folder)
    for name in ("here", "base"):
        (folder / name / ".git").mkdir(parents=True)
        (folder / name / "train.py").write_text((folder / "train.py").read_text())
    (folder / "here" / "only_here.py").write_text("")
    first = f"import sys; sys.path.append({str(folder / 'here')!r}); import only_here\n"
    (folder / "base" / "train.py").write_text(first + (folder / "train.py").read_text())
    os.chdir(folder / "here")
    with pytest.raises(SetFailure, match="runs only_here of your checkout, not of"):
        run(side=Side(name=BASE, root=folder / "base"))


def test_script_may_use_all_cores_although_the_controller_is_pinned(folder: Path) -> None:
    write(
        folder, "print('cores', sorted(os.sched_getaffinity(0)), flush=True)\nfor _ in range(3):\n    step()"
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pytest.raises(SetFailure, match=re.escape(f"cores {sorted(cores)}")):
            alone(ScriptSpec(command=PYTHON, world_size=1), replace(options(), all_cores=sorted(cores)))
    finally:
        os.sched_setaffinity(0, cores)


def test_own_sitecustomize_runs_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins; builtins.MORE = 0.03\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'site'}{os.pathsep}{REPOSITORY}")
    write(folder, "while True:\n    time.sleep(MORE)\n    step()")
    assert STEP + 0.03 <= median(run().ranks[0]["seconds"]) < 1.5 * STEP + 0.03


def test_traced_run_shows_the_optimizer_and_what_runs_between_operators(folder: Path) -> None:
    write(folder, "sum(range(10**5))", TORCH)
    spec = ScriptSpec(command=PYTHON, world_size=1, steps=10)
    (found,) = run_scripts([("A1", HERE, spec)], options(), lambda part: None, folder / "traces")
    (trace,), (stacks,) = found.files("trace"), found.files("stacks")
    assert found.ranks[0]["problem"] == ""
    steps = steps_of(json.loads(Path(trace).read_text())["traceEvents"])
    assert len(steps) == FEWEST_TRACED
    for rows in steps:
        assert any(path[:2] == ("operators", "optimizer") for path in rows)
        assert rows[BETWEEN, ""].seconds >= STEP
    functions = functions_of(json.loads(Path(stacks).read_text())["traceEvents"])
    assert max(functions, key=lambda path: functions[path])[-1].endswith(": waits_for_data")


# --- failures


def test_script_that_never_steps(folder: Path) -> None:
    write(folder, "print('trained')")
    assert "ended without a step of an optimizer of torch; call ddpperf.step()" in failure()


def test_script_on_a_cpu_takes_turns_with_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is slower for a while, as on a busy machine, makes both sides slower."""
    busy = "until = float(os.environ['BEGAN']) + 8\nwhile True:\n    step()\n"
    write(folder, f"{busy}    time.sleep(0.02 * (time.time() < until))")
    monkeypatch.setenv("BEGAN", str(time.time()))
    spec = ScriptSpec(command=PYTHON, world_size=1)
    with Pool(options(), sides=(Side(name=BASE), Side(name=CANDIDATE))) as pool:
        base, candidate = pool.measure(spec).mean_step_seconds().values()
    assert 1.1 * STEP < base < 2 * STEP  # without the time in which it was stopped
    assert candidate == pytest.approx(base, rel=0.15)


def test_other_processes_of_a_script_wait_for_its_turn_too(folder: Path) -> None:
    """A data loader that went on while other scripts run would have data in stock."""
    loader = "if os.fork() == 0:\n    while True:\n        open('times', 'a').write(f'{time.monotonic()} ')"
    write(folder, f"{loader}\n        time.sleep(0.01)\n{FOREVER}")
    for name in ("one", "two"):
        (folder / name).mkdir()
    jobs = [
        (name, HERE, ScriptSpec(command=f"cd {name}; python ../train.py", world_size=1))
        for name in ("one", "two")
    ]
    run_scripts(jobs, options(), lambda part: None)
    times = [float(word) for word in (folder / "one" / "times").read_text().split()]
    assert sum(after - before > 0.4 for before, after in pairwise(times)) >= 5


def test_ranks_that_wait_for_each_other_take_turns(folder: Path) -> None:
    """A rank that waits for its turn holds up one that is in the next step already."""
    join = "import torch.distributed as dist\nname = os.environ['NAME']"
    group = "dist.init_process_group('gloo', f'file://{name}', rank=int(os.environ['RANK']), world_size=2)"
    loop = "while True:\n    dist.barrier()\n    time.sleep(0.015 * dist.get_rank())\n    step()"
    write(folder, f"{join}\n{group}\nopen('starts', 'a').write('x')\n{loop}")
    spec = ScriptSpec(command=f"export NAME=$(mktemp -u); {TWO_RANKS}", world_size=2)
    jobs = [(name, HERE, spec) for name in ("A1", "A2")]
    runs = run_scripts(jobs, options(2, deadline=15.0), lambda part: None)
    assert (folder / "starts").read_text() == "xx" * len(jobs)  # not once more, one after another
    for ran in runs:
        assert 100 < ran.steps == len(ran.ranks[0]["seconds"]) == len(ran.ranks[1]["seconds"])
        assert median(ran.ranks[0]["seconds"]) < 1.3 * (STEP + 0.015)


def test_script_that_ends_too_early(folder: Path) -> None:
    write(folder, "for _ in range(7):\n    step()")
    assert "ended after 7 steps, and 56 are needed (10 of warm-up, 16 of a control" in failure()


def test_error_of_one_rank_is_named(folder: Path) -> None:
    write(folder, "step()\nassert os.environ['RANK'] == '0', 'no data'\nwhile True:\n    step()")
    message = failure("(RANK=0 python train.py & first=$!; RANK=1 python train.py || kill $first; wait)", 2)
    assert message.startswith("rank 1 of set A1 raised AssertionError: no data")
    assert "train.py" in message


def test_exit_status_and_output_are_shown(folder: Path) -> None:
    message = failure("echo 'no such data set'; exit 3")
    assert "exited with status 3" in message
    assert "no such data set" in message


def test_other_number_of_processes_is_named(folder: Path) -> None:
    write(folder)
    message = failure(TWO_RANKS, 1)
    assert "trained with 2 processes, not with 1; write {ranks} for their number" in message


def test_hanging_script_prints_its_stacks(folder: Path) -> None:
    write(folder, "def waits_for_data():\n    time.sleep(1000)\nstep()\nwaits_for_data()")
    message = failure(deadline=6.0)
    assert "took no step for 6 s" in message
    assert "in waits_for_data" in message


@pytest.mark.timeout(90)  # without this detection, it would never end
def test_script_that_hangs_in_its_turns(folder: Path) -> None:
    write(folder, "for _ in range(10 + 16 + 50):\n    step()\ntime.sleep(1000)")
    sides = Side(name=BASE), Side(name=CANDIDATE)
    hangs = pytest.raises(SetFailure, match="took no step for 6 s")
    with Pool(options(deadline=6.0), sides=sides) as pool, hangs:
        pool.measure(ScriptSpec(command=PYTHON, world_size=1, steps=60))


def test_rank_that_ends_early_is_missed(folder: Path) -> None:
    write(folder, "for _ in range(40 + 1000 * (os.environ['RANK'] == '0')):\n    step()\nos._exit(0)")
    assert "ended in 1 of 2 ranks before all steps were measured" in failure(TWO_RANKS, 2)


def test_too_few_processes_are_named_while_the_script_runs(folder: Path) -> None:
    write(folder)
    assert "trained with 1 process, not with 2" in failure(PYTHON, 2)


def test_nothing_is_left_of_a_script_that_ignores_sigterm(folder: Path) -> None:
    """Its child has left the session, ignores SIGTERM as well, and has lost its parent."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = "if os.fork() == 0:\n    os.setsid()\n    os.fork() and os._exit(0)\n    time.sleep(1000)"
    write(folder, f"{ignore}\n{child}\n{FOREVER}")
    assert run().steps == 30
    assert processes_of(folder) in ([], [os.getpid()])


def test_gigabyte_of_output_is_read_and_not_kept(folder: Path) -> None:
    write(folder, "for _ in range(2**10):\n    sys.stdout.write('x' * 2**20)\nwhile True:\n    step()")
    spec = ScriptSpec(command=PYTHON, world_size=1, steps=30)
    assert alone(spec, options(logs=folder)).steps == 30
    assert (folder / "A1.log").stat().st_size < 2**22


def test_killed_controller_leaves_nothing(folder: Path) -> None:
    write(folder)
    code = (
        "from tests.ranks.test_script_run import *\n"
        f"alone(ScriptSpec(command={PYTHON!r}, world_size=1, steps=10**6), options())"
    )
    controller = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    end = time.monotonic() + 60
    while len(processes_of(folder)) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(processes_of(folder)) >= 4 - (os.getpid() not in processes_of(folder))
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    while set(processes_of(folder)) - {os.getpid()} and time.monotonic() < end:
        time.sleep(0.1)
    assert not set(processes_of(folder)) - {os.getpid()}

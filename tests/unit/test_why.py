"""Why a step got slower: rows of both sides that add up to the change, and how they are said."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.report.html_page import page
from ddpperf.report.summary import summary_lines
from ddpperf.specs import TrainingSpec
from ddpperf.why import explain, sweep
from ddpperf.why.changes import TracedSet, changes
from ddpperf.why.differences import differences_of
from ddpperf.why.lines import name, row_text, rows_of, tree, why_lines
from ddpperf.why.sweep import LAUNCHING, Path, Row, Rows
from ddpperf.why.tracing_sets import TracingSets
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side
from tests.unit.test_comparison import compared

CONVOLUTION: Path = ("operators", "forward", "aten::conv2d")
MUL: Path = ("operators", "forward", "aten::mul")
BETWEEN: Path = ("CPU time between operators", "optimizer")
NOISE = 1e-4  # seconds, of a step of 0.1 s


def side_of(
    name: str,
    rows: dict[Path, tuple[float, int]],
    *,
    seed: int,
    sets: int = 3,
    traced: float = 0.0,
    **fields: Any,
) -> list[TracedSet]:
    """Process sets whose steps have some rows. traced: what tracing adds to each event."""
    generator, found = random.Random(seed), []
    for _ in range(sets):
        offset = generator.gauss(0, NOISE)
        steps: list[Rows] = [
            {
                path: Row(seconds + traced * calls + (offset if path == CONVOLUTION else 0.0), calls)
                for path, (seconds, calls) in rows.items()
            }
            for _ in range(8)
        ]
        seconds = sum(seconds for seconds, _ in rows.values()) + offset
        usual: dict[str, Any] = {"first": [seconds] * 8, "page_faults": 10.0, "seconds": [seconds] * 8}
        found.append(TracedSet(side=name, steps=steps, **usual | fields))
    return found


BASE = {CONVOLUTION: (0.08, 20), BETWEEN: (0.02, 0)}


@pytest.mark.parametrize("traced", [0.0, 5e-7])
def test_rows_add_up_to_the_change(traced: float) -> None:
    slower = BASE | {MUL: (0.01, 60), BETWEEN: (0.025, 0)}
    sets = side_of("A", BASE, seed=1, traced=traced) + side_of("B", slower, seed=2, traced=traced)
    why = changes(sets, "cpu")
    assert why.whole.change == pytest.approx(0.015, abs=3 * NOISE)
    assert [path for path, _, clear in why.rows if clear] == [MUL, BETWEEN]
    (_, row, _), *_ = why.rows
    assert row.change == pytest.approx(0.01, abs=1e-6)
    assert row.calls == (0, 60)
    assert abs(why.unexplained) < 1e-5


def test_tracing_lengthens_the_time_between_launches_if_a_gpu_waits_for_the_cpu() -> None:
    kernels: Path = ("kernels", "elementwise", "add")
    launching: Path = ("idle", LAUNCHING, "forward")
    waiting: dict[Path, tuple[float, int]] = {kernels: (0.01, 20), launching: (0.09, 1_000)}
    slower = waiting | {launching: (0.10, 3_000)}
    sets = side_of("A", waiting, seed=1) + side_of("B", slower, seed=2)
    cost = {path: 3e-6 * calls for path, (_, calls) in slower.items()}
    for one in sets:  # tracing adds 3 us to each event of the CPU, none to kernels
        for step in one.steps:
            row = step[launching]
            step[launching] = Row(row.seconds + cost[launching] * row.calls / 3_000, row.calls)
    rows = changes(sets, "cuda").rows
    found = {path: row.change for path, row, _ in rows}
    assert {row.calls for path, row, _ in rows if path == launching} == {(0, 0)}, "their number is chance"
    assert found[launching] == pytest.approx(0.01, abs=2e-4)
    assert found[kernels[:2]] == 0


def test_equal_sides_have_no_clear_row() -> None:
    for seed in range(20):
        sets = side_of("A", BASE, seed=seed) + side_of("B", BASE, seed=100 + seed)
        assert not any(clear for _, _, clear in changes(sets, "cpu").rows)


def test_rows_with_more_events_come_before_rows_of_noise() -> None:
    noisy = [{"first": [0.1] * 8, "seconds": [0.1 + 0.05 * number] * 8} for number in range(3)]
    base, candidate = (
        side_of(side, BASE | rows, seed=1) for side, rows in (("A", {}), ("B", {MUL: (0.01, 60)}))
    )
    sets = [
        TracedSet(
            side=one.side,
            page_faults=0.0,
            steps=[{**step, CONVOLUTION: Row(0.08 + spread, 20)} for step in one.steps],
            **noise,
        )
        for side in (base, candidate)
        for one, noise, spread in zip(side, noisy, (0.0, 0.02 if side is base else 0.05, 0.04), strict=True)
    ]
    (path, *_), *_ = changes(sets, "cpu").rows
    assert path == MUL


def test_a_row_of_the_other_sign_is_not_clear() -> None:
    moved = {CONVOLUTION: (0.06, 20), BETWEEN: (0.05, 0)}
    sets = side_of("A", BASE, seed=1) + side_of("B", moved, seed=2)
    found: dict[Path, Any] = {path: (row.change, clear) for path, row, clear in changes(sets, "cpu").rows}
    assert found[BETWEEN] == (pytest.approx(0.03), True)
    assert found[CONVOLUTION] == (pytest.approx(-0.02, abs=3 * NOISE), False)


def test_memory_pages_are_what_untraced_steps_lose_while_memory_is_given_back() -> None:
    before: dict[str, Any] = {"first": [0.13] * 8, "page_faults": 20_000.0}
    sets = side_of("A", BASE, seed=1) + side_of("B", BASE, seed=2, **before)
    why = changes(sets, "cpu")
    (path, row, clear), *_ = why.rows
    assert (path, row.calls, clear) == (("memory pages",), (10, 20_000), True)
    assert row.change == pytest.approx(0.03, abs=3 * NOISE)
    assert why.whole.change == pytest.approx(0.03, abs=3 * NOISE)
    assert row_text(why.to_json()["rows"][0]).endswith(", 10 -> 20,000 page faults")


def test_kernels_of_a_family_are_one_row_unless_one_of_them_has_most_of_the_change() -> None:
    family = ("kernels", "elementwise")
    base: dict[Path, tuple[float, int]] = {(*family, "add"): (1e-3, 10), (*family, "mul"): (1e-3, 10)}
    both: dict[Path, tuple[float, int]] = {(*family, "add"): (2e-3, 20), (*family, "mul"): (2e-3, 20)}
    one: dict[Path, tuple[float, int]] = {(*family, "add"): (3e-3, 30), (*family, "mul"): (1e-3, 10)}
    for slower, path, calls in ((both, family, (20, 40)), (one, (*family, "add"), (20, 40))):
        why = changes(side_of("A", base, seed=1) + side_of("B", slower, seed=2), "cuda")
        assert [(found, row.calls) for found, row, _ in why.rows] == [(path, calls)]
        assert why.rows[0][1].change == pytest.approx(2e-3)


def test_communication_with_other_channels_is_one_row() -> None:
    few: Path = ("communication", "nccl AllReduce", "nccl AllReduce, 4 channels of 512 threads")
    many: Path = ("communication", "nccl AllReduce", "nccl AllReduce, 8 channels of 512 threads")
    ((path, row, _),) = changes(
        side_of("A", {few: (8e-3, 10)}, seed=1) + side_of("B", {many: (9e-3, 10)}, seed=2), "cuda"
    ).rows
    assert name(path) == "communication: nccl AllReduce, 8 channels of 512 threads"
    assert row.change == pytest.approx(1e-3)
    assert row.calls == (10, 10)


def test_one_process_set_a_side_leaves_one_percent_of_a_step_unclear() -> None:
    little = BASE | {MUL: (0.0005, 1)}
    much = BASE | {MUL: (0.005, 1)}
    for slower, found in ((little, []), (much, [MUL])):
        sets = side_of("A", BASE, seed=1, sets=1) + side_of("B", slower, seed=2, sets=1)
        assert [path for path, _, clear in changes(sets, "cuda").rows if clear] == found


# --- what is traced


SPEC = TrainingSpec(model="resnet10_cifar", world_size=2, per_rank_batch_size=2, strategy="ddp")
POOL: Any = SimpleNamespace(options=SimpleNamespace(device="cpu"), sides=[None] * 6)


def explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath, *steps: float | Exception
) -> list[tuple[str, Any]]:
    """The test and the number of sets of each traced measurement, or its problem, by seconds of a step."""

    def traced(pool: Any, one: explain.Slower, folder: FilePath, seconds: float, most_sets: int) -> Any:
        if isinstance(error := steps[int(one.tests[0])], Exception):
            raise error
        return {"sets": most_sets}

    monkeypatch.setattr(explain, "_traced", traced)
    slower = [
        explain.Slower(
            tests=[str(n)], spec=SPEC, candidate=SPEC, seconds=0.02 if isinstance(step, Exception) else step
        )
        for n, step in enumerate(steps)
    ]
    (folder := tmp_path / "traces" / "now").mkdir(parents=True)
    found = explain.explain(POOL, slower, folder, lambda stage: None)
    return [(one["tests"][0], one.get("problem", one.get("sets"))) for one in found]


def test_long_steps_are_traced_on_fewer_sets_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
) -> None:
    found = explained(monkeypatch, tmp_path, 10.0, 1.0, 0.02)
    assert found == [("0", "there is no time to trace steps of 10.00 s"), ("1", 1), ("2", 0)]


def test_only_a_failed_process_set_ends_tracing(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    what = "raised AttributeError: 'Rank' object has no attribute 'trace'"
    old = SetFailure("B3", "at trace", [RankFailure(rank=0, cause=Cause.RAISED, what=what)])
    found = explained(monkeypatch, tmp_path, KeyError("ts"), old, 0.02)
    assert found == [("0", "'ts'"), ("1", "the candidate's code is too old: its ranks cannot trace")]
    assert [*(tmp_path / "traces").iterdir()] == [], "an empty folder would count as traces of a run"


def test_rows_need_the_device_but_no_trace_with_python_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
) -> None:
    class Tracing:
        def __init__(self, *_: Any) -> None:
            self.sets = [LiveSet("A"), LiveSet("B")]
            self.sides = {live.side.name: live for live in self.sets}

        def __enter__(self) -> Tracing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def all_do(self, what: str) -> None: ...

        def do(self, live: LiveSet, what: str, steps: int = 0) -> dict[int, Any]:
            if what == "stacks":
                raise ValueError("a trace of 1 steps has 80 MiB")
            long, file = 1e4 if live.side.name == "A" else 2e4, tmp_path / f"{live.name}.json"
            step = {"ph": "X", "cat": "user_annotation", "name": "ddpperf step", "tid": 1, "dur": long}
            file.write_text(json.dumps({"traceEvents": [{**step, "ts": n * 1e5} for n in range(3)]}))
            answer = {"seconds": [long / 1e6], "page_faults": 0.0, "messages": {}, "file": str(file)}
            return {0: answer}

        def keep(self, traces: Any) -> list[str]:
            return []

    monkeypatch.setattr(explain, "TracingSets", Tracing)
    one = explain.Slower(tests=["0"], spec=SPEC, candidate=SPEC, seconds=0.01)
    (found,) = explain.explain(POOL, [one], tmp_path / "traces" / "now", lambda stage: None)
    on_gpu: Any = SimpleNamespace(options=SimpleNamespace(device="cuda"), sides=POOL.sides)
    (unseen,) = explain.explain(on_gpu, [one], tmp_path / "traces" / "now", lambda stage: None)
    assert "CUPTI in use?" in unseen["problem"], "a trace of the CPU alone says nothing of a GPU's step"
    lost = "its function is not known, because a trace of 1 steps has 80 MiB"
    assert rows_of(found) == [f"CPU time between operators: +10.00 ms (± 1.500 ms); {lost}"]


@pytest.mark.parametrize(
    ("device", "part", "named"),
    [
        ("cuda", "forward", "hook (mine.py:7)"),
        ("cpu", "backward", "run (graph.py:9)"),
        ("cuda", "backward", ""),
    ],
)
def test_function_is_one_of_the_part_that_grew(
    device: str, part: str, named: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = ("forward", "mine.py(7): hook"), ("backward", "graph.py(9): run")
    seconds = [{forward: 0.001, backward: 0.001}, {forward: 0.002, backward: 0.009}]
    monkeypatch.setattr(sweep, "functions_of", lambda number: seconds[number])
    monkeypatch.setattr(explain, "_events", int)
    assert explain._function("0", "1", part=part, device=device) == named


# --- the files of traces


class LiveSet:
    """A process set of one rank that writes an empty trace."""

    def __init__(self, side: str) -> None:
        self.name, self.side, self.alive = f"{side}1", SimpleNamespace(name=side), True
        self.asked: list[str] = []

    def ask(self, command: str, *, what: str, **arguments: Any) -> None:
        self.asked.append(what)

    def answers(self) -> dict[int, Any]:
        return {}

    def request(self, command: str, *, what: str, path: str, **arguments: Any) -> dict[int, Any]:
        FilePath(f"{path}-rank0.json").write_text("")
        return {0: {"file": f"{path}-rank0.json"}}


def tracing(folder: FilePath, test: str, live: list[LiveSet]) -> TracingSets:
    def open_on(*_: Any, **__: Any) -> Any:
        return [(one, None) for one in live]

    pool: Any = SimpleNamespace(
        options=SimpleNamespace(devices_in_turn=1), open=open_on, close_opened=lambda jobs: None
    )
    spec: Any = SimpleNamespace(turns=lambda size: [[0]], compiled=False)
    return TracingSets(pool, spec, None, folder, test)


def test_kept_traces_stay_when_tests_with_like_names_are_traced(tmp_path: FilePath) -> None:
    kept = []
    for test in ("a.py::test_it[2-32]", "a.py::test_it[2]", "b.py::test_it[2]", f"a.py::test[{'é/' * 200}]"):
        with tracing(tmp_path, test, [LiveSet("A"), LiveSet("B")]) as sets:
            for _ in range(2):
                files = {side: sets.do(live, "trace", 1)[0]["file"] for side, live in sets.sides.items()}
            kept += sets.keep(files)
    assert sorted(map(str, tmp_path.iterdir())) == sorted(kept)
    assert len(kept) == 8


def test_interrupted_tracing_leaves_no_file_and_gives_no_command(tmp_path: FilePath) -> None:
    live = [LiveSet("A"), LiveSet("B")]

    def interrupted() -> None:
        with tracing(tmp_path, "a.py::test_it", live) as sets:
            sets.do(sets.sets[0], "trace", 1)
            raise KeyboardInterrupt("SIGINT")

    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        interrupted()
    assert [*tmp_path.iterdir()] == []
    assert [one.asked for one in live] == [["load"], ["load"]]


def test_problem_of_a_rank_is_raised_and_its_sets_are_freed(tmp_path: FilePath) -> None:
    live = [LiveSet("A"), LiveSet("B")]
    live[1].request = lambda *_, **__: {0: {"problem": "torch's profiler fails"}}  # type: ignore[method-assign]
    with tracing(tmp_path, "a.py::test_it", live) as sets, pytest.raises(ValueError, match="profiler fails"):
        sets.do(sets.sets[1], "trace", 1)
    assert [one.asked for one in live] == [["load", "free"], ["load", "free"]]


def test_packages_of_one_side_only_are_no_difference() -> None:
    sides = Side(root=FilePath()), Side(name="B", root=FilePath(), python="/no/python")
    assert differences_of(*sides, FilePath()) == []


# --- the text


def why_of(
    base: dict[Path, tuple[float, int]], now: dict[Path, tuple[float, int]], **fields: Any
) -> dict[str, Any]:
    found = changes(side_of("A", base, seed=1) + side_of("B", now, seed=2), "cpu").to_json()
    usual = {"tests": ["perf/test_it.py::test_a[2]"], "rank": 1, "sets": 3, "messages": {}}
    return {**found, **usual, "function": "", "lost": "", **fields}


def text_of(*reasons: dict[str, Any]) -> str:
    return "\n".join(why_lines({"judged": {"why": reasons}}))


def test_text_names_the_clear_rows_first() -> None:
    shown = text_of(why_of(BASE, BASE | {MUL: (0.01, 60)}))
    assert re.search(
        r"test_a\[2\]: a step of \S+ ms takes \S+ ms longer \(± \S+ .s\), on rank 1 of 3 process sets",
        shown,
    )
    assert "\n  aten::mul in forward: +10.00 ms" in shown
    assert "new: 60 calls" in shown
    assert shown.index("aten::mul") < shown.index("aten::conv2d"), "whose change is noise"
    assert re.fullmatch(r"  other rows: 0; not explained: 0", shown.splitlines()[-1])


def test_messages_that_changed_are_the_second_row() -> None:
    messages = {"gradients": [(2, 44_000_000), (60, 44_000_000)], "buffers": [(0, 0), (2, 38_560)]}
    second = text_of(why_of(BASE, BASE | {MUL: (0.01, 60)}, messages=messages)).splitlines()[2]
    assert "gradients 2 -> 60 messages, 44 MB -> 44 MB; buffers 0 -> 2 messages, 0 B -> 38.56 KB" in second


def test_python_function_stands_beside_the_time_between_operators() -> None:
    slower = BASE | {BETWEEN: (0.05, 0)}
    shown = text_of(why_of(BASE, slower, function="burn (mine.py:7)"))
    assert "CPU time between operators in optimizer: +30.00 ms" in shown
    assert "most in burn (mine.py:7)" in shown
    lost = text_of(why_of(BASE, slower, lost="a trace of 1 steps has 75 MiB"))
    assert "its function is not known, because a trace of 1 steps has 75 MiB" in lost


def test_what_only_the_base_does_is_named() -> None:
    found = text_of(why_of(BASE | {MUL: (0.002, 60)}, BASE | {BETWEEN: (0.05, 0)}))
    assert found.splitlines()[-1].endswith("; no longer there: aten::mul in forward")


@pytest.mark.parametrize(
    ("change", "half", "unexplained", "text"),
    [
        (0.001, 0.002, 0.0, "takes 1.000 ms longer (± 2.000 ms, not clear), on rank 1"),
        (0.02, 0.001, 0.0201, "on rank 1 of 3 process sets a side; the rows do not explain +20.10 ms"),
        (0.02, 0.001, 0.004, "takes 20.00 ms longer (± 1.000 ms), on rank 1 of 3 process sets a side\n"),
        (-0.005, 0.001, 0.0, "were not slower now (-5.000 ms, on rank 1 of 3 process sets a side), so noise"),
    ],
)
def test_heading_says_how_sure_the_change_is(
    change: float, half: float, unexplained: float, text: str
) -> None:
    why = why_of(BASE, BASE) | {"unexplained": unexplained}
    why["step"] |= {"candidate": why["step"]["base"] + change, "half": half}
    assert text in text_of(why)


def test_what_could_not_be_traced_is_one_sentence() -> None:
    problem = {"tests": ["perf/test_it.py::test_b[1]"], "problem": "the base's code is too old"}
    assert text_of(problem) == "test_b[1]: not shown, because the base's code is too old"
    shown = text_of(problem, why_of(BASE, BASE | {MUL: (0.01, 60)})).splitlines()
    assert shown[0].startswith("test_a[2]: a step of "), "all rows of the first one that was traced"
    assert shown[-1] == text_of(problem)


def test_page_has_all_rows_below_the_sum_of_their_kind() -> None:
    rows = tree(why_of(BASE, BASE | {MUL: (0.01, 60), BETWEEN: (0.04, 0)}))
    between = "CPU time between operators"
    names = [(row["name"], row["is_sum"]) for row in rows]
    assert names[:3] == [(between, True), (f"{between} in optimizer", False), ("operators", True)]
    sums = [row for row in rows if row["is_sum"]]
    assert {row["name"] for row in sums} == {"operators", between}
    assert max(row["bar"] for row in rows) == 1.0


def test_comparison_and_page_say_why() -> None:
    run = compared()
    why = why_of(BASE, BASE | {MUL: (0.01, 60)}, traces=["/tmp/base.json", "/tmp/candidate.json"])
    run["ddpperf"]["judged"] |= {"why": [why], "differ": ["commits: 1 -> 2; 1 file changed: a.py"]}
    lines = summary_lines(run, verbose=False)
    place = next(
        number for number, line in enumerate(lines) if line.startswith("WHY       test_a[2]: a step of ")
    )
    assert lines[place + 1].startswith("            aten::mul in forward: +10.00 ms")
    assert "DIFFER    commits: 1 -> 2; 1 file changed: a.py" in lines
    assert all(len(line) <= 110 for line in lines)
    shown = page(run)
    assert "Why perf/test_it.py::test_a[2] is slower: all rows of a step" in shown
    assert "/tmp/base.json, /tmp/candidate.json" in shown
    assert shown.count('class="bar"') == 2 + 3


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("kernels", "convolution", "convolution wgrad bf16"), "convolution, mostly wgrad bf16"),
        (("kernels", "elementwise"), "elementwise"),
        (("kernels", "elementwise", "add"), "elementwise, mostly add"),
        (
            ("idle", "CPU time between launches", "backward"),
            "the GPU is idle: CPU time between launches in backward",
        ),
        (("loading", "DataLoader"), "loading: DataLoader"),
        (("memory pages",), "memory pages"),
    ],
)
def test_rows_have_plain_names(path: Path, text: str) -> None:
    assert name(path) == text

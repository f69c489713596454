"""tools/update_thresholds.py: a threshold is the worst of enough runs that agree, less a margin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.samples import Measured, Sample
from ddpperf.results.stored_runs import SCHEMA, NoBaseline
from ddpperf.specs import AllReduceSpec, EpochSpec, Fault, Precision, SamplerSpec, Spec, TrainingSpec
from ddpperf.specs.strategy import DDP_OPTIONS
from ddpperf.verdict.thresholds import Threshold, read_document, read_thresholds
from tests.canned import STATS
from tests.generated import BOUNDED
from tests.project import REPOSITORY, script

Metrics = Mapping[tuple[str, Spec], Mapping[str, float]]
QUIET = (1.0, 1.02, 0.97, 1.01, 0.99)  # what a metric is in run after run, relative
SUM = AllReduceSpec(world_size=2, nbytes=1024)


@pytest.fixture(scope="module", name="script")
def update_thresholds() -> ModuleType:
    return script("update_thresholds")


def training(
    world_size: int = 1, batch: int = 32, delay_seconds: float = 0.0, precision: Precision = "fp32"
) -> TrainingSpec:
    return TrainingSpec(
        world_size=world_size,
        per_rank_batch_size=batch,
        strategy="single" if world_size == 1 else "ddp",
        delay_seconds=delay_seconds,
        precision=precision,
    )


def commit(
    root: Path, metrics: Metrics, *, key: str = "h200x4", host: str = "a", gpus: Sequence[str] = ()
) -> Path:
    """Write a run with these metrics, by function and spec, below `root` as the plugin stores it."""
    folder = root / "perf" / "baselines" / key
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())) + 1:04}_run.json"
    benchmarks = []
    for (test, spec), values in metrics.items():
        sample = Sample(set="A1", side="A", torch="2.11", seconds=((0.1,) * spec.world_size,) * 4)
        ours = Measured(spec=spec, iterations=1, samples=(sample,)).to_json() | {
            "metrics": {
                name: {"value": value, "unit": "1", "by_set": {"A1": value}} for name, value in values.items()
            }
        }
        fullname = f"perf/test_mine.py::{test}[{spec.measurement}-{spec.id}]"
        benchmarks.append({"fullname": fullname, "stats": STATS, "extra_info": {"ddpperf": ours}})
    environment = {"hostname": host, "gpus": [{"uuid": uuid} for uuid in gpus]}
    header = {"schema": SCHEMA, "hardware_key": key, "environment": environment}
    path.write_text(json.dumps({"machine_info": {}, "benchmarks": benchmarks, "ddpperf": header}))
    return path


def commit_quiet(root: Path, *cases: tuple[str, Spec], key: str = "h200x4") -> None:
    for factor in QUIET:
        commit(root, {case: {"images_per_second": 1000 * factor} for case in cases}, key=key)


def written(script: ModuleType, root: Path) -> list[Threshold]:
    return list(read_thresholds(read_document(script.made(root))))


def test_threshold_is_the_worst_run_less_5_percent(script: ModuleType, tmp_path: Path) -> None:
    for factor, gpus in zip(QUIET, ("ab", "ba", "c", "ab", "c"), strict=True):
        metrics: dict[tuple[str, Spec], dict[str, float]] = {
            ("test_weak", training()): {"images_per_second": 111_111.1 * factor},
            ("test_weak", training(4)): {
                "speedup": 4 * factor,
                "efficiency": factor,
                "loss_after_5_steps": factor,
            },
            ("test_sum", SUM): {"busbw_bytes_per_second": 3.4e11 * factor, "algbw_bytes_per_second": 1e11},
        }
        commit(tmp_path, metrics, gpus=gpus)
    commit_quiet(tmp_path, ("test_weak", training()), key="cpu2-xeon-8581c")
    cpu, *gpu = written(script, tmp_path)
    assert cpu.hardware == "cpu2-xeon-8581c"
    assert cpu.bounds == {"images_per_second": 921}  # 0.95 * 970 = 921.5
    assert [(one.test, dict(one.bounds)) for one in gpu] == [
        ("test_weak", {"images_per_second": 102_000}),  # 0.95 * 107,777.8 = 102,388.9
        ("test_weak", {"speedup": 3.68, "efficiency": 0.921}),  # 0.95 * 3.88 = 3.686, and 0.9215
        ("test_sum", {"busbw_bytes_per_second": 313e9}),  # 0.95 * 329.8e9 = 313.3e9
    ]
    comments = [line for line in script.made(tmp_path).splitlines() if line.startswith("#")][7:]
    assert comments == [
        "# cpu2-xeon-8581c: each threshold is the worst value in 5 runs on 1 machine, less 5%.",
        "# h200x4: each threshold is the worst value in 5 runs on 2 machines, less 5%.",
    ]


def test_own_runs_do_not_violate_a_threshold(script: ModuleType, tmp_path: Path) -> None:
    commit_quiet(tmp_path, ("test_weak", training()))
    (one,) = written(script, tmp_path)
    assert all(one.violations({"images_per_second": 1000 * factor}) == [] for factor in QUIET)
    assert one.violations({"images_per_second": 900.0}) != []


@pytest.mark.parametrize(
    ("values", "thresholds"),
    [
        ((100, 100, 100, 95, 105), 1),  # 10 % of the median
        ((100, 100, 100, 94.9, 105), 0),
        ((100, 100, 100, 100, 111), 0),  # a spread upward is a spread
        ((100, 100, 100, 100), 0),  # too few runs
        ((0, 0, 0, 0, 0), 0),  # nothing that could fail
    ],
)
def test_only_agreeing_runs_give_a_threshold(
    script: ModuleType, tmp_path: Path, values: Sequence[float], thresholds: int
) -> None:
    for value in values:
        commit(tmp_path, {("test_sum", SUM): {"busbw_bytes_per_second": value}})
    assert len(written(script, tmp_path)) == thresholds


def test_noisy_and_missing_metrics_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    for run, factor in enumerate(QUIET):
        noise = 1 + run
        metrics: dict[tuple[str, Spec], dict[str, float]] = {
            ("test_a", training(2, batch=32)): {"speedup": noise, "images_per_second": 100 * noise},
            ("test_a", training(2, batch=64)): {"speedup": noise, "images_per_second": 100 * factor},
            ("test_a", training(2, batch=128)): {"images_per_second": 100} if run else {"speedup": 2},
        }
        commit(
            tmp_path, metrics | ({("test_missing", training()): {"images_per_second": 100}} if run else {})
        )
    (one,) = written(script, tmp_path)
    assert (one.where["per_rank_batch_size"], set(one.bounds)) == (64, {"images_per_second"})


def test_too_few_runs_give_no_threshold(script: ModuleType, tmp_path: Path) -> None:
    commit(tmp_path, {("test_sum", SUM): {"busbw_bytes_per_second": 1}})
    assert script.made(tmp_path).endswith(
        "\n\n# h200x4: no thresholds, because no test is steady in enough runs, found 1 run on 1 machine.\n"
    )
    commit(tmp_path, {("test_sum", SUM): {"busbw_bytes_per_second": 1}}, host="b")
    assert script.made(tmp_path).endswith(
        "\n\n# h200x4: no thresholds, because no test is steady in enough runs, found 2 runs on 2 machines.\n"
    )
    assert written(script, tmp_path) == written(script, tmp_path / "elsewhere") == []


def test_three_runs_are_enough_in_a_cuda_graph(script: ModuleType, tmp_path: Path) -> None:
    captured = dataclasses.replace(training(), execution="graph")
    for factor in QUIET[:3]:
        values = {"images_per_second": 1000 * factor}
        commit(tmp_path, {("test_weak", captured): values, ("test_weak", training()): values})
    (one,) = written(script, tmp_path)
    assert (one.where["execution"], dict(one.bounds)) == ("graph", {"images_per_second": 921})


def test_slowed_or_disturbed_runs_are_ignored(script: ModuleType, tmp_path: Path) -> None:
    commit_quiet(tmp_path, ("test_weak", training()))
    before = script.made(tmp_path)
    slow: dict[str, float] = {"images_per_second": 950}
    commit(tmp_path, {("test_weak", training()): slow, ("test_other", training(delay_seconds=0.01)): slow})
    disturbed = AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind="hang", rank=0))
    commit(tmp_path, {("test_weak", training()): slow, ("test_sum", disturbed): slow})
    assert script.made(tmp_path) == before
    commit(tmp_path, {("test_weak", training()): slow})
    assert written(script, tmp_path)[0].bounds == {"images_per_second": 902}


def test_where_names_every_field_that_can_differ(script: ModuleType, tmp_path: Path) -> None:
    cases = [("test_precision", training(precision=precision)) for precision in ("fp32", "bf16")]
    sums = [("test_sum", SUM), ("test_sum", AllReduceSpec(world_size=4, nbytes=1024))]
    weak = [("test_weak", training(world_size)) for world_size in (1, 2)]
    samplers = [
        ("test_sampler", SamplerSpec(world_size=2, epoch_images=100, drop_last=drop_last))
        for drop_last in (True, False)
    ]
    commit_quiet(tmp_path, *cases, *sums, *weak, *samplers)
    one_batch = {
        **{
            "model": "resnet18",
            "per_rank_batch_size": 32,
            "data": "synthetic",
            "digest": "",
            "strategy": "single",
        },
        **{"memory_format": "contiguous", "input": "fixed", "execution": "eager", "inductor": ""},
        **{
            "accumulation_steps": 1,
            "sync_batch_norm": False,
            "epoch_images": 1024,
            "loader_workers": 0,
            "drop_last": True,
        },
    }
    assert [one.where for one in written(script, tmp_path)] == [
        {"world_size": 1, **one_batch, "precision": "fp32"},
        {"world_size": 1, **one_batch, "precision": "bf16"},
        {"world_size": 2, "nbytes": 1024, "algorithm": "backend", "execution": "eager", "in_place": True},
        {"world_size": 4, "nbytes": 1024, "algorithm": "backend", "execution": "eager", "in_place": True},
        {"world_size": 1, **one_batch, "strategy": "single", "precision": "fp32"},
        {"world_size": 2, **one_batch | {"strategy": "ddp"} | DDP_OPTIONS, "precision": "fp32"},
        {"world_size": 2, "set_epoch": True, "drop_last": True, "epoch_images": 100},
        {"world_size": 2, "set_epoch": True, "drop_last": False, "epoch_images": 100},
    ]


def test_cases_with_equal_fields_get_no_threshold(script: ModuleType, tmp_path: Path) -> None:
    epoch = EpochSpec(world_size=1, per_rank_batch_size=32, strategy="single")
    commit_quiet(
        tmp_path,
        ("test_both", training()),
        ("test_both", epoch),
        ("test_step", training()),
        ("test_epoch", epoch),
    )
    assert [one.test for one in written(script, tmp_path)] == ["test_step", "test_epoch"]


def test_two_cases_of_one_spec_are_refused(script: ModuleType, tmp_path: Path) -> None:
    path = commit(tmp_path, {("test_sum", SUM): {"busbw_bytes_per_second": 1}})
    document = json.loads(path.read_text())
    (benchmark,) = document["benchmarks"]
    document["benchmarks"].append(benchmark | {"fullname": "perf/test_other.py::test_sum[same]"})
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"0001_run\.json has two cases of test_sum with the same spec; remove one of them"
    ):
        script.made(tmp_path)


def test_run_of_other_hardware_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path = commit(tmp_path, {("test_sum", SUM): {"busbw_bytes_per_second": 1}}, key="h200x2")
    path.parent.rename(path.parent.with_name("h200x4"))
    with pytest.raises(NoBaseline, match="was measured on h200x2, this is h200x4"):
        script.made(tmp_path)


@pytest.mark.parametrize(
    ("machines", "count"),
    [([], 0), (["a"], 1), (["ab", "ab"], 1), (["a", "b"], 2), (["ab", "bc", "a"], 1), (["ab", "bc", "d"], 2)],
)
def test_runs_that_share_a_gpu_were_on_one_machine(
    script: ModuleType, machines: list[str], count: int
) -> None:
    assert (
        script.machine_count([script.Run(machine=frozenset(gpus), metrics={}) for gpus in machines]) == count
    )


@BOUNDED
@given(st.floats(min_value=1e-6, max_value=1e15))
def test_thresholds_are_rounded_down(script: ModuleType, worst: float) -> None:
    least = float(script.lowered(worst))
    assert 0.95 * worst * 0.99 < least <= 0.95 * worst * (1 + 1e-12)
    assert float(f"{least:.3g}") == pytest.approx(least, rel=1e-12)


@BOUNDED
@given(st.lists(st.floats(min_value=90, max_value=110), min_size=5, max_size=9))
def test_loss_of_a_sixth_is_below_every_threshold(script: ModuleType, values: list[float]) -> None:
    if script.is_quiet(values, script.MOST_SPREAD):
        assert median(values) * 5 / 6 < float(script.lowered(min(values)))


def test_committed_thresholds_are_current(script: ModuleType) -> None:
    """Without the file there are no thresholds."""
    path = REPOSITORY / "perf" / "thresholds.toml"
    text = script.by_hand(path) + script.made(REPOSITORY, script.default_suite)
    committed = path.read_text() if path.exists() else ""
    assert read_thresholds(read_document(committed)) == read_thresholds(read_document(text)), (
        "run tools/update_thresholds.py"
    )
    assert committed in ("", text), "run tools/update_thresholds.py"


def test_noisy_or_few_rounds_give_no_threshold(script: ModuleType, tmp_path: Path) -> None:
    quiet, launches, short = training(1), training(2), training(4)
    for _ in range(5):
        path = commit(
            tmp_path,
            {("test_weak", spec): {"images_per_second": 100.0} for spec in (quiet, launches, short)},
            gpus="a",
        )
        document = json.loads(path.read_text())
        samples = [benchmark["extra_info"]["ddpperf"]["samples"][0] for benchmark in document["benchmarks"]]
        samples[1]["seconds"] = [[0.1] * 2, [0.1] * 2, [0.104] * 2, [0.104] * 2]
        samples[2]["seconds"] = [[0.1] * 4] * 3
        path.write_text(json.dumps(document))
    assert [one.where["world_size"] for one in written(script, tmp_path)] == [1]


def test_five_of_six_runs_are_enough(script: ModuleType, tmp_path: Path) -> None:
    """A metric that one of these runs lacks gives no threshold."""
    for run, factor in enumerate((*QUIET, 1.0)):
        metrics: dict[tuple[str, Spec], dict[str, float]] = {
            ("test_sum", SUM): {"busbw_bytes_per_second": 100 * factor}
        }
        if run:
            metrics["test_weak", training()] = {"images_per_second": 100 * factor}
        if run > 1:
            metrics["test_weak", training(2)] = {"images_per_second": 100 * factor}
        metrics["test_weak", training(4)] = {"images_per_second": 100 * factor} if run else {}
        commit(tmp_path, metrics)
    assert [(one.test, one.where["world_size"]) for one in written(script, tmp_path)] == [
        ("test_sum", 2),
        ("test_weak", 1),
    ]

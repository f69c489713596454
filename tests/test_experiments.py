"""This repository's own experiments, run once: every figure is what its definition makes of raw seconds."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

from tests.experiments import Run, measure, metric, seconds, slowest_device, steps_of

PARAMETERS = 11_689_512  # of torchvision's ResNet-18


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The one run for all tests: of several processes that test, the first makes it, and the others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    root = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "experiments"
    with open(root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            root.mkdir()
            measure(root)
    return Run(root)


def test_everything_is_measured_and_passes(run: Run) -> None:
    assert run.status == 0, run.output
    tests = {name.partition("[")[0] for name in run.stored}
    assert tests == {
        "test_all_reduce",
        "test_batch_size",
        "test_epoch_scaling",
        "test_forms",
        "test_loader_workers",
        "test_precision",
        "test_shards_are_disjoint_and_cover_the_data",
        "test_strategies",
        "test_strong_scaling",
        "test_weak_scaling",
        "test_without_set_epoch_the_epochs_repeat",
    }
    assert f"PASS: {len(run.stored)} tests measured" in run.output


def test_what_the_cpu_cannot_do_is_skipped_with_a_sentence(run: Run) -> None:
    outcomes = {test.rpartition("::")[2]: each for test, each in run.header["outcomes"].items()}
    skipped = {test: each["reason"] for test, each in outcomes.items() if each["outcome"] == "skipped"}
    one_process = "strategy data_parallel drives several GPUs from one process; this runs on the CPU"
    cell = "world_size=2-batch=8-resnet18-data_parallel-fp32-eager-fixed"
    assert skipped == {f"test_{scaling}_scaling[{cell}]": one_process for scaling in ("weak", "strong")}
    assert [stored["spec"]["form"] for stored in run.of("test_forms")] == ["eager"], "the others are a GPU's, or take long"
    assert f"skipped: {one_process}: 2 tests" in run.output.splitlines()


def test_weak_speedup_is_n_times_one_devices_step_over_that_of_n(run: Run) -> None:
    two = run.one("test_weak_scaling", "ddp")
    one_device = two["legs"]["one_device"]
    assert [stored["spec"]["per_rank_batch_size"] for stored in (two, one_device)] == [8, 8]
    speedup = 2 * slowest_device(one_device, 2) / seconds(two)
    assert metric(two, "speedup") == pytest.approx(speedup)
    assert metric(two, "efficiency") == pytest.approx(speedup / 2)
    assert "speedup" not in run.one("test_weak_scaling", "single")["metrics"]


def test_strong_speedup_is_one_devices_step_of_the_global_batch_over_that_of_n(run: Run) -> None:
    two = run.one("test_strong_scaling", "ddp")
    one_device = two["legs"]["one_device"]
    assert [stored["spec"]["per_rank_batch_size"] for stored in (two, one_device)] == [8, 16]
    speedup = slowest_device(one_device, 2) / seconds(two)
    assert metric(two, "speedup") == pytest.approx(speedup)
    assert metric(two, "efficiency") == pytest.approx(speedup / 2)
    assert run.one("test_strong_scaling", "single")["samples"] == one_device["samples"], "measured once, for both"


def test_the_speedup_of_an_epoch_is_its_seconds_on_one_device_over_those_on_n(run: Run) -> None:
    two = run.one("test_epoch_scaling", "ddp")
    one_device = two["legs"]["one_device"]
    assert [stored["spec"]["measurement"] for stored in (two, one_device)] == ["training_epoch"] * 2
    assert [stored["spec"]["world_size"] for stored in (two, one_device)] == [2, 1]
    speedup = seconds(one_device) / seconds(two)
    assert metric(two, "speedup") == pytest.approx(speedup)
    assert metric(two, "efficiency") == pytest.approx(speedup / 2)
    for stored, images in ((two, 48), (run.one("test_epoch_scaling", "single"), 48)):
        assert metric(stored, "images_per_second") == pytest.approx(images / seconds(stored))
        assert metric(stored, "step_seconds") == pytest.approx(seconds(stored) / steps_of(stored))


def test_a_strategys_speedup_is_plain_ddps_step_over_its_own(run: Run) -> None:
    strategies = {stored["spec"]["strategy"] + stored["spec"]["comm_hook"]: stored for stored in run.of("test_strategies")}
    assert set(strategies) == {"ddpnone", "ddpbf16", "zero1none", "fsdpnone"}
    ddp = strategies.pop("ddpnone")
    assert "speedup_over_ddp" not in ddp["metrics"]
    for stored in strategies.values():
        assert stored["legs"]["ddp"]["samples"] == ddp["samples"], "measured once, for all"
        assert metric(stored, "speedup_over_ddp") == pytest.approx(seconds(ddp) / seconds(stored))


@pytest.mark.parametrize(
    "test", ["test_weak_scaling", "test_strong_scaling", "test_precision", "test_forms", "test_strategies"]
)
def test_a_steps_figures_follow_from_its_seconds(run: Run, test: str) -> None:
    for stored in run.of(test):
        steps, batch = steps_of(stored), stored["spec"]["world_size"] * stored["spec"]["per_rank_batch_size"]
        assert metric(stored, "epoch_seconds") == pytest.approx(steps * seconds(stored))
        assert metric(stored, "images_per_second") == pytest.approx(batch / seconds(stored))
        by_ddp = stored["spec"]["strategy"] in ("ddp", "zero1")
        assert ("communicated_bytes_per_epoch" in stored["metrics"]) is by_ddp
        if by_ddp:
            nbytes = 2 if stored["spec"]["comm_hook"] == "bf16" else 4
            assert metric(stored, "communicated_bytes_per_epoch") == nbytes * PARAMETERS * steps
        assert ("communicator_seconds" in stored["metrics"]) is (stored["spec"]["world_size"] > 1)
        assert 0 < metric(stored, "cpu_seconds") < 3 * seconds(stored), "of one thread, beside what it must wait for"


def test_each_precision_learns(run: Run) -> None:
    losses = {each["spec"]["precision"]: metric(each, "loss_after_5_steps") for each in run.of("test_precision")}
    assert losses["fp32"] == pytest.approx(losses["bf16"], abs=0.1)
    assert 0 < losses["fp32"] < 2.3, "less than that of guessing one of 10 classes"


def loading_doubts(stored: dict[str, Any]) -> list[str]:
    return [note for note in stored["notes"] if "loading" in note]


def test_an_epochs_figures_follow_from_its_seconds(run: Run) -> None:
    inputs = {stored["spec"]["input"]: stored for stored in run.of("test_batch_size")}
    assert set(inputs) == {"fixed", "device", "dataloader"}
    for stored in inputs.values():
        assert metric(stored, "step_seconds") == pytest.approx(seconds(stored) / 6)
        assert metric(stored, "images_per_second") == pytest.approx(48 / seconds(stored))
    for name in ("device", "dataloader"):
        share = 1 - seconds(inputs["fixed"]) / seconds(inputs[name])
        assert metric(inputs[name], "loading_share") == pytest.approx(share)
        assert loading_doubts(inputs[name]) == (["doubtful: loading the images limits"] if share >= 0.05 else [])
        assert inputs[name]["legs"]["without_loading"]["samples"] == inputs["fixed"]["samples"]
    assert inputs["fixed"]["notes"] == []


def test_enough_workers_are_those_from_which_on_loading_takes_less_than_5_percent(run: Run) -> None:
    stored = run.one("test_loader_workers")
    without = seconds(stored["legs"]["without_loading"])
    epochs = {0: stored["legs"]["workers=0"], 1: stored["legs"]["workers=1"], 2: stored}
    assert [epoch["spec"]["loader_workers"] for epoch in epochs.values()] == [0, 1, 2]
    shares = {workers: 1 - without / seconds(epoch) for workers, epoch in epochs.items()}
    for workers, share in shares.items():
        assert metric(stored, f"loading_share_with_{workers}_workers") == pytest.approx(share)
    enough = [workers for workers in (0, 1, 2) if all(share < 0.05 for more, share in shares.items() if more >= workers)]
    if enough:
        assert metric(stored, "enough_workers") == enough[0]
    assert ("enough_workers" in stored["metrics"]) is bool(enough)
    assert loading_doubts(stored) == ([] if enough else ["doubtful: loading the images limits, with 2 workers, too"])


def test_shards_leave_out_and_repeat_only_the_rest(run: Run) -> None:
    told, untold = run.of("test_shards_are_disjoint_and_cover_the_data"), run.of("test_without_set_epoch_the_epochs_repeat")
    cells = [(each["spec"]["world_size"], each["spec"]["drop_last"]) for each in told]
    assert sorted(cells) == [(1, False), (1, True), (2, False), (2, True)]
    for stored in [*told, *untold]:
        assert stored["spec"]["epoch_images"] % 2 == 1, "or two ranks would have no rest"
        rest = stored["spec"]["world_size"] - 1
        assert metric(stored, "missing_images") == (rest if stored["spec"]["drop_last"] else 0)
        assert metric(stored, "repeated_images") == (0 if stored["spec"]["drop_last"] else rest)
    assert max(metric(stored, "repeated_places") for stored in told) < 0.5
    assert [metric(stored, "repeated_places") for stored in untold] == [1, 1]


def test_a_buffers_bandwidth_is_its_bytes_over_seconds(run: Run) -> None:
    """Of two ranks the bus bandwidth is the same: 2 (N - 1) / N is 1."""
    sizes = [stored["spec"]["nbytes"] for stored in run.of("test_all_reduce")]
    assert sizes == [2**10, 2**16, 2**20, 2**24, 2**26]
    for stored in run.of("test_all_reduce"):
        assert metric(stored, "algbw_bytes_per_second") == pytest.approx(stored["spec"]["nbytes"] / seconds(stored))
        assert metric(stored, "busbw_bytes_per_second") == metric(stored, "algbw_bytes_per_second")


def test_the_time_counted_is_that_of_the_rounds(run: Run) -> None:
    """Ranks that work at the same time count once, those that work in turn each; what is shared by tests counts once."""
    timing = run.header["timing"]
    parts = [part for stored in run.stored.values() for part in (stored, *stored["legs"].values())]
    measured = {str(part["spec"]): part for part in parts}
    counted = 0.0
    for part in measured.values():
        together = part["spec"].get("strategy") != "single"
        counted += sum(max(each) if together else sum(each) for each in part["samples"][0]["seconds"])
    assert timing["counted_seconds"] == pytest.approx(counted)
    assert timing["counted_seconds"] < timing["seconds"]
    assert {test.rpartition("::")[2] for test in timing["overhead_seconds"]} == set(run.stored)
    assert all(overhead >= 0 for overhead in timing["overhead_seconds"].values())
    assert sum(timing["overhead_seconds"].values()) + counted <= timing["seconds"]

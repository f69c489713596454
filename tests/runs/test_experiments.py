"""This repository's experiments, run once: every metric follows from the raw samples.

By default on canned measurements, as a slow test on real ranks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from ddpperf.machine.hardware import computes_bf16
from ddpperf.specs import OWN_ALGORITHMS, PARTS
from perf.test_precision import SLOW_BF16
from tests.canned import CannedSuite
from tests.experiments import (
    PARAMETERS,
    Run,
    metric,
    run_experiments,
    seconds,
    slowest_device,
    steps_of,
    with_experiments,
)
from tests.project import Project

PARTED = [f"{part}_seconds" for part in PARTS]


@pytest.fixture(scope="module", params=["canned", pytest.param("real", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all tests of this file."""
    kind = CannedSuite if request.param == "canned" else Project
    project = kind(tmp_path_factory.mktemp(request.param))
    try:
        yield run_experiments(project)
    finally:
        project.clean()


@pytest.fixture
def real_run(request: pytest.FixtureRequest, run: Run) -> Run:
    """The run on real ranks; a test of what only real ranks do is skipped on canned measurements."""
    if request.node.callspec.params["run"] == "canned":
        pytest.skip("only real ranks learn and write traces")
    return run


def test_everything_is_measured_and_passes(run: Run) -> None:
    assert run.status == 0, run.output
    tests = {name.partition("[")[0] for name in run.stored}
    assert tests == {
        "test_all_reduce",
        "test_backend_model",
        "test_batch_size",
        "test_collective",
        "test_comm_split",
        "test_cost_model",
        "test_epoch_scaling",
        "test_fastest_all_reduce",
        "test_execution",
        "test_large_batch",
        "test_loader_workers",
        "test_messages",
        "test_precision",
        "test_precision_accuracy",
        "test_remedies",
        "test_shards_are_disjoint_and_cover_the_data",
        "test_epoch_breakdown",
        "test_step_breakdown",
        "test_strategies",
        "test_strong_parts_speedup",
        "test_weak_parts_speedup",
        "test_strong_scaling",
        "test_weak_scaling",
        "test_without_set_epoch_the_epochs_repeat",
    }
    assert f"PASS: {len(run.stored)} tests measured" in run.output


def test_impossible_cases_are_skipped_with_a_reason(run: Run) -> None:
    outcomes = {test.rpartition("::")[2]: found for test, found in run.header["outcomes"].items()}
    skipped = {test: each["reason"] for test, each in outcomes.items() if each["kind"] == "skipped"}
    for precision in ("fp32", "bf16"):
        assert "images of an epoch; use a smaller one" in skipped.pop(
            f"test_precision_accuracy[b64-{precision}]"
        )
    large = {
        test: skipped.pop(test)
        for test in list(skipped)
        if "large" in test or "same_result" in test or "long" in test or "test_remedies" in test
    }
    reports = {test: skipped.pop(test) for test in list(skipped) if test.startswith("test_report_training")}
    assert len(reports) == 10
    assert set(reports.values()) == {"whole trainings of ResNets take hours on a CPU; run them on GPUs"}
    assert large.pop("test_long_run[long]") == "50 epochs take hours on a CPU; run them on GPUs"
    assert large.pop("test_largest_batch[1rank-b32]").startswith("a CPU step is too slow")
    assert len(large) == 22
    assert all(
        "images of the data set" in reason or "images of an epoch; use a smaller one" in reason
        for reason in large.values()
    )
    one_process = "strategy data_parallel drives several GPUs from one process; this runs on the CPU"
    data_parallel = {f"test_{scaling}_scaling[2rank-b8-data_parallel]" for scaling in ("weak", "strong")}
    data_parallel |= {"test_data_parallel_split[2rank]"}
    emulated = ("test_precision[1rank-b8-bf16]", "test_precision_accuracy[b16-bf16]")
    bf16 = {} if computes_bf16() else dict.fromkeys(emulated, SLOW_BF16)
    few = "two world sizes above 1, found 1, 2; pass --world-sizes 1,2,4"
    too_few = {
        f"{test}[2rank]": f"a fit needs {few}"
        for test in ("test_amdahl", "test_gustafson", "test_projection")
    }
    assert skipped == dict.fromkeys(data_parallel, one_process) | bf16 | too_few
    assert [stored["spec"]["execution"] for stored in run.of("test_execution")] == ["eager"]
    assert f"{one_process}: 3 tests" in run.output


@pytest.mark.parametrize(("kind", "batch_size", "factor"), [("weak", 8, 2), ("strong", 16, 1)])
def test_speedup_is_factor_t1_over_tn(run: Run, kind: str, batch_size: int, factor: int) -> None:
    two = run.one(f"test_{kind}_scaling", world_size=2)
    one_device = two["references"]["one_device"]
    assert [stored["spec"]["per_rank_batch_size"] for stored in (two, one_device)] == [8, batch_size]
    speedup = factor * slowest_device(one_device, 2) / seconds(two)
    assert metric(two, "speedup") == pytest.approx(speedup)
    assert metric(two, "efficiency") == pytest.approx(speedup / 2)
    alone = run.one(f"test_{kind}_scaling", world_size=1)
    if kind == "strong":
        assert alone["samples"] == one_device["samples"], "measured once, for both"
    assert "speedup" not in alone["metrics"]


def test_ddp_sends_as_many_bytes_as_the_parameters_have(run: Run) -> None:
    plain, *_ = run.of("test_messages", strategy="ddp", comm_hook="none")
    assert metric(plain, "gradients_over_parameters") == 1
    assert metric(run.one("test_messages", comm_hook="bf16"), "gradients_over_parameters") == 0.5


def test_epoch_speedup_is_t1_over_tn(run: Run) -> None:
    two = run.one("test_epoch_scaling", world_size=2)
    one_device = two["references"]["one_device"]
    assert [stored["spec"]["measurement"] for stored in (two, one_device)] == ["training_epoch"] * 2
    assert [stored["spec"]["world_size"] for stored in (two, one_device)] == [2, 1]
    speedup = seconds(one_device) / seconds(two)
    assert metric(two, "speedup") == pytest.approx(speedup)
    assert metric(two, "efficiency") == pytest.approx(speedup / 2)
    for stored, images in ((two, 48), (run.one("test_epoch_scaling", world_size=1), 48)):
        assert metric(stored, "images_per_second") == pytest.approx(images / seconds(stored))
        assert metric(stored, "step_seconds") == pytest.approx(seconds(stored) / steps_of(stored))


def test_strategies_are_compared_with_plain_ddp(run: Run) -> None:
    strategies = {
        stored["spec"]["strategy"] + stored["spec"]["comm_hook"]: stored
        for stored in run.of("test_strategies")
    }
    assert set(strategies) == {"ddpnone", "ddpbf16", "own_ddpnone", "zero1none", "fsdpnone"}
    ddp = strategies.pop("ddpnone")
    assert "speedup_over_ddp" not in ddp["metrics"]
    for stored in strategies.values():
        assert stored["references"]["ddp"]["samples"] == ddp["samples"], "measured once, for all"
        assert metric(stored, "speedup_over_ddp") == pytest.approx(seconds(ddp) / seconds(stored))


@pytest.mark.parametrize(
    "test",
    ["test_weak_scaling", "test_strong_scaling", "test_precision", "test_execution", "test_strategies"],
)
def test_step_metrics_follow_from_its_seconds(run: Run, test: str) -> None:
    for stored in run.of(test):
        steps, batch = steps_of(stored), stored["spec"]["world_size"] * stored["spec"]["per_rank_batch_size"]
        assert metric(stored, "epoch_seconds") == pytest.approx(steps * seconds(stored))
        assert metric(stored, "images_per_second") == pytest.approx(batch / seconds(stored))
        all_reduced = stored["spec"]["strategy"] in ("ddp", "own_ddp", "zero1")
        assert ("communicated_bytes_per_epoch" in stored["metrics"]) is all_reduced
        if all_reduced:
            nbytes = 2 if stored["spec"]["comm_hook"] == "bf16" else 4
            assert metric(stored, "communicated_bytes_per_epoch") == nbytes * PARAMETERS * steps
        assert ("communicator_seconds" in stored["metrics"]) is (stored["spec"]["world_size"] > 1)
        assert 0 < metric(stored, "cpu_seconds") < 3 * seconds(stored), (
            "of one thread, beside what it must wait for"
        )


def test_each_precision_learns(real_run: Run) -> None:
    losses = {
        stored["spec"]["precision"]: metric(stored, "loss_after_5_steps")
        for stored in real_run.of("test_precision")
    }
    assert set(losses) == ({"fp32", "bf16"} if computes_bf16() else {"fp32"})
    assert losses.get("bf16", losses["fp32"]) == pytest.approx(losses["fp32"], abs=0.1)
    assert 0 < losses["fp32"] < 2.3, "less than that of guessing one of 10 classes"


@pytest.mark.slow
def test_bf16_learns_on_every_cpu(project: Project) -> None:
    with_experiments(project)
    options = ("--precision", "bf16", "--model", "resnet10_cifar", "--batch-sizes", "8", "--rounds", "1")
    finished = project.run("perf/test_precision.py::test_precision", *options)
    finished.assert_one_sentence(0, "PASS: 2 tests measured")
    losses = {
        stored["spec"]["precision"]: metric(stored, "loss_after_5_steps")
        for stored in project.measured().values()
    }
    assert set(losses) == {"fp32", "bf16"}
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.1)
    assert losses["bf16"] != losses["fp32"], "they are not the same computation"
    assert 0 < losses["fp32"] < 2.3, "less than guessing one of 10 classes"


def loading_warnings(stored: dict[str, Any]) -> list[str]:
    return [note["text"] for note in stored["notes"] if "loading" in note["text"]]


def test_epoch_metrics_follow_from_its_seconds(run: Run) -> None:
    inputs = {stored["spec"]["input"]: stored for stored in run.of("test_batch_size")}
    assert set(inputs) == {"fixed", "device", "dataloader"}
    for stored in inputs.values():
        assert metric(stored, "step_seconds") == pytest.approx(seconds(stored) / 6)
        assert metric(stored, "images_per_second") == pytest.approx(48 / seconds(stored))
    for name in ("device", "dataloader"):
        share = 1 - seconds(inputs["fixed"]) / seconds(inputs[name])
        assert metric(inputs[name], "loading_fraction") == pytest.approx(share)
        assert loading_warnings(inputs[name]) == (["loading limits the epoch"] if share >= 0.05 else [])
        assert inputs[name]["references"]["without_loading"]["samples"] == inputs["fixed"]["samples"]
    assert inputs["fixed"]["notes"] == []


def test_enough_workers_keep_loading_below_5_percent(run: Run) -> None:
    stored = run.one("test_loader_workers")
    without = seconds(stored["references"]["without_loading"])
    epochs = {0: stored["references"]["workers=0"], 1: stored["references"]["workers=1"], 2: stored}
    assert [epoch["spec"]["loader_workers"] for epoch in epochs.values()] == [0, 1, 2]
    shares = {workers: 1 - without / seconds(epoch) for workers, epoch in epochs.items()}
    for workers, share in shares.items():
        assert metric(stored, f"loading_fraction_with_{workers}_workers") == pytest.approx(share)
    enough = [
        workers
        for workers in (0, 1, 2)
        if all(share < 0.05 for more, share in shares.items() if more >= workers)
    ]
    if enough:
        assert metric(stored, "enough_workers") == enough[0]
    assert ("enough_workers" in stored["metrics"]) is bool(enough)
    assert loading_warnings(stored) == ([] if enough else ["loading limits the epoch even with 2 workers"])


def test_shards_drop_or_repeat_only_the_rest(run: Run) -> None:
    told, untold = (
        run.of("test_shards_are_disjoint_and_cover_the_data"),
        run.of("test_without_set_epoch_the_epochs_repeat"),
    )
    cases = [(each["spec"]["world_size"], each["spec"]["drop_last"]) for each in told]
    assert sorted(cases) == [(1, False), (1, True), (2, False), (2, True)]
    for stored in [*told, *untold]:
        assert stored["spec"]["epoch_images"] % 2 == 1, "or two ranks would have no rest"
        rest = stored["spec"]["world_size"] - 1
        assert metric(stored, "missing_images") == (rest if stored["spec"]["drop_last"] else 0)
        assert metric(stored, "repeated_images") == (0 if stored["spec"]["drop_last"] else rest)
    assert max(metric(stored, "repeated_places") for stored in told) < 0.5
    assert [metric(stored, "repeated_places") for stored in untold] == [1, 1]


def test_communication_is_measured_by_three_methods(run: Run) -> None:
    stored = run.one("test_comm_split")
    references = stored["references"]
    by_rank = [
        [ranks_seconds / each["iterations"] for ranks_seconds in each["samples"][0]["seconds"][0]]
        for each in (stored, references["no_sync"])
    ]
    exposed = max(ddp - alone for ddp, alone in zip(*by_rank, strict=True))
    assert metric(stored, "exposed_comm_seconds") == pytest.approx(exposed)
    counters = references["trace"]["samples"][0]["counters"]
    rank = max(range(2), key=counters["exposed_comm_seconds"].__getitem__)
    for name, counted in (
        ("traced_comm_seconds", "comm_seconds"),
        ("traced_exposed_comm_seconds", "exposed_comm_seconds"),
        ("compute_seconds", "compute_seconds"),
        ("idle_seconds", "idle_seconds"),
    ):
        assert metric(stored, name) == counters[counted][rank], "all of one rank"
    overlapped = metric(stored, "overlap_fraction") * metric(stored, "traced_comm_seconds")
    assert overlapped == pytest.approx(
        metric(stored, "traced_comm_seconds") - metric(stored, "traced_exposed_comm_seconds")
    )
    parts = [
        metric(stored, name) for name in ("traced_exposed_comm_seconds", "compute_seconds", "idle_seconds")
    ]
    assert sum(parts) == pytest.approx(metric(stored, "traced_step_seconds")), (
        "a CPU copies nothing by itself"
    )
    assert metric(stored, "replayed_comm_seconds") == pytest.approx(seconds(references["replay"]))
    one = slowest_device(references["one_device"], 2)
    assert metric(stored, "step_minus_one_device_seconds") == pytest.approx(seconds(stored) - one)
    sent = metric(stored, "communicated_bytes_per_epoch") / steps_of(stored)
    assert metric(stored, "gradient_busbw_bytes_per_second") == pytest.approx(
        sent / min(counters["all_reduce_seconds"])
    )
    disagreement = (exposed - metric(stored, "traced_exposed_comm_seconds")) / seconds(stored)
    assert metric(stored, "method_disagreement") == pytest.approx(disagreement)


def test_parts_are_those_of_the_least_waiting_rank(run: Run) -> None:
    alone, together = run.of("test_step_breakdown")
    for stored in (alone, together):
        (sample,) = stored["references"]["parts"]["samples"]
        names = [name for name in PARTED if name in sample["counters"]]
        waits = sample["counters"].get("gradient_sync_seconds", [0.0])
        parts = [sample["counters"][name][waits.index(min(waits))] for name in names]
        assert [metric(stored, name) for name in names] == parts
        own = sample["seconds"][0][waits.index(min(waits))] / stored["references"]["parts"]["iterations"]
        assert metric(stored, "parts_over_step") == pytest.approx(sum(parts) / own)
        assert metric(stored, "parts_over_step") == pytest.approx(1, abs=0.02)
        assert metric(stored, "marked_over_step") == pytest.approx(
            seconds(stored["references"]["parts"]) / seconds(stored)
        )
        assert "mfu" not in stored["metrics"], "of a CPU no peak is known"
    assert set(PARTED) - {"loading_seconds"} <= set(together["metrics"])
    alone_each = [
        each / together["references"]["no_sync"]["iterations"]
        for each in together["references"]["no_sync"]["samples"][0]["seconds"][0]
    ]
    assert metric(together, "straggler_spread") == pytest.approx(max(alone_each) / min(alone_each) - 1)
    assert "gradient_sync_seconds" not in alone["metrics"]


def test_parts_of_an_epoch_add_up_to_the_epoch(run: Run) -> None:
    for stored in run.of("test_epoch_breakdown"):
        names = [name for name in PARTED if name in stored["metrics"]]
        assert "loading_seconds" in names
        assert ("gradient_sync_seconds" in names) == (stored["spec"]["world_size"] > 1)
        parts = [metric(stored, name) for name in names]
        (sample,) = stored["references"]["parts"]["samples"]
        waits = sample["counters"].get("gradient_sync_seconds", [0.0])
        own = [ranks[waits.index(min(waits))] for ranks in sample["seconds"]]
        over = steps_of(stored) * sum(parts) / median(own)
        assert metric(stored, "parts_over_step") == pytest.approx(over)
        assert over == pytest.approx(1, abs=0.02)
        assert metric(stored, "loading_wait_seconds") > 0


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_speedup_of_each_part(kind: str, run: Run) -> None:
    """Weak: N t(1) / t(N) with the same batch per rank. Strong: t(1) / t(N) with the same global batch."""
    tests = run.of(f"test_{kind}_parts_speedup")
    assert {stored["spec"]["input"] for stored in tests} == {"fixed", "dataloader"}
    for stored in tests:
        N, alone = stored["spec"]["world_size"], stored["references"]["parts_on_one_device"]
        assert alone["spec"]["world_size"] == 1
        times = N if kind == "strong" else 1
        assert alone["spec"]["per_rank_batch_size"] == times * stored["spec"]["per_rank_batch_size"]
        ranks = list(zip(*alone["samples"][0]["seconds"], strict=True))
        medians = [median(seconds) for seconds in ranks]
        slowest = medians.index(max(medians))
        t1 = alone["samples"][0]["counters"]["backward_seconds"][slowest]
        assert metric(stored, "backward_seconds_on_one_device") == t1
        speedup = t1 / metric(stored, "backward_seconds") * (1 if kind == "strong" else N)
        assert metric(stored, "backward_speedup") == pytest.approx(speedup)
        assert "gradient_sync_speedup" not in stored["metrics"]
        loads = "loading_seconds_on_one_device" in stored["metrics"]
        assert loads == (stored["spec"]["input"] == "dataloader")


def test_cost_of_more_devices(run: Run) -> None:
    _, stored = run.of("test_step_breakdown")
    epoch = steps_of(stored) * seconds(stored)
    images = steps_of(stored) * stored["spec"]["world_size"] * stored["spec"]["per_rank_batch_size"]
    one = (
        slowest_device(stored["references"]["one_device"], 2) * images / stored["spec"]["per_rank_batch_size"]
    )
    assert metric(stored, "device_seconds_per_epoch") == pytest.approx(2 * epoch)
    assert metric(stored, "saved_seconds_per_epoch") == pytest.approx(one - epoch)
    assert metric(stored, "extra_device_seconds_per_epoch") == pytest.approx(2 * epoch - one)


def test_bandwidth_is_bytes_over_seconds(run: Run) -> None:
    """Of two ranks the bus bandwidth is the same: 2 (N - 1) / N is 1."""
    sizes = [
        stored["spec"]["nbytes"]
        for stored in run.of("test_all_reduce")
        if stored["spec"]["algorithm"] == "backend" and stored["spec"]["in_place"]
    ]
    assert sizes == [2**12, 2**16, 2**18, 2**20]
    assert {stored["spec"]["algorithm"] for stored in run.of("test_all_reduce")} == {
        "backend",
        *OWN_ALGORITHMS,
    }
    for stored in run.of("test_all_reduce"):
        assert metric(stored, "algbw_bytes_per_second") == pytest.approx(
            stored["spec"]["nbytes"] / seconds(stored)
        )
        assert metric(stored, "busbw_bytes_per_second") == metric(stored, "algbw_bytes_per_second")


def test_fastest_algorithm_is_named(run: Run) -> None:
    for stored in run.of("test_fastest_all_reduce"):
        by_algorithm = {name: seconds(reference) for name, reference in stored["references"].items()} | {
            "backend": seconds(stored)
        }
        fastest = min(by_algorithm, key=by_algorithm.__getitem__)
        best = min(seconds(reference) for reference in stored["references"].values())
        assert metric(stored, "speedup_of_the_best_other") == pytest.approx(seconds(stored) / best), (
            "it may be slower, too"
        )
        assert f"on 2 ranks: {fastest} is the fastest" in stored["notes"][-1]["text"]
        for name in stored["references"]:
            assert metric(stored, f"{name}_over_backend") == pytest.approx(
                by_algorithm[name] / by_algorithm["backend"]
            )


def test_busbw_of_collectives_excludes_local_bytes(run: Run) -> None:
    shares = {"reduce_scatter": 0.5, "all_gather": 0.5, "all_to_all": 0.5, "broadcast": 1.0}
    assert {stored["spec"]["kind"] for stored in run.of("test_collective")} == set(shares)
    for stored in run.of("test_collective"):
        busbw = shares[stored["spec"]["kind"]] * stored["spec"]["nbytes"] / seconds(stored)
        assert metric(stored, "busbw_bytes_per_second") == pytest.approx(busbw)


def test_cost_model_predicts_every_call(run: Run) -> None:
    for algorithm in OWN_ALGORITHMS:
        stored = run.one("test_cost_model", algorithm=algorithm)
        measured = [name for name in stored["metrics"] if name.startswith("predicted_over_measured_")]
        assert len(measured) == len(run.of("test_all_reduce", algorithm=algorithm)) == 4
        assert (
            metric(stored, "latency_seconds_low")
            <= metric(stored, "latency_seconds")
            <= metric(stored, "latency_seconds_high")
        )
        assert metric(stored, "held_out_error") >= 0
        is_fitted = "link_bytes_per_second" in stored["metrics"]  # sending may cost too little to be seen
        assert "link_utilization" not in stored["metrics"], "no rate of a CPU's link is known"
        if not is_fitted:
            continue
        fitted = metric(stored, "link_bytes_per_second")
        seconds_by_link = stored["spec"]["nbytes"] / fitted / seconds(stored)
        for execution, of_two_ranks in (("ring_bytes", 1), ("doubling_seconds", 1), ("aggregate_bytes", 2)):
            assert metric(stored, f"{execution}_over_measured") == pytest.approx(
                of_two_ranks * seconds_by_link
            )


def test_counted_time_is_that_of_the_rounds(run: Run) -> None:
    """Ranks that work at the same time count once, ranks that work in turn each, shared references once."""
    timing = run.header["timing"]
    parts = [part for stored in run.stored.values() for part in (stored, *stored["references"].values())]
    measured = {str(part["spec"]): part for part in [*parts, run.header["copied"]]}
    counted = 0.0
    for part in measured.values():
        together = part["spec"].get("strategy") != "single"
        counted += sum(max(each) if together else sum(each) for each in part["samples"][0]["seconds"])
    assert timing["counted_seconds"] == pytest.approx(counted)
    assert {test.rpartition("::")[2] for test in timing["overhead_seconds"]} == set(run.stored)


def test_overhead_and_rounds_fit_into_the_run(real_run: Run) -> None:
    timing = real_run.header["timing"]
    overhead = timing["overhead_seconds"].values()
    assert min(overhead) >= 0
    assert sum(overhead) + timing["counted_seconds"] <= timing["seconds"]

"""This repository's experiments, run once: every metric follows from the raw samples.

By default on canned measurements, as a slow test on real ranks too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from ddpperf.machine.hardware import computes_bf16
from ddpperf.specs import PARTS
from ddpperf.specs.collective import OWN_ALGORITHMS
from tests.canned import LATE, CannedSuite
from tests.experiments import (
    PARAMETERS,
    Run,
    Stored,
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


def assert_metrics(stored: Stored, **expected: float) -> None:
    found = {name: metric(stored, name) for name in expected}
    assert found == pytest.approx(expected)


def test_everything_is_measured_and_passes(run: Run) -> None:
    assert run.status == 0, run.output
    tests = {name.partition("[")[0].removeprefix("test_") for name in run.stored}
    assert tests == {
        *("all_reduce", "backend_model", "batch_size", "collective", "comm_split", "cost_model"),
        *("epoch_breakdown", "epoch_scaling", "execution", "fastest_all_reduce", "large_batch"),
        *("loader_workers", "messages", "precision", "precision_accuracy", "remedies", "single_calls"),
        "step_breakdown",
        *("shards_are_disjoint_and_cover_the_data", "without_set_epoch_the_epochs_repeat"),
        *("strategies", "strong_parts_speedup", "strong_scaling", "weak_parts_speedup", "weak_scaling"),
    }
    assert f"PASS: {len(run.stored)} tests measured" in run.output


def test_impossible_cases_are_skipped_with_a_reason(run: Run) -> None:
    outcomes = {test.rpartition("::")[2]: found for test, found in run.header["outcomes"].items()}
    skipped = {test: found["reason"] for test, found in outcomes.items() if found["kind"] == "skipped"}
    assert all(skipped.values())
    assert {test.partition("[")[0].removeprefix("test_") for test in skipped} == {
        *("amdahl", "data_parallel_split", "gustafson", "large_batch", "largest_batch", "long_run"),
        *("precision_accuracy", "projection", "remedies", "script", "report_training"),
        *("same_result_on_more_devices", "strong_scaling", "weak_scaling"),
        *(() if computes_bf16() else ("precision",)),
    }
    one_process = "strategy data_parallel drives several GPUs from one process; this runs on the CPU"
    assert skipped["test_weak_scaling[2rank-b8-data_parallel]"] == one_process
    assert "-rs says why" in run.output


@pytest.mark.parametrize(("kind", "batch_size", "factor"), [("weak", 8, 2), ("strong", 16, 1)])
def test_speedup_is_factor_t1_over_tn(run: Run, kind: str, batch_size: int, factor: int) -> None:
    two = run.one(f"test_{kind}_scaling", world_size=2)
    one_device = two["references"]["one_device"]
    assert [stored["spec"]["per_rank_batch_size"] for stored in (two, one_device)] == [8, batch_size]
    speedup = factor * slowest_device(one_device, 2) / seconds(two)
    assert_metrics(two, speedup=speedup, efficiency=speedup / 2)
    alone = run.one(f"test_{kind}_scaling", world_size=1)
    if kind == "strong":
        assert alone["samples"] == one_device["samples"], "measured once, for both"
    assert "speedup" not in alone["metrics"]


def test_ddp_sends_as_many_bytes_as_the_parameters_have(run: Run) -> None:
    plain, *_ = run.of("test_messages", strategy="ddp", comm_hook="none")
    assert metric(plain, "gradients_over_parameters") == 1
    assert metric(run.one("test_messages", comm_hook="bf16"), "gradients_over_parameters") == 0.5


def test_epoch_speedup_is_t1_over_tn(run: Run) -> None:
    two, one = (run.one("test_epoch_scaling", world_size=N) for N in (2, 1))
    one_device = two["references"]["one_device"]
    assert (one_device["spec"]["measurement"], one_device["spec"]["world_size"]) == ("training_epoch", 1)
    speedup = seconds(one_device) / seconds(two)
    assert_metrics(two, speedup=speedup, efficiency=speedup / 2)
    for stored in (two, one):
        step = seconds(stored) / steps_of(stored)
        assert_metrics(stored, images_per_second=48 / seconds(stored), step_seconds=step)


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
        assert_metrics(stored, speedup_over_ddp=seconds(ddp) / seconds(stored))


@pytest.mark.parametrize("test", ["weak_scaling", "strong_scaling", "precision", "execution", "strategies"])
def test_step_metrics_follow_from_its_seconds(run: Run, test: str) -> None:
    for stored in run.of(f"test_{test}"):
        spec, steps = stored["spec"], steps_of(stored)
        batch = spec["world_size"] * spec["per_rank_batch_size"]
        assert_metrics(
            stored, epoch_seconds=steps * seconds(stored), images_per_second=batch / seconds(stored)
        )
        all_reduced = spec["strategy"] in ("ddp", "own_ddp", "zero1")
        assert ("communicated_bytes_per_epoch" in stored["metrics"]) is all_reduced
        if all_reduced:
            nbytes = 2 if spec["comm_hook"] == "bf16" else 4
            assert metric(stored, "communicated_bytes_per_epoch") == nbytes * PARAMETERS * steps
        assert ("communicator_seconds" in stored["metrics"]) is (spec["world_size"] > 1)
        assert 0 < metric(stored, "cpu_seconds") < 3 * seconds(stored), (
            "of one thread, beside what it must wait for"
        )


@pytest.mark.slow
def test_bf16_learns_on_every_cpu(project: Project) -> None:
    with_experiments(project)
    options = ("--precision", "bf16", "--model", "resnet10_cifar", "--batch-sizes", "8", "--rounds", "1")
    finished = project.run("perf/test_precision.py::test_precision", *options)
    finished.assert_one_sentence(0, "PASS: 2 tests measured")
    losses = {
        stored["spec"].get("precision", "fp32"): metric(stored, "loss_after_5_steps")
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
        assert_metrics(stored, step_seconds=seconds(stored) / 6, images_per_second=48 / seconds(stored))
    for name in ("device", "dataloader"):
        share = 1 - seconds(inputs["fixed"]) / seconds(inputs[name])
        assert_metrics(inputs[name], loading_fraction=share)
        assert loading_warnings(inputs[name]) == (["loading limits the epoch"] if share >= 0.05 else [])
        assert inputs[name]["references"]["without_loading"]["samples"] == inputs["fixed"]["samples"]
    assert inputs["fixed"]["notes"] == []


def test_enough_workers_keep_loading_below_5_percent(run: Run) -> None:
    stored = run.one("test_loader_workers")
    without = seconds(stored["references"]["without_loading"])
    epochs = {0: stored["references"]["workers=0"], 1: stored["references"]["workers=1"], 2: stored}
    assert [epoch["spec"]["loader_workers"] for epoch in epochs.values()] == [0, 1, 2]
    shares = {workers: 1 - without / seconds(epoch) for workers, epoch in epochs.items()}
    assert_metrics(stored, **{f"loading_fraction_with_{N}_workers": share for N, share in shares.items()})
    enough = [N for N in shares if all(share < 0.05 for more, share in shares.items() if more >= N)]
    assert stored["metrics"].get("enough_workers", {}).get("value") == (enough[0] if enough else None)
    assert loading_warnings(stored) == ([] if enough else ["loading limits the epoch even with 2 workers"])


def test_shards_drop_or_repeat_only_the_rest(run: Run) -> None:
    shuffled = run.of("test_shards_are_disjoint_and_cover_the_data")
    repeated = run.of("test_without_set_epoch_the_epochs_repeat")
    cases = [(stored["spec"]["world_size"], stored["spec"]["drop_last"]) for stored in shuffled]
    assert sorted(cases) == [(1, False), (1, True), (2, False), (2, True)]
    for stored in [*shuffled, *repeated]:
        assert stored["spec"]["epoch_images"] % 2 == 1, "or two ranks would have no rest"
        rest, dropped = stored["spec"]["world_size"] - 1, stored["spec"]["drop_last"]
        assert_metrics(stored, missing_images=rest * dropped, repeated_images=rest * (not dropped))
    assert max(metric(stored, "repeated_places") for stored in shuffled) < 0.5
    assert [metric(stored, "repeated_places") for stored in repeated] == [1, 1]


def test_communication_is_measured_by_three_methods(run: Run) -> None:
    stored = run.one("test_comm_split")
    references = stored["references"]
    by_rank = {
        name: [ranks / part["iterations"] for ranks in part["samples"][0]["seconds"][0]]
        for name, part in (("ddp", stored), *references.items())
        if name in ("ddp", "no_sync", "local")
    }
    exposed, copies = (
        max(longer - alone for longer, alone in zip(by_rank[name], by_rank["no_sync"], strict=True))
        for name in ("ddp", "local")
    )
    counters = references["trace"]["samples"][0]["counters"]
    rank = max(range(2), key=counters["exposed_comm_seconds"].__getitem__)
    total, traced = counters["comm_seconds"][rank], counters["exposed_comm_seconds"][rank]
    sent = metric(stored, "communicated_bytes_per_epoch") / steps_of(stored)
    assert_metrics(
        stored,
        exposed_comm_seconds=exposed,
        bucket_copy_seconds=copies,
        comm_skew_seconds=max(by_rank["local"]) - min(by_rank["local"]),
        traced_comm_seconds=total,
        traced_exposed_comm_seconds=traced,
        traced_comm_skew_seconds=max(counters["comm_seconds"]) - min(counters["comm_seconds"]),
        comm_without_waiting_seconds=counters["comm_without_waiting_seconds"][0],
        overlap_fraction=1 - traced / total,
        compute_seconds=counters["compute_seconds"][rank],
        idle_seconds=counters["idle_seconds"][rank],
        replayed_comm_seconds=seconds(references["replay"]),
        step_minus_one_device_seconds=seconds(stored) - slowest_device(references["one_device"], 2),
        gradient_busbw_bytes_per_second=sent / counters["all_reduce_without_waiting_seconds"][0],
        method_disagreement=(exposed - traced) / seconds(stored),
    )
    parts = [metric(stored, f"{part}_seconds") for part in ("traced_exposed_comm", "compute", "idle")]
    assert sum(parts) == pytest.approx(metric(stored, "traced_step_seconds")), "a CPU copies nothing"


@pytest.mark.parametrize("test", ["step_breakdown", "epoch_breakdown"])
def test_parts_are_those_of_the_least_waiting_rank(run: Run, test: str) -> None:
    for stored in run.of(f"test_{test}"):
        reference, is_epoch = stored["references"]["parts"], test == "epoch_breakdown"
        (sample,) = reference["samples"]
        waits = sample["counters"].get("gradient_sync_seconds", [0.0])
        rank = waits.index(min(waits))
        parts = {name: found[rank] for name, found in sample["counters"].items() if name in PARTED}
        assert ("gradient_sync_seconds" in parts) == (stored["spec"]["world_size"] > 1)
        assert ("loading_seconds" in parts) == is_epoch
        own = median(ranks[rank] for ranks in sample["seconds"]) / reference["iterations"]
        over = sum(parts.values()) * (steps_of(stored) if is_epoch else 1) / own
        assert over == pytest.approx(1, abs=0.02)
        marked = seconds(reference) / seconds(stored)
        assert_metrics(stored, **parts, parts_over_step=over, marked_over_step=marked)
        assert "mfu" not in stored["metrics"], "of a CPU no peak is known"


def test_stragglers_are_slower_without_communication(run: Run) -> None:
    _, together = run.of("test_step_breakdown")
    ranks = together["references"]["no_sync"]["samples"][0]["seconds"][0]
    assert_metrics(together, straggler_spread=max(ranks) / min(ranks) - 1)


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
        medians = [median(rounds) for rounds in zip(*alone["samples"][0]["seconds"], strict=True)]
        slowest = medians.index(max(medians))
        t1 = alone["samples"][0]["counters"]["backward_seconds"][slowest]
        speedup = t1 / metric(stored, "backward_seconds") * (1 if kind == "strong" else N)
        assert_metrics(stored, backward_seconds_on_one_device=t1, backward_speedup=speedup)
        assert "gradient_sync_speedup" not in stored["metrics"]
        loads = "loading_seconds_on_one_device" in stored["metrics"]
        assert loads == (stored["spec"]["input"] == "dataloader")


def test_cost_of_more_devices(run: Run) -> None:
    _, stored = run.of("test_step_breakdown")
    epoch = steps_of(stored) * seconds(stored)
    # One device takes twice as many steps of the same batch size for the same images.
    one = 2 * steps_of(stored) * slowest_device(stored["references"]["one_device"], 2)
    assert_metrics(
        stored,
        device_seconds_per_epoch=2 * epoch,
        saved_seconds_per_epoch=one - epoch,
        extra_device_seconds_per_epoch=2 * epoch - one,
    )


def test_bandwidth_is_bytes_over_seconds(run: Run) -> None:
    """Of two ranks the bus bandwidth is the same: 2 (N - 1) / N is 1. With a copy, there is none."""
    (copied,) = run.of("test_all_reduce", in_place=False)
    assert copied["metrics"] == {}
    calls = run.of("test_all_reduce", in_place=True)
    sizes = [call["spec"]["nbytes"] for call in run.of("test_all_reduce", algorithm="backend", in_place=True)]
    assert sizes == [2**12, 2**16, 2**18, 2**20]
    assert {call["spec"]["algorithm"] for call in calls} == {"backend", *OWN_ALGORITHMS}
    for call in calls:
        bandwidth = call["spec"]["nbytes"] / seconds(call)
        assert_metrics(call, algbw_bytes_per_second=bandwidth, busbw_bytes_per_second=bandwidth)


def test_fastest_algorithm_is_named(run: Run) -> None:
    for stored in run.of("test_fastest_all_reduce"):
        own, others = seconds(stored), {name: seconds(one) for name, one in stored["references"].items()}
        times = others | {"backend": own}
        assert_metrics(stored, speedup_of_the_best_other=own / min(others.values()))
        assert_metrics(stored, **{f"{name}_over_backend": other / own for name, other in others.items()})
        fastest = min(times, key=times.__getitem__)
        note = stored["notes"][-1]["text"]
        assert re.search(rf" on 2 ranks: {fastest}\b.* is the fastest", note), "named first, if several are"


def test_busbw_of_collectives_excludes_local_bytes(run: Run) -> None:
    shares = {"reduce_scatter": 0.5, "all_gather": 0.5, "all_to_all": 0.5, "broadcast": 1.0}
    assert {stored["spec"]["kind"] for stored in run.of("test_collective")} == set(shares)
    for stored in run.of("test_collective"):
        busbw = shares[stored["spec"]["kind"]] * stored["spec"]["nbytes"] / seconds(stored)
        assert_metrics(stored, busbw_bytes_per_second=busbw)


def test_cost_model_predicts_every_call(run: Run) -> None:
    for algorithm in OWN_ALGORITHMS:
        stored = run.one("test_cost_model", algorithm=algorithm)
        measured = [name for name in stored["metrics"] if name.startswith("predicted_over_measured_")]
        assert len(measured) == len(run.of("test_all_reduce", algorithm=algorithm)) == 4
        low, value, high = (metric(stored, f"latency_seconds{end}") for end in ("_low", "", "_high"))
        assert low <= value <= high
        assert metric(stored, "held_out_error") >= 0
        assert "link_utilization" not in stored["metrics"], "no rate of a CPU's link is known"


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


def test_single_calls_store_their_tails(run: Run) -> None:
    """A late rank and two modes are notes, which the canned calls always have."""
    stored = run.of("test_single_calls")
    kinds = {call["spec"].get("kind", "all_reduce") for call in stored}
    assert kinds == {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"}
    for call in stored:
        p50, p99, largest = (metric(call, f"call_{end}_seconds") for end in ("p50", "p99", "largest"))
        assert p50 <= p99 <= largest
        if metric(call, "late_fraction") == LATE:
            modes, late = (note["text"] for note in call["notes"][-2:])
            assert modes.endswith("90.0% of the calls take 40.00 us, 10.0% take 60.00 us")
            assert "rank 1 comes last in 90.0% of the slowest calls, by " in late

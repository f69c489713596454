"""The tables of a report, each recomputed from the raw seconds of every rank and round."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ddpperf.report.__main__ import main as report
from ddpperf.report.cases import cases_of, of_functions
from ddpperf.report.questions import QUESTIONS, report_tables
from ddpperf.report.questions.precision import claim
from ddpperf.results.stored_runs import read_document

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "runs"
CPU = ROOT / "perf" / "baselines" / "cpu2-epyc-25-17-1" / "0014_core.json"
GPU = RUNS / "h200x4-suite.json.gz"
WHERE = RUNS / "h200x2-where.json.gz"  # steps, their parts and their communication
MESSAGES = ROOT / "perf" / "baselines" / "h100-80gb-hbm3x4" / "0005_core.json"
NODES = RUNS / "2xcpu2-nodes.json.gz"  # 2 nodes of 2 ranks
LAWS = RUNS / "h200x4-own_ddp.json.gz"


def of(*paths: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0}
UNITS |= {"GB/s": 1e9, "MB/s": 1e6, "KB/s": 1e3}
Json = dict[str, Any]


@cache
def run(path: Path) -> Json:
    document: Json = read_document(path)
    return document


def stored_of(path: Path, *names: str) -> Iterator[Json]:
    """The stored tests of these test functions."""
    for test in run(path)["benchmarks"]:
        if test["name"].partition("[")[0] in names:
            yield test["extra_info"]["ddpperf"]


def rows(path: Path, title: str) -> list[dict[str, str]]:
    """The rows of a question's table by heading."""
    return rows_in(run(path), title)


def rows_in(document: Json, title: str) -> list[dict[str, str]]:
    section = report_tables(document).split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def number(text: str) -> float:
    """The value of a text such as "1.5 ms", "95.0%", "1.95x" or "12,346"."""
    first, *unit = text.replace(",", "").split()
    if first.endswith("%"):
        return float(first[:-1]) / 100
    return float(first.removesuffix("x")) * (UNITS[unit[0]] if unit else 1.0)


def close(text: str, value: float, places: float = 0.006) -> bool:
    least = 0.006 if "%" in text or "x" in text else 0.0
    return math.isclose(number(text), value, rel_tol=places, abs_tol=least)


def _median(values: Iterator[float]) -> float:
    return float(median(values))


def step(stored: Json) -> float:
    """The seconds of a step: the slowest rank of each round, the median over rounds, then over sets."""
    N = stored["spec"]["world_size"]
    ranks = N if stored["spec"].get("strategy") != "single" else 1
    return _median(
        median(max(seconds[:ranks]) / stored["iterations"] for seconds in sample["seconds"])
        for sample in stored["samples"]
    )


def slowest_alone(stored: Json, N: int) -> float:
    """t(1): the slowest device's median over rounds, in the median process set."""
    return _median(
        max(
            median(round_[rank] / stored["iterations"] for round_ in sample["seconds"])
            for rank in range(min(N, len(sample["seconds"][0])))
        )
        for sample in stored["samples"]
    )


def steps_per_epoch(spec: Json) -> int:
    images = spec["epoch_images"] // spec["world_size"]
    return int(images // spec["per_rank_batch_size"])


@of(CPU, GPU)
def test_epoch_times_are_those_of_the_samples(path: Path) -> None:
    found = rows(path, "Q1: time per epoch by batch size")
    for row, stored in zip(found, stored_of(path, "test_batch_size"), strict=True):
        assert row["batch"] == f"{stored['spec']['per_rank_batch_size']:,}"
        epoch = step(stored)
        assert close(row["epoch"], epoch)
        if stored["spec"]["input"] != "fixed":
            without = step(stored["references"]["without_loading"])
            assert close(row["epoch without loading"], without)
            assert close(row["loading"], 1 - without / epoch)


@of(CPU, GPU)
def test_speedups_are_those_of_the_samples(path: Path) -> None:
    found = rows(path, "Q2: time and speedup by batch size and devices")
    stored_tests = list(stored_of(path, "test_weak_scaling", "test_strong_scaling"))
    assert len(found) == len(stored_tests)
    for row, stored in zip(found, stored_tests, strict=True):
        N = stored["spec"]["world_size"]
        assert (row.get("GPUs") or row["ranks"], close(row["step"], step(stored))) == (str(N), True)
        if N > 1:
            t1 = slowest_alone(stored["references"]["one_device"], N)
            speedup = t1 / step(stored) * (N if row["kind"] == "weak" else 1)
            assert close(row["speedup"], speedup)
            assert close(row["efficiency"], speedup / N)


@of(CPU, WHERE)
def test_communication_is_that_of_the_traces(path: Path) -> None:
    measured = [stored for stored in stored_of(path, "test_comm_split") if "trace" in stored["references"]]
    found = rows(path, "Q3: computation and communication in an epoch")
    assert found
    for row, stored in zip(found, measured, strict=True):
        N, steps = stored["spec"]["world_size"], steps_per_epoch(stored["spec"])
        (sample,) = stored["references"]["trace"]["samples"][:1]
        counters = sample["counters"]
        exposed = counters["exposed_comm_seconds"][:N]
        rank = exposed.index(max(exposed))  # the rank with the most exposed communication
        assert close(row["exposed, by trace"], max(exposed) * steps)
        assert close(row["communication"], counters["comm_seconds"][rank] * steps)
        assert close(row["computation"], counters["compute_seconds"][rank] * steps)


@of(CPU, WHERE)
def test_parts_and_costs_are_those_of_the_samples(path: Path) -> None:
    stored_tests = list(stored_of(path, "test_step_breakdown"))
    assert stored_tests
    for row, stored in zip(rows(path, "Parts of a step"), stored_tests, strict=True):
        assert close(row["step"], step(stored))
        (sample,) = stored["references"]["parts"]["samples"]
        ranks = range(stored["spec"]["world_size"])
        backward = [sample["counters"]["backward_seconds"][rank] for rank in ranks]
        assert min(backward) * 0.99 <= number(row["backward"]) <= max(backward) * 1.01
    costs = rows(path, "Cost")
    several = [stored for stored in stored_tests if stored["spec"]["world_size"] > 1]
    for row, stored in zip(costs, several, strict=True):
        spec = stored["spec"]
        N = spec["world_size"]
        TN = step(stored) * steps_per_epoch(spec)
        alone = slowest_alone(stored["references"]["one_device"], N)
        T1 = alone * N * steps_per_epoch(spec)
        assert close(row["device-minutes per epoch"], N * TN / 60, 0.02)
        assert close(row["time saved"], T1 - TN, 0.02)
        assert close(row["extra device time"], N * TN - T1, 0.02)


def test_bandwidth_and_formulas_are_those_of_the_trace() -> None:
    (row,) = rows(CPU, "Q3: bandwidth while training")
    (stored,) = stored_of(CPU, "test_comm_split")
    N = stored["spec"]["world_size"]
    (sample,) = stored["references"]["trace"]["samples"]
    S = max(stored["references"]["replay"]["samples"][0]["counters"]["gradient_bytes"])
    sending = min(sample["counters"]["all_reduce_seconds"][:N])
    assert close(row["bus bandwidth"], 2 * (N - 1) / N * S / sending)
    assert close(row["2 (N-1) S / N"], 2 * (N - 1) * S / N / sending)
    assert close(row["(S / B) log2 N"], S * math.log2(N) / sending)
    assert close(row["2 (N-1) S"], 2 * (N - 1) * S / sending)


def linked(link: float) -> Json:
    """The run on four GPUs, as if it had stored the utilization of a link with this rate."""
    document = copy.deepcopy(run(GPU))
    for test in document["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if busbw := metrics.get("busbw_bytes_per_second"):
            metrics["link_utilization"] = busbw | {"unit": "1", "value": busbw["value"] / link}
    return document


FORMULAS: dict[str, Callable[[int, int], float]] = {
    "2 (N-1) S / N": lambda N, S: 2 * (N - 1) * S / N,
    "(S / B) log2 N": lambda N, S: S * math.log2(N),
    "2 (N-1) S": lambda N, S: 2 * (N - 1) * S,
}


def test_formulas_are_beside_each_all_reduce() -> None:
    found = rows_in(linked(450e9), "Q3: formulas of reports beside the measured all_reduce")
    library = [
        stored
        for stored in stored_of(GPU, "test_all_reduce")
        if stored["spec"].get("algorithm", "backend") == "backend" and stored["spec"].get("in_place", True)
    ]
    assert len(found) == 3 * len(library) > 30
    for number_of_row, row in enumerate(found):
        stored = library[number_of_row // 3]
        N, S = stored["spec"]["world_size"], stored["spec"]["nbytes"]
        assert (row["GPUs"], row["formula"]) == (str(N), list(FORMULAS)[number_of_row % 3])
        predicted = FORMULAS[row["formula"]](N, S) / 450e9
        assert close(row["predicted"], predicted)
        assert close(row["measured"], step(stored))
        assert close(row["predicted over measured"], predicted / step(stored))
    assert len({row["what it counts"] for row in found}) == 3


def test_formulas_sentence_relates_them_to_the_link() -> None:
    text = report_tables(linked(450e9)).split("## Q3: formulas")[1].split("\n## ")[0]
    assert "Bytes are divided by the rate of the link, 450 GB/s." in text
    assert "the link utilization: 78.7% with 4 GPUs" in text
    assert "(S / B) log2 N is 1.33 times as long, and 2 (N-1) S is 4 times as long" in text


def test_unknown_link_compares_no_formula() -> None:
    text = report_tables(run(GPU)).split("## Not measured in this run")[1]
    assert "- Q3: formulas of reports beside the measured all_reduce: `python -m pytest perf/" in text


def test_accuracies_are_those_of_the_last_epoch() -> None:
    (row,) = rows(CPU, "Q4: accuracy with a large batch")
    (stored,) = stored_of(CPU, "test_large_batch")
    seeds = [stored, *stored["references"].values()]
    last = stored["spec"]["epochs"]
    for name in ("train", "test"):
        values = [seed["samples"][0]["counters"][f"{name}_accuracy_{last}"][0] for seed in seeds]
        heading = "training accuracy" if name == "train" else "test accuracy"
        assert close(row[heading], sum(values) / len(values))


def about(document: Json, title: str) -> str:
    """The part of the tables that answers a question."""
    return report_tables(document).split(f"## {title}\n")[1].split("\n## ")[0]


def precision_steps() -> dict[tuple[str, int], float]:
    """The seconds of a step by precision and batch size."""
    tests = list(stored_of(GPU, "test_precision"))
    return {(at["spec"]["precision"], at["spec"]["per_rank_batch_size"]): step(at) for at in tests}


def test_fp16_is_compared_with_fp32_and_tf32() -> None:
    steps = precision_steps()
    text = about(run(GPU), "Mixed precision: time of a step")
    for base, answer in (("fp32", "always more"), ("tf32", "always less")):
        first, second, third = (
            f"{steps[base, batch] / steps['fp16', batch]:.2f}x at batch {batch}" for batch in (32, 128, 512)
        )
        assert (
            f"Is fp16 2 to 3 times as fast as {base}? It is {first}, {second} and {third}: {answer}." in text
        )


def test_reasons_for_a_speedup_are_computed() -> None:
    steps = precision_steps()
    text = about(run(GPU), "Mixed precision: time of a step")
    grown = {of: steps[of, 512] / steps[of, 32] for of in ("fp16", "fp32")}
    of_images = "16 times as many images take"
    assert f"{of_images} {grown['fp16']:.1f} times as long in fp16, {grown['fp32']:.1f} times in fp32" in text
    by_tf32 = steps["fp32", 512] / steps["tf32", 512]
    assert f"tf32 is {by_tf32:.2f}x as fast as fp32 by tensor cores alone, which is the larger part" in text
    assert "waits for kernel launches" not in text


def test_waiting_for_launches_is_a_reason() -> None:
    document = copy.deepcopy(run(GPU))
    for test in document["benchmarks"]:
        if test["name"] == "test_precision[1gpu-b32-fp16-fixed]":
            value = {"value": 1.3, "unit": "1", "by_set": {"A1": 1.3}}
            test["extra_info"]["ddpperf"]["metrics"]["launch_bound"] = value
    text = about(document, "Mixed precision: time of a step")
    assert "At batch 32 the fp16 step waits for kernel launches on the CPU" in text


def test_cpus_compare_bf16_with_fp32() -> None:
    text = about(run(CPU), "Mixed precision: time of a step")
    assert "fp16 was not measured. Is bf16 2 to 3 times as fast as fp32? It is" in text
    assert "tf32" not in text


@pytest.mark.parametrize(
    ("ratios", "answer"),
    [
        ({32: 2.0, 64: 3.0}, "always in this range"),
        ({32: 1.9, 64: 2.5}, "in this range at batch 64, less at batch 32"),
        ({32: 3.1, 64: 3.2}, "always more"),
        ({32: 1.0, 64: 2.0, 2048: 3.1}, "in this range at batch 64, less at batch 32, more at batch 2,048"),
    ],
)
def test_claim_names_the_batches_where_it_holds(ratios: dict[int, float], answer: str) -> None:
    assert claim(ratios).endswith(f": {answer}.")


@of(CPU, MESSAGES)
def test_messages_are_those_that_were_counted(path: Path) -> None:
    measured = list(stored_of(path, "test_messages"))
    found = rows(path, "Q6 and Q7: messages besides gradients")
    assert found
    for row, stored in zip(found, measured, strict=True):
        counters = stored["samples"][0]["counters"]
        for kind in ("gradients", "buffers", "parameters", "metrics"):
            nbytes = max(counters.get(f"{kind}: bytes", [0]))
            assert (row.get(kind, "-") == "-") == (nbytes == 0)
            if nbytes:
                size, count = row[kind].split(" in ")
                assert close(size, nbytes)
                assert int(count.split()[0]) == max(counters[f"{kind}: messages"])


def test_set_epoch_is_compared() -> None:
    found = rows(CPU, "Q5: with and without set_epoch")
    assert {row["set_epoch"]: row["same place next epoch"] for row in found} == {
        "called": "0.0%",
        "not called": "100.0%",
    }
    assert "100.0% of the images keep their place in the next epoch" in report_tables(run(CPU))


def law(amdahl: bool, s: float, N: int) -> float:
    return 1 / (s + (1 - s) / N) if amdahl else N - s * (N - 1)


def test_laws_predict_from_the_fitted_fraction() -> None:
    """Amdahl: 1 / (s + (1 - s) / N). Gustafson: N - s (N - 1)."""
    found = rows(LAWS, "Laws of scaling")
    stored_tests = list(stored_of(LAWS, "test_gustafson", "test_amdahl"))
    assert [row["devices"] for row in found] == ["2", "4", "8", "16", "32"] * len(stored_tests)
    for place, row in enumerate(found):
        metrics = {name: each["value"] for name, each in stored_tests[place // 5]["metrics"].items()}
        amdahl, N = row["training"].startswith("Amdahl's law, global batch "), int(row["devices"])
        assert amdahl or row["training"].startswith("Gustafson's law, batch ")
        s, low, high = (metrics[f"serial_fraction{end}"] for end in ("", "_low", "_high"))
        speedup, interval = row["predicted speedup"].strip(")").split(" (")
        least, most = interval.split(" to ")
        assert close(speedup, law(amdahl, s, N))
        assert close(least, law(amdahl, high, N))
        assert close(most, law(amdahl, max(low, 0.0), N)), "0 is the least serial fraction"
        efficiency, interval = row["predicted efficiency"].strip(")").split(" (")
        assert close(efficiency, law(amdahl, s, N) / N)
        assert close(interval.split(" to ")[0], law(amdahl, high, N) / N)
        if N <= 4:
            assert close(row["measured speedup"], metrics[f"speedup_of_{N}"])
        else:
            assert row["measured speedup"] == "not measured"


def with_fraction(value: float, *, interval: bool = True) -> str:
    """The answers on laws of scaling if each stored serial fraction is this one."""
    document = copy.deepcopy(run(LAWS))
    for test in document["benchmarks"]:
        metrics = test["extra_info"]["ddpperf"]["metrics"]
        if "serial_fraction" in metrics:
            metrics["serial_fraction"]["value"] = value
            if not interval:
                del metrics["serial_fraction_low"]
    return report_tables(document).split("## Laws of scaling")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("fraction", "meaning"),
    [
        # of which Amdahl's law divides by zero on 16 devices
        (-1 / 15, "a serial fraction of -6.7% means that speedups exceed the number of devices: "),
        (1.2, "a serial fraction of 120.0% means that several devices are slower than one: "),
    ],
)
def test_impossible_fraction_is_explained(fraction: float, meaning: str) -> None:
    text = with_fraction(fraction)
    assert f"Gustafson's law, batch 32 per rank: {meaning}" in text
    assert "is predicted on 32" not in text
    for line in text.splitlines():
        if line.startswith("| Amdahl"):
            assert line.endswith("| - | - |")


def test_unknown_interval_is_said_to_be_missing() -> None:
    text = with_fraction(0.1, interval=False)
    assert "| 10.0% (interval not known) | 32 | not measured | 28.90x (interval not known) | " in text
    assert "28.90x (interval not known) is predicted on 32 devices" in text


def test_law_is_compared_with_measured_speedups() -> None:
    metrics = [stored["metrics"] for stored in stored_of(LAWS, "test_amdahl")][-1]
    error = max(
        abs(metrics[f"predicted_speedup_of_{N}"]["value"] / metrics[f"speedup_of_{N}"]["value"] - 1)
        for N in (2, 4)
    )
    assert f"It differs from the measured speedups by up to {error:.1%}." in report_tables(run(LAWS))


# --- costs


def with_costs(price: float | None, suffix: str, test: str, *seconds: float) -> Json:
    """The stored run of a CPU with a price and with these costs of a test's only case."""
    document = copy.deepcopy(run(CPU))
    document["ddpperf"]["options"]["gpu_hour_price"] = price
    metrics = [each for each in document["benchmarks"] if each["name"].startswith(test)][-1]["extra_info"][
        "ddpperf"
    ]["metrics"]
    for name, value in zip(("device", "saved", "extra_device"), seconds, strict=False):
        unit = {"unit": "s", "by_set": {"A1": value}}
        metrics[f"{name}_seconds_{suffix}"] = {"value": value, **unit}
    return document


def section(document: Json, title: str) -> str:
    return report_tables(document).split(f"## {title}\n")[1].split("\n## ")[0]


def test_price_is_that_of_the_device_time() -> None:
    """Two devices for 45 minutes, and 60 minutes on one: 30 extra device-minutes for 15 saved ones."""
    document = with_costs(2.0, "of_training", "test_large_batch", 5400.0, 900.0, 1800.0)
    text = section(document, "Cost of a whole training")
    head, _, row = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
    figures = dict(zip(head, row, strict=True))
    assert figures["device-minutes per training"] == "90.0000"
    assert figures["extra device-hours per saved hour"] == "2.000"
    assert [figures[name] for name in ("price", "extra price", "price of a saved hour")] == [
        "3.00",
        "1.00",
        "4.00",
    ]
    assert "It costs 3.00, 1.00 more than on one device. A saved hour costs 4.00." in text


def test_nothing_is_priced_without_a_price() -> None:
    text = report_tables(with_costs(None, "of_training", "test_large_batch", 5400.0, 900.0, 1800.0))
    assert "90.0000" in text
    assert "price" not in text
    assert "costs" not in text.split("## Cost")[1]


def test_saved_hour_of_a_slower_training_has_no_price() -> None:
    document = with_costs(2.0, "of_training", "test_large_batch", 9000.0, -900.0, 5400.0)
    text = section(document, "Cost of a whole training")
    assert "| - | 5.00 | 3.00 | - |" in text
    assert "a training is 900.0 s longer and takes 5400 s more device time" in text
    assert "A saved hour" not in text


def test_epoch_on_one_device_has_a_price() -> None:
    document = with_costs(3600.0, "of_training", "test_large_batch", 12.5)
    text = section(document, "Cost of a whole training")
    assert " a training takes 12.50 s of device time and costs 12.50." in text


def test_stored_run_is_priced_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", str(CPU), "--tables", "--gpu-hour-price", "1000"])
    assert report() == 0
    (device_seconds,) = (
        stored["metrics"]["device_seconds_per_epoch"]["value"]
        for stored in stored_of(CPU, "test_step_breakdown")
        if stored["spec"]["world_size"] > 1
    )
    text = capsys.readouterr().out.split("## Cost\n")[1]
    assert f" It costs {1000 * device_seconds / 3600:.2f}, " in text


@pytest.mark.parametrize("price", ["cheap", "0", "-1", "inf", "nan", "1e9"])
def test_wrong_price_of_a_report_is_refused(
    price: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["report", str(CPU), "--tables", f"--gpu-hour-price={price}"])
    with pytest.raises(SystemExit, match="4"):
        report()
    sentence = f"takes a price above 0 and up to 999999, got '{price}'; pass for example 2.5; see --help"
    assert capsys.readouterr().err.strip().endswith(f"argument --gpu-hour-price: {sentence}")


# --- when one device is enough


def test_limits_of_efficiency_are_those_of_the_samples() -> None:
    found = {row["training"]: row for row in rows(LAWS, "When is one device enough?")}
    measured: dict[tuple[str, int], dict[int, float]] = {}
    for stored in stored_of(LAWS, "test_strong_scaling"):
        spec = stored["spec"]
        if spec["strategy"] == "ddp":
            N = spec["world_size"]
            speedup = slowest_alone(stored["references"]["one_device"], N) / step(stored)
            measured.setdefault(("", N * spec["per_rank_batch_size"]), {})[N] = speedup
    assert {size for _, size in measured} == {128, 512}
    for (_, size), speedups in measured.items():
        (row,) = (
            row
            for name, row in found.items()
            if name.startswith(f"strong scaling, global batch {size}, ") and "data_parallel" not in name
        )
        for limit in (0.8, 0.5):
            worth = max([1, *(N for N, speedup in speedups.items() if speedup / N >= limit)])
            assert row[f"efficiency of {limit:.0%} up to"] == str(worth)
        fastest = max(speedups, key=speedups.__getitem__)
        devices, text = row["fastest"].strip(")").split(" (")
        assert (int(devices), close(text, speedups[fastest])) == (fastest, True)
        assert (row["least device time on"], row["slower than one device"]) == ("1", "-")


def test_slower_devices_are_named() -> None:
    (row,) = (row for row in rows(CPU, "When is one device enough?") if row["training"].startswith("strong"))
    (stored,) = (
        stored for stored in stored_of(CPU, "test_strong_scaling") if stored["spec"]["world_size"] == 2
    )
    speedup = slowest_alone(stored["references"]["one_device"], 2) / step(stored)
    assert speedup < 1
    assert (row["slower than one device"], row["fastest"]) == ("2", "1 (1.00x)")
    slower = f"2 devices are {1 - speedup:.0%} slower and take {2 / speedup - 1:.0%} more device time"
    assert slower in section(run(CPU), "When is one device enough?")


def test_one_device_is_enough_below_the_limit() -> None:
    text = section(run(GPU), "When is one device enough?")
    assert "With an efficiency of 80% as the limit, one device is enough for " in text
    document = copy.deepcopy(run(GPU))
    for test in document["benchmarks"]:
        if efficiency := test["extra_info"]["ddpperf"]["metrics"].get("efficiency"):
            efficiency["value"] = 0.9
    text = section(document, "When is one device enough?")
    assert "With an efficiency of 80% as the limit, more devices are worth it. They gain least for " in text
    assert "2 devices are 80% faster and take 11% more device time." in text


def test_links_of_nodes_are_those_that_were_set() -> None:
    """Measured with a delay of 1 ms and a rate of 125 MB/s. A message of gloo takes two delays."""
    title = "Q3: links inside and between nodes"
    gloo, ring, hierarchical = rows(NODES, title)
    assert [row["algorithm"] for row in (gloo, ring, hierarchical)] == ["gloo", "ring", "hierarchical"]
    assert number(gloo["latency between nodes"]) == pytest.approx(1e-3, rel=0.1)
    assert number(gloo["bandwidth between nodes"]) == pytest.approx(125e6, rel=0.1)
    assert number(ring["message between nodes"]) == pytest.approx(2e-3, rel=0.2)
    assert number(ring["bandwidth inside a node"]) > 10 * number(ring["bandwidth between nodes"])
    slowest, fastest = ring["bandwidth between nodes"], gloo["bandwidth between nodes"]
    assert f"a node sends {slowest} to {fastest} to the other nodes" in section(run(NODES), title)


@pytest.mark.parametrize("stored_metrics", [0, 1])
def test_tests_that_failed_before_their_metrics_answer_nothing(stored_metrics: int) -> None:
    """Their time is stored, and the tables of the other tests are still printed."""
    document = copy.deepcopy(run(CPU))
    for test in document["benchmarks"]:
        if not test["name"].startswith("test_weak_scaling"):
            found = test["extra_info"]["ddpperf"]
            needed = {metric for question in QUESTIONS for metric in question.needs}
            names = [name for name in found["metrics"] if name not in needed]
            found["metrics"] = {name: found["metrics"][name] for name in names[:stored_metrics]}
    text = report_tables(document)
    assert "The best efficiency is 36.9%" in text
    assert text.count("\n- ") == len(QUESTIONS) - 2, "weak scaling answers two"


def test_question_that_was_not_measured_names_its_command() -> None:
    nothing = {"benchmarks": [], "ddpperf": {**run(CPU)["ddpperf"], "outcomes": {}}}
    text = report_tables(nothing)
    assert text.startswith("## Not measured in this run\n")
    for question in QUESTIONS:
        assert f"- {question.title}: `python -m pytest perf/{question.file}`\n" in text


def test_large_batches_stand_beside_what_reports_state() -> None:
    document = copy.deepcopy(run(CPU))
    (test,) = [test for test in document["benchmarks"] if test["name"].startswith("test_large_batch[")]
    stated = {"A": 0.849, "B": 0.8222}
    for name, value in stated.items():
        metric = {"value": value, "unit": "1", "by_set": {"A1": value}}
        test["extra_info"]["ddpperf"]["metrics"][f"reported_train_accuracy_{name}"] = metric
    document["ddpperf"]["recipes"] = {test["fullname"]: "128, as it is"}
    (case,) = of_functions(cases_of(document), "test_large_batch")
    assert case.properties["recipe"] == case.recipe == "128, as it is"
    text = report_tables(document)
    lines = [line for line in text.split("## Q4")[1].split("## Q5")[0].splitlines() if line.startswith("|")]
    heading, row = (lines[place].strip("| ").split(" | ") for place in (0, 2))
    cells = dict(zip(heading, row, strict=True))
    assert cells["training accuracy in reports"] == "A: 84.9%, B: 82.2%"
    assert "test accuracy in reports" not in cells


def with_part_speedups() -> Json:
    """Return a stored run with the speedups of the parts on 2 and on 4 ranks, which were not measured.

    They are those of weak scaling: on one device forward takes 10 ms, and backward 30 ms.
    """
    document = copy.deepcopy(run(CPU))
    (test,) = (found for found in document["benchmarks"] if found["name"] == "test_step_breakdown[2rank-b32]")
    outcome = document["ddpperf"]["outcomes"][test["fullname"]]
    for N in (2, 4):
        made = copy.deepcopy(test)
        made["name"] = f"test_weak_parts_speedup[{N}rank-b32]"
        made["fullname"] = f"perf/test_step_breakdown.py::{made['name']}"
        stored = made["extra_info"]["ddpperf"]
        stored["spec"]["world_size"] = N
        for sample in stored["samples"]:
            sample["seconds"] = [[ranks[0]] * N for ranks in sample["seconds"]]
        seconds = {
            "forward_seconds_on_one_device": 0.01,
            "backward_seconds_on_one_device": 0.03,
            "forward_seconds": 0.01,
            "backward_seconds": 0.04,
            "gradient_sync_seconds": 0.01 * N,
        }
        factors = {"forward_speedup": N, "backward_speedup": 0.75 * N}
        values = [(name, "s", value) for name, value in seconds.items()]
        values += [(name, "1", value) for name, value in factors.items()]
        stored["metrics"] = {
            name: {"value": value, "unit": unit, "by_set": {stored["samples"][0]["set"]: value}}
            for name, unit, value in values
        }
        document["benchmarks"].append(made)
        document["ddpperf"]["outcomes"][made["fullname"]] = outcome
    return document


def test_speedups_of_parts_have_a_row_for_each_part() -> None:
    text = report_tables(with_part_speedups()).split("## Speedup of the parts of a step\n")[1]
    head, _, *found = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    assert head == "| scaling | part | 1 rank | 2 ranks | 4 ranks | speedup on 2 | speedup on 4 |"
    work = "| weak, batch 32 per rank |"
    assert found == [
        f"{work} forward | 10.00 ms | 10.00 ms | 10.00 ms | 2.00x | 4.00x |",
        f"{work} backward | 30.00 ms | 40.00 ms | 40.00 ms | 1.50x | 3.00x |",
        f"{work} gradient sync | - | 20.00 ms | 40.00 ms | - | - |",
        f"{work} all parts | 40.00 ms | 70.00 ms | 90.00 ms | 1.14x | 1.78x |",
    ]
    assert "Forward has the largest speedup: 4.00x (weak scaling, 4 ranks" in text
    assert "Backward has the smallest speedup: 1.50x (weak scaling, 2 ranks" in text

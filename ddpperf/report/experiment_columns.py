"""The title of each experiment's table, and the metrics that are its columns.

A test without an entry, such as a test of your own suite, has a table with all of its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpperf.specs import PARTS


@dataclass(frozen=True)
class Experiment:
    """The title and the metrics of an experiment's table.

    title: tests with the same title share a table.
    metrics: names or patterns of metrics, the most important first. A table leaves out the last
    metrics if its columns do not fit.
    kind: what distinguishes this test from other tests in its table, or "".
    global_batch: whether the batch size in the table is that of all ranks together.
    timed: whether the time of the test is a result. time_last: whether the metrics come before it.
    """

    title: str
    metrics: str = "*"
    kind: str = ""
    global_batch: bool = False
    timed: bool = True
    time_last: bool = False


SCALING = "speedup efficiency images_per_second ddp_over_data_parallel epoch_seconds"
CALLS = "algbw_bytes_per_second busbw_bytes_per_second link_utilization framework_seconds"
LAW = "serial_fraction speedup_of_* predicted_speedup_of_32 predicted_speedup_of_* predicted_efficiency_of_32"
TRAINING = (
    "test_accuracy train_accuracy mirrored_test_accuracy accuracy_over_* reported_* "
    "accuracy_without_set_epoch accuracy_unscaled_rate gpu_utilization_mean cpu_utilization_mean "
    "power_watts_mean joules_per_epoch"
)
SAMPLER = "missing_images repeated_images repeated_places"
PART_SECONDS = " ".join(f"{part}_seconds" for part in PARTS)
PART_SPEEDUPS = "forward_speedup backward_speedup optimizer_speedup loading_speedup data_speedup"
PARTS_SPEEDUP = "speedup of the parts of a step"
EXPERIMENTS = {
    "test_weak_scaling": Experiment("scaling", SCALING, kind="weak"),
    "test_strong_scaling": Experiment("scaling", SCALING, kind="strong", global_batch=True),
    "test_epoch_scaling": Experiment(
        "scaling of epochs", "speedup efficiency images_per_second step_seconds"
    ),
    "test_gustafson": Experiment("Gustafson's law", LAW),
    "test_amdahl": Experiment("Amdahl's law", LAW, global_batch=True),
    "test_projection": Experiment(
        "projection to more devices",
        "projected_efficiency_on_* projected_excess_on_* excess_seconds projection_error",
    ),
    "test_step_breakdown": Experiment(
        "step breakdown", f"{PART_SECONDS} straggler_spread gpu_busy_fraction mfu"
    ),
    "test_epoch_breakdown": Experiment("epoch breakdown", PART_SECONDS),
    "test_weak_parts_speedup": Experiment(PARTS_SPEEDUP, PART_SPEEDUPS, kind="weak"),
    "test_strong_parts_speedup": Experiment(PARTS_SPEEDUP, PART_SPEEDUPS, kind="strong", global_batch=True),
    "test_comm_split": Experiment(
        "communication in a step",
        "exposed_comm_seconds traced_exposed_comm_seconds exposed_inside_node_seconds "
        "exposed_between_nodes_seconds traced_comm_seconds comm_without_waiting_seconds "
        "replayed_comm_seconds overlap_fraction gradient_busbw_bytes_per_second link_utilization",
    ),
    "test_data_parallel_split": Experiment(
        "communication of DataParallel",
        "exposed_comm_seconds traced_exposed_comm_seconds traced_comm_seconds replicate_seconds "
        "scatter_seconds gather_seconds reduce_seconds comm_over_ddp idle_in_comm_seconds overlap_fraction",
    ),
    "test_strategies": Experiment(
        "strategies", "speedup_over_ddp images_per_second communicated_bytes_per_epoch peak_memory_bytes"
    ),
    "test_execution": Experiment(
        "execution modes",
        "speedup_over_eager images_per_second cpu_seconds launch_bound peak_memory_bytes "
        "compile_seconds capture_seconds",
    ),
    "test_precision": Experiment(
        "precision", "speedup_over_* images_per_second loss_after_5_steps peak_memory_bytes"
    ),
    "test_all_reduce": Experiment("collectives", CALLS),
    "test_collective": Experiment("collectives", CALLS),
    "test_single_calls": Experiment(
        "single calls",
        "call_p50_seconds call_p99_seconds call_largest_seconds late_rank late_fraction late_seconds "
        "event_seconds",
    ),
    "test_fastest_all_reduce": Experiment("fastest all_reduce", "speedup_of_the_best_other"),
    "test_backend_model": Experiment(
        "all_reduce model",
        "latency_seconds asymptotic_busbw_bytes_per_second link_utilization held_out_error between_*",
    ),
    "test_cost_model": Experiment(
        "all_reduce cost model",
        "latency_seconds link_bytes_per_second link_utilization held_out_error reduce_byte_seconds "
        "inside_* between_*",
    ),
    "test_precision_accuracy": Experiment(
        "precision of whole trainings",
        "speedup_over_* test_accuracy train_accuracy accuracy_over_fp32 images_per_second skipped_steps",
        time_last=True,
    ),
    "test_batch_size": Experiment(
        "batch size",
        "images_per_second loading_fraction peak_memory_bytes gpu_utilization_mean joules_per_epoch",
    ),
    "test_loader_workers": Experiment("loader workers", "enough_workers loading_fraction_with_*_workers"),
    "test_largest_batch": Experiment("largest batch", "largest_batch_size images_per_second_at_*"),
    "test_large_batch": Experiment("whole trainings", TRAINING, time_last=True),
    "test_remedies": Experiment("remedies for large batches", TRAINING, time_last=True),
    "test_report_training": Experiment("trainings of reports", TRAINING, time_last=True),
    "test_long_run": Experiment("long trainings", TRAINING, time_last=True),
    "test_same_result_on_more_devices": Experiment(
        "the same training on more devices", TRAINING, time_last=True
    ),
    "test_messages": Experiment(
        "messages of a step",
        "gradients_bytes parameters_bytes buffers_bytes model_bytes metrics_bytes "
        "gradients_over_parameters start_initial_state_bytes",
        timed=False,
    ),
    "test_shards_are_disjoint_and_cover_the_data": Experiment("sampler", SAMPLER, timed=False),
    "test_without_set_epoch_the_epochs_repeat": Experiment("sampler", SAMPLER, timed=False),
}
# Tables that a run of many experiments leaves out: exact counts, and what other tables imply
DETAILS = ("messages of a step", "sampler", "fastest all_reduce", "all_reduce model", "all_reduce cost model")
WHOLE_TRAININGS = tuple(name for name, experiment in EXPERIMENTS.items() if experiment.metrics == TRAINING)


def experiment_of(test: str) -> Experiment:
    """Return the experiment of a test, such as perf/test_scaling.py::test_weak_scaling[4gpu-b512]."""
    name = function_of(test)
    return EXPERIMENTS.get(name) or Experiment(name.removeprefix("test_").replace("_", " "))


def function_of(test: str) -> str:
    """Return the name of a test's function, such as test_weak_scaling."""
    return test.rpartition("::")[-1].partition("[")[0]

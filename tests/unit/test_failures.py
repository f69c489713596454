"""The error of a process set: which rank it names first, and how a process ended."""

from __future__ import annotations

import itertools
import subprocess

import pytest
import torch

from ddpperf.errors import CannotTrain
from ddpperf.machine.child_process import describe_exit
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.worker import describe

DIED = RankFailure(rank=3, cause=Cause.DIED, what="was killed by SIGKILL", detail="last words\n")
RAISED = RankFailure(rank=2, cause=Cause.RAISED, what="raised ValueError: no", detail="Traceback 2")
DISTRIBUTED = RankFailure(
    rank=1, cause=Cause.RAISED_DISTRIBUTED, what="raised DistBackendError", detail="Traceback 1"
)
HUNG = RankFailure(rank=0, cause=Cause.HUNG, what="gave no answer in 20 s", detail="stacks 0")


@pytest.mark.parametrize("order", list(itertools.permutations([DIED, RAISED, DISTRIBUTED, HUNG])))
def test_likeliest_cause_comes_first_in_any_order(order: tuple[RankFailure, ...]) -> None:
    failure = SetFailure("A1", "at sample", order)
    assert failure.failures == (DIED, RAISED, DISTRIBUTED, HUNG)
    assert str(failure).splitlines() == [
        "rank 3 of set A1 was killed by SIGKILL (at sample)",
        "last words",
        "after it, rank 2 raised ValueError: no",
        "after it, rank 1 raised DistBackendError",
        "after it, rank 0 gave no answer in 20 s",
    ]


def test_first_noticed_is_named_of_equal_causes() -> None:
    """Not the lowest rank: torchrun kills rank 0 when rank 1 has died."""
    peers = [RankFailure(rank=rank, cause=Cause.DIED, what="ended", detail="") for rank in (5, 1, 3)]
    failure = SetFailure("A1", "at sample", peers)
    assert [one.rank for one in failure.failures] == [5, 1, 3]
    assert str(failure).startswith("rank 5 of set A1 ended (at sample)\n")


def test_hung_ranks_are_named_together_with_stacks() -> None:
    hung = [RankFailure(rank=rank, cause=Cause.HUNG, what="hung", detail=f"stacks {rank}") for rank in (0, 1)]
    lines = ["ranks 0, 1 of set A1 hung (at sample)", "stacks 0", "stacks 1"]
    assert str(SetFailure("A1", "at sample", hung)).splitlines() == lines


def captured(error: Exception) -> CannotTrain:
    """Return the refusal of a graph capture that this error stopped."""
    refusal = CannotTrain("execution graph cannot capture this step")
    refusal.__cause__ = error
    return refusal


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (torch.OutOfMemoryError("no room"), True),
        (RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"), True),
        (captured(RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")), True),
        (OverflowError("int too large"), True),
        (CannotTrain("a mistake"), False),
        (captured(ValueError("a mistake")), False),
        (NotImplementedError("yet"), False),
        (FloatingPointError("the loss is nan"), False),
    ],
)
def test_limits_are_told_from_mistakes(error: Exception, limit: bool) -> None:
    assert describe(error)["limit"] is limit


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("sleep 0.1; exit 4", "exited with status 4 before it answered"),
        ("exec sleep 60", "closed its connection before it answered, but runs on"),
    ],
)
def test_end_of_a_process_is_described(script: str, words: str) -> None:
    with subprocess.Popen(["sh", "-c", script]) as process:
        assert describe_exit(process) == words
        process.kill()

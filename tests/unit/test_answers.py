"""Answers of ranks: what is wrong with them, in a few words."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.workers.answers import problem_of

HUGE = 10**400
ERROR = {"summary": "ValueError: no", "traceback": "", "distributed": False}


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("ping", {}),
        ("setup", {"port": None, "environment": {"torch": "2.11"}, "can_skip_untimed": True}),
        ("setup", {"port": 1234, "environment": {"torch": "2.11"}}),
        ("open", {"max_iterations": 1000, "of a newer version": 1}),
        ("sample", {"seconds": 0.5}),
        ("close", {"counters": {"flops": 1.0, "messages": 3}, "kernels": "12"}),
        ("sample", {"progress": 0.5}),
        ("sample", {"error": ERROR}),
        ("sample", {"error": ERROR | {"limit": True}}),
    ],
)
def test_right_answer_has_no_problem(command: str, answer: dict[str, Any]) -> None:
    assert problem_of(command, answer) == ""


@pytest.mark.parametrize(
    ("command", "answer", "problem"),
    [
        ("sample", {}, "seconds is missing"),
        ("sample", {"unknown": 1}, "seconds is missing"),
        ("sample", {"seconds": "1"}, "seconds must be a number of at least 0, got '1'"),
        ("sample", {"seconds": True}, "seconds must be a number of at least 0, got True"),
        ("sample", {"seconds": -1}, "seconds must be a number of at least 0, got -1"),
        ("sample", {"seconds": HUGE}, "seconds must be a number of at least 0, got 10000"),
        ("sample", {"seconds": None}, "seconds must be a number of at least 0, got None"),
        (
            "sample",
            {"seconds": "\x1b[31m" + "x" * 1000},
            "seconds must be a number of at least 0, got '\\x1b[31m",
        ),
        ("sample", {"progress": []}, "progress must be a number, got []"),
        ("sample", {"error": "no"}, "error must be an object, got 'no'"),
        ("sample", {"error": {}}, "summary is missing"),
        ("sample", {"error": ERROR | {"traceback": 1}}, "traceback must be a text, got 1"),
        ("sample", {"error": ERROR | {"limit": 1}}, "limit must be true or false, got 1"),
        ("open", {"max_iterations": 0}, "max_iterations must be a number above 0, got 0"),
        ("close", {"counters": []}, "counters must be numbers by name, got []"),
        ("close", {"counters": {"a": "b"}}, "counters must be numbers by name, got {'a': 'b'}"),
        ("close", {"counters": {}, "kernels": 1}, "kernels must be a text, got 1"),
        ("finish", {}, "counters is missing"),
        ("setup", {"port": 2**16, "environment": {}}, "port must be a port or null, got 65536"),
        (
            "setup",
            {"port": None, "environment": {}},
            "environment must be versions, got {}",
        ),
    ],
)
def test_problem_of_a_wrong_answer_is_named(command: str, answer: dict[str, Any], problem: str) -> None:
    found = problem_of(command, answer)
    assert found.startswith(problem)
    assert len(found) < 120

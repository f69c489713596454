"""tools/simulate_all_reduce.py: the table of simulated all-reduces."""

from __future__ import annotations

import pytest

from tests.project import script

tool = script("simulate_all_reduce")
SMALL = ("--node-size", "1", "--buffer-size", "1000B", "--network-latency", "1e-3")


@pytest.fixture(autouse=True)
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "NODES", [2, 4])


def test_table_shows_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([*SMALL, "--network-bandwidth", "1e-3"])
    assert capsys.readouterr().out == (
        "nodes  ranks      ring      tree  hierarchical\n"
        "    2      2  3.000 ms  4.000 ms      3.000 ms\n"
        "    4      4  7.500 ms  8.000 ms      7.500 ms\n"
    )


def test_options_change_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([*SMALL, "--straggler", "2", "--waits-for-receiver"])
    assert "    2      2  2.004 s  2.002 s       2.004 s\n" in capsys.readouterr().out


def test_wrong_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--node-size", "0"])
    assert "argument --node-size: takes a whole number from 1" in capsys.readouterr().err

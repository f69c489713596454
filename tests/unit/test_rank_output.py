"""What a rank prints: limits on the log file, and files that are not written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from ddpperf.workers.rank_output import BEGINNING_BYTES, END_BYTES, RankOutput
from tests.project import full_disk, wait_until

FLOOD = """
import sys
print("the first line")
line = "x" * 900_000
for number in range(60):
    print(line)
print("the last line", file=sys.stderr)
"""


def output_to(log: Path) -> tuple[RankOutput, BinaryIO]:
    """Return a new reader of output, and the pipe that it reads."""
    reader, writer = os.pipe()
    return RankOutput(reader, log), open(writer, "wb", buffering=0)


def printed_by(script: str, log: Path) -> RankOutput:
    """Return what reads the output of a script, which has ended."""
    output, pipe = output_to(log)
    with pipe:
        subprocess.check_call([sys.executable, "-c", script], stdout=pipe, stderr=pipe)
    return output


def test_flood_keeps_its_beginning_and_end(tmp_path: Path) -> None:
    log = tmp_path / "A1-rank0.log"
    output = printed_by(FLOOD, log)
    end = output.end()
    output.close()
    assert end.endswith("\nthe last line\n")
    assert END_BYTES <= len(end) <= 2 * END_BYTES
    text = log.read_text()
    assert text.startswith("the first line\n")
    assert text.endswith("\nthe last line\n")
    beginning, line, rest = text[:BEGINNING_BYTES], *text[BEGINNING_BYTES + 1 :].split("\n", 1)
    dropped = int(line.removeprefix("(ddpperf dropped ").removesuffix(" bytes here)"))
    assert len(rest) == END_BYTES
    assert len(beginning) + dropped + len(rest) == output.printed


def test_log_is_there_while_the_rank_runs(tmp_path: Path) -> None:
    log = tmp_path / "A1-rank0.log"
    output, pipe = output_to(log)
    pipe.write(b"a line\n")
    wait_until(lambda: log.read_text() == "a line\n", 5, lambda: log.read_text())
    begin = len("a line\n")
    pipe.write(b"stacks\n")
    wait_until(lambda: output.since(begin) == "stacks\n", 5, lambda: output.since(begin))
    pipe.close()
    output.close()


def test_child_with_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    output, pipe = output_to(tmp_path / "A1-rank0.log")
    before = threading.active_count()
    with pipe:
        child = subprocess.Popen(["sleep", "60"], stdout=pipe)
    try:
        began = time.monotonic()
        output.end()
        output.close()
        output.close()
        assert time.monotonic() - began < 2
        assert threading.active_count() == before - 1
    finally:
        child.kill()
        child.wait()


def test_earlier_files_are_replaced_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "A1-rank0.log")
    os.mkfifo(tmp_path / "A1-rank1.log")
    for rank in range(2):
        printed_by("print('hello')", tmp_path / f"A1-rank{rank}.log").close()
        assert (tmp_path / f"A1-rank{rank}.log").read_text() == "hello\n"
    assert (tmp_path / "precious").read_text() == "precious"


def test_full_disk_is_a_problem_with_a_path(tmp_path: Path) -> None:
    with full_disk():
        output = printed_by("print('x' * 5000); print('the last line')", tmp_path / "A1-rank0.log")
        assert output.end().endswith("the last line\n")
        output.close()
    assert output.problem == f"{tmp_path}/A1-rank0.log cannot be written (File too large)"

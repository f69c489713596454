"""What an agent says before it has joined a run."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.node.__main__ import _address, _join, _key

AS_PRINTED = "pass --join HOST:PORT, as pytest prints it"


@pytest.mark.parametrize(
    ("join", "sentence"),
    [
        (None, f"no run to join was named; {AS_PRINTED}"),
        ("node-a", f"--join must be HOST:PORT of the first node, got 'node-a'; {AS_PRINTED}"),
        ("node-a:", f"--join must be HOST:PORT of the first node, got 'node-a:'; {AS_PRINTED}"),
        ("node-a:70000", f"--join must be HOST:PORT of the first node, got 'node-a:70000'; {AS_PRINTED}"),
    ],
)
def test_unusable_join_says_what_to_pass(
    join: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        _address(join)


def test_agent_names_key_file_that_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        _key(str(tmp_path / "node.key"), end=0.0)
    assert f"waiting for the key file {tmp_path / 'node.key'}; copy it from" in capsys.readouterr().out


def test_silent_address_is_refused_with_advice() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = closed.getsockname()
        with pytest.raises(Refused, match=r"no run answers at 127\.0\.0\.1:\d+ \(.*\); start `pytest perf/"):
            _join(address, b"", end=0.0)

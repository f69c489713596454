"""Network namespaces as nodes leave nothing behind, however a test ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.namespaces import ip, needs_namespaces, nodes

pytestmark = needs_namespaces

MAKER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.namespaces import nodes
with nodes(1) as made:
    made.start(0, ["sleep", "60"])
    print(made.names[0], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_test_leaves_no_node(end: signal.Signals, namespaces_allowed: None) -> None:
    """Ctrl-C removes nodes at once; what a killed process left is removed at the next start."""
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert maker.stdout is not None
    name = maker.stdout.readline().strip()
    assert name in ip("netns", "list")
    maker.send_signal(end)
    maker.wait()
    if end == signal.SIGKILL:
        assert name in ip("netns", "list")
        with nodes(1):
            pass
    assert name not in ip("netns", "list")
    maker.communicate(timeout=10)  # ends when no process of the node has its output open any more

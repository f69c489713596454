"""What the pytest process and the agents of a run on several nodes must agree on."""

from __future__ import annotations

KEY_FILE = ".ddpperf/node.key"
PORT = 29511

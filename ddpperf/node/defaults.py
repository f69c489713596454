"""Defaults that the pytest process and the agents of other nodes share."""

from __future__ import annotations

KEY_FILE = ".ddpperf/node.key"
PORT = 29511

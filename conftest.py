"""Loads the plugin for every test of the repository.

pyproject.toml has no entry point for the plugin, because pytest would then register it twice.
"""

pytest_plugins = ["ddpperf.plugin"]

"""Loads the plugin for every test of the repository; an entry point beside it would register it twice."""

pytest_plugins = ["ddpperf.plugin"]

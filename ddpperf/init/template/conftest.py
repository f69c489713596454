pytest_plugins = ["ddpperf.plugin"]

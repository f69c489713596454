"""The command-line options of ddpperf, from their declaration to the checked values."""

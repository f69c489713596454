"""All-reduce algorithms and timed collective calls."""

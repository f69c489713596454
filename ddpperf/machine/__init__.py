"""What this machine is, and what disturbs a measurement on it."""

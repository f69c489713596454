"""The machine: its hardware, its cores and compilers, and what disturbs a measurement on it."""

"""All-reduce: our algorithms, the transports below them, and the calls that are measured."""

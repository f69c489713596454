"""All-reduce algorithms, the transports that carry their messages, and timed collective calls."""

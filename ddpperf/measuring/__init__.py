"""Tools that measure training: clock, profiler, records of messages, compiling, CUDA graphs."""

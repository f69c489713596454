"""What training itself uses to measure: clock, profiler, records of messages, compiling, CUDA graphs."""

"""Write a first performance test into another repository: python -m ddpperf.init."""

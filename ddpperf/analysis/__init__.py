"""Pure arithmetic over measured seconds: no torch, no processes, no pytest."""

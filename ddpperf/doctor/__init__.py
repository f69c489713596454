"""What this machine can measure, and what would spoil its measurements."""

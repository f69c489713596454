"""What was measured, and the files in which it is kept."""

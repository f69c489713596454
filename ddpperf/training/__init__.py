"""What a rank does in a step, an epoch and a whole training run."""

"""Train a model on one rank for one step, one epoch or several epochs."""

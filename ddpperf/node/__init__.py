"""Runs on several nodes: agents that start ranks, and the controller's connections to them."""

"""Further nodes: the agent that runs on each of them, and what starts it."""

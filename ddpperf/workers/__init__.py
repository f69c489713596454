"""Process sets: how they start, what they are told, and what becomes of them."""

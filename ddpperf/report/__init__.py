"""A run's JSON turned into what a person reads."""

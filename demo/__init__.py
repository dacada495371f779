"""Real weights for `make demo`."""

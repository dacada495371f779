"""Beam: work items in, one tally out, and everything around a run of it."""

"""Migrating Tunix runs: every step planned, copied and committed on its own, all of them in one go."""

"""From Tunix's layout to MaxText's: every step planned, copied and committed on its own, all of them in one go."""

"""Tunix runs: what every leaf of an old step becomes in the layout that MaxText's pre-training reads."""

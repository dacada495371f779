"""Orbax checkpoints: found, read as stock Orbax sees them, and their metadata written by Orbax itself."""

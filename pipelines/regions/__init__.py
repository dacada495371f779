"""Boxes of tensors: read, decoded and put where they belong, a block at a time."""

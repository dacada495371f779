"""Measurements for `make bench`; not part of the installed package."""

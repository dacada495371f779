"""Outputs read again, by other code than wrote them, and compared with their sources."""

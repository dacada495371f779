"""What people read: problems, and text for numbers and names."""

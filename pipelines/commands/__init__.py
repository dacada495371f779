"""One module per command: its arguments, and the function that runs it."""

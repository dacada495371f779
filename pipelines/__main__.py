"""``python -m pipelines``: the command line, as the console script starts it."""

from pipelines.start import entry

if __name__ == "__main__":
    entry()

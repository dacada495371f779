"""``python -m tensorferry``: the command line, as the console script starts it."""

from tensorferry.pipelines.cli.start import entry

if __name__ == "__main__":
    entry()

"""The program's first lines: from here on Ctrl-C is a sentence and exit code 1, whatever is being imported."""

from typing import NoReturn

from tensorferry.pipelines.engine import interrupts


def entry() -> NoReturn:
    """The console script. Leaves without tearing down Beam, gRPC and Orbax, which takes half a second."""
    interrupts.install()
    from tensorferry.pipelines.cli.main import main
    from tensorferry.pipelines.engine.supervisor import leave

    try:
        code = main()
    except SystemExit as end:  # argparse's
        code = end.code if isinstance(end.code, int) else 0
    leave(code)

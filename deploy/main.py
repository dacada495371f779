"""The flex template's program: its parameters become the options of ``tensorferry convert``."""

import sys
from collections.abc import Iterable

from tensorferry.pipelines.cli.main import convert_options, main


def arguments(parameters: Iterable[str]) -> list[str]:
    """Command line for a template's parameters: names with underscores, switches as ``true`` or ``false``.

    Args:
      parameters: ``--name=value``; those that are not ours go to Beam as they are.
    """
    ours = convert_options()
    found: list[str] = []
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        option = name.replace("_", "-")
        if option not in ours:
            found.append(parameter)
        elif ours[option]:
            found += [option] if value.lower() != "false" else []
        else:
            found.append(f"{option}{equals}{value}")
    return found


if __name__ == "__main__":
    sys.exit(main(["convert", *arguments(sys.argv[1:])]))

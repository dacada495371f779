"""The command line ``tensorferry plan | convert | migrate | export | verify | inspect``; each imports what it needs."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.engine import interrupts
from tensorferry.pipelines.storage.kvstores import gcs_by_grpc

COMMANDS = {
    "plan": "show what would be written, from headers only",
    "convert": "convert a Hugging Face checkpoint into an Orbax checkpoint in MaxText's layout",
    "migrate": "migrate Tunix runs, every step, into the layout that MaxText's pre-training reads",
    "export": "export an Orbax checkpoint in MaxText's layout as a Hugging Face repository",
    "verify": "re-read a converted checkpoint and compare it with its source",
    "inspect": "list what a Hugging Face or Orbax checkpoint holds",
}

# They have no plan of their own that a user would mend.
_READERS = ("verify", "inspect")
_RESUMABLE = ("convert", "migrate", "export")

_EPILOG = """\
examples:
  tensorferry plan    --source Llama-3.1-8B
  tensorferry convert --source Llama-3.1-8B --output checkpoints/llama
  tensorferry verify  --source Llama-3.1-8B --output checkpoints/llama
  tensorferry migrate --source runs --output converted --structural
  tensorferry export  --source checkpoints/llama/0 --config Llama-3.1-8B --output exported/llama
  tensorferry inspect checkpoints/llama

exit codes: 0 done; 1 it failed, the same command resumes; 2 the plan does not add up, nothing was written;
3 verify found a difference; 4 migrate refused some steps, the others are in place.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        "tensorferry",
        description="Moves terabyte model checkpoints between the layouts that training teams use.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tensorferry {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"tensorferry.pipelines.cli.{name}_command")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of a failure")
        _add_gcs_grpc(command)
        command.set_defaults(run=module.run)
    return parser


def _add_gcs_grpc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gcs-grpc", action="store_true",
        help="arrays and receipts on gs:// by gRPC, here and on workers: for machines inside Google Cloud",
    )  # fmt: skip


def convert_options() -> dict[str, bool]:
    """Every option of ``convert``, and whether it is a switch without a value."""
    return {action.option_strings[-1]: action.nargs == 0 for action in convert_actions()}


def convert_actions() -> list[argparse.Action]:
    """The options of ``convert`` as argparse knows them, in the order of its help."""
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module("tensorferry.pipelines.cli.convert_command").add_arguments(parser)
    _add_gcs_grpc(parser)
    return list(parser._actions)


def _version() -> str:
    from importlib.metadata import version

    return version("tensorferry")


def _multiply_alone() -> None:
    """Keeps numpy, here and in worker processes, from multiplying with threads of its own: there are enough of ours,
    and those wait for each other for ten times as long as they multiply."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a foreseeable fault is shown as sentences."""
    _multiply_alone()
    args, rest = build_parser().parse_known_args(argv)
    takes_beam = args.command in ("convert", "export", "migrate", "verify")
    if rest and not takes_beam:
        build_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    interrupts.say(_interrupted(args.command))
    try:
        with gcs_by_grpc(args.gcs_grpc):
            return args.run(args, rest) if takes_beam else args.run(args)
    except PlanError as error:
        if args.command in _READERS:
            return _tell(FerryError(str(error)), args.debug)
        return _tell_plan(error, args.debug)
    except FerryError as error:
        return _tell(error, args.debug)
    except KeyboardInterrupt:  # of those who call this; the program itself takes no exception for it
        return _tell(FerryError(_interrupted(args.command)), args.debug)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not a fault.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _tell(FerryError(f"{error.strerror or error}{where}"), args.debug)


def _interrupted(command: str) -> str:
    resume = "Run the same command again to resume." if command in _RESUMABLE else "Nothing was changed."
    return f"Interrupted. {resume}"


def _tell_plan(error: PlanError, debug: bool) -> int:
    from tensorferry.mappings.plan.plan_report import problem_lines

    _trace(debug)
    print(*problem_lines(error.problems), "Nothing was written.", sep="\n", file=sys.stderr)
    return error.exit_code


def _tell(error: FerryError, debug: bool) -> int:
    _trace(debug)
    print(f"tensorferry: {error}", file=sys.stderr)
    if getattr(error, "still_running", False):
        from tensorferry.pipelines.engine.supervisor import leave

        leave(error.exit_code)
    return error.exit_code


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()

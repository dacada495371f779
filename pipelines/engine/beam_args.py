"""Beam's own options, handed over from our command line and checked before anything runs."""

import argparse
import contextlib
import difflib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.words.problems import FerryError

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

RUNNING_MODES = ("in_memory", "multi_threading", "multi_processing")

# All of them mean the engine inside Beam's Python package. Left to itself, Beam would turn "DirectRunner"
# into a downloaded engine on machines that reach the network, and into this one on machines that do not.
_LOCAL_NAMES = ("", "direct", "directrunner", "fnapirunner")
# Beam has no short name for it.
_DASK_NAME = "apache_beam.runners.dask.dask_runner.DaskRunner"


@dataclass(frozen=True)
class EngineChoice:
    """Where the pipeline will run.

    Attributes:
      runner: Beam's name of the runner, or "" for the local engine.
      running_mode: one of `RUNNING_MODES`; of the local engine only.
      workers: threads or processes of the local engine.
      args: every Beam option as given.
      pools: addresses of worker pools on other hosts, where the local engine has its workers there.
    """

    runner: str
    running_mode: str
    workers: int
    args: tuple[str, ...]
    pools: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether everything runs on this machine."""
        return not self.runner and not self.pools

    @property
    def retries(self) -> bool:
        """Whether the engine does again what failed."""
        return bool(self.runner)

    @property
    def is_dataflow(self) -> bool:
        """Whether it is Google's service."""
        return self.runner.lower() == "dataflowrunner"

    @property
    def only_builds(self) -> bool:
        """Whether the job is described and not run."""
        return self.is_dataflow and any(arg.startswith(("--template_location", "--dry_run")) for arg in self.args)

    @property
    def is_template(self) -> bool:
        """Whether a service will run the job after this process has described it and ended."""
        return self.is_dataflow and any(arg.startswith("--template_location") for arg in self.args)

    @property
    def is_dask(self) -> bool:
        """Whether it is Beam's runner on a Dask cluster."""
        return self.runner == _DASK_NAME

    def cut_for_dask(self, partitions: int) -> "EngineChoice":
        """The choice with a number of Dask partitions, unless the user gave one: Beam's own guess is one."""
        if not self.is_dask or any(
            arg.startswith(("--dask_npartitions", "--dask_partition_size")) for arg in self.args
        ):
            return self
        return replace(self, args=(*self.args, f"--dask_npartitions={partitions}"))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_engine(beam_args: Sequence[str]) -> EngineChoice:
    """Reads the runner and the local engine's size from Beam options, without importing Beam.

    Raises:
      FerryError: when a value is not one that the local engine knows.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--runner", default="")
    parser.add_argument("--direct_running_mode", default="multi_threading", choices=RUNNING_MODES)
    parser.add_argument("--direct_num_workers", type=int, default=0)
    parser.add_argument("--environment_type", default="")
    parser.add_argument("--environment_config", default="")
    try:
        known, _ = parser.parse_known_args(list(beam_args))
    except argparse.ArgumentError as error:
        raise FerryError(str(error)) from error
    if known.direct_num_workers < 0:
        raise FerryError(f"--direct_num_workers is {known.direct_num_workers}; it must be 0 (one per core) or more")
    runner = _full_name(known.runner)
    if not runner and known.environment_type.upper() == "EXTERNAL":
        pools = _pools(known.environment_config)
        return EngineChoice("", "in_memory", known.direct_num_workers or len(pools), tuple(beam_args), pools)
    workers = known.direct_num_workers or cores()
    if known.direct_running_mode == "in_memory":
        workers = 1
    return EngineChoice(runner, known.direct_running_mode, workers, tuple(beam_args))


def _pools(config: str) -> tuple[str, ...]:
    pools = tuple(filter(None, (one.strip() for one in config.split(","))))
    if not pools:
        raise FerryError("--environment_type EXTERNAL needs the addresses of worker pools, separated by commas: "
                         "--environment_config host1:50000,host2:50000")  # fmt: skip
    return pools


def _full_name(runner: str) -> str:
    if runner.lower() in _LOCAL_NAMES:
        return ""
    return _DASK_NAME if runner.lower() == "daskrunner" else runner


def pipeline_options(choice: EngineChoice) -> "PipelineOptions":
    """Beam's options object for a choice; unknown and malformed options are refused.

    Raises:
      FerryError: when Beam does not know an option, or cannot read its value.
    """
    from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser

    if choice.is_dask:
        _import_dask_options()
    parser = _BeamArgumentParser(allow_abbrev=False)
    for options_class in {str(each): each for each in PipelineOptions.__subclasses__()}.values():
        options_class._add_argparse_args(parser)
    _check(parser, choice.args)
    named: dict[str, Any] = {"runner": choice.runner}
    if not choice.runner:
        named = {"direct_running_mode": choice.running_mode, "direct_num_workers": choice.workers}
    return PipelineOptions(flags=list(choice.args), **named)


def _check(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            _, unknown = parser.parse_known_args(list(args))
    except SystemExit as error:
        last = complaint.getvalue().strip().splitlines()[-1:] or ["a Beam option is malformed"]
        raise FerryError(last[0].split("error: ", 1)[-1]) from error
    if unknown:
        raise FerryError(_unknown_sentence(unknown, parser))


def _unknown_sentence(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    first = unknown[0].split("=", 1)[0]
    names = [name for action in parser._actions for name in action.option_strings]
    close = difflib.get_close_matches(first, names, n=1)
    hint = f"Did you mean {close[0]}?" if close else "`tensorferry COMMAND --help` lists ours."
    return f"{first} is neither an option of Tensorferry nor of Apache Beam. {hint}"


def _import_dask_options() -> None:
    # Beam only knows the --dask_* options once this module has been imported.
    try:
        import apache_beam.runners.dask.dask_runner  # noqa: F401
    except ImportError as error:
        raise FerryError("--runner DaskRunner needs Dask: pip install 'apache-beam[dask]'") from error

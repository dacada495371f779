"""Beam options that a user need not give: threads for waiting on a network, and what Dataflow has to be told."""

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.plan.resources import Resources, recommend
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.storage.kvstores import is_local

# A thread that waits for 50 ms holds no core; the memory bound admits as many items as fit (measured: BENCHMARKS.md).
NETWORK_THREADS = 8
_PACKAGE = "tensorferry"
# Of the extra that outputs in buckets need; Beam's image may have an older one.
_STREAMS = "google-cloud-storage"
_CLONE = Path(__file__).parents[2]
_PACKAGES = ("tensorferry", "pipelines", "mappings", "transforms")
_DEFAULTS = (
    "--autoscaling_algorithm=THROUGHPUT_BASED",
    # One process on each machine, so that the memory bound holds for the machine.
    "--experiments=no_use_multiple_sdk_containers",
)


def complete_args(beam_args: Iterable[str], resources: Resources, scratch: Path, is_far: bool) -> tuple[str, ...]:
    """The user's Beam options and what follows from the plan; what the user gave stands.

    Args:
      beam_args: as given.
      resources: recommended for the plan.
      scratch: a directory of this machine for what is staged.
      is_far: whether source or output are reached through a network.

    Raises:
      FerryError: the package cannot be staged.
    """
    args = tuple(beam_args)
    choice = choose_engine(args)
    if choice.is_local:
        return local_args(args, is_far)
    if not choice.is_dataflow:
        return args
    staged = () if _gives(args, "--sdk_container_image") else _staged(scratch)
    own_image = ("--sdk_location=container",) if not staged else ()
    return (*args, *missing((*resources.beam_args(), *_DEFAULTS, *own_image, *staged), args))


def refuse_out_of_reach(source: str, output: str, beam_args: Iterable[str]) -> None:
    """Refuses what workers of a service elsewhere cannot reach.

    Raises:
      FerryError: source or output are on this machine, and the workers are not.
    """
    if not choose_engine(tuple(beam_args)).is_dataflow:
        return
    if is_local(output):
        expected = "gs://bucket/path: Dataflow's workers cannot write here"
        raise FerryError(str(Problem(output, expected, "a local path", "Give a bucket as --output.")))
    if is_local(source) or source.startswith("file:"):
        expected = "gs://, hf:// or https://: Dataflow's workers cannot read it here"
        raise FerryError(str(Problem(source, expected, "a local path", "Copy it to a bucket: gcloud storage cp -r.")))


def plan_resources(plan: Plan, units: int | None = None) -> Resources:
    """What a plan needs of a cluster.

    Args:
      plan: what will be done.
      units: what workers are dealt, where that is not single work items.
    """
    totals, memory_bytes = plan.totals, plan.options.worker_memory_bytes
    sizes = totals.read_bytes, totals.write_bytes, units or totals.work_items, totals.largest_item_bytes
    return recommend(*sizes, memory_bytes)


def local_args(beam_args: Iterable[str], is_far: bool) -> tuple[str, ...]:
    """The user's Beam options, with more threads than cores for the local engine where they wait for a network."""
    args = tuple(beam_args)
    choice = choose_engine(args)
    if not (choice.is_local and is_far and choice.running_mode == "multi_threading"):
        return args
    return (*args, *missing((f"--direct_num_workers={max(choice.workers, NETWORK_THREADS)}",), args))


def missing(wanted: Iterable[str], args: Iterable[str]) -> tuple[str, ...]:
    """Those of the wanted options that are not given; experiments add up."""
    args = tuple(args)
    return tuple(one for one in wanted if one.startswith("--experiments") or not _gives(args, one.split("=", 1)[0]))


def _gives(args: Iterable[str], name: str) -> bool:
    return any(arg.split("=", 1)[0] == name for arg in args)


def _staged(scratch: Path) -> tuple[str, ...]:
    """This package as a wheel, and everything it needs at the versions of this machine."""
    folder = scratch / "staged"
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / "requirements.txt"
    pins.write_text("".join(f"{pin}\n" for pin in pinned()))
    # Workers install the pins themselves: downloading them all here first would take minutes.
    return (f"--extra_package={_wheel(folder)}", f"--requirements_file={pins}", "--requirements_cache=skip")


def _wheel(folder: Path) -> Path:
    if not (_CLONE / "pyproject.toml").is_file():
        raise FerryError("--runner DataflowRunner: Tensorferry is installed, not cloned: there is no wheel to stage. "
                         "Give --sdk_container_image (deploy/README.md says how to build it).")  # fmt: skip
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
               "--wheel-dir", str(folder), str(_copy_of_clone(folder / "source"))]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("tensorferry-*.whl"))
    if built.returncode or not wheels:
        last = built.stderr.strip().splitlines()[-1:] or ["no wheel"]
        raise FerryError(f"--runner DataflowRunner: the wheel to stage cannot be built: {last[0]}")
    return wheels[-1]


def _copy_of_clone(folder: Path) -> Path:
    """Built in the clone itself, the wheel would hold what earlier builds left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(_CLONE / name, folder)
    for name in _PACKAGES:
        shutil.copytree(_CLONE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def pinned() -> list[str]:
    """Every package that workers need, directly or not, as ``name==version``; Beam is in the worker's image."""
    found: dict[str, str] = {}
    waiting = [[*_needs(_PACKAGE), _STREAMS]]
    while waiting:
        for name in waiting.pop():
            if name not in found and name != "apache-beam":
                try:
                    found[name] = distribution(name).version
                except PackageNotFoundError:
                    continue
                waiting.append([*_needs(name)])
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _needs(package: str) -> Iterator[str]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for line in requires(package) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)

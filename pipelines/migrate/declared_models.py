"""The model that the weights must be: from a checkpoint, from config.json, or from MaxText itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.tunix.family_model import family_model
from tensorferry.mappings.tunix.model_check import ModelTree
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.migrate.migration_options import MigrationOptions
from tensorferry.pipelines.migrate.plan_work import DeclaredModel
from tensorferry.pipelines.orbax.step_source import read_template

PYTHON_VARIABLE = "TENSORFERRY_MAXTEXT_PYTHON"
_PROBE = Path(__file__).with_name("maxtext_tree.py")


def declared_model(options: MigrationOptions) -> DeclaredModel:
    """The model of a migration; without one nothing is compared.

    Raises:
      PlanError: it cannot be had: no such checkpoint, an unknown family, MaxText is not installed.
    """
    if options.template:
        return _from_template(options.template)
    if options.config:
        return _from_config(options.config)
    if options.maxtext:
        return _both(_from_maxtext(options.maxtext))
    return DeclaredModel()


def _both(tree: ModelTree) -> DeclaredModel:
    return DeclaredModel(tree, tree)


def _from_template(url: str) -> DeclaredModel:
    try:
        return _both(read_template(url))
    except PlanError:
        raise
    except FerryError as error:
        fix = "Give a checkpoint that pre-training wrote: its step, or the items folder."
        raise PlanError([Problem("--template", "a checkpoint in the new layout", str(error), fix)]) from error


def _from_config(path: str) -> DeclaredModel:
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    fix = "Give the config.json of the model that the runs trained."
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PlanError([Problem("--config", "a Hugging Face config.json", str(error), fix)]) from error
    if not isinstance(raw, dict):
        raise PlanError([Problem("--config", "a Hugging Face config.json", "JSON of another kind", fix)])
    return DeclaredModel(*(family_model(Config(raw), scan, str(file)) for scan in (True, False)))


def _from_maxtext(settings: str) -> ModelTree:
    """Asks MaxText in a process of its own: it brings JAX along, and may live in another environment."""
    if not settings.split():
        raise PlanError([Problem("--maxtext", "settings such as model_name=llama3.1-8b", "nothing", "Give some.")])
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([python, str(_PROBE), settings], capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip() or "nothing").splitlines()[-1]
        fix = f"Install maxtext here, or name an interpreter that has it in {PYTHON_VARIABLE}; check the settings."
        raise PlanError([Problem("--maxtext", f"a model that MaxText builds in {python}", last, fix)])
    told = json.loads(done.stdout.splitlines()[-1])
    return ModelTree(
        weights={name: tuple(shape) for name, shape in told["weights"].items()},
        custom=frozenset(told["custom"]),
        aux=frozenset(told["aux"]),
        origin=f"MaxText with {_shortly(settings)}",
    )


def _shortly(settings: str) -> str:
    """The first setting, which every difference repeats."""
    first, *others = settings.split()
    return f"{first} …" if others else first

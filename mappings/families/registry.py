"""Every family that there is, and which of them a checkpoint is."""

import importlib
import pkgutil
from collections.abc import Collection
from functools import cache

from tensorferry.mappings import families
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import MAKERS, MODEL_TYPES, Family, FamilyOptions
from tensorferry.mappings.words.problems import PlanError, Problem


@cache
def _load_families() -> None:
    """Imports every file of the folder; those of families register themselves."""
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def family_names() -> tuple[str, ...]:
    """Every family that ``--family`` accepts."""
    _load_families()
    return tuple(sorted(MAKERS))


def model_types(family: str) -> tuple[str, ...]:
    """The ``model_type`` values of config.json that mean a family."""
    family_names()
    return tuple(name for name, meant in MODEL_TYPES.items() if meant == family and name.islower())


def find_family(config: Config, wanted: str = "auto") -> str:
    """The family's name, from ``--family`` or from ``model_type`` and ``architectures``.

    Raises:
      PlanError: the family is not known.
    """
    known = family_names()
    if wanted != "auto":
        if wanted in known:
            return wanted
        raise PlanError([_unknown("--family", wanted, known)])
    for candidate in (*config.architectures, config.model_type):
        if candidate in MODEL_TYPES:
            return MODEL_TYPES[candidate]
    found = f"model_type {config.model_type!r}, architectures {list(config.architectures)}"
    raise PlanError([_unknown("config.json", found, known)])


def make_family(config: Config, names: Collection[str], options: FamilyOptions, wanted: str = "auto") -> Family:
    """The family of a checkpoint, sized by its config and spelt as its tensor names are.

    Raises:
      PlanError: the family is not known, or config.json lacks a size.
    """
    return MAKERS[find_family(config, wanted)](config, names, options)


def _unknown(name: str, found: str, known: tuple[str, ...]) -> Problem:
    return Problem(
        name,
        f"one of the families {', '.join(known)}",
        found,
        "Name the family whose layout the checkpoint has with --family, or add a family (mappings/README.md).",
    )

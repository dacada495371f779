"""Outputs that share a place with what they are made from: replaced, or found changed, by the export itself."""

import os
from collections.abc import Iterator

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.export.export_planning import Export, ExportOptions
from tensorferry.pipelines.storage.kvstores import is_local


def refuse_overlap(export: Export, options: ExportOptions, output: str) -> None:
    """Refuses an output that holds what is exported, which ``--overwrite`` would delete, or lies in the source's item.

    Raises:
      FerryError: says which option names the same place.
    """
    item = export.source.item.path
    for option, place in _inputs(item, options):
        if _is_below(place, output):
            fix = "Choose another output: it would be replaced while it is read."
            raise FerryError(str(Problem(output, f"an output apart from {option}", place, fix)))
    if _is_below(output, item):
        fix = "Choose another output: files there would change the checkpoint that is read."
        raise FerryError(str(Problem(output, "an output apart from --source", f"a folder of {item}", fix)))


def _inputs(item: str, options: ExportOptions) -> Iterator[tuple[str, str]]:
    yield "--source", item
    yield "--config", options.config
    if options.fp8_from:
        yield "--fp8-from", options.fp8_from


def _is_below(place: str, folder: str) -> bool:
    """Whether a place is a folder or lies in it."""
    return f"{_normal(place)}/".startswith(f"{_normal(folder)}/")


def _normal(place: str) -> str:
    return (os.path.realpath(place) if is_local(place) else place).rstrip("/")

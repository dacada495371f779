"""An export that is already in place: whether ``--overwrite`` may replace it, and what of it is ours."""

import json
from collections.abc import Collection
from pathlib import Path

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.lora.peft_files import ADAPTER_CONFIG
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.huggingface.repository import CONFIG
from tensorferry.pipelines.output.export_manifest import ADAPTER_KIND, KIND
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.kvstores import is_local

_SHOWN = 5


def refuse_to_replace(
    place: str, found: Collection[str], manifest: bytes | None, overwrite: bool, expected: str
) -> None:
    """Refuses a place that must stay: without ``overwrite`` any, with it whatever is not wholly a Tensorferry export.

    Args:
      place: the output.
      found: every file there, relative to it.
      manifest: the content of the manifest there.
      overwrite: whether an export may be replaced.
      expected: what the place may be without it.

    Raises:
      FerryError: says what is there and what to do.
    """
    known = exported_files(manifest)
    if not known:
        fix = "Nothing is ever overwritten but a Tensorferry export; choose another output."
        raise FerryError(str(Problem(place, expected, _some(found), fix)))
    if not overwrite:
        when = " once the new one is complete" if is_local(place) else ": in a bucket the old one is deleted first"
        fix = f"Choose another output, or pass --overwrite to replace it{when}."
        raise FerryError(str(Problem(place, expected, "a Tensorferry export", fix)))
    strangers = sorted(set(found) - known)
    if strangers:
        fix = "--overwrite would delete it; move it away first."
        raise FerryError(str(Problem(place, "only a Tensorferry export", _some(strangers), fix)))


def exported_files(manifest: bytes | None) -> set[str]:
    """Every file of the export that a manifest tells of; none when it is not that of an export."""
    try:
        told = json.loads(manifest or b"")
        if told["kind"] not in (KIND, ADAPTER_KIND):
            return set()
        return {*told["files"], *told["copied"], CONFIG, INDEX_FILE, MANIFEST_NAME, ADAPTER_CONFIG}
    except (ValueError, KeyError, TypeError):
        return set()


def local_files(folder: Path, beside: str) -> list[str]:
    """Every file below a folder but those of one folder in it; empty folders count as files, links are not followed."""
    if not folder.is_dir():
        return []
    inside = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != beside]
    leaves = (path for path in inside if path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    return sorted(path.relative_to(folder).as_posix() for path in leaves)


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")

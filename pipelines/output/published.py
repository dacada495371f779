"""A step that is already in place: whether it is ours, and whether anything in it is not."""

import json
from pathlib import Path

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME, NOT_ARRAYS

_BESIDE_ITEM = frozenset({"_CHECKPOINT_METADATA", "commit_success.txt"})


def is_whole_step(step: Path, item: str) -> bool:
    """Whether the step is a complete Tensorferry checkpoint: the manifest and the success mark are there."""
    return (step / item / MANIFEST_NAME).is_file() and (step / "commit_success.txt").is_file()


def refuse_to_replace(step: Path, item: str, overwrite: bool) -> None:
    """Refuses a step that must stay: without ``overwrite`` any, with it whatever is not wholly ours.

    Raises:
      FerryError: says what is there and what to do.
    """
    if step.is_symlink() or not (step / item / MANIFEST_NAME).is_file():
        found = "something that is not a Tensorferry checkpoint"
        fix = "It is never overwritten; choose another output or move it away yourself."
        raise FerryError(str(Problem(str(step), f"no step, or one with {item}/{MANIFEST_NAME}", found, fix)))
    if not overwrite:
        fix = "Choose another output, or pass --overwrite to replace it once the new one is complete."
        raise FerryError(str(Problem(str(step), "no checkpoint yet", "a complete checkpoint", fix)))
    strangers = strange_entries(step, item)
    if strangers:
        fix = "--overwrite would delete it; move it away first."
        raise FerryError(str(Problem(str(strangers[0]), "only a Tensorferry checkpoint", "another file", fix)))


def strange_entries(step: Path, item: str) -> list[Path]:
    """Entries of a Tensorferry step that no Tensorferry run put there."""
    outside = [path for path in sorted(step.iterdir()) if path.name not in _BESIDE_ITEM | {item}]
    known = NOT_ARRAYS | _array_keys(step / item)
    inside = [path for path in sorted((step / item).iterdir()) if path.name not in known]
    return outside + [path for path in inside if not path.name.startswith("ocdbt.process_")]


def _array_keys(item: Path) -> set[str]:
    """The arrays' directory names, as Orbax's tree metadata tells them."""
    try:
        tree = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]
        return {".".join(str(key["key"]) for key in entry["key_metadata"]) for entry in tree.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()

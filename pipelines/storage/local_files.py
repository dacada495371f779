"""Small files that are whole or absent, and making sure of what is on the disk."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a JSON file that is never seen half-written, not even after a power cut."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        json.dump(record, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The record, or None when the file is absent or no JSON object."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def sync_directory(folder: Path) -> None:
    """Makes the directory's names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Makes every file below survive a power cut: the writes themselves did not wait for the disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(path, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(path))


def remove_tree(path: Path) -> None:
    """Removes a file or a directory with all below it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
